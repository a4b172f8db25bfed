"""Function transforms in JAX's conventions: ``grad``, ``vmap``, ``jvp``, ``vjp``, ``scan``, ``constrain``.

Gradients come from ``torch.autograd.grad`` on detached leaves: unlike ``torch.func.grad`` it works with
activation checkpointing, custom operators, DTensors and graph capture. ``torch.func`` does the rest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from functitan import tree
from functitan._torch import inside_transform, is_distributed, marked
from functitan.sharding.layout import check_names, completed, laid_out_as
from functitan.sharding.layout import current as current_layout

_nesting = threading.local()
_passes = itertools.count(1)


def value_and_grad(
    fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """``fun``'s value and its gradient, as ``jax.value_and_grad``.

    Args:
        fun: returns a scalar (a 0-dim floating tensor), or ``(scalar, aux)`` with ``has_aux``.
        argnums: which positional arguments to differentiate; each may be any tree of floating tensors.
        has_aux: ``fun`` returns ``(scalar, aux)``; the result is then ``((scalar, aux), gradients)``.

    Returns:
        A function giving ``(value, gradients)``. The gradients have the structure of the argument (a tuple of
        them if ``argnums`` is a sequence), zeros where the value does not depend on a leaf. Over a mesh a gradient is
        laid out as its leaf is, and no partial sum is left in value or aux. Nothing returned
        carries an autograd graph, unless the call is itself being differentiated.

    Raises:
        TypeError: a differentiated leaf is no floating tensor, or the value is no floating scalar.
    """
    name = getattr(fun, "__name__", repr(fun))

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any):
        indices = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        _check_argnums(name, indices, len(args))
        selected = tuple(args[i] for i in indices)
        _check_differentiable(name, indices, selected)
        leaves, treedef = tree.flatten(selected)

        def flat_fun(*flat: Tensor):
            replaced = list(args)
            for i, value in zip(indices, tree.unflatten(treedef, flat)):
                replaced[i] = value
            result = fun(*replaced, **kwargs)
            value, aux = _split_aux(name, result) if has_aux else (result, None)
            _check_scalar(name, value)
            return completed(value), tree.map(completed, aux)

        differentiate = _grad_by_functorch if inside_transform() else _grad_by_autograd
        value, aux, gradients = differentiate(flat_fun, leaves)
        gradients = tree.unflatten(treedef, gradients)
        if isinstance(argnums, int):
            gradients = gradients[0]
        return ((value, aux) if has_aux else value), gradients

    return wrapped


def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """``fun``'s gradient, as ``jax.grad``; ``(gradients, aux)`` with ``has_aux``. See :func:`value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any):
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrapped


def _grad_by_autograd(flat_fun: Callable, leaves: list[Tensor]) -> tuple[Tensor, Any, list[Tensor]]:
    if torch.is_inference_mode_enabled():
        raise RuntimeError("grad inside torch.inference_mode(): it has no gradients; use torch.no_grad() instead")
    depth = getattr(_nesting, "depth", 0)
    outermost = depth == 0
    _nesting.depth = depth + 1
    # Each microbatch of a step is a pass of its own: what it gathers is freed before the next one.
    mark = marked("pass", next(_passes)) if outermost else contextlib.nullcontext()
    try:
        with torch.enable_grad(), mark:
            # An inner call of grad(grad(f)) must stay connected to the leaves of the outer one.
            inputs = [x.detach().requires_grad_() if outermost or not x.requires_grad else x.view_as(x) for x in leaves]
            value, aux = flat_fun(*inputs)
            if value.requires_grad:
                with marked("phase", "backward"):
                    gradients = torch.autograd.grad(value, inputs, create_graph=not outermost, allow_unused=True)
            else:
                gradients = [None] * len(inputs)
    finally:
        _nesting.depth = depth
    gradients = [torch.zeros_like(x) if g is None else laid_out_as(x, g) for x, g in zip(leaves, gradients)]
    if outermost:
        value, aux = tree.map(detached, (value, aux))
    return value, aux, gradients


