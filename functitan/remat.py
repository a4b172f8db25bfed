"""Rematerialisation: intermediate results are computed again in the backward pass instead of kept until then."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from functitan import tree
from functitan._torch import OpOverload, inside_transform, is_distributed_type, marked
from functitan.compiler.graphs import WAIT
from functitan.transforms import detached

RematPolicy = Literal["none", "selective", "full"]


def remat(fun: Callable, policy: RematPolicy = "full") -> Callable:
    """``fun`` whose intermediate results are computed again in backward instead of kept, as ``jax.checkpoint``.

    Inside torch.func transforms (vmap, jvp, vjp) it is ``fun`` itself: their tensors cannot be hooked.

    Args:
        policy: "full" keeps the arguments alone; "selective" keeps the results of matrix products, of attention and of
            reductions over the mesh as well, so that only what is cheap is computed again (Korthikanti et al.,
            https://arxiv.org/abs/2205.05198, section 5); "none" keeps everything.

    Raises:
        ValueError: another policy.
    """
    if policy not in get_args(RematPolicy):
        raise ValueError(f"remat: policy={policy!r}; legal: {', '.join(map(repr, get_args(RematPolicy)))}")
    if policy == "none":
        return fun
    contexts = {"context_fn": _keep_and_recall} if policy == "selective" else {}

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any):
        if not torch.is_grad_enabled() or inside_transform():
            return fun(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(
            _marked(fun), *args, use_reentrant=False, preserve_rng_state=False, **contexts, **kwargs
        )

    return wrapped


_EXPENSIVE = ("mm", "addmm", "bmm", "baddbmm", "convolution", "reduce_scatter_tensor", "all_reduce")


def _is_expensive(op: Any) -> bool:
    name = op.overloadpacket.__name__ if isinstance(op, OpOverload) else ""
    return name in _EXPENSIVE or "attention" in name


def _keep_and_recall() -> tuple[_Keep, _Recall]:
    """The modes in which a selectively rematerialised function runs first, and again.

    Not torch's create_selective_checkpoint_contexts: under a tracer it leaves the choice to a later partitioner.
    """
    kept: list[Any] = []
    return _Keep(kept), _Recall(kept)


_state = threading.local()


def kept(fun: Callable, *args: Any) -> Any:
    """``fun(*args)``, which a selective remat keeps the result of as it does of one expensive operator.

    For what is expensive as a whole and made of many operators, such as attention block by block, whose parts are not
    to be kept one by one, nor sent over the mesh again.
    """
    mode = getattr(_state, "selective", None)
    return fun(*args) if mode is None else mode.whole(fun, args)


class _Selective(TorchDispatchMode):
    """Tells the expensive operators from the others; the wait for an expensive collective is part of it."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.kept = kept
        self.sent: list[Tensor] = []
        self.inside = False
        self.before: list[_Selective | None] = []

    def __enter__(self) -> _Selective:
        self.before.append(getattr(_state, "selective", None))
        _state.selective = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _state.selective = self.before.pop()
        return super().__exit__(*error)

    def whole(self, fun: Callable, args: tuple) -> Any:
        """:func:`kept` in this mode."""
        before, self.inside = self.inside, True
        try:
            return fun(*args) if before else self.expensive(fun, args, {})
        finally:
            self.inside = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        if any(map(is_distributed_type, types)):
            return NotImplemented  # what DTensor makes of it comes here again
        if func is WAIT and any(x is args[0] for x in self.sent):
            return self.expensive(func, args, kwargs or {})
        if not _is_expensive(func):
            return func(*args, **(kwargs or {}))
        out = self.expensive(func, args, kwargs or {})
        if func.namespace == "_c10d_functional":
            self.sent.append(out)
        return out

    def expensive(self, func: Any, args: tuple, kwargs: Any) -> Any:
        raise NotImplementedError


class _Keep(_Selective):
    def expensive(self, func: Any, args: tuple, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        # Autograd makes ``out`` part of its graph: what is kept is another tensor of the same values.
        self.kept.append(tree.map(detached, out))
        return out


class _Recall(_Selective):
    def expensive(self, func: Any, args: tuple, kwargs: Any) -> Any:
        return self.kept.pop(0)


_remat_count = itertools.count(1)


def _marked(fun: Callable) -> Callable:
    """``fun`` that marks what it does on every run but the first, so that no graph pass merges the two again."""
    runs = itertools.count()

    def run(*args: Any, **kwargs: Any):
        if next(runs) == 0:
            return fun(*args, **kwargs)
        with marked("remat", next(_remat_count)):
            return fun(*args, **kwargs)

    return run
