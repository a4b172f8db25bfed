"""What ``functitan bench pipeline`` compares: the same training step through stages, functitan's and torch's.

Every rank is given the whole batch. Microbatches have equally many tokens, so the mean of their means is the mean over
all tokens.
"""

from __future__ import annotations

import functools

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

import functitan as ft
from functitan import random
from functitan.compiler.pipeline.schedules import make_schedule
from functitan.compiler.pipeline.stages import Pipeline
from models import llama
from train.bench.module import Llama, from_params
from train.bench.rounds import Work
from train.bench.sharded import LEARNING_RATE, Precision, Rank, fsdp_config, join, mean_loss, my_rows
from train.bench.variants import CLIP, Setting, held_bytes, make_adamw, need_compiler
from train.build import build
from train.config import RunConfig
from train.errors import UserError
from train.layout_config import MeshConfig, PipelineConfig
from train.step import make_train_step


def make_functional(
    setting: Setting, precision: Precision, rank: Rank, pipeline: PipelineConfig, *, inductor: bool = False
) -> Work:
    """functitan's step on the mesh pp=size, captured, as ``functitan train`` builds it.

    Args:
        setting: its ``batch_size`` is the rows of all microbatches.
    """
    if inductor:
        need_compiler()
    device = join(rank)
    parts = build(run_config(setting, precision, rank.size, pipeline), rank.size)
    held = [ft.init_state(parts.plan, random.key(setting.seed, device=device), parts.optimizer)]
    tokens, labels = _batch(setting, rank, device)
    batch = ft.shard_batch(parts.plan, {"tokens": tokens, "labels": labels})
    step = make_train_step(parts.model, parts.optimizer, parts.schedule, parts.train_parts)
    step = ft.jit(step, parts.plan, donate=("state",), inductor=inductor)

    def run() -> float:
        held[0], metrics = step(held[0], batch)  # not in use_plan, which would guard each operator of the graph
        return metrics["loss"].item()

    return Work(run, held_bytes(held[0]), device.type)


def make_torch(
    setting: Setting, precision: Precision, rank: Rank, pipeline: PipelineConfig, *, compiled: bool = False
) -> Work:
    """The module of :mod:`train.bench.module` in ``torch.distributed.pipelining``, as torchtitan trains its own.

    Args:
        setting: as of :func:`make_functional`.
        compiled: every layer, and the loss, as torchtitan does.

    Raises:
        UserError: ``compiled``, and the schedule takes the backward pass in halves, which torch cannot do then.
    """
    plan = build(run_config(setting, precision, rank.size, pipeline), rank.size).plan.pipeline
    if compiled:
        need_compiler()
        order = make_schedule(plan.schedule, plan.ranks, plan.microbatches, plan.stages_per_rank)
        if order.splits_backward:
            raise UserError(f"torch cannot take a compiled backward pass in halves, as {plan.schedule} does")
    device = join(rank)
    numbers = plan.stages_of(rank.rank)
    modules = _modules(setting, plan, numbers, device)
    if compiled:
        for module in modules:
            for layer in module.layers:
                layer.compile(fullgraph=True)
    if precision == "bfloat16":
        mesh = init_device_mesh(device.type, (rank.size, 1), mesh_dim_names=("pp", "fsdp"))["fsdp"]
        for module in modules:
            module.compute_in_bfloat16(mesh)
    optimizer = make_adamw(modules, LEARNING_RATE)
    parameters = list(modules.parameters())
    stages = [PipelineStage(m, i, len(plan.layers), device) for m, i in zip(modules, numbers)]
    kind = get_schedule_class(plan.schedule)
    token_losses = torch.compile(mean_loss) if compiled else mean_loss
    schedule = kind(
        stages if issubclass(kind, PipelineScheduleMulti) else stages[0],
        plan.microbatches,
        loss_fn=lambda logits, labels: token_losses(logits, labels) / plan.microbatches,
        scale_grads=False,
    )
    tokens, labels = _batch(setting, rank, device)
    is_first, is_last = 0 in numbers, len(plan.layers) - 1 in numbers

    def run() -> float:
        losses: list[Tensor] = []
        schedule.step(
            *((tokens,) if is_first else ()), target=labels if is_last else None, losses=losses, return_outputs=False
        )
        _clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        # The last stage has the whole loss, and the ranks' mean is what is compared; no step has to know it elsewhere.
        return rank.size * torch.stack(losses).sum().item() if is_last else 0.0

    return Work(run, 3 * held_bytes(parameters), device.type)


def run_config(setting: Setting, precision: Precision, size: int, pipeline: PipelineConfig) -> RunConfig:
    """The run whose step is measured, on the mesh pp=size."""
    config = fsdp_config(setting, precision, size)
    train = attrs.evolve(config.train, batch_size=setting.batch_size, seq_len=setting.seq_len)
    return attrs.evolve(config, train=train, mesh=MeshConfig(pp=size), pipeline=pipeline)


class Part(nn.Module):
    """One stage: some of the layers, the embedding where it is the first one, norm and head where it is the last.

    tokens int64 [batch, seq], or [batch, seq, embed] -> [batch, seq, embed], or logits [batch, seq, vocab].
    """

    def __init__(self, whole: Llama, start: int, stop: int) -> None:
        super().__init__()
        self.embed = whole.embed if start == 0 else None
        self.layers = whole.layers[start:stop]
        is_last = stop == len(whole.layers)
        self.norm = whole.norm if is_last else None
        self.unembed = whole.unembed if is_last else None
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.unembed is None else self.unembed(self.norm(x))

    def compute_in_bfloat16(self, mesh: dist.DeviceMesh) -> None:
        """``fully_shard`` over a mesh of one rank, which is how torchtitan computes in another dtype."""
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # As torchtitan, which keeps what is gathered from microbatch to microbatch.
        shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if self.embed is not None:
            shard(self.embed)
        for layer in self.layers:
            shard(layer)
        if self.unembed is not None:
            shard([self.norm, self.unembed])
        shard(self)


def _modules(setting: Setting, plan: Pipeline, stages: tuple[int, ...], device: torch.device) -> nn.ModuleList:
    """This rank's stages, of the same layers and values as functitan's. It holds the whole model for a moment."""
    # As init_state does it.
    params_key, _ = random.split(random.key(setting.seed, device=device))
    specs = ft.compile_specs(llama.declare(setting.model))
    with device:
        whole = from_params(ft.init_params(specs, params_key), setting.model, setting.seq_len)
    return nn.ModuleList(Part(whole, *plan.layers[stage]) for stage in stages)


def _clip(parameters: list[nn.Parameter]) -> None:
    """As torchtitan (distributed/utils.py, clip_grad_norm_ with a pp_mesh): the norm is that over all stages."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = norm**2
    dist.all_reduce(norm)
    nn.utils.clip_grads_with_norm_(parameters, CLIP, norm.sqrt(), foreach=True)


def _batch(setting: Setting, rank: Rank, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels [batch, seq], the same on every rank."""
    return my_rows(setting, attrs.evolve(rank, rank=0, size=1), device)
