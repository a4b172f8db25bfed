"""Floating-point operations of a captured graph: two for each multiply-add of a product, by PyTorch's own formulas.

Elementwise operators, reductions and moves count nothing, as everywhere in the field: beside products they are limited
by memory. An operator that is neither that nor has a formula is reported, and not taken for free in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from functitan._torch import OpOverload
from functitan.compiler.graphs import is_view

KINDS = ("matmul", "attention", "attention backward", "convolution", "other")

_NO_PRODUCTS = frozenset(
    """
    _local_scalar_dense _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _to_copy _unique2
    _unsafe_index _unsafe_index_put _unsafe_view all amax amin any arange argmax argmin argsort bernoulli bincount
    bucketize cat constant_pad_nd copy cummax cummin cumprod cumsum embedding embedding_dense_backward empty
    empty_like empty_strided eye fill flip full full_like gather index index_add index_copy index_fill index_put
    index_select isin kthvalue lift_fresh_copy linalg_vector_norm linspace logcumsumexp logsumexp masked_scatter max
    mean median min mode native_dropout native_layer_norm native_layer_norm_backward new_empty new_empty_strided
    new_full new_ones new_zeros nll_loss_backward nll_loss_forward nonzero norm normal ones ones_like prod rand
    rand_like randint randint_like randn randn_like randperm repeat roll scalar_tensor scatter scatter_add
    scatter_reduce searchsorted select_backward select_scatter slice_backward slice_scatter sort
    split_with_sizes_copy stack std sum topk tril tril_indices triu triu_indices unfold_backward unique_dim var
    var_mean zeros zeros_like
    """.split()
)
"""ATen operators that neither multiply matrices nor carry the tag of elementwise operators."""


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **others: Any) -> int:
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[2] * (width + value.shape[3])


def _cpu_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **others: Any) -> int:
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[2] * (3 * width + 2 * value.shape[3])


_aten = torch.ops.aten
_ATTENTION_ON_CPU: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}
"""What PyTorch's registry lacks, counted as its other attention kernels: two products forward, five backward (the
scores again, and two for each of the two products), of the whole square also where a mask hides a part."""


def flops_of(node: Node) -> tuple[str, int] | None:
    """The kind (see ``KINDS``) and number of a node's operations; None where it has no formula.

    ``mm`` of [m, k] and [k, n] is ``2 * m * k * n``; the formulas are those of ``torch.utils.flop_counter``.
    """
    packet = _packet(node)
    formula = _ATTENTION_ON_CPU.get(packet) or flop_registry.get(packet)
    if formula is None:
        return None
    kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    args, kwargs = map_arg((node.args, kwargs), lambda source: source.meta["val"])
    return _kind(packet), int(formula(*args, **kwargs, out_val=node.meta["val"]))


def is_uncounted(node: Node) -> bool:
    """True for an operator without a formula that may do products: whatever is not known to do none."""
    target = node.target
    if node.op != "call_function" or _packet(node) in _ATTENTION_ON_CPU or _packet(node) in flop_registry:
        return False
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", "") != "getitem"
    if target.namespace != "aten":
        # What only communicates; the fused operators of symm_mem compute as well.
        return not target.namespace.removeprefix("_").startswith("c10d")
    if is_elementwise(target) or is_view(node):
        return False
    return target.overloadpacket.__name__.removesuffix("_") not in _NO_PRODUCTS


@functools.cache
def is_elementwise(op: OpOverload) -> bool:
    """True if an operator, or the one whose ``out=`` form it is, works element by element."""
    overloads = (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _packet(node: Node) -> Any:
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target


def _kind(packet: Any) -> str:
    name = getattr(packet, "__name__", str(packet))
    if "attention" in name:
        return "attention backward" if "backward" in name else "attention"
    if "conv" in name:
        return "convolution"
    return "matmul" if name.strip("_").endswith(("mm", "mm_")) else "other"
