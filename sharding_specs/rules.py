"""Rules: which mesh axes split the dims of a given meaning, said once for parameters and activations alike."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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

    Sequence parallelism is the rule ``seq=("cp", "tp")``: see :meth:`spec`.

    Attributes:
      uneven: the names whose dims need not divide over their axes: see :meth:`allow_uneven`.

    Raises:
      TypeError: a value is not None, an axis name or a tuple of axis names.
    """

    _items: tuple[tuple[str, Entry], ...]
    uneven: frozenset[str]

    def __init__(self, *, batch: Any = ("dp", "fsdp"), seq: Any = "cp", **rules: Any):
        items = []
        for name, entry in {"batch": batch, "seq": seq, **rules}.items():
            try:
                items.append((name, canonical(entry)))
            except TypeError as error:
                raise TypeError(f"rule {name!r}: {error}") from None
        self.__attrs_init__(tuple(sorted(items)), frozenset())

    def replace(self, **rules: Any) -> Rules:
        """The rules with some changed or added. Names that may be uneven stay so."""
        return Rules(**{**dict(self), **rules}).allow_uneven(*self.uneven)

    def allow_uneven(self, *names: str) -> Rules:
        """The rules with more names whose dims need not divide over their axes.

        Such a dim is split as ``torch.chunk`` and DTensor split: over k ranks the first ones hold ceil(n / k), the
        last ones fewer or nothing. Ranks then do unequal work, so it has to be asked for. ``Rules(**rules)`` is the
        same rules with no such name.

        Raises:
          ValueError: a name is "batch" or "seq", whose shards must have equal sizes on every rank, or has no rule.
        """
        for name in names:
            if name in DATA_NAMES:
                raise ValueError(f"dims named {name!r} can not be uneven; make the batch divide over the mesh")
            if name not in self:
                raise ValueError(self._no_rule(name))
        rules = object.__new__(Rules)
        rules.__attrs_init__(self._items, self.uneven.union(names))
        return rules

    @property
    def replicates_parameters(self) -> bool:
        """Whether there is no rule beside those of the batch's own dims."""
        return all(name in DATA_NAMES for name in self)

    def spec(self, names: Iterable[str | None], mesh: Container[str] | None = None) -> P:
        """The layout of an array whose dims have these logical names; None is a dim that is not split.

        An axis splits one dim only, so the dims take turns, and each gets those axes of its rule that are left:

        1. "batch", all of its axes;
        2. "seq", the axis "cp" alone;
        3. the other dims, in their order;
        4. "seq", whatever else its rule names.

        So with the default rules and ``embed="fsdp"`` a parameter ``("vocab", "embed")`` is split over fsdp, and an
        activation ``("batch", "seq", "embed")`` is split over fsdp along its batch. With ``seq=("cp", "tp")`` and
        ``mlp="tp"`` that activation has its sequence over tp as well, while ``("batch", "seq", "mlp")`` has mlp over
        tp: the sequence parallelism of Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198.

        Args:
          names: one a dim; the result has one entry a dim.
          mesh: the axes there are (a MeshSpec, or any container of names); others are left out. None keeps all.

        Raises:
          ValueError: a name has no rule.
        """
        names = tuple(names)
        asked = [
            # A rule that names an axis twice is reported by check, and must not fail here.
            tuple(dict.fromkeys(axis for axis in entry_axes(self._entry(name)) if mesh is None or axis in mesh))
            for name in names
        ]
        batch = [dim for dim, name in enumerate(names) if name == "batch"]
        seq = [dim for dim, name in enumerate(names) if name == "seq"]
        others = [dim for dim, name in enumerate(names) if name not in DATA_NAMES]
        context = [("cp", dim) for dim in seq if "cp" in asked[dim]]
        owner: dict[str, int] = {}
        for axis, dim in (*_pairs(asked, batch), *context, *_pairs(asked, (*others, *seq))):
            owner.setdefault(axis, dim)
        return P(*(tuple(axis for axis in axes if owner[axis] == dim) for dim, axes in enumerate(asked)))

    def compute_spec(self, names: Iterable[str | None], mesh: Container[str] | None = None) -> P:
        """The layout that a parameter of these names has where it is used: :meth:`spec` without the storage axes.

        An axis of a dim is *storage*, gathered at use, where the activation ``("batch", "seq", name)`` does not have
        it on that dim: it splits other data there. So fsdp is storage, and tp stays in compute. The rule of "experts"
        always stays, since tokens are dispatched to the experts' ranks before these compute (Fedus et al., 2021,
        https://arxiv.org/abs/2101.03961, section 3).

        Args:
          names, mesh: as for :meth:`spec`.

        Raises:
          ValueError: a name has no rule.
        """
        names = tuple(names)
        entries = []
        for name, entry in zip(names, self.spec(names, mesh)):
            at_use = (name,) if name == "experts" else tuple(dict.fromkeys((*DATA_NAMES, name)))
            kept = entry_axes(self.spec(at_use, mesh)[at_use.index(name)])
            entries.append(tuple(axis for axis in entry_axes(entry) if axis in kept))
        return P(*entries)

    def batch_spec(self, mesh: Container[str] | None = None) -> P:
        """The layout of a batch's arrays [batch, seq]: that of the first two dims of logits, so that labels match."""
        return P(*self.spec(("batch", "seq", "vocab" if "vocab" in self else None), mesh)[:2])

    def _entry(self, name: str | None) -> Entry:
        if name is None or (name not in self and self.replicates_parameters):
            return None
        if name not in self:
            raise ValueError(
                f"{self._no_rule(name)} or add the rule {name}=None to leave that dim whole (and, where activations "
                f"alone have it, compile_specs(…, activations=({name!r},)))"
            )
        return self[name]

    def _no_rule(self, name: str) -> str:
        hint = did_you_mean(name, self) or f"rules exist for {', '.join(self)}"
        return f"no rule for the logical name {name!r}; {hint}"

    def __repr__(self) -> str:
        uneven = f".allow_uneven({', '.join(map(repr, sorted(self.uneven)))})" if self.uneven else ""
        return f"Rules({', '.join(f'{name}={entry!r}' for name, entry in self._items)}){uneven}"

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


