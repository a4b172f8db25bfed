"""What ``functitan bench long`` compares: the same step of attention over one long sequence, functitan's and PyTorch's.

A step is forward and backward of attention alone: causal, with grouped heads, of given queries, keys, values and
gradient of the output. All variants have the same numbers, each rank its part of the sequence.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as experimental

import functitan as ft
from functitan import nn
from functitan.compiler.boundary import local
from functitan.sharding.context.order import taken
from sharding_specs import BatchSpec, ContextParallel, MeshSpec, Param, Rules
from sharding_specs.context import runs
from train.bench.rounds import Work
from train.bench.shard import ONE_RANK
from train.bench.sharded import Rank, join
from train.bench.variants import held_bytes
from train.errors import UserError

METHODS = ("ring", "all_gather", "ulysses")
"""functitan's, over the ranks."""
TORCH = ("torch-allgather", "torch-alltoall", "torch-allgather+cpu", "torch-alltoall+cpu")
"""PyTorch's. Of these the fastest at a length is what the others are compared with."""
Rotate = Literal["allgather", "alltoall"]
GRADIENTS = ("dq", "dk", "dv")
"""What the first steps, those before anything is measured, report on, one each."""
_PROBES = ("q", "v", "k")
"""Of each gradient, the input of its shape that it is multiplied with to be compared."""

Step = Callable[[], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]


@attrs.frozen
class Setting:
    """Of all variants alike."""

    seq_len: int
    batch_size: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int = 0


Make = Callable[[Setting, Rank], Work]


def variants() -> dict[str, Make]:
    """How to make each variant on a rank, by its name."""
    return {
        ONE_RANK: make_functional,
        **{method: functools.partial(make_functional, method=method) for method in METHODS},
        TORCH[0]: functools.partial(make_context_parallel, rotate="allgather"),
        TORCH[1]: functools.partial(make_context_parallel, rotate="alltoall"),
        TORCH[2]: functools.partial(make_torch_ring, rotate="allgather"),
        TORCH[3]: functools.partial(make_torch_ring, rotate="alltoall"),
    }


def make_functional(setting: Setting, rank: Rank, *, method: str = "ring") -> Work:
    """functitan's attention, captured, over the mesh cp=size in the layout that the plan chooses for the method."""
    device = join(rank)
    plan = _plan(setting, rank.size, method)
    batch = ft.shard_batch(plan, inputs(setting, device))
    captured = ft.jit(_attention_step, plan)

    def step() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        loss, grads = captured(batch)
        return local(loss), tuple(map(local, grads))

    return _work(step, {name: local(x) for name, x in batch.items()}, device)


def make_context_parallel(setting: Setting, rank: Rank, *, rotate: Rotate) -> Work:
    """``torch.distributed.tensor.experimental.context_parallel`` around scaled_dot_product_attention.

    Its kernels for float32 take no grouped heads: those of keys and values are repeated before.
    """
    device = join(rank)
    mesh = init_device_mesh(device.type, (rank.size,))
    experimental.set_rotate_method(rotate)
    whole = inputs(setting, device)
    buffers = list(whole.values())
    stack = contextlib.ExitStack()
    atexit.register(stack.close)  # until then it is in force: what entering costs is not a step's
    stack.enter_context(
        experimental.context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        )
    )
    # Cloned, since the buffers keep the memory of the whole sequence.
    x = _heads_first({name: part.clone() for name, part in whole.items()})
    del whole, buffers
    repeats = setting.heads // setting.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (y.repeat_interleave(repeats, 1) for y in (k, v))
        try:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        except NotImplementedError as error:
            raise UserError(f"torch's context_parallel does not run on {device.type}: {error}") from error

    return _work(_eager(attend, x), x, device)


def make_torch_ring(setting: Setting, rank: Rank, *, rotate: Rotate) -> Work:
    """The ring that is behind ``context_parallel``, in its balanced order, with the kernel of a CPU put in."""
    device = join(rank)
    if device.type != "cpu":
        raise UserError(f"it stands in for context_parallel on a CPU; on {device.type} that runs itself")
    experimental.set_rotate_method(rotate)
    mine = runs(rank.rank, rank.size, setting.seq_len, "balanced")
    x = _heads_first({name: taken(whole, mine, 1) for name, whole in inputs(setting, device).items()})
    return _work(_eager(_TorchRing.apply, x), x, device)


class _TorchRing(torch.autograd.Function):
    """[batch, heads, seq, head_dim] of q, k and v, this rank's part, as torch's own operators on a GPU take them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as rings

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = rings._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as rings

        q, k, v, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return rings._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, grad, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )


def _attention_step(x: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The sum of the output times the cotangent, and its gradients with respect to q, k and v."""

    def loss(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return (nn.attention(*qkv, causal=True) * x["cotangent"]).sum()

    return ft.value_and_grad(loss)((x["q"], x["k"], x["v"]))


def _eager(attend: Callable[[Tensor, Tensor, Tensor], Tensor], x: dict[str, Tensor]) -> Step:
    """The same step of parts of a sequence, [batch, heads, seq, head_dim], by autograd."""
    qkv = [x[name].requires_grad_() for name in "qkv"]

    def step() -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        loss = (attend(*qkv) * x["cotangent"]).sum()
        grads = torch.autograd.grad(loss, qkv)
        loss = loss.detach()
        dist.all_reduce(loss)  # as functitan's is the whole sequence's
        return loss, grads

    return step


def _work(step: Step, x: dict[str, Tensor], device: torch.device) -> Work:
    """The first steps give a checksum of each gradient in turn, all others the loss: all of the whole sequence."""
    turns = itertools.count()

    def run() -> float:
        loss, grads = step()
        turn = next(turns)
        if turn < len(GRADIENTS):
            return _checksum(grads[turn], x[_PROBES[turn]].detach())
        return loss.item()

    return Work(run, held_bytes(x), device.type)


def _checksum(part: Tensor, probe: Tensor) -> float:
    """Of a tensor of which each rank has a part: 4 times its norm and its product with another one, at random to it.

    The product, of about the size of the norm, tells signs and places; the norm keeps the sum away from 0.
    """
    part = part.double()
    sums = torch.stack([part.square().sum(), (part * probe).sum()])
    dist.all_reduce(sums)
    square, product = sums.tolist()
    return 4 * square**0.5 + product


def _plan(setting: Setting, cp: int, method: str) -> ft.Plan:
    """Parameters that tell the heads, and a sequence over cp."""
    sizes = {"heads": setting.heads, "kv_heads": setting.kv_heads}
    params = {name: Param((size,), (name,), ft.init.zeros()) for name, size in sizes.items()}
    return ft.compile_specs(
        params, Rules(), MeshSpec(cp=cp), batch=BatchSpec(setting.batch_size, setting.seq_len),
        context=ContextParallel(method, "auto"),
    )  # fmt: skip


def inputs(setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """[batch, seq, heads, head_dim] of the whole sequence."""
    generator = torch.Generator().manual_seed(setting.seed)
    heads = {"q": setting.heads, "k": setting.kv_heads, "v": setting.kv_heads, "cotangent": setting.heads}
    shape = (setting.batch_size, setting.seq_len)
    return {
        name: torch.randn(*shape, count, setting.head_dim, generator=generator).to(device)
        for name, count in heads.items()
    }


def _heads_first(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """As scaled_dot_product_attention takes them; in memory heads stay behind the sequence, as a model makes them."""
    return {name: y.transpose(1, 2) for name, y in x.items()}
