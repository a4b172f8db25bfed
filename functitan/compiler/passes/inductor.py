"""Compiles a captured graph with TorchInductor; the one file that knows its entry point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from functitan.compiler.graphs import call, outputs, placeholders, storages, value
from functitan.compiler.passes.recompute import recompute_elementwise


class CompilerError(RuntimeError):
    """TorchInductor could not compile the graph."""


def compile_graph(
    module: GraphModule, inputs: Sequence[Tensor], donated: Collection[int]
) -> tuple[Callable[[list[Tensor]], list[Any]], str]:
    """``(run, source)`` as ``functitan.compiler.execute.compile_graph``, with generated kernels.

    Raises:
        CompilerError: no C++ compiler, or the graph does not compile; says what Inductor said.
    """
    import torch._inductor

    _products_with_vectors_as_sums(module.graph)
    recompute_elementwise(module.graph)
    _write_back(module, donated)
    module.recompile()
    source = module.code
    try:
        with torch.no_grad():
            compiled = torch._inductor.compile(module, [x.detach() for x in inputs])
    except Exception as error:  # whatever the compiler stack raises is told with what to do about it
        raise CompilerError(
            "TorchInductor could not compile the step: "
            f"{type(error).__name__}: {(str(error).strip() or '(no text)').splitlines()[0]}. "
            "On a CPU it needs a C++ compiler (g++ on the PATH); without Inductor the captured graph runs as it is"
        ) from error

    def run(taken: list[Tensor]) -> list[Any]:
        arguments = list(taken)
        taken.clear()
        with torch.no_grad():
            return list(compiled(*arguments))

    return run, source


def _products_with_vectors_as_sums(graph: Graph) -> None:
    """Multiplications of a matrix and a vector as elementwise products and sums.

    As calls of BLAS, which is how they run best alone (weight gradients of norms), Inductor cannot fuse them with what
    makes their operands, and has to write those to memory.
    """
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is not aten.mm.default:
            continue
        a, b = node.args
        rows, columns = value(node).shape
        if rows != 1 and columns != 1:
            continue
        with graph.inserting_before(node):
            if columns == 1:  # [n, d] x [d, 1]
                product = call(graph, aten.mul.Tensor, a, call(graph, aten.t.default, b))
                new = call(graph, aten.sum.dim_IntList, product, [1], True)
            else:  # [1, n] x [n, d]
                product = call(graph, aten.mul.Tensor, call(graph, aten.t.default, a), b)
                new = call(graph, aten.sum.dim_IntList, product, [0], True)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _write_back(module: GraphModule, donated: Collection[int]) -> None:
    """Copies each result into a donated input of its type, which Inductor turns into writing it there."""
    graph = module.graph
    results = outputs(graph)
    returned = {s for result in results if isinstance(result, Node) for s in storages(result)}
    # One that is itself a result, or that a result is a view of, is no place for another.
    free = [node for i, node in enumerate(placeholders(graph)) if i in donated and not storages(node) & returned]
    replaced = []
    with graph.inserting_before(graph.output_node()):
        for result in results:
            home = _home(result, free)
            if home is not None:
                free.remove(home)
                result = graph.call_function(torch.ops.aten.copy_.default, (home, result))
            replaced.append(result)
    graph.output_node().args = (replaced,)


def _home(result: Any, free: list[Node]) -> Node | None:
    if not isinstance(result, Node) or value(result) is None:
        return None
    x = value(result)
    for node in free:
        y = value(node)
        if (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device):
            return node
    return None
