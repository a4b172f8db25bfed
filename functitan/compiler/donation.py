"""Donated tensors: the caller gives their memory to the step, and is told so if it reads them afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor


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
    x.data = _empty(x.dtype, x.device)
    x.__class__ = DonatedTensor
    return mine


def spend(x: Tensor) -> None:
    """Makes every use of a DTensor, whose local tensor was taken, raise :class:`DonatedError`."""
    x.__class__ = _donated_dtensor()


@functools.cache
def _donated_dtensor() -> type:
    from torch.distributed.tensor import DTensor

    class DonatedDTensor(DTensor):
        """What remains of a DTensor whose memory was donated."""

        __torch_function__ = DonatedTensor.__torch_function__

    return DonatedDTensor


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def is_dense(x: Tensor) -> bool:
    """Whether each element has a place of its own and none is left free between them: only then can it be donated."""
    dims = [(stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1]
    expected = 1
    for stride, size in sorted(dims):
        if stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def are_distinct(inputs: Sequence[Tensor], donated: Collection[int]) -> bool:
    """Whether no donated tensor shares its memory with another of the inputs."""
    ranges = sorted((*_range(x), i in donated) for i, x in enumerate(inputs) if x.numel())
    reach, reached_by_donated = -1, False
    for start, end, is_donated in ranges:
        if start < reach and (is_donated or reached_by_donated):
            return False
        if end >= reach:
            reach, reached_by_donated = end, is_donated
    return True


def shared_pair(pairs: Sequence[tuple[str, Tensor]], is_donated: Callable[[str], bool]) -> tuple[str, str]:
    """The paths of a donated tensor that shares its memory, and of the one that it shares it with."""
    spans = [(path, *_range(x)) for path, x in pairs if x.numel()]
    return next(
        (one, other)
        for one, start, end in spans
        for other, other_start, other_end in spans
        if one != other and is_donated(one) and start < other_end and other_start < end
    )


def _range(x: Tensor) -> tuple[int, int]:
    """The addresses of the whole buffer: two storages may stand on one piece of memory, as arrays of numpy do."""
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
