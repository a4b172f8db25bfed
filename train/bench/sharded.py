"""What ``functitan bench shard`` compares: the same training step on several ranks, functitan's and FSDP2's.

Every rank has the same number of rows, so FSDP2's average of the ranks' gradients is the gradient of the mean over all.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import functitan as ft
from functitan import random
from functitan.compiler.passes import DEFAULT
from models import llama
from train.bench.module import Llama, from_params
from train.bench.rounds import Work
from train.bench.variants import B1, B2, CLIP, WEIGHT_DECAY, Setting, held_bytes, make_adamw, need_compiler
from train.build import build
from train.config import OptimConfig, RunConfig, TrainConfig
from train.hardware import default_device
from train.layout_config import MeshConfig
from train.step import make_train_step

Precision = Literal["float32", "bfloat16"]
Compiled = Literal["no", "blocks", "whole"]
LEARNING_RATE = 1e-4
"""So low that a large model does not learn its one batch by heart at once: losses near 0 would compare nothing."""


@attrs.frozen
class Rank:
    """One of a variant's processes.

    Attributes:
        store: a file that is not there yet, the same for all ranks of the variant: there they meet.
        timeout: seconds that a collective may wait for the other ranks.
    """

    rank: int
    size: int
    threads: int
    store: str
    timeout: float


def make_functional(
    setting: Setting,
    precision: Precision,
    rank: Rank,
    *,
    captured: bool = True,
    passes: Sequence[str] = DEFAULT,
    inductor: bool = False,
) -> Work:
    """functitan's step on the mesh fsdp=size, as ``functitan train`` builds it.

    Args:
        setting: its ``batch_size`` is the rows of a rank.
        captured: otherwise the plain function runs.
    """
    if inductor:
        need_compiler()
    device = join(rank)
    parts = build(fsdp_config(setting, precision, rank.size), rank.size)
    held = [ft.init_state(parts.plan, random.key(setting.seed, device=device), parts.optimizer)]
    tokens, labels = my_rows(setting, rank, device)
    batch = ft.shard_batch(parts.plan, {"tokens": tokens, "labels": labels})
    step = make_train_step(parts.model, parts.optimizer, parts.schedule)
    if captured:
        step = ft.jit(step, parts.plan, donate=("state",), passes=passes, inductor=inductor)

    def run() -> float:
        with ft.use_plan(parts.plan):
            held[0], metrics = step(held[0], batch)
        return metrics["loss"].item()

    return Work(run, held_bytes(held[0]), device.type)


def make_fsdp2(
    setting: Setting, precision: Precision, rank: Rank, *, compiled: Compiled = "no", reshard: bool = True
) -> Work:
    """The module of :mod:`train.bench.module` under ``fully_shard``, as torchtitan trains its own.

    Args:
        compiled: "blocks": every layer, and the loss, as torchtitan does; "whole": model and loss in one.
        reshard: ``reshard_after_forward`` of the embedding and the layers. False: what is gathered for forward is kept
            for backward, quicker and larger.
    """
    if compiled != "no":
        need_compiler()
    device = join(rank)
    mesh = init_device_mesh(device.type, (rank.size,), mesh_dim_names=("fsdp",))
    plan = ft.compile_specs(llama.declare(setting.model))
    # As init_state does it. Every rank holds the whole model for a moment.
    params_key, _ = random.split(random.key(setting.seed, device=device))
    with device:
        model = from_params(ft.init_params(plan, params_key), setting.model, setting.seq_len)
    if compiled == "blocks":
        for layer in model.layers:
            layer.compile(fullgraph=True)
    _shard(model, mesh, precision, setting.model.tied_embeddings, reshard)
    optimizer = make_adamw(model, LEARNING_RATE)
    tokens, labels = my_rows(setting, rank, device)
    token_losses = torch.compile(mean_loss) if compiled == "blocks" else mean_loss

    def loss_fn(tokens: Tensor, labels: Tensor) -> Tensor:
        return token_losses(model(tokens), labels)

    step_loss = torch.compile(loss_fn) if compiled == "whole" else loss_fn

    def run() -> float:
        loss = step_loss(tokens, labels)
        loss.backward()
        _clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # of this rank's rows: what all ranks' is, no step has to know

    return Work(run, 3 * held_bytes(list(model.parameters())), device.type)


def fsdp_config(setting: Setting, precision: Precision, size: int) -> RunConfig:
    """Of a run over fsdp=size whose step is the one that all variants compute."""
    return RunConfig(
        model=setting.model,
        train=TrainConfig(precision=precision),
        optim=OptimConfig(
            learning_rate=LEARNING_RATE, schedule="constant", warmup_steps=0, b1=B1, b2=B2, weight_decay=WEIGHT_DECAY,
            clip_norm=CLIP,
        ),
        mesh=MeshConfig(fsdp=size),
    )  # fmt: skip


def _shard(model: Llama, mesh: DeviceMesh, precision: Precision, tied: bool, reshard: bool) -> None:
    """``fully_shard`` as in torchtitan (models/llama3/infra/parallelize.py, apply_fsdp)."""
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        # The angles are no activations: they stay float32.
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if not tied:
        fully_shard(model.embed, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if not tied:
        # Backward begins with them, so they are kept from forward.
        fully_shard([model.norm, model.unembed], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of PyTorch's models: logits [batch, seq, vocab], labels [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _clip(parameters: list[nn.Parameter]) -> None:
    """As torchtitan (distributed/utils.py, clip_grad_norm_): the norm is whole before anything is scaled by it."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, CLIP, norm, foreach=True)


def join(rank: Rank) -> torch.device:
    """Meets the other ranks; gives this one's device."""
    torch.set_num_threads(rank.threads)
    device = default_device()
    if device.type == "cuda":
        device = torch.device("cuda", rank.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(rank.store, rank.size),
        rank=rank.rank,
        world_size=rank.size,
        timeout=datetime.timedelta(seconds=rank.timeout),
    )
    return device


def my_rows(setting: Setting, rank: Rank, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels of this rank: its rows of the global batch."""
    B, S = setting.batch_size, setting.seq_len
    key = random.key(setting.seed + 1, device=device)
    text = random.randint(key, (B * rank.size, S + 1), 0, setting.model.vocab_size).to(torch.int64)
    rows = text[rank.rank * B : (rank.rank + 1) * B]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
