"""Which parameter a local tensor is, while a step is captured: how passes know what a collective is for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from attrs import frozen
from torch import Tensor

from functitan._torch import is_traced, marked, storage_id

_state = threading.local()


@frozen
class Label:
    """A parameter, or one layer of a stack of them.

    Attributes:
        path: of the captured function's argument: ``state/params/layers/wq``.
        layer: its place along the first dim, where only that slice is meant.
    """

    path: str
    layer: int | None

    @property
    def unit(self) -> tuple[str, int | None]:
        """What parameters that are used together have in common: ``("state/params/layers", 3)``."""
        return self.path.rpartition("/")[0], self.layer


@contextmanager
def naming(inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, on this thread, the local tensors under these paths, their slices and views are known by name."""
    before = getattr(_state, "names", {})
    _state.names = {storage_id(x): (path, x.numel()) for path, x in inputs.items()}
    try:
        yield
    finally:
        _state.names = before


def label_of(local: Tensor) -> Label | None:
    """The label of what an input holds; None for what was computed."""
    known = getattr(_state, "names", {}).get(storage_id(local))
    if known is None:
        return None
    path, numel = known
    if local.numel() == numel or local.numel() == 0:
        return Label(path, None)
    return Label(path, local.storage_offset() // local.numel())


def labelled(label: Label | None) -> AbstractContextManager[None]:
    """Marks what is traced inside as being for a parameter's sake."""
    return marked("parameter", label) if label is not None and is_traced() else nullcontext()
