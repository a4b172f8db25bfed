"""Capture: a function of tensors becomes one FX graph of ATen operators, for the given shapes.

The whole function is traced by ``make_fx`` under fake tensors, so forward, backward, clipping and optimizer end up in
one graph: no autograd engine and no Python of the model at run time. Nothing is computed while tracing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.fx import GraphModule

from functitan._torch import DATA_DEPENDENT, retrace_functional, trace
from functitan.compiler.graphs import is_op, ops
from functitan.compiler.guards import CaptureError, NoReads, NoSideEffects, refusal_of

__all__ = ["CaptureError", "capture", "is_capturing"]

_state = threading.local()


def is_capturing() -> bool:
    """True while a function is being traced on this thread (a jitted function called now is traced into it)."""
    return getattr(_state, "capturing", False)


@contextmanager
def _capturing() -> Iterator[None]:
    _state.capturing = True
    try:
        yield
    finally:
        _state.capturing = False


def capture(
    fun: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], name: str = "function"
) -> GraphModule:
    """The graph of ``fun(*inputs)``, a function from tensors to a flat sequence of tensors.

    Tensors that ``fun`` closes over are copied into the graph with the values they have now, as in JAX.

    Args:
        fun: pure; its outputs may carry autograd history, which is dropped.
        inputs: give shapes, dtypes, strides and devices; their values are not read.
        name: what errors call the function.

    Returns:
        A functional graph (no operator changes anything in place) with one placeholder for each input.
        ``node.meta["val"]`` holds each result as a fake tensor; nodes that a remat computes again carry the mark
        ``remat``. ``module.meta["needs_grad"]`` says whether a tensor that it closes over requires grad.

    Raises:
        CaptureError: the function reads a traced value, changes a tensor that it did not make, or draws from the
            global generator.
    """

    def guarded(*args: Tensor) -> list[Tensor]:
        with NoReads(name), NoSideEffects(name, args):
            return [x.detach() for x in fun(*args)]

    example = [x.detach() for x in inputs]
    with _capturing():
        try:
            module = trace(guarded, example)
        except DATA_DEPENDENT as error:
            raise refusal_of(name, error) from None
        if any(is_op(node) and node.target._schema.is_mutable for node in ops(module.graph)):
            # The user changed an intermediate result in place. There is no autograd left in the graph, so it can be
            # replayed through functionalize, which torch.autograd.grad could not.
            module = retrace_functional(module, example)
    _own_constants(module)
    return module


def _own_constants(module: GraphModule) -> None:
    """Copies the tensors that the function closed over: what happens to them later must not reach the graph."""
    module.meta["needs_grad"] = False
    for target in {node.target for node in module.graph.nodes if node.op == "get_attr"}:
        constant = getattr(module, target)
        if isinstance(constant, Tensor):
            module.meta["needs_grad"] |= constant.requires_grad
            delattr(module, target)
            module.register_buffer(target, constant.detach().clone(), persistent=False)
