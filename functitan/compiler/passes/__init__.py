"""The optimisations of a captured graph, by name: each keeps the numbers and can be switched off alone.

A pass takes the graph and the numbers of the donated inputs, and changes the graph in place. The order is the order
in which they run; ``jit(passes=(…))`` and ``--jit.passes`` choose among the names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from torch.fx import Graph

from functitan.compiler.passes.bucket import bucket_by_layer
from functitan.compiler.passes.cse import merge_duplicates
from functitan.compiler.passes.exchange import exchange_and_add
from functitan.compiler.passes.fold import fold_constants
from functitan.compiler.passes.order import order_by_component
from functitan.compiler.passes.own import own_outputs
from functitan.compiler.passes.prefetch import overlap_communication
from functitan.compiler.passes.regather import gather_again, gather_all_again
from functitan.compiler.passes.reuse import reuse_buffers

Pass = Callable[[Graph, Collection[int]], None]

PASSES: dict[str, Pass] = {
    "cse": merge_duplicates,
    "fold": fold_constants,
    "regather": gather_again,
    "bucket": bucket_by_layer,
    "exchange": exchange_and_add,
    "order": order_by_component,
    "prefetch": overlap_communication,
    "reuse": reuse_buffers,
}
APART: dict[str, Pass] = {"regather": gather_all_again}
"""Of a graph whose backward pass does not follow its forward pass at once, in the place of the pass of that name."""
DEFAULT = tuple(PASSES)
FUNCTIONAL = ("cse", "fold", "regather", "bucket", "exchange")
"""Those that leave a functional graph, which TorchInductor is given; what the others do, it does in its own way."""


def check_passes(names: Sequence[str]) -> tuple[str, ...]:
    """``names`` in the order in which they run.

    Raises:
        ValueError: a name that is no pass.
    """
    unknown = [name for name in names if name not in PASSES]
    if unknown:
        raise ValueError(f"no pass is called {', '.join(map(repr, unknown))}; the passes are {', '.join(PASSES)}")
    return tuple(name for name in PASSES if name in names)


def run_passes(graph: Graph, donated: Collection[int], names: Sequence[str]) -> None:
    """Runs the named passes on the graph. Results get buffers of their own whatever the names: that is no option.

    Args:
        donated: numbers of the inputs whose memory may be overwritten.
    """
    run_functional(graph, donated, names)
    own_outputs(graph, donated)
    run_others(graph, donated, names)


def run_functional(
    graph: Graph, donated: Collection[int], names: Sequence[str], instead: Mapping[str, Pass] = MappingProxyType({})
) -> None:
    """Those of the named passes that leave a functional graph; ``instead``: what runs in the place of some of them."""
    for name in check_passes(names):
        if name in FUNCTIONAL:
            {**PASSES, **instead}[name](graph, donated)
    graph.lint()


def run_others(graph: Graph, donated: Collection[int], names: Sequence[str]) -> None:
    """The rest of the named passes, which put operators in order and write into memory; ``donated`` as above."""
    for name in check_passes(names):
        if name not in FUNCTIONAL:
            PASSES[name](graph, donated)
    graph.lint()
