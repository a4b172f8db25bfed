"""The end of a run that has done all its steps: the plot, a sample, and where everything is."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import functitan as ft
from functitan import tree
from functitan.state import TrainState
from train.build import Parts
from train.config import RunConfig
from train.data import Data
from train.distributed import Ranks
from train.metrics import HELD_OUT_LOSS, plot_loss, read_metrics
from train.sample import continuation


def finish(
    config: RunConfig, ranks: Ranks, parts: Parts, data: Data, state: TrainState, note: Callable[[str], None]
) -> None:
    """Draws the losses, writes a sample, and says with ``note`` what there is. All ranks call it; the first works."""
    params = _whole_params(ranks, parts, state)
    if not ranks.is_first:
        return
    out, step = config.out, int(state.step)
    try:
        plot_loss(out)
    except OSError as error:  # the run itself is done and saved
        note(f"no plot: {error.filename or out}: {error.strerror}")
    evaluated = [(row["step"], row[HELD_OUT_LOSS]) for row in read_metrics(out) if HELD_OUT_LOSS in row]
    if evaluated:
        at, loss = evaluated[-1]
        uniform = math.log(config.model.vocab_size)
        note(f"held-out loss after {at} steps: {loss:.3f} nats a token (a uniform guess: {uniform:.3f})")
    if skipped := int(state.skipped):
        note(f"{skipped} of {step} steps were skipped: their gradients were not finite")
    if params is not None:
        prompt = _prompt(config, data)
        text = prompt + continuation(parts.model, params, data.tokenizer, prompt, config.train.seq_len, tokens=300)
        # A young model writes any byte: none of them is to reach the terminal as a command.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        note("\n".join(["", f"a sample after {step} steps:", "", *(f"    {line}" for line in text.split("\n")), ""]))
    note(f"files of this run in {_shown(out)}: config.yaml, metrics.jsonl, loss.png, checkpoints/, tensorboard/")
    note(f"more text: functitan sample {_shown(out)} --prompt 'class '")


def free_memory(device: torch.device) -> int:
    """Bytes that the device has left; of a CPU, the machine."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _whole_params(ranks: Ranks, parts: Parts, state: TrainState) -> Any | None:
    """The parameters on the first rank, where half of its free memory has room for them; None elsewhere, or if not."""
    if ranks.size == 1:
        return state.params
    if not ranks.from_first(2 * parts.plan.param_bytes < free_memory(ranks.device)):
        return None
    # Leaf by leaf, so that the other ranks never hold more than one whole leaf.
    gathered = (ft.gather(leaf, parts.plan) for leaf in tree.leaves(state.params))
    whole = [value if ranks.is_first else None for value in gathered]
    return tree.unflatten(tree.structure(state.params), whole) if ranks.is_first else None


def _prompt(config: RunConfig, data: Data) -> str:
    """The beginning of a text such as the model was trained on."""
    if not config.data.path:
        return "import sys\n\ndef "
    sample = (data.held_out if len(data.held_out) else data.train)[0]
    return data.tokenizer.decode(sample["tokens"][:16].tolist())


def _shown(path: Path) -> str:
    """The path as short as it can be given from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
