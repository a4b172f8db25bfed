"""Which dtype each part of a step has."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs import field, frozen

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""The dtypes that a part of a step can have."""


def _name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _is_legal(_: Any, attribute: attrs.Attribute, name: str | None) -> None:
    if name is not None and name not in DTYPES:
        raise ValueError(f"precision: {attribute.name}={name!r}; legal: {', '.join(DTYPES)}, or None")


def _part() -> Any:
    return field(default=None, converter=_name, validator=_is_legal)


@frozen
class Precision:
    """The dtypes of a step, by name; torch dtypes are turned into their names.

    Parameters keep the dtype that they are declared with (float32 master weights), and so do optimizer states, sums and
    averages, whatever is computed in between.

    Attributes:
        compute: of activations, and of parameters where they are used: these are cast before they are gathered. None:
            that of the parameters.
        reduce: in which gradients of parameters are added up over the ranks, whatever they were computed in. None:
            that of the parameters, at least float32.
        output: of the logits. None: as compute.

    Raises:
        ValueError: a name that is no floating dtype a step can have.
    """

    compute: str | None = _part()
    reduce: str | None = _part()
    output: str | None = _part()

    def compute_dtype(self, param: torch.dtype) -> torch.dtype:
        """Of what is computed with a parameter of this dtype."""
        return param if self.compute is None else getattr(torch, self.compute)

    def reduce_dtype(self, param: torch.dtype) -> torch.dtype:
        """In which the gradients of a parameter of this dtype are added up."""
        return torch.promote_types(param, torch.float32) if self.reduce is None else getattr(torch, self.reduce)

    def output_dtype(self, computed: torch.dtype) -> torch.dtype:
        """Of logits that were computed in this dtype."""
        return computed if self.output is None else getattr(torch, self.output)
