"""Runs by name: complete configurations with published hyperparameters, each a starting point for options.

``recipe("llama3-8b")`` is plain data. The Llama 3 recipes follow "The Llama 3 Herd of Models" (arXiv:2407.21783),
table 3 and section 3.4.1: peak learning rates, 8,000 steps of warm-up, a cosine to a hundredth over 1,200,000 steps,
weight decay 0.1 and sequences of 8,192. The paper gives the schedule for 405B; the smaller sizes take it over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
from attrs import frozen

from functitan.nn import RopeScaling
from models.llama import SIZES
from train.checkpoint import CheckpointConfig
from train.config import OptimConfig, RunConfig, TrainConfig
from train.config_text import ConfigError, near
from train.layout_config import MeshConfig

NOT_SCALED = RopeScaling(factor=1.0)
"""The same as none, but with fields that options can change."""


@frozen
class Recipe:
    summary: str
    """One line for ``functitan train --help``."""
    make: Callable[[], RunConfig]


def recipe(name: str) -> RunConfig:
    """The configuration of that name.

    Raises:
        ConfigError: there is none; the message names near ones.
    """
    if name not in RECIPES:
        raise ConfigError([f"unknown recipe {name!r}{near(name, RECIPES)}"])
    return RECIPES[name].make()


def debug() -> RunConfig:
    """Seconds to minutes on a CPU: bytes of the standard library's source text."""
    return RunConfig(
        # Byte tokens are 257 ids; rounded up, so that tensor parallelism divides them.
        model=attrs.evolve(SIZES["debug"], vocab_size=264, rope_scaling=NOT_SCALED),
        train=TrainConfig(steps=500, batch_size=16, seq_len=256, eval_every=100, eval_batches=8, log_every=10),
        optim=OptimConfig(learning_rate=4e-3, schedule="cosine", warmup_steps=20, min_ratio=0.05),
        checkpoint=CheckpointConfig(every=100),
        out=Path("runs/debug"),
    )


def small() -> RunConfig:
    """160M parameters on one GPU. Learning rate, betas and clipping of Pythia-160M (arXiv:2304.01373, table 6), and
    20 tokens a parameter (Hoffmann et al., arXiv:2203.15556)."""
    return RunConfig(
        model=attrs.evolve(SIZES["160M"], rope_scaling=NOT_SCALED),
        train=TrainConfig(
            steps=12_000, batch_size=128, seq_len=2048, accumulation=8, eval_every=500, eval_batches=16,
            precision="bfloat16",
        ),
        optim=OptimConfig(learning_rate=6e-4, warmup_steps=120, min_ratio=0.1, b2=0.95),
        checkpoint=CheckpointConfig(every=1000),
        out=Path("runs/small"),
    )  # fmt: skip


def llama3_1b() -> RunConfig:
    """Meta published no pretraining rates for Llama 3.2 1B: peak and warm-up are of OLMo 2 1B (arXiv:2501.00656)."""
    return _llama3("1B", learning_rate=4e-4, warmup_steps=2000, batch_size=512, mesh=MeshConfig(fsdp=-1))


def llama3_8b() -> RunConfig:
    return _llama3("8B", learning_rate=3e-4, batch_size=512, mesh=MeshConfig(fsdp=-1))


def llama3_70b() -> RunConfig:
    return _llama3("70B", learning_rate=1.5e-4, batch_size=1024, mesh=MeshConfig(fsdp=-1, tp=8))


def llama3_405b() -> RunConfig:
    return _llama3("405B", learning_rate=8e-5, batch_size=2048, mesh=MeshConfig(fsdp=-1, tp=8))


def _llama3(
    size: str, *, learning_rate: float, batch_size: int, mesh: MeshConfig, warmup_steps: int = 8000
) -> RunConfig:
    return RunConfig(
        model=SIZES[size],
        train=TrainConfig(
            steps=1_200_000, batch_size=batch_size, seq_len=8192, eval_every=5000, eval_batches=16, remat="full",
            precision="bfloat16",
        ),
        optim=OptimConfig(learning_rate=learning_rate, warmup_steps=warmup_steps, min_ratio=0.01, weight_decay=0.1),
        mesh=mesh,
        checkpoint=CheckpointConfig(every=1000),
        out=Path(f"runs/llama3-{size.lower()}"),
    )  # fmt: skip


DEFAULT = "debug"
RECIPES: dict[str, Recipe] = {
    "debug": Recipe("a small model on bytes of Python's standard library; minutes on a CPU (the default)", debug),
    "small": Recipe("160M parameters, one GPU", small),
    "llama3-1b": Recipe("Llama 3.2 1B, sequences of 8192, any number of GPUs (fsdp)", llama3_1b),
    "llama3-8b": Recipe("Llama 3 8B, sequences of 8192, any number of GPUs (fsdp)", llama3_8b),
    "llama3-70b": Recipe("Llama 3 70B, sequences of 8192, a multiple of 8 GPUs (fsdp x tp=8)", llama3_70b),
    "llama3-405b": Recipe("Llama 3.1 405B, sequences of 8192, a multiple of 8 GPUs (fsdp x tp=8)", llama3_405b),
}
