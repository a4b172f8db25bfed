"""What a captured function may not do, caught while it is traced and told with the user's line.

A captured graph holds tensor operations and nothing else. Reading a traced value (``print``, ``.item()``,
``if x > 0``), changing a tensor that the function did not make, and drawing from torch's global generator would all
happen once, at capture, and never again: each is refused here instead.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

import einops
import numpy as np
import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from functitan._torch import is_distributed_type, is_fake, storage_id
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
    "data_ptr": "reads the address of a traced value",
}
_READ_ADVICE = (
    "a captured function has no values while it is traced. Return the value and read it outside, use torch.where "
    "for a choice, or run the plain function under functitan.disable_jit()"
)
_STDLIB = os.path.dirname(os.path.abspath(sysconfig.__file__)) + os.sep
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(module.__file__)) + os.sep for module in (torch, einops, optree, np)
) + (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,)


_SET_DATA = torch.Tensor.data.__set__


class CaptureError(TypeError):
    """The function does something that a captured graph cannot hold."""


def user_line(frames: Iterable[tuple[str, int]]) -> str:
    """``file:line: source`` of the innermost frame that belongs to neither functitan, torch nor the interpreter."""
    for filename, lineno in frames:
        if not _is_machinery(filename):
            return f"{filename}:{lineno}: {linecache.getline(filename, lineno).strip()}"
    return "a line that could not be found"


def _is_machinery(filename: str) -> bool:
    if filename.startswith(("<", *_LIBRARIES)):
        return True
    return filename.startswith(_STDLIB) and "site-packages" not in filename


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
        if what is not None and args and isinstance(args[0], Tensor) and is_fake(args[0]):
            raise refusal(self.name, what, _READ_ADVICE)
        if func == _SET_DATA:
            raise refusal(self.name, "sets .data of a tensor", "a step function is pure. Return the new value")
        if func is torch.tensor and args and not isinstance(args[0], Tensor) and _holds_traced(args[0]):
            raise refusal(
                self.name, "makes a tensor from traced values with torch.tensor", "use torch.stack, which is traced"
            )
        return func(*args, **(kwargs or {}))


def _holds_traced(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(_holds_traced(x) for x in data)
    return isinstance(data, Tensor) and is_fake(data)


class NoSideEffects(TorchDispatchMode):
    """Refuses global random draws, changes of what was not made here, and shapes that follow from values."""

    def __init__(self, name: str, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.inputs = {storage_id(x) for x in inputs}
        # With the tensors themselves: the number of a buffer that is gone may be given to another.
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_distributed_type(kind) for kind in types):
            return NotImplemented  # what DTensor makes of it comes here again
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
        self._note_views_of_outside(func, args, out)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, Tensor) and any(not isinstance(size, int) for size in first.shape):
            raise refusal(
                self.name,
                f"makes a tensor whose shape depends on values ({func})",
                "every shape must follow from the shapes of the arguments. Use torch.where or a mask",
            )
        return out

    def _note_views_of_outside(self, func, args, out) -> None:
        source = args[0] if args else None
        if not isinstance(source, Tensor) or (is_fake(source) and storage_id(source) not in self.outside):
            return
        if not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns):
            parts = out if isinstance(out, (list, tuple)) else (out,)
            self.outside |= {storage_id(x): x for x in parts if isinstance(x, Tensor)}

    def _check_targets(self, func, args, kwargs) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            target = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in target if isinstance(target, (list, tuple)) else (target,):
                if not isinstance(x, Tensor):
                    continue
                is_input = storage_id(x) in self.inputs
                if is_input or not is_fake(x) or storage_id(x) in self.outside:
                    what = "an argument" if is_input else "a tensor from outside the function"
                    raise refusal(
                        self.name,
                        f"changes {what} in place ({func})",
                        "a step function is pure. Return the new value instead",
                    )
