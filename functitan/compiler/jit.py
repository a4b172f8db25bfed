"""``jit``: a pure function of trees, captured into one graph on its first call for these shapes."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from functitan import tree
from functitan._torch import fakes_like, inside_transform, is_distributed
from functitan.compiler import boundary, donation, passes
from functitan.compiler.agreement import check_agreement
from functitan.compiler.capture import capture, is_capturing
from functitan.compiler.execute import compile_graph
from functitan.compiler.graphs import is_call, ops, placeholders
from functitan.compiler.key import Key, leaf_key, settings
from functitan.compiler.passes import inductor as inductor_pass
from functitan.compiler.pipeline.options import Options, compiling
from functitan.compiler.plan import Plan
from functitan.sharding.labels import naming
from functitan.sharding.layout import Layout, completed, layout_of, use_plan

log = logging.getLogger("functitan.jit")

_MANY_CAPTURES = 8
_MAX_CAPTURES = 64
_state = threading.local()


@contextmanager
def disable_jit() -> Iterator[None]:
    """Within it, on this thread, a jitted function runs as the plain function that it was made from."""
    before = getattr(_state, "disabled", False)
    _state.disabled = True
    try:
        yield
    finally:
        _state.disabled = before


@attrs.frozen(eq=False)
class Captured:
    """One captured graph of a jitted function.

    Attributes:
        graph: the FX graph after all passes.
        source: the Python text that runs (or, with Inductor, the graph that it compiled).
        reason: why it was captured: ``first call``, or what differs from the capture before.
        seconds: what capturing and compiling took.
        donated: which of the traced inputs may be overwritten.
        needs_grad: a tensor that the function closes over requires grad: where gradients are on, the graph, which has
            none to give, is not run.
    """

    graph: GraphModule
    source: str
    reason: str
    seconds: float
    donated: tuple[int, ...]
    needs_grad: bool
    run: Callable[[list[Tensor]], list[Any]] = attrs.field(repr=False)
    pack: Callable[[list[Any]], Any] = attrs.field(repr=False)


def jit(
    fun: Callable,
    plan: Plan | None = None,
    *,
    donate: Sequence[str] = (),
    passes: Sequence[str] = passes.DEFAULT,  # noqa: A002
    inductor: bool = False,
) -> JitFunction:
    """Captures ``fun`` into one graph for the shapes of its arguments, and runs that.

    Args:
        fun: pure; its arguments and results are trees. Tensors and numpy arrays are traced. Every other leaf is static,
            also numbers, which ``jax.jit`` traces: the graph holds its value, and another value means another
            capture. Tensors that ``fun`` closes over are copied into the graph.
        plan: whose rules ``constrain`` and the operators follow inside (see ``functitan.use_plan``). On a mesh the
            arguments are DTensors, as ``init_state`` and ``shard_batch`` make them, and the graph is what this rank
            does: operators on local tensors, and collectives. Every rank must call it in the same order.
        donate: names of arguments whose memory the results may reuse. Neither their tensors nor views of them can be
            used afterwards, also where the run fails. Of a donated view the buffer is copied; a tensor with gaps or
            repeated elements is not donated, and nothing is where the plain function runs.
        passes: names of the graph passes to run, see ``functitan.compiler.passes``. With Inductor those that leave a
            functional graph are run before it.
        inductor: compile the graph with TorchInductor (needs a C++ compiler on a CPU).

    Returns:
        A function with the signature of ``fun``. Its ``captures`` tell what was captured and why; it keeps the last
        64. Inside another captured function, under :func:`disable_jit`, and where gradients or torch.func transforms
        pass through it, it is ``fun`` itself. Every result has memory of its own, shared with no other and with no
        argument that was not donated.

    Raises:
        ValueError: ``donate`` or ``passes`` has an unknown name.
        RuntimeError: (at the call) the process group has not the size of the plan's mesh.
        CaptureError: (at the call) ``fun`` reads a traced value or has a side effect; names the line.
    """
    return JitFunction(fun, plan, tuple(donate), tuple(passes), inductor)


class JitFunction:
    """What :func:`jit` returns."""

    def __init__(
        self, fun: Callable, plan: Plan | None, donate: tuple[str, ...], pass_names: tuple[str, ...], inductor: bool
    ) -> None:
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.signature = inspect.signature(fun)
        chosen = passes.check_passes(pass_names)
        self.passes = tuple(name for name in chosen if name in passes.FUNCTIONAL or not inductor)
        self.options = Options(chosen, inductor)
        self.inductor = inductor
        self.donate = donate
        self._check_donate()
        self.plan = plan
        self._cache: dict[Any, Captured] = {}
        self._last_key: Key | None = None
        self._warned = False

    @property
    def captures(self) -> list[Captured]:
        """Every graph captured so far, in order."""
        return list(self._cache.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_state, "disabled", False) or is_capturing() or inside_transform():
            return self._call_plain(*args, **kwargs)
        arguments = self._bind(args, kwargs)
        leaves, treedef = tree.flatten(arguments)
        leaves = [torch.tensor(x) if isinstance(x, np.ndarray) else x for x in leaves]  # copied: the array stays whole
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
            self._warn_of_gradients()
            return self._call_plain(*args, **kwargs)  # a graph has no autograd history to give
        key = Key(treedef, tuple(leaf_key(x) for x in leaves), settings(layout_of(self.plan)))
        captured = self._cache.get(key)
        if captured is None:
            captured = self._capture(arguments, leaves, treedef, key)
            self._remember(key, captured)
        if captured.needs_grad and torch.is_grad_enabled():
            self._warn_of_gradients()
            return self._call_plain(*args, **kwargs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        inputs = [boundary.local(x) for x in tensors]
        del leaves
        if captured.donated:
            if not donation.are_distinct(inputs, captured.donated):
                self._refuse_shared(arguments)
            for i in captured.donated:
                inputs[i] = donation.take(inputs[i])
                if is_distributed(tensors[i]):
                    donation.spend(tensors[i])
        del tensors
        with torch.no_grad():
            return captured.pack(captured.run(inputs))

    def lower(self, *args: Any, **kwargs: Any) -> Captured:
        """The graph for these arguments, without running it or keeping it: as ``jax.jit(f).lower``.

        Args:
            args: as in a call; tensors may be on the meta device (``abstract_state``, ``abstract_batch``), and then
                stand for ones on the CPU.

        Raises:
            CaptureError: as in a call.
        """
        arguments = self._bind(args, kwargs)
        leaves, treedef = tree.flatten(arguments)
        return self._captured(arguments, leaves, treedef, "lowered")

    def _call_plain(self, *args: Any, **kwargs: Any) -> Any:
        with use_plan(self.plan):
            return tree.map(completed, self.fun(*args, **kwargs))

    def _remember(self, key: Key, captured: Captured) -> None:
        if len(self._cache) >= _MAX_CAPTURES:
            self._cache.pop(next(iter(self._cache)))
        self._cache[key] = captured

    def _warn_of_gradients(self) -> None:
        if self.donate and not self._warned:
            self._warned = True
            log.warning(
                "%s runs as the plain function and donates nothing: an argument, or a tensor that it closes over, "
                "requires grad. Pass detached tensors, "
                "and take gradients inside with value_and_grad", self.name,
            )  # fmt: skip

    def _bind(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _is_donated(self, path: str) -> bool:
        return path.split("/", 1)[0] in self.donate

    def _refuse_shared(self, arguments: dict[str, Any]) -> None:
        leaves = tree.leaves_with_path(arguments)
        pairs = [(path, boundary.local(x)) for path, x in leaves if isinstance(x, Tensor)]
        one, other = donation.shared_pair(pairs, self._is_donated)
        raise ValueError(
            f"jit({self.name}): cannot donate {one}: {other} lives in the same memory, and would change with it. "
            "Donate neither, or pass a clone of one of them"
        )

    def _capture(self, arguments: dict[str, Any], leaves: list[Any], treedef: tree.TreeDef, key: Key) -> Captured:
        layout = layout_of(self.plan)
        if layout is not None:
            _check_on_mesh(self.name, tree.leaves_with_path(arguments), layout)
        captured = self._captured(arguments, leaves, treedef, self._reason(arguments, key))
        if layout is not None:
            paths = [path for path, _ in tree.leaves_with_path(arguments)]
            check_agreement(captured.graph.graph, key.lines(paths), self.name, layout.mesh.device_type)
        level = logging.INFO if not self._cache else logging.WARNING
        log.log(level, "captured %s in %.1f s: %s", self.name, captured.seconds, captured.reason)
        if len(self._cache) + 1 == _MANY_CAPTURES:
            log.warning("%s has been captured %d times; pass what changes as a tensor", self.name, _MANY_CAPTURES)
        self._last_key = key
        return captured

    def _captured(self, arguments: dict[str, Any], leaves: list[Any], treedef: tree.TreeDef, reason: str) -> Captured:
        started = time.perf_counter()
        traced = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        specs = [boundary.spec_of(leaves[i]) for i in traced]
        paths = [path for path, _ in tree.leaves_with_path(arguments)]
        input_paths = [paths[i] for i in traced]
        result: list[tuple[tree.TreeDef, list[Any], list[boundary.Spec | None]]] = []

        def flat_fun(*inputs: Tensor) -> list[Tensor]:
            filled = list(leaves)
            for i, x in zip(traced, boundary.wrap_all(inputs, specs)):
                filled[i] = x
            with use_plan(self.plan), naming(dict(zip(input_paths, inputs))):
                out, out_def = tree.flatten(self._call_bound(tree.unflatten(treedef, filled)))
                tensors = [completed(x) for x in out if isinstance(x, Tensor)]
            statics = [None if isinstance(x, Tensor) else x for x in out]
            result[:] = [(out_def, statics, [boundary.spec_of(x) for x in tensors])]
            return [boundary.local(x) for x in tensors]

        inputs = [boundary.local(leaves[i]) for i in traced]
        if any(x.is_meta for x in inputs):
            inputs = fakes_like(inputs)
        with compiling(self.options):
            graph = capture(flat_fun, inputs, self.name)
        needs_grad = graph.meta["needs_grad"]
        for node, path in zip(placeholders(graph.graph), input_paths):
            node.meta["path"] = path
        donated = tuple(
            n for n, path in enumerate(input_paths) if self._is_donated(path) and donation.is_dense(inputs[n])
        )
        # Inductor has compiled the stages of a pipeline; the graph around them holds calls that it does not know.
        inductor = self.inductor and not any(is_call(node) for node in ops(graph.graph))
        passes.run_passes(graph.graph, donated, self.passes if inductor else self.options.passes)
        if inductor:
            run, source = inductor_pass.compile_graph(graph, inputs, donated)
        else:
            run, source = compile_graph(graph)
        out_def, statics, out_specs = result[0]
        seconds = time.perf_counter() - started
        pack = _packer(out_def, statics, out_specs)
        return Captured(graph, source, reason, seconds, donated, needs_grad, run, pack)

    def _call_bound(self, arguments: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(self.signature, arguments)
        return self.fun(*bound.args, **bound.kwargs)

    def _reason(self, arguments: dict[str, Any], key: Key) -> str:
        if self._last_key is None:
            return "first call"
        return key.difference(self._last_key, [path for path, _ in tree.leaves_with_path(arguments)])

    def _check_donate(self) -> None:
        unknown = [name for name in self.donate if name not in self.signature.parameters]
        if unknown:
            raise ValueError(
                f"jit({self.name}): donate names {', '.join(map(repr, unknown))}; "
                f"its arguments are {', '.join(self.signature.parameters)}"
            )


def _check_on_mesh(name: str, arguments: Sequence[tuple[str, Any]], layout: Layout) -> None:
    """Refuses arrays that are not on the plan's mesh: this rank's part of one would be taken for the whole."""
    for path, x in arguments:
        if isinstance(x, np.ndarray) or (isinstance(x, Tensor) and not is_distributed(x)):
            if x.ndim and getattr(x, "dtype", None) != torch.uint32:  # scalars and keys are the same on every rank
                raise ValueError(
                    f"jit({name}): {path} is a plain array of shape {tuple(x.shape)}, and the plan has a mesh of "
                    f"{layout.plan.mesh.size}: lay it out with shard_batch(plan, rows) where ranks have different "
                    "parts, or with replicate(plan, x) where all have the same"
                )
        elif is_distributed(x) and x.device_mesh != layout.mesh:
            raise ValueError(
                f"jit({name}): {path} is on the mesh {x.device_mesh}, and the plan on {layout.mesh}: make it with "
                "this plan"
            )


def _packer(
    out_def: tree.TreeDef, statics: list[Any], specs: list[boundary.Spec | None]
) -> Callable[[list[Any]], Any]:
    places = [i for i, x in enumerate(statics) if x is None]
    if len(places) == len(statics) and not any(specs):
        return functools.partial(tree.unflatten, out_def)

    def pack(tensors: list[Any]) -> Any:
        filled = list(statics)
        for i, x in zip(places, boundary.wrap_all(tensors, specs)):
            filled[i] = x
        return tree.unflatten(out_def, filled)

    return pack
