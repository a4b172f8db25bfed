"""How the stages of a pipeline are compiled: as the jitted function that they are part of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import frozen

from functitan.compiler import passes

_state = threading.local()


@frozen
class Options:
    """Names of passes, and whether Inductor compiles what they leave."""

    passes: tuple[str, ...] = passes.DEFAULT
    inductor: bool = False


def current() -> Options:
    """Those in force on this thread; the defaults where a step runs uncaptured."""
    return getattr(_state, "options", Options())


@contextmanager
def compiling(options: Options) -> Iterator[None]:
    """Puts options in force on this thread."""
    before = current()
    _state.options = options
    try:
        yield
    finally:
        _state.options = before
