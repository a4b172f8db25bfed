"""What a captured function may not do, caught while it is traced and told with the user's line.

A captured graph holds tensor operations and nothing else. Reading a traced value (``print``, ``.item()``, ``if x >
0``), changing an input in place, and drawing from torch's global generator would all happen once, at capture, and
never
again: each is refused here instead.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from types import FrameType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from functitan.compiler.graphs import draws

_READS = {
    "__repr__": "prints a traced value",
    "__format__": "formats a traced value",
    "__bool__": "branches on a traced value",
    "__contains__": "searches a traced value",
    "__int__": "turns a traced value into a Python int",
    "__index__": "uses a traced value as a Python index",
    "__float__": "turns a traced value into a Python float",
    "__complex__": "turns a traced value into a Python complex",
    "__array__": "turns a traced value into a numpy array",
    "item": "reads a traced value with .item()",
    "tolist": "reads a traced value with .tolist()",
    "numpy": "turns a traced value into a numpy array",
}
_READ_ADVICE = (
    "a captured function has no values while it is traced. Return the value and read it outside, use torch.where "
    "for a choice, or run the plain function under functitan.disable_jit()"
)
_ROOTS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__), sysconfig.__file__)
)


class CaptureError(TypeError):
    """The function does something that a captured graph cannot hold."""


def user_line(frames: Iterable[tuple[str, int]]) -> str:
    """``file:line: source`` of the innermost frame that belongs to neither functitan, torch nor the interpreter."""
    for filename, lineno in frames:
        if "site-packages" in filename or filename.startswith(("<", *_ROOTS)):
            continue
        return f"{filename}:{lineno}: {linecache.getline(filename, lineno).strip()}"
    return "a line that could not be found"


def _stack(frame: FrameType | None) -> Iterable[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def refusal(name: str, what: str, advice: str, frames: Iterable[tuple[str, int]] | None = None) -> CaptureError:
    where = user_line(_stack(sys._getframe(1)) if frames is None else frames)
    return CaptureError(f"jit({name}): {where}\n  {what}; {advice}")


def refusal_of(name: str, error: BaseException) -> CaptureError:
    """The same message for an error that torch itself raised while tracing."""
    frames = [(f.filename, f.lineno) for f in reversed(traceback.extract_tb(error.__traceback__))]
    return refusal(name, "depends on the values of a traced tensor", _READ_ADVICE, frames)


class NoReads(TorchFunctionMode):
    """Refuses to hand the value of a traced tensor to Python."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func, types, args=(), kwargs=None):
        what = _READS.get(getattr(func, "__name__", ""))
        if what is not None:
            raise refusal(self.name, what, _READ_ADVICE)
        return func(*args, **(kwargs or {}))


class NoSideEffects(TorchDispatchMode):
    """Refuses random draws from the global generator, changes of the inputs, and shapes that depend on values."""

    def __init__(self, name: str, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.inputs = {x.untyped_storage()._cdata for x in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            raise refusal(
                self.name,
                f"draws from torch's global generator ({func})",
                "a captured draw would repeat. Use functitan.random with a key that is an argument",
            )
        if func._schema.is_mutable:
            self._check_targets(func, args, kwargs)
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, Tensor) and any(not isinstance(size, int) for size in first.shape):
            raise refusal(
                self.name,
                f"makes a tensor whose shape depends on values ({func})",
                "every shape must follow from the shapes of the arguments. Use torch.where or a mask",
            )
        return out

    def _check_targets(self, func, args, kwargs) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in target if isinstance(target, (list, tuple)) else (target,):
                if isinstance(x, Tensor) and x.untyped_storage()._cdata in self.inputs:
                    raise refusal(
                        self.name,
                        f"changes an argument in place ({func})",
                        "a step function is pure. Return the new value instead",
                    )
