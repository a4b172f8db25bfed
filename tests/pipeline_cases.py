"""What the tests of pipelines run: a small model for three steps, by every schedule, compared with one device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import attrs
import torch
from mesh_cases import MODEL, global_batch, own_rows
from torch import Tensor

import functitan as ft
from functitan import optim, random, tree
from functitan.compiler.pipeline.stages import make_pipeline
from models import llama
from sharding_specs import PRESETS, MeshSpec
from train.step import make_eval_step, make_train_step

STEPS = 3


class Case(NamedTuple):
    """One way to train the model."""

    mesh: dict[str, int]
    schedule: str | None = None
    microbatches: int = 4
    layers: int = 4
    tied: bool = False
    captured: bool = True
    remat: str = "none"
    inductor: bool = False

    def __str__(self) -> str:
        mesh = "x".join(f"{axis}{size}" for axis, size in self.mesh.items())
        words = [mesh, str(self.schedule), f"m{self.microbatches}", f"{self.layers}layers", "tied" if self.tied else ""]
        words += ["jit" if self.captured else "plain", self.remat, "inductor" if self.inductor else ""]
        return "-".join(filter(None, words))


class Outcome(NamedTuple):
    """What one case gave."""

    initial: dict[str, Tensor]
    metrics: list[list[float]]
    params: dict[str, Tensor]


def train(rank: int, case: Case) -> Outcome:
    """Three steps and an evaluation on this rank, with dropout; the same outcome on every rank."""
    model = attrs.evolve(MODEL, tied_embeddings=case.tied, n_layers=case.layers)
    params, mesh = llama.declare(model), MeshSpec(**case.mesh)
    pipeline = None
    if case.schedule is not None:
        pipeline = make_pipeline(params, PRESETS["all"], mesh, case.schedule, case.microbatches)
    plan = ft.compile_specs(params, PRESETS["all"], mesh, pipeline=pipeline)
    # As in mesh_cases: a small eps would turn rounding into updates.
    rule = optim.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=optim.decay_mask(params))
    optimizer = optim.chain(optim.clip_by_global_norm(0.5), rule)
    apply = functools.partial(llama.apply, cfg=model, remat=case.remat)
    step: Any = make_train_step(apply, optimizer, lambda count: 1e-2, case.microbatches)
    evaluate = make_eval_step(apply, case.microbatches)
    state = ft.init_state(plan, random.key(0), optimizer)
    initial = dict(tree.leaves_with_path(ft.gather(state.params, plan)))
    batch = ft.shard_batch(plan, own_rows(plan, rank, global_batch()))
    if case.captured:
        step = ft.jit(step, plan, donate=("state",), inductor=case.inductor)
    found = []
    for _ in range(STEPS):
        with ft.use_plan(plan):
            state, metrics = step(state, batch)
        found.append([metrics[name].item() for name in ("loss", "grad_norm", "tokens")])
    with ft.use_plan(plan):
        sums = evaluate(state.params, batch)
    found.append([sums["loss_sum"].item(), sums["tokens"].item()])
    return Outcome(initial, found, dict(tree.leaves_with_path(ft.gather(state.params, plan))))


@functools.cache
def reference(layers: int, microbatches: int, tied: bool) -> Outcome:
    """The plain function on one device."""
    return train(0, Case({}, None, microbatches, layers, tied, captured=False))


def check(rank: int, case: Case) -> None:
    """Trains a case and compares it with one device."""
    expected, got = reference(case.layers, case.microbatches, case.tied), train(rank, case)
    for path, value in expected.initial.items():
        assert torch.equal(got.initial[path], value), f"initial {path} differs"
    for step, (mine, theirs) in enumerate(zip(got.metrics, expected.metrics, strict=True)):
        torch.testing.assert_close(
            torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-5, msg=lambda text, s=step: f"step {s}: {text}"
        )
    for path, value in expected.params.items():
        torch.testing.assert_close(
            got.params[path], value, rtol=1e-5, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}"
        )
