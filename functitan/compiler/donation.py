"""Donated tensors: the caller gives their memory to the step, and is told so if it reads them afterwards."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from functitan._torch import storage_id


class DonatedError(RuntimeError):
    """A tensor was used after it had been donated."""


class DonatedTensor(torch.Tensor):
    """What remains of a tensor whose memory was donated: every use of it raises :class:`DonatedError`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise DonatedError(
            f"{getattr(func, '__name__', func)}: this tensor was donated to a jitted function, which has reused its "
            "memory. Use the value that the function returned, or leave the argument out of donate=(…)"
        )


def take(x: Tensor) -> Tensor:
    """The memory of ``x`` as a new tensor; ``x`` itself becomes a :class:`DonatedTensor` without memory.

    A view gives a copy: the rest of its buffer is not the caller's to give.
    """
    whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    mine = x.detach() if whole else x.detach().clone(memory_format=torch.preserve_format)
    x.requires_grad_(False)
    x.data = _empty(x.dtype, x.device)
    x.__class__ = DonatedTensor
    return mine


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def are_distinct(inputs: Sequence[Tensor], donated: Collection[int]) -> bool:
    """Whether no donated tensor shares its memory with another of the inputs."""
    count = Counter(storage_id(x) for x in inputs if x.numel())
    return all(count[storage_id(inputs[i])] <= 1 for i in donated)


def shared_pair(pairs: Sequence[tuple[str, Tensor]], is_donated: Callable[[str], bool]) -> tuple[str, str]:
    """The paths of the first donated tensor that shares its memory, and of the one that it shares it with."""
    groups: dict[int, list[str]] = {}
    for path, x in pairs:
        if x.numel():
            groups.setdefault(storage_id(x), []).append(path)
    group = next(g for g in groups.values() if len(g) > 1 and any(map(is_donated, g)))
    one = next(filter(is_donated, group))
    return one, next(path for path in group if path is not one)
