"""Continuing a text with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import functitan as ft
from functitan import random
from train import checkpoint
from train import config as configs
from train.build import build
from train.data import Tokenizer, load_tokenizer
from train.errors import UserError
from train.folder import CHECKPOINTS, CONFIG, read_config
from train.hardware import default_device
from train.layout_config import MeshConfig
from train.step import Model


def sample(
    folder: Path | str,
    prompt: str,
    *,
    tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """``prompt`` and its continuation by the model of a run.

    Args:
        folder: of the run; it has config.yaml and checkpoints.
        tokens: how many to add at most; the end of a document ends the text.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among so many likeliest tokens; None: among all.
        step: of the checkpoint; None: the newest.

    Raises:
        UserError: no run or checkpoint there, or one that does not fit.
    """
    folder = Path(folder)
    config = configs.parse(read_config(folder / CONFIG), str(folder / CONFIG))
    parts = build(attrs.evolve(config, mesh=MeshConfig()))  # on one device, whatever it was trained on
    params = {"params": ft.abstract_state(parts.plan, parts.optimizer).params}
    params = checkpoint.load(_checkpoint_path(folder, step), params, device=default_device(), subset=True)["params"]
    tokenizer = load_tokenizer(config.data.tokenizer)
    return prompt + continuation(
        parts.model, params, tokenizer, prompt, config.train.seq_len, tokens, temperature, top_k, seed
    )


def continuation(
    model: Model,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str,
    window: int,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """What ``model`` adds to ``prompt``, one token after the other, each seeing at most ``window`` tokens before it."""
    device = ft.tree.leaves(params)[0].device
    pick = ft.jit(_make_pick(model, tokenizer.vocab_size, temperature, top_k))
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eod]
    start = len(ids)
    key = random.key(seed).to(device)
    for i in range(tokens):
        seen = ids[-window:]
        # Always the same shape, so that it is captured once: what follows the text cannot be seen from before it.
        text = torch.zeros(1, window, dtype=torch.int64)
        text[0, : len(seen)] = torch.tensor(seen)
        last = torch.tensor(len(seen) - 1)
        token = int(pick(params, text.to(device), last.to(device), random.fold_in(key, i)))
        if token == tokenizer.eod:
            break
        ids.append(token)
    return tokenizer.decode(ids[start:])


def _make_pick(model: Model, vocab_size: int, temperature: float, top_k: int | None):
    """``pick(params, text [1, window], last, key)``: the token that follows position ``last``."""

    def pick(params: Any, text: Tensor, last: Tensor, key: Tensor) -> Tensor:
        logits = model(params, {"tokens": text})[0].index_select(0, last[None])[0].float()
        logits = logits[:vocab_size]  # the model's vocabulary may be padded
        if top_k is not None and top_k < vocab_size:
            logits = torch.where(logits < logits.topk(top_k).values[-1], -torch.inf, logits)
        if temperature == 0:
            return logits.argmax()
        return random.categorical(key, logits / temperature)

    return pick


def _checkpoint_path(folder: Path, step: int | None) -> Path:
    checkpoints = folder / CHECKPOINTS
    if step is not None:
        return checkpoint.path_of(checkpoints, step)
    found = checkpoint.latest(checkpoints, lambda text: print(f"functitan: {text}", file=sys.stderr))
    if found is None:
        raise UserError(f"no checkpoint in {checkpoints}: train first, to the first checkpoint or the end")
    return found.path
