"""The fields of a run that say how it is laid out over devices. Every docstring is the command line's help text."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from sharding_specs import PRESETS, STANDARD_NAMES, ContextParallel, MeshSpec, Rules
from sharding_specs.rules import DATA_NAMES

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""Mesh axes, outermost first: the axes that communicate most vary fastest, so that their ranks share a machine."""

RUNNABLE_AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""The axes that this version trains over. Layouts over the others can be declared and checked, and no more yet."""


@frozen
class MeshConfig:
    """Devices along each axis of the mesh. One axis may be -1: whatever the number of devices leaves."""

    dp: int = 1
    """Replicated data parallel: each rank has all parameters and a part of the batch."""
    fsdp: int = 1
    """Data sharding: parameters, gradients and optimizer state are split, and gathered where they are used."""
    tp: int = 1
    """Tensor parallel: heads, hidden units and vocabulary are split."""
    cp: int = 1
    """Context parallel: the sequence is split."""
    pp: int = 1
    """Pipeline: the layers are split into stages."""
    ep: int = 1
    """Expert parallel: the experts are split."""

    def spec(self) -> MeshSpec:
        """The mesh with all six axes, in the order of :data:`AXES`. :func:`validate` says what is wrong with it."""
        return MeshSpec(**{axis: getattr(self, axis) for axis in AXES})


@frozen
class RulesConfig:
    """Which mesh axes split which dims: a preset, and what is changed in it."""

    preset: Literal["data", "tensor", "all"] = "all"
    """data: parameters over fsdp only; tensor: also over tp; all: also layers over pp and experts over ep."""
    batch: str | None = None
    """Axes over which the samples of a batch are split, such as "dp,fsdp"; here as below "none" leaves the dim whole,
    and None (nothing given) takes what the preset says."""
    seq: str | None = None
    """The sequence. "cp,tp" is sequence parallel beside tensor parallel; "cp" keeps it whole over tp."""
    embed: str | None = None
    """The width of the model."""
    vocab: str | None = None
    """The vocabulary, of the embedding and of the logits."""
    heads: str | None = None
    """The heads of queries."""
    kv_heads: str | None = None
    """The heads of keys and values."""
    head_dim: str | None = None
    """The width of a head."""
    mlp: str | None = None
    """The hidden units."""
    layers: str | None = None
    """The layers."""
    experts: str | None = None
    """The experts."""
    uneven: tuple[str, ...] = ()
    """More dims, by these names, that need not divide over their axes, as the vocabulary does not in any preset: some
    ranks then hold less of them than others."""

    def rules(self) -> Rules:
        """The preset with the changes. :func:`validate` says what is wrong with them; wrong ones are left out here."""
        given = {name: getattr(self, name) for name in STANDARD_NAMES}
        rules = PRESETS[self.preset].replace(**{name: _axes(text) for name, text in given.items() if text is not None})
        return rules.allow_uneven(*(name for name in self.uneven if name in UNEVEN_NAMES))


UNEVEN_NAMES = tuple(name for name in STANDARD_NAMES if name not in DATA_NAMES)
"""Logical names that rules may allow to divide unevenly."""


def _axes(text: str) -> tuple[str, ...]:
    """``"fsdp,tp"`` -> ("fsdp", "tp"); ``"none"`` -> ()."""
    axes = tuple(axis.strip() for axis in text.split(","))
    return () if axes == ("none",) else tuple(filter(None, axes))


@frozen
class PipelineConfig:
    """How a step goes through the stages of a pipeline, where mesh.pp is above 1."""

    schedule: str = "1F1B"
    """GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, or a .csv file with the actions of
    each rank, one rank a line."""
    microbatches: int | None = None
    """Parts that each accumulation part of the batch is taken in. None: the fewest with which the schedule works, at
    least twice mesh.pp. Dropout draws other numbers where a step has other parts in all."""
    stages_per_rank: int | None = None
    """Stages of one rank. None: what the schedule wants: 1, or 2 for the interleaved and the V-shaped ones."""
    layers: str = "auto"
    """How many layers each stage has: auto (as equal in work as they can be, embedding and output head counted),
    equal, or a number for each stage, such as 3,4,4,3."""


@frozen
class ContextConfig:
    """How attention runs over a sequence that is split, where mesh.cp is above 1."""

    method: Literal["auto", "ring", "all_gather", "ulysses"] = "auto"
    """ring: keys and values go round the ranks while they compute. all_gather: each rank gathers all of them. ulysses:
    the ranks change from parts of the sequence to heads and back. auto: ring, or ulysses where it sends less."""
    layout: Literal["auto", "balanced", "contiguous"] = "auto"
    """balanced: each rank has an early and a late part of the sequence, which is equal work where tokens see those
    before them only. contiguous: one part. auto: balanced where that helps and the sequence divides."""

    def wanted(self) -> ContextParallel:
        """What :func:`functitan.compile_specs` is asked for."""
        return ContextParallel(self.method, self.layout)
