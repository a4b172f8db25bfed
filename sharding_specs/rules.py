"""Rules: which mesh axes split the dims of a given meaning, said once for parameters and activations alike."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from sharding_specs.partition import Entry, P, canonical, entry_axes
from sharding_specs.problem import did_you_mean

DATA_NAMES = ("batch", "seq")
"""Dims that every batch and activation has, and no parameter."""

STANDARD_NAMES = (*DATA_NAMES, "embed", "vocab", "heads", "kv_heads", "head_dim", "mlp", "layers", "experts")
"""The logical names that the models and presets here use. A rule for one of them may go unused; a rule for another
name that no parameter has is taken for a misspelling by ``check``."""


@frozen(init=False, repr=False)
class Rules:
    """Logical name -> mesh axis, tuple of axes (outermost first), or None for a dim that is not split.

    ``Rules(embed="fsdp", mlp="tp")``. Unless said otherwise the batch is split over ``dp`` and ``fsdp`` and the
    sequence over ``cp``, since data parallelism that leaves the batch whole does the same work on every rank. An axis
    that a mesh lacks splits nothing on it, so the same rules serve every mesh. With no rule beside those two,
    ``Rules()``, every parameter is replicated; otherwise every name that a parameter uses needs a rule
    (``head_dim=None``), so that a misspelling is not a silent replication. Reads as a mapping; the order of the rules
    does not matter.

    Raises:
      TypeError: a value is not None, an axis name or a tuple of axis names.
    """

    _items: tuple[tuple[str, Entry], ...]

    def __init__(self, *, batch: Any = ("dp", "fsdp"), seq: Any = "cp", **rules: Any):
        items = []
        for name, entry in {"batch": batch, "seq": seq, **rules}.items():
            try:
                items.append((name, canonical(entry)))
            except TypeError as error:
                raise TypeError(f"rule {name!r}: {error}") from None
        self.__attrs_init__(tuple(sorted(items)))

    def replace(self, **rules: Any) -> Rules:
        """The rules with some changed or added."""
        return Rules(**{**dict(self), **rules})

    @property
    def replicates_parameters(self) -> bool:
        """Whether there is no rule beside those of the batch's own dims."""
        return all(name in DATA_NAMES for name in self)

    def spec(self, names: Iterable[str | None], mesh: Container[str] | None = None) -> P:
        """The layout of an array whose dims have these logical names; None is a dim that is not split.

        An axis splits one dim only: **the first dim that asks for it gets it**, and later ones do without it, axis by
        axis. So with the default rules and ``embed="fsdp"`` a parameter ``("vocab", "embed")`` is split over fsdp,
        and an activation ``("batch", "seq", "embed")`` is split over fsdp along its batch.

        Args:
          names: one a dim; the result has one entry a dim.
          mesh: the axes there are (a MeshSpec, or any container of names); others are left out. None keeps all.

        Raises:
          ValueError: a name has no rule.
        """
        taken: set[str] = set()
        entries = []
        for name in names:
            axes = []
            for axis in entry_axes(self._entry(name)):
                if axis not in taken and (mesh is None or axis in mesh):
                    taken.add(axis)
                    axes.append(axis)
            entries.append(tuple(axes))
        return P(*entries)

    def _entry(self, name: str | None) -> Entry:
        if name is None or (name not in self and self.replicates_parameters):
            return None
        if name not in self:
            hint = did_you_mean(name, self) or f"rules exist for {', '.join(self)}"
            raise ValueError(f"no rule for the logical name {name!r}; {hint}")
        return self[name]

    def __repr__(self) -> str:
        return f"Rules({', '.join(f'{name}={entry!r}' for name, entry in self._items)})"

    def __getitem__(self, name: str) -> Entry:
        return dict(self._items)[name]

    def get(self, name: str, default: Entry = None) -> Entry:
        return dict(self._items).get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._items)

    def keys(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._items)

    def values(self) -> tuple[Entry, ...]:
        return tuple(entry for _, entry in self._items)

    def items(self) -> tuple[tuple[str, Entry], ...]:
        return self._items


_WHOLE = {name: None for name in STANDARD_NAMES if name not in DATA_NAMES}
_DATA = Rules(**{**_WHOLE, "embed": "fsdp"})
_TENSOR = _DATA.replace(vocab="tp", heads="tp", kv_heads="tp", mlp="tp")
# Experts live on ep and every other parameter is replicated there, so ep must also split the batch.
_ALL = _TENSOR.replace(batch=("dp", "fsdp", "ep"), layers="pp", experts="ep")

PRESETS: Mapping[str, Rules] = MappingProxyType({"data": _DATA, "tensor": _TENSOR, "all": _ALL})
"""Rules by name, for the logical names of STANDARD_NAMES. Each one serves a mesh with any of its axes.

- ``data``: the batch over dp and fsdp, the sequence over cp, parameters stored split along "embed" over fsdp.
- ``tensor``: data, and heads, key/value heads, the MLP's hidden dim and the vocabulary over tp (the split of
  Megatron-LM, https://arxiv.org/abs/1909.08053).
- ``all``: tensor, and layers over pp, experts over ep, where ep also splits the batch. On the mesh ep stands
  behind fsdp.
"""
