"""Random programs: with donation and all passes, a graph gives the plain function's bits and touches no input."""

import random

import pytest
import torch

from functitan.compiler.jit import jit

SHAPE = (6, 6)
UNARY = [torch.tanh, torch.exp, torch.neg, lambda x: x * 0.5, lambda x: x + 1, lambda x: torch.where(x > 0, x, -x)]
VIEWS = [
    lambda x: x.t(), lambda x: x.view(-1).view(SHAPE) if x.is_contiguous() else x.reshape(SHAPE),
    lambda x: x[::1], lambda x: x.flip(0), lambda x: torch.cat([x[3:], x[:3]]), lambda x: x[:1].expand(SHAPE),
]  # fmt: skip
BINARY = [torch.add, torch.mul, torch.maximum, torch.matmul, lambda a, b: torch.lerp(a, b, 0.3)]
IN_PLACE = [lambda x: x.mul_(0.5), lambda x: x.add_(1.0), lambda x: x[1:3].zero_()]


def program(seed):
    """A function of two dicts of tensors, drawn from the seed; it always does the same."""

    def fun(state, other):
        choose = random.Random(seed)
        values = [*state.values(), *other.values()]
        for _ in range(choose.randint(4, 16)):
            kind = choose.random()
            a, b = choose.choice(values), choose.choice(values)
            if kind < 0.35:
                values.append(choose.choice(UNARY)(a.clamp(-3, 3)))
            elif kind < 0.6:
                values.append(choose.choice(VIEWS)(a))
            elif kind < 0.9:
                values.append(choose.choice(BINARY)(a, b))
            else:
                mine = a.clone()
                choose.choice(IN_PLACE)(mine)
                values.append(mine)
        picked = [choose.choice(values) for _ in range(4)]
        return {f"out{i}": x for i, x in enumerate(picked)}, sum(x.sum() for x in values)

    return fun


def arguments(seed):
    generator = torch.Generator().manual_seed(seed)
    make = lambda: torch.randn(SHAPE, generator=generator)  # noqa: E731
    return {"a": make(), "b": make(), "c": make()}, {"d": make(), "e": make()}


@pytest.mark.parametrize("block", range(8))
def test_random_programs(block):
    for seed in range(25 * block, 25 * block + 25):
        fun = program(seed)
        expected, total = fun(*arguments(seed))
        for donate in ((), ("state",)):
            step = jit(fun, donate=donate)
            for _ in range(2):  # captured, then run again
                state, other = arguments(seed)
                got, got_total = step(state, other)
                assert torch.equal(got_total, total) or (got_total.isnan() and total.isnan()), seed
                for name, value in expected.items():
                    assert torch.equal(got[name].nan_to_num(7.0), value.nan_to_num(7.0)), (seed, donate, name)
                buffers = [x.untyped_storage().data_ptr() for x in got.values()]
                assert len(set(buffers)) == len(buffers), seed
                for x in got.values():
                    x.zero_()  # what was handed out is the caller's to change
                fresh_state, fresh_other = arguments(seed)
                assert all(torch.equal(other[k], fresh_other[k]) for k in other), seed
                if not donate:
                    assert all(torch.equal(state[k], fresh_state[k]) for k in state), seed