def _grad_by_functorch(flat_fun: Callable, leaves: list[Tensor]) -> tuple[Tensor, Any, list[Tensor]]:
    argnums = tuple(range(len(leaves)))
    packed, unpack = _packed_aux(flat_fun)
    gradients, (value, aux) = torch.func.grad_and_value(packed, argnums=argnums, has_aux=True)(*leaves)
    return value, unpack(aux), list(gradients)


def vmap(fun: Callable, in_axes: Any = 0, out_axes: Any = 0, axis_size: int | None = None) -> Callable:
    """``fun`` over a batch dim of its arguments, as ``jax.vmap``.

    Args:
        fun: a function of trees of tensors.
        in_axes: which dim of each positional argument is mapped: an int, None (not mapped), or a tuple with one
            entry an argument, each an int, None or a tree prefix of them. Keyword arguments are mapped over dim 0.
        out_axes: where the mapped dim goes in the output: an int, or a tree prefix.
        axis_size: the size of the mapped dim; needed only when no argument is mapped.
    """
    name = getattr(fun, "__name__", repr(fun))

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any):
        axes = in_axes
        if isinstance(axes, list):
            axes = tuple(axes)
        if isinstance(axes, tuple) and len(axes) != len(args):
            raise ValueError(f"vmap({name}): in_axes has {len(axes)} entries for {len(args)} positional arguments")
        per_arg = axes if isinstance(axes, tuple) else (axes,) * len(args)
        leaves, treedef = tree.flatten((args, kwargs))
        dims = _broadcast_prefix((per_arg, {k: 0 for k in kwargs}), (args, kwargs))
        if all(d is None for d in dims):
            if axis_size is None:
                raise ValueError(f"vmap({name}): no argument is mapped, so axis_size is needed")
            leaves, dims = [*leaves, torch.empty(axis_size, 0)], [*dims, 0]
        out_tree: list[tree.TreeDef] = []

        def flat_fun(*flat: Any):
            positional, keywords = tree.unflatten(treedef, flat[: treedef.num_leaves])
            result = fun(*positional, **keywords)
            for path, x in tree.leaves_with_path(result):
                if not isinstance(x, Tensor):
                    raise TypeError(
                        f"vmap({name}): the result{' at ' + path if path else ''} is {type(x).__name__}; "
                        "results must be tensors"
                    )
            out, out_def = tree.flatten(result)
            out_tree[:] = [out_def]
            return tuple(out)

        # Output dims are moved afterwards: their tree prefix can only be read once the structure is known.
        outputs = torch.func.vmap(flat_fun, in_dims=tuple(dims), out_dims=0)(*leaves)
        result = tree.unflatten(out_tree[0], outputs)
        places = _broadcast_prefix(out_axes, result)
        if None in places:
            raise ValueError(f"vmap({name}): out_axes has a None; give each result the place of its mapped dim, an int")
        moved = [x if d == 0 else x.movedim(0, d) for x, d in zip(outputs, places)]
        return tree.unflatten(out_tree[0], moved)

    return wrapped


