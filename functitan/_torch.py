"""The private corners of torch that functitan stands on, all in this file: a new torch breaks here and nowhere else.

(TorchInductor's entry point is in ``functitan.compiler.passes.inductor``.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._C import _functorch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "FAKE_BACKEND",
    "DATA_DEPENDENT",
    "OpOverload",
    "call_untraced",
    "distributed_like",
    "faked",
    "fakes_like",
    "implicit_replication",
    "inside_transform",
    "is_distributed",
    "is_distributed_type",
    "is_fake",
    "is_on_gloo",
    "is_traced",
    "marked",
    "mark_of",
    "retrace_functional",
    "storage_id",
    "trace",
    "untraced",
]

FAKE_BACKEND = "fake"
"""The process group backend that sends nothing, with which one process stands for many."""


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What tracing raises where a shape or a branch depends on values."""


def inside_transform() -> bool:
    """True while a torch.func transform (vmap, grad, jvp, …) is running the current code.

    Its wrapped tensors cannot become autograd leaves (``requires_grad_`` fails), so ``value_and_grad`` and ``remat``
    have to take another road there.
    """
    return _functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """True while ``make_fx`` is tracing the current code."""
    return get_proxy_mode() is not None


def is_distributed(x: Any) -> bool:
    """True for a DTensor. Asked of every operand of every operator, and answered without importing DTensor, which
    takes half a second: where nothing has imported it, nothing is one."""
    return is_distributed_type(type(x))


def is_distributed_type(kind: type) -> bool:
    """:func:`is_distributed` of a type."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


_replication = threading.Lock()
_replicating = 0


@contextmanager
def implicit_replication() -> Iterator[None]:
    """While any thread is inside, a plain tensor beside a DTensor counts as replicated.

    torch's own context of this name switches it off for everybody at the end of the innermost one.
    """
    from torch.distributed.tensor import DTensor

    global _replicating
    with _replication:
        _replicating += 1
        DTensor._op_dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        with _replication:
            _replicating -= 1
            if not _replicating:
                DTensor._op_dispatcher._allow_implicit_replication = False


def distributed_like(local: Tensor, like: Tensor) -> Tensor:
    """The DTensor of this local tensor, laid out as ``like``, in the dtype of ``local``; not differentiable.

    As DTensor wraps the results of its own operators: without the view of ``DTensor.from_local``.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


def is_fake(x: Tensor) -> bool:
    """True for a tensor without values, as tracing hands them out; False for one from outside."""
    return isinstance(x, FakeTensor)

def is_on_gloo(group_name: str, device: torch.device) -> bool:
    """True if the process group of this name sends what is on the device through Gloo."""
    from torch.distributed.distributed_c10d import _resolve_process_group, get_backend_config

    backends = get_backend_config(_resolve_process_group(group_name)).split(",")
    return f"{device.type}:gloo" in backends


def fakes_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors without values, of the shapes, strides and dtypes of others; what is on the meta device is on the CPU."""
    with faked(tensors) as fakes:
        return fakes


@contextmanager
def faked(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gives :func:`fakes_like` others; within it operators on them run without values, unseen by what is outside."""
    with _disable_current_modes(), FakeTensorMode():
        yield [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu" if x.is_meta else x.device)
            for x in tensors
        ]


def storage_id(x: Tensor) -> int:
    """Equal for tensors that live in the same buffer, for as long as that lives. Fake tensors have one too."""
    return x.untyped_storage()._cdata


def trace(fun: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> GraphModule:
    """The ATen graph of ``fun`` for the shapes of ``inputs``, traced under fake tensors; marks are kept."""
    with torch.no_grad(), fx_traceback.preserve_node_meta():
        return make_fx(fun, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def call_untraced(target: Callable[..., Any], inputs: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """A call of ``target(*inputs)`` as one node of the graph that is being traced, whatever happens inside it.

    Args:
        results: of their shapes, strides and dtypes are the tensors that it will give, a list.
    """
    mode = get_proxy_mode()
    proxies = [mode.tracer.unwrap_proxy(x) for x in inputs]
    proxy = mode.tracer.create_proxy("call_function", target, tuple(proxies), {})
    fake_mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    with disable_proxy_modes_tracing(), _disable_current_modes(), fake_mode:
        outputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in results]
    track_tensor_tree(outputs, proxy, constant=None, tracer=mode.tracer)
    return outputs


@contextmanager
def untraced() -> Iterator[None]:
    """Within it nothing is traced or faked, whatever goes on outside."""
    with _disable_current_modes():
        yield


def retrace_functional(module: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """The same graph without operators that write in place; marks are kept."""
    constants = {node.target: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}

    def replay(*args: Tensor) -> Any:
        # Constants are traced as inputs: functionalize cannot tell what is written to a copy of one otherwise.
        return _Replay(module, dict(zip(constants, args[len(inputs) :]))).run(*args[: len(inputs)])

    values = [x.detach() for x in constants.values()]
    functional = trace(torch.func.functionalize(replay, remove="mutations"), [*inputs, *values])
    places = [node for node in functional.graph.nodes if node.op == "placeholder"][len(inputs) :]
    for node, (target, value) in zip(places, constants.items()):
        name = f"closed_over_{target}"
        functional.register_buffer(name, value, persistent=False)  # itself, and not its detached alias
        with functional.graph.inserting_before(node):
            attribute = functional.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        functional.graph.erase_node(node)
    functional.recompile()
    return functional


class _Replay(Interpreter):
    """Runs a graph with other constants; each node's meta is the current one while it runs, so that marks survive."""

    def __init__(self, module: GraphModule, constants: dict[str, Any]) -> None:
        super().__init__(module)
        self.constants = constants

    def fetch_attr(self, target: str) -> Any:
        return self.constants[target]


@contextmanager
def marked(key: str, mark: Any) -> Iterator[None]:
    """While traced, every node made inside carries the mark."""
    with fx_traceback.annotate({key: mark}):
        yield


def mark_of(node: Node, key: str) -> Any:
    """The mark that :func:`marked` gave a node, or None."""
    return (node.meta.get("custom") or {}).get(key)
