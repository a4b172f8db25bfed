"""Capture: a function of tensors becomes one FX graph of ATen operators, for the given shapes.

The whole function is traced by ``make_fx`` under fake tensors, so forward, backward, clipping and optimizer end up in
one
graph: no autograd engine and no Python of the model at run time. Nothing is computed while tracing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from functitan.compiler.graphs import outputs, storages, value
from functitan.compiler.guards import CaptureError, NoReads, NoSideEffects, refusal_of

__all__ = ["CaptureError", "capture", "is_capturing"]

_state = threading.local()
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


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
    fun: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    name: str = "function",
) -> GraphModule:
    """The graph of ``fun(*inputs)``, a function from tensors to a flat sequence of tensors.

    Args:
        fun: pure; its outputs may carry autograd history, which is dropped.
        inputs: give shapes, dtypes, strides and devices; their values are not read.
        name: what errors call the function.

    Returns:
        A functional graph (no operator changes anything in place) with one placeholder for each input.
        ``node.meta["val"]`` holds each result as a fake tensor; ``node.meta["custom"]["remat"]`` marks what a remat
        computes again.

    Raises:
        CaptureError: the function reads a traced value, changes an input or draws from the global generator.
    """

    def guarded(*args: Tensor) -> list[Tensor]:
        with NoReads(name), NoSideEffects(name, args):
            return [x.detach() for x in fun(*args)]

    example = [x.detach() for x in inputs]
    with _capturing(), fx_traceback.preserve_node_meta():
        try:
            graph = _trace(guarded, example)
        except _DATA_DEPENDENT as error:
            raise refusal_of(name, error) from None
        if any(_is_mutation(node) for node in graph.graph.nodes):
            # The user changed an intermediate result in place. There is no autograd left in the graph, so it can be
            # replayed through functionalize, which torch.autograd.grad could not.
            graph = _trace(torch.func.functionalize(graph, remove="mutations"), example)
    _own_outputs(graph)
    return graph


def _trace(fun: Callable, inputs: Sequence[Tensor]) -> GraphModule:
    with torch.no_grad():
        return make_fx(fun, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def _own_outputs(module: GraphModule) -> None:
    """Copies what is returned but lives in the graph: a caller may donate what it was given."""
    graph = module.graph
    kept = {s for node in graph.nodes if node.op == "get_attr" for s in storages(node)}
    results = outputs(graph)
    with graph.inserting_before(graph.output_node()):
        for i, result in enumerate(results):
            if storages(result) & kept:
                results[i] = graph.call_function(torch.ops.aten.clone.default, (result,))
                results[i].meta["val"] = torch.ops.aten.clone.default(value(result))
    graph.output_node().args = (results,)


def _is_mutation(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