def jvp(fun: Callable, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple:
    """``(fun(*primals), the directional derivative along tangents)``, as ``jax.jvp``; ``aux`` comes third."""
    if len(primals) != len(tangents):
        raise TypeError(f"jvp: {len(primals)} primals and {len(tangents)} tangents; give one tangent for each primal")
    leaves, treedef = tree.flatten(tuple(primals))
    tangent_leaves = treedef.flatten_up_to(tuple(tangents))
    flat_fun, out_tree = _flattened(fun, treedef, has_aux)
    packed, unpack = _packed_aux(flat_fun)
    out, out_tangents, aux = torch.func.jvp(packed, tuple(leaves), tuple(tangent_leaves), has_aux=True)
    out, out_tangents = tree.unflatten(out_tree[0], out), tree.unflatten(out_tree[0], out_tangents)
    return (out, out_tangents, unpack(aux)) if has_aux else (out, out_tangents)


def vjp(fun: Callable, *primals: Any, has_aux: bool = False) -> tuple:
    """``(fun(*primals), pull)``, as ``jax.vjp``: ``pull(cotangents)`` is a tuple with one gradient for each primal."""
    leaves, treedef = tree.flatten(primals)
    flat_fun, out_tree = _flattened(fun, treedef, has_aux)
    packed, unpack = _packed_aux(flat_fun)
    out, flat_pull, aux = torch.func.vjp(packed, *leaves, has_aux=True)

    def pull(cotangents: Any) -> tuple:
        return tree.unflatten(treedef, flat_pull(tuple(out_tree[0].flatten_up_to(cotangents))))

    out = tree.unflatten(out_tree[0], out)
    return (out, pull, unpack(aux)) if has_aux else (out, pull)


def scan(f: Callable, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False) -> tuple[Any, Any]:
    """``f(carry, x) -> (carry, y)`` over the leading dim of ``xs``, as ``jax.lax.scan``.

    The loop is unrolled: torch's scan operator has no gradient through tuples of carries and no DTensor rule.

    Args:
        f: keeps the structure, shapes and dtypes of the carry.
        init: the first carry, a tree.
        xs: a tree whose leaves share their leading dim, or None with ``length`` given.
        length: number of iterations; must agree with ``xs``.
        reverse: from the last to the first; the outputs keep the order of ``xs``.

    Returns:
        The last carry and the ``y`` stacked along a new leading dim.

    Raises:
        ValueError: the leading dims, or they and ``length``, differ.
        TypeError: ``f`` changes the structure, a shape or a dtype of the carry.
    """
    for path, x in tree.leaves_with_path(xs):
        if not isinstance(x, Tensor):
            where = f"xs at {path}" if path else "xs"
            raise TypeError(f"scan: {where} is {type(x).__name__}; its leaves must be tensors")
    sizes = {path or "xs": x.shape[0] if x.ndim else None for path, x in tree.leaves_with_path(xs)}
    if length is not None:
        sizes["length"] = length
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise ValueError(f"scan: leading dims must agree, and xs or length be given; got {sizes}")
    n = next(iter(sizes.values()))
    leaves, treedef = tree.flatten(xs)
    # unbind, not x[i]: the backward of n selects allocates n full-size zeros.
    steps = [tree.unflatten(treedef, step) for step in zip(*(x.unbind(0) for x in leaves))] if leaves else [xs] * n
    carry, ys = init, []
    for x in reversed(steps) if reverse else steps:
        new_carry, y = f(carry, x)
        _check_carry(carry, new_carry)
        carry = new_carry
        ys.append(y)
    if reverse:
        ys.reverse()
    if not ys:
        # As jax: the outputs of no step, which has to be asked for their structure.
        _, y = f(init, tree.map(lambda x: x.new_zeros(x.shape[1:]), xs))
        return carry, tree.map(lambda part: torch.as_tensor(part).new_empty((0, *torch.as_tensor(part).shape)), y)
    return carry, tree.map(lambda *parts: torch.stack([torch.as_tensor(p) for p in parts]), *ys)


def constrain(x: Tensor, names: Sequence[str | None]) -> Tensor:
    """Declares what the dims of ``x`` mean, so that the rules of a plan lay it out; without a mesh, ``x`` itself.

    Args:
        x: any tensor of the model.
        names: one logical name (``"batch"``, ``"seq"``, ``"mlp"``, …) or None for each dim of ``x``.

    Raises:
        ValueError: not one name for each dim, or, where a plan is in force, a name without a rule.
    """
    if len(names) != x.ndim:
        raise ValueError(
            f"constrain: {len(names)} names {tuple(names)} for a tensor with {x.ndim} dims {tuple(x.shape)}; "
            "give one logical name (or None) for each dim"
        )
    layout = current_layout()
    if layout is None or not is_distributed(x):
        check_names(names)
        return x
    from functitan.sharding.move import redistribute

    return redistribute(x, layout.placements(names))


def _flattened(fun: Callable, treedef: tree.TreeDef, has_aux: bool) -> tuple[Callable, list[tree.TreeDef]]:
    out_tree: list[tree.TreeDef] = []

    def flat_fun(*flat: Tensor):
        result = fun(*tree.unflatten(treedef, flat))
        result, aux = _split_aux(getattr(fun, "__name__", repr(fun)), result) if has_aux else (result, None)
        out, out_def = tree.flatten(result)
        out_tree[:] = [out_def]
        return tuple(out), aux

    return flat_fun, out_tree


def _packed_aux(fun: Callable) -> tuple[Callable, Callable]:
    """``fun() -> (value, aux)`` with aux as a tuple of tensors, all that torch.func takes; and the way back."""
    kept: list[Any] = []

    def packed(*args: Any) -> tuple[Any, tuple[Tensor, ...]]:
        value, aux = fun(*args)
        leaves, treedef = tree.flatten(aux)
        kept[:] = [leaves, treedef]
        return value, tuple(x for x in leaves if isinstance(x, Tensor))

    def unpack(tensors: Sequence[Tensor]) -> Any:
        leaves, treedef = kept
        rest = iter(tensors)
        return tree.unflatten(treedef, [next(rest) if isinstance(x, Tensor) else x for x in leaves])

    return packed, unpack


def _broadcast_prefix(prefix: Any, full: Any) -> list[Any]:
    """``prefix``'s values, each repeated for the leaves of ``full`` below it; None is a value in ``prefix``."""
    try:
        values = optree.broadcast_prefix(prefix, full, none_is_leaf=True, namespace=tree.NAMESPACE)
    except ValueError as error:
        raise ValueError(f"vmap: axes {prefix} are no prefix of the tree they are for: {error}") from error
    leaves = optree.tree_leaves(full, none_is_leaf=True, namespace=tree.NAMESPACE)
    return [value for value, leaf in zip(values, leaves) if leaf is not None]


def detached(x: Any) -> Any:
    """A tensor without its autograd history; anything else as it is."""
    return x.detach() if isinstance(x, Tensor) else x


def _split_aux(name: str, result: Any) -> tuple[Any, Any]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"{name}: with has_aux it must return a pair (value, aux); it returned {type(result).__name__}")
    return result


