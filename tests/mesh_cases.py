"""What ranks do in the tests of meshes: train a small model for a few steps, and compare with one device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

import functitan as ft
from functitan import optim, random, tree
from models import llama
from sharding_specs import PRESETS, ContextParallel, MeshSpec
from train.step import make_train_step

BATCH, SEQ, STEPS = 16, 16, 3
MODEL = llama.LlamaConfig(
    vocab_size=67, dim=32, n_layers=2, n_heads=16, n_kv_heads=8, head_dim=4, hidden_dim=48, dropout=0.1
)
"""Grouped heads, dropout, and a vocabulary that 2, 4 and 8 do not divide."""


class Case(NamedTuple):
    """One way to train :data:`MODEL`."""

    mesh: dict[str, int]
    sequence_parallel: bool = True
    remat: str = "none"
    captured: bool = True
    tied: bool = False
    accumulation: int = 1
    passes: tuple[str, ...] | None = None
    method: str = "auto"
    kv_heads: int = MODEL.n_kv_heads

    def __str__(self) -> str:
        mesh = "x".join(f"{axis}{size}" for axis, size in self.mesh.items()) or "one"
        words = [mesh, "sp" if self.sequence_parallel else "", self.remat, "jit" if self.captured else "plain"]
        words += ["tied" if self.tied else "", f"acc{self.accumulation}" if self.accumulation > 1 else ""]
        words += ["" if self.method == "auto" else f"{self.method}-16:{self.kv_heads}"]
        return "-".join(word for word in words if word)


class Outcome(NamedTuple):
    """What one case gave: plain tensors."""

    initial: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    tokens: list[int]
    params: dict[str, Tensor]


def parts(case: Case) -> tuple[ft.Plan, optim.GradientTransformation, Any]:
    """The plan, the optimizer and the plain step of a case."""
    model = attrs.evolve(MODEL, tied_embeddings=case.tied, n_kv_heads=case.kv_heads)
    params = llama.declare(model)
    rules = PRESETS["all"] if case.sequence_parallel else PRESETS["all"].replace(seq="cp")
    plan = ft.compile_specs(params, rules, MeshSpec(**case.mesh), context=ContextParallel(case.method))
    # With a small eps Adam turns the rounding of gradients near 0 into updates of full size, on one device as well.
    rule = optim.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=optim.decay_mask(params))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), rule)
    apply = functools.partial(llama.apply, cfg=model, remat=case.remat)
    return plan, optimizer, make_train_step(apply, optimizer, lambda step: 1e-2, case.accumulation)


def global_batch() -> dict[str, Tensor]:
    """Documents of 5 tokens, and labels of which some do not count, unevenly over the rows."""
    tokens, labels = (random.randint(random.key(seed), (BATCH, SEQ), 0, MODEL.vocab_size) for seed in (1, 2))
    ignored = random.uniform(random.key(3), (BATCH, SEQ)) < torch.linspace(0, 0.9, BATCH).unsqueeze(1)
    place = torch.arange(SEQ).expand(BATCH, SEQ)
    return {
        "tokens": tokens.to(torch.int64),
        "labels": torch.where(ignored, -100, labels.to(torch.int64)),
        "positions": place % 5,
        "documents": (place // 5).contiguous(),
    }


def own_rows(plan: ft.Plan, rank: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of the global batch that a rank reads."""
    start, count = plan.batch_rows(rank, BATCH)
    return {name: x[start : start + count].contiguous() for name, x in batch.items()}


def train(rank: int, case: Case) -> Outcome:
    """Three steps of a case on this rank; the same outcome on every rank."""
    plan, optimizer, plain_step = parts(case)
    state = ft.init_state(plan, random.key(0), optimizer)
    initial = dict(tree.leaves_with_path(ft.gather(state.params)))
    batch = ft.shard_batch(plan, own_rows(plan, rank, global_batch()))
    options = {} if case.passes is None else {"passes": case.passes}
    step = ft.jit(plain_step, plan, donate=("state",), **options) if case.captured else plain_step
    losses, norms, tokens = [], [], []
    for _ in range(STEPS):
        with ft.use_plan(plan):
            state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
        tokens.append(metrics["tokens"].item())
    return Outcome(initial, losses, norms, tokens, dict(tree.leaves_with_path(ft.gather(state.params))))


@functools.cache
def reference(tied: bool, accumulation: int, kv_heads: int) -> Outcome:
    """The plain function on one device."""
    return train(0, Case({}, captured=False, tied=tied, accumulation=accumulation, kv_heads=kv_heads))


def check(rank: int, case: Case) -> None:
    """Trains a case on this rank and compares it with one device: the test itself, run by every rank."""
    expected, got = reference(case.tied, case.accumulation, case.kv_heads), train(rank, case)
    assert got.tokens == expected.tokens
    for path, value in expected.initial.items():
        assert torch.equal(got.initial[path], value), f"initial {path} differs"
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(torch.tensor(got.losses), torch.tensor(expected.losses), msg=lambda text: f"losses: {text}")
    close(torch.tensor(got.norms), torch.tensor(expected.norms), msg=lambda text: f"gradient norms: {text}")
    for path, value in expected.params.items():
        close(got.params[path], value, msg=lambda text, path=path: f"{path}: {text}")