def _pairs(asked: Sequence[Iterable[str]], dims: Iterable[int]) -> list[tuple[str, int]]:
    return [(axis, dim) for dim in dims for axis in asked[dim]]


_WHOLE = {name: None for name in STANDARD_NAMES if name not in DATA_NAMES}
# Vocabularies are seldom round numbers, and their operators are ready for shards that differ.
_DATA = Rules(**{**_WHOLE, "embed": "fsdp"}).allow_uneven("vocab")
_TENSOR = _DATA.replace(seq=("cp", "tp"), vocab="tp", heads="tp", kv_heads="tp", mlp="tp")
# Experts live on ep and every other parameter is replicated there, so ep must also split the batch.
_ALL = _TENSOR.replace(batch=("dp", "fsdp", "ep"), layers="pp", experts="ep")

PRESETS: Mapping[str, Rules] = MappingProxyType({"data": _DATA, "tensor": _TENSOR, "all": _ALL})
"""Rules by name, for the logical names of STANDARD_NAMES. Each one serves a mesh with any of its axes, in the order
pp, dp, fsdp, ep, cp, tp. The vocabulary need not divide.

- ``data``: the batch over dp and fsdp, the sequence over cp, parameters stored split along "embed" over fsdp.
- ``tensor``: data, and heads, key/value heads, the MLP's hidden dim and the vocabulary over tp (the split of
  Megatron-LM, https://arxiv.org/abs/1909.08053), with sequence parallelism: between those the sequence is over tp.
  ``replace(seq="cp")`` switches it off.
- ``all``: tensor, and layers over pp, experts over ep, where ep also splits the batch.
"""