def _check_argnums(name: str, indices: tuple[int, ...], n: int) -> None:
    if len({i % n if n else i for i in indices}) != len(indices):
        raise ValueError(f"grad({name}): argnums {indices} names an argument twice")
    for i in indices:
        if not -n <= i < n:
            raise ValueError(f"grad({name}): argnums names argument {i}, but {n} positional arguments were given")


def _check_differentiable(name: str, indices: tuple[int, ...], selected: tuple) -> None:
    for i, arg in zip(indices, selected):
        for path, x in tree.leaves_with_path(arg):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                what = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(
                    f"grad({name}): argument {i}{' at ' + path if path else ''} is {what}; "
                    "only floating tensors have gradients. Pass the rest as another argument"
                )


def _check_scalar(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        got = f"shape {tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"grad({name}): the value must be a floating scalar (shape ()); got {got}. With an auxiliary "
                        "result, return (value, aux) and pass has_aux=True")


def _check_carry(old: Any, new: Any) -> None:
    if tree.structure(old) != tree.structure(new):
        raise TypeError(f"scan: f changed the carry's structure from {tree.structure(old)} to {tree.structure(new)}")
    for i, (a, b) in enumerate(zip(tree.leaves(old), tree.leaves(new))):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype):
            path = tree.leaves_with_path(old)[i][0]
            raise TypeError(
                f"scan: f changed the carry{' at ' + path if path else ''} from {tuple(a.shape)} {a.dtype} "
                f"to {tuple(b.shape)} {b.dtype}; a carry keeps its shape and dtype"
            )
