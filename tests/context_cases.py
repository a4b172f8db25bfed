"""What ranks do in the tests of context parallel attention: the operator and its gradients against one device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import functitan as ft
from functitan import nn
from sharding_specs import ContextParallel, MeshSpec, Param, Rules

BATCH, SEQ, WIDTH = 2, 16, 8
DOCUMENTS = torch.tensor([[0] * 3 + [1] * 5 + [2] * 8, [4] * 9 + [7] * 1 + [2] * 6])


class Case(NamedTuple):
    """One call of attention over cp."""

    cp: int
    method: str
    layout: str
    mask: str
    heads: int = 4
    kv_heads: int = 4
    captured: bool = False
    remat: str = "none"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = [f"cp{self.cp}", self.method, self.layout, self.mask, f"{self.heads}:{self.kv_heads}", self.remat]
        return "-".join([*words, "jit" if self.captured else "plain", str(self.dtype).removeprefix("torch.")])


MASKS: dict[str, dict] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "short": {"causal": True, "window": 3},
    "around": {"causal": False, "window": 4},
    "documents": {"causal": True, "documents": True},
    "packed": {"causal": False, "documents": True},
    "all": {"causal": True, "window": 4, "documents": True},
}


def inputs(case: Case) -> dict[str, Tensor]:
    """q, k, v, the gradient of the output, and documents: all of the whole sequence."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(BATCH, SEQ, heads, WIDTH, generator=generator).to(case.dtype)

    grad, q, k, v = normal(case.heads), normal(case.heads), normal(case.kv_heads), normal(case.kv_heads)
    return {"q": q, "k": k, "v": v, "grad": grad, "documents": DOCUMENTS}


def attend(x: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """The output and the gradients of q, k and v."""
    restrictions = dict(MASKS[case.mask])
    if restrictions.pop("documents", False):
        restrictions["documents"] = x["documents"]

    def loss(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y = nn.attention(*qkv, scale=0.4, **restrictions)
        return (y * x["grad"]).to(torch.float32).sum(), y

    loss = ft.remat(loss, policy=case.remat) if case.remat != "none" else loss
    gradients, y = ft.grad(loss, has_aux=True)((x["q"], x["k"], x["v"]))
    return {"y": y, "dq": gradients[0], "dk": gradients[1], "dv": gradients[2]}


def plan_of(case: Case, **mesh: int) -> ft.Plan:
    """Parameters that tell the heads, and a sequence over cp."""
    sizes = {"heads": case.heads, "kv_heads": case.kv_heads}
    params = {name: Param((size,), (name,), ft.init.zeros()) for name, size in sizes.items()}
    context = ContextParallel(case.method, case.layout)
    return ft.compile_specs(params, Rules(), MeshSpec(**{"cp": case.cp, **mesh}), context=context)


def check(rank: int, case: Case) -> None:
    """Attention over cp against attention on one device, run by every rank."""
    plan = plan_of(case)
    x = inputs(case)
    expected = attend(x, case._replace(remat="none"))
    whole = ft.shard_batch(plan, x)

    def run(x):
        return attend(x, case)

    if case.captured:
        got = ft.jit(run, plan)(whole)
    else:
        with ft.use_plan(plan):
            got = run(whole)
    rtol, atol = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (2e-2, 2e-2)}[case.dtype]
    for name, value in ft.gather(got, plan).items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
