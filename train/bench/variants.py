"""What ``functitan bench step`` compares: one training step of the same model from the same parameters, in six ways."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functitan as ft
from functitan import optim, random, tree
from functitan.compiler.boundary import local
from models import llama
from train.bench.module import angles, from_params
from train.bench.rounds import Work
from train.errors import UserError
from train.recipes import recipe
from train.step import make_train_step

LEARNING_RATE, B1, B2, WEIGHT_DECAY, CLIP = 1e-3, 0.9, 0.95, 0.1, 1.0


@attrs.frozen
class Setting:
    """Of all variants alike."""

    model: llama.LlamaConfig
    batch_size: int
    seq_len: int
    seed: int = 0


def make_plain(setting: Setting) -> Work:
    """The plain function, no graph."""
    step, state, batch = _functional(setting)
    return _work(step, state, batch)


def make_jit(setting: Setting) -> Work:
    """``functitan.jit``."""
    step, state, batch = _functional(setting)
    return _work(ft.jit(step, donate=("state",)), state, batch)


def make_jit_inductor(setting: Setting) -> Work:
    """``functitan.jit`` with TorchInductor."""
    need_compiler()
    step, state, batch = _functional(setting)
    return _work(ft.jit(step, donate=("state",), inductor=True), state, batch)


def make_module(setting: Setting) -> Work:
    """An ordinary ``nn.Module`` with ``torch.optim.AdamW(fused=True)``."""
    return _module(setting, lambda fun: fun)


def make_module_compile(setting: Setting) -> Work:
    """The same under ``torch.compile``: forward and backward compiled, the optimizer fused."""
    need_compiler()
    return _module(setting, torch.compile)


def make_jax(setting: Setting) -> Work:
    """``jax.jit`` of the same model with optax."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None:
        raise UserError("jax or optax is not installed: pip install 'functitan[jax]'")
    import jax
    import optax

    from train.bench import jax_llama

    params, tokens, labels = _start(setting)
    state_bytes = 3 * held_bytes(params)
    mask = jax.tree.map(bool, optim.decay_mask(llama.declare(setting.model)))
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, B1, B2, weight_decay=WEIGHT_DECAY, mask=mask)
    )
    step = jax_llama.make_step(setting.model, angles(setting.model, setting.seq_len).numpy(), optimizer)
    values = jax_llama.as_jax(params)
    state = [values, optimizer.init(values)]
    tokens, labels = jax_llama.as_jax((tokens, labels))
    del params

    def run() -> float:
        *state[:], loss = step(*state, tokens, labels)
        return float(loss)

    return Work(run, state_bytes)


VARIANTS: dict[str, Callable[[Setting], Work]] = {
    "plain": make_plain,
    "jit": make_jit,
    "jit+inductor": make_jit_inductor,
    "module": make_module,
    "module+compile": make_module_compile,
    "jax.jit": make_jax,
}


def model_config(name: str) -> llama.LlamaConfig:
    """One of ``models.llama.SIZES`` by its name; "debug" as its recipe has it."""
    return recipe("debug").model if name == "debug" else llama.SIZES[name]


def make_adamw(model: nn.Module, learning_rate: float = LEARNING_RATE) -> torch.optim.AdamW:
    """The optimizer of a module, less the clipping: norms do not decay."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}],
        lr=learning_rate, betas=(B1, B2), weight_decay=WEIGHT_DECAY, fused=True,
    )  # fmt: skip


def _functional(setting: Setting) -> tuple[Callable, ft.TrainState, dict[str, Tensor]]:
    specs = llama.declare(setting.model)
    optimizer = optim.chain(
        optim.clip_by_global_norm(CLIP),
        optim.adamw(LEARNING_RATE, B1, B2, weight_decay=WEIGHT_DECAY, mask=optim.decay_mask(specs)),
    )
    params, tokens, labels = _start(setting)
    state = ft.init_state(ft.compile_specs(specs), random.key(setting.seed), optimizer)
    state = attrs.evolve(state, params=params)

    def model(params: Any, batch: dict[str, Tensor], key: Tensor | None = None) -> Tensor:
        return llama.apply(params, batch, setting.model, key=key)

    step = make_train_step(model, optimizer, optim.constant_schedule(LEARNING_RATE))
    return step, state, {"tokens": tokens, "labels": labels}


def _work(step: Callable, state: ft.TrainState, batch: dict[str, Tensor]) -> Work:
    held = [state]
    state_bytes = held_bytes(state)
    del state

    def run() -> float:
        held[0], metrics = step(held[0], batch)
        return metrics["loss"].item()

    return Work(run, state_bytes)


def _module(setting: Setting, compiled: Callable) -> Work:
    params, tokens, labels = _start(setting)
    model = from_params(params, setting.model, setting.seq_len)
    del params
    optimizer = make_adamw(model)

    @compiled
    def loss_fn(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    def run() -> float:
        loss = loss_fn(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Work(run, 3 * held_bytes(list(model.parameters())))


def _start(setting: Setting) -> tuple[Any, Tensor, Tensor]:
    """Parameters, tokens and labels: the same for every variant."""
    params = ft.init_params(ft.compile_specs(llama.declare(setting.model)), random.key(setting.seed))
    shape = (setting.batch_size, setting.seq_len + 1)
    text = random.randint(random.key(setting.seed + 1), shape, 0, setting.model.vocab_size).to(torch.int64)
    return params, text[:, :-1].contiguous(), text[:, 1:].contiguous()


def held_bytes(values: Any) -> int:
    """Of a tree of tensors, what this rank holds."""
    return sum(local(x).nbytes for x in tree.leaves(values))


def need_compiler() -> None:
    """Raises UserError where TorchInductor cannot work."""
    if not torch.cuda.is_available() and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("TorchInductor needs a C++ compiler on the PATH (g++)")
