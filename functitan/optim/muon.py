"""Muon: momentum, orthogonalized by a Newton-Schulz iteration (Jordan, https://github.com/KellerJordan/Muon)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from functitan import tree
from functitan.optim.aliases import adamw
from functitan.optim.base import (
    EmptyState,
    GradientTransformation,
    ScalarOrSchedule,
    Schedule,
    at_least_float32,
    bias_correction,
    chain,
    check_decay_rate,
    check_not_negative,
    increment,
    init_empty_state,
    map_matching,
    zero_count,
    zeros_like,
)
from functitan.optim.masking import MaskedNode, MaskOrFn, partition
from functitan.optim.transforms import add_decayed_weights, scale_by_learning_rate

NS_COEFFS = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: the steepest slope at 0, singular values end between about 0.5 and 1.5."""

NsCoeffs = Sequence[float] | Sequence[Sequence[float]]


def _dims(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(operator.index(d) for d in value)


@attrs.frozen
class MuonDimensionNumbers:
    """Which dims of a parameter are the rows and the columns of its matrix ``W`` in ``y = x W``; a leaf of trees.

    Attributes:
        reduction_dims: the dims summed over (a dim or several, which are flattened into one).
        output_dims: the dims of the result. All other dims are batch: each of their matrices is taken by itself.

    Raises:
        ValueError: a dim is in both, or twice in one, or either is empty.
    """

    reduction_dims: tuple[int, ...] = attrs.field(default=-2, converter=_dims)
    output_dims: tuple[int, ...] = attrs.field(default=-1, converter=_dims)

    def __attrs_post_init__(self) -> None:
        dims = self.reduction_dims + self.output_dims
        if len(set(dims)) != len(dims) or not self.reduction_dims or not self.output_dims:
            raise ValueError(
                f"MuonDimensionNumbers: reduction_dims={self.reduction_dims} and output_dims={self.output_dims}; "
                "each needs at least one dim, and no dim may occur twice"
            )


DimensionNumbersOrFn = Any | Callable[[Any], Any]
"""A tree of :class:`MuonDimensionNumbers` and None with the structure of the parameters or a prefix of it, or a
function of the parameters that returns one. None: no matrix. A function is given partitioned trees too, with MaskedNode
for the leaves of AdamW, so it should go through ``tree.map`` (or be called by you: pass the tree it returns)."""


class MuonState(NamedTuple):
    count: Tensor
    mu: Any


def orthogonalize_via_newton_schulz(
    x: Tensor,
    ns_coeffs: NsCoeffs = NS_COEFFS,
    ns_steps: int = 5,
    eps: float = 1e-8,
    dimension_numbers: MuonDimensionNumbers = MuonDimensionNumbers(),  # noqa: B008
) -> Tensor:
    """About ``U Vᵀ``, where ``U S Vᵀ`` is the singular value decomposition of each matrix in ``x``.

    The quintic iteration ``X ← c0·X + (c1·A + c2·A²)·X`` with ``A = X Xᵀ``, from ``X / (‖X‖_F + eps)``.

    Args:
        x: ``[*batch, reduction, output]``, or as the dimension numbers say.
        ns_coeffs: ``(c0, c1, c2)``, or one such triple for each step, of which the last ``ns_steps`` are used.
        ns_steps: number of iterations.
        eps: added to the Frobenius norm.
        dimension_numbers: which dims are the matrix.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        ValueError: coefficients that are no triples, fewer triples than steps, or dims that ``x`` lacks.
    """
    coeffs = _coefficients("orthogonalize_via_newton_schulz", ns_coeffs, ns_steps)
    batch, reduction, output = _resolve_dims(x, dimension_numbers)
    order = batch + reduction + output
    sizes = [math.prod(x.shape[d] for d in dims) for dims in (batch, reduction, output)]
    X_NRO = _permuted(x, order).reshape(sizes)
    # The iteration commutes with transposition; A is smaller if the shorter side comes first.
    is_tall = sizes[1] > sizes[2]
    if is_tall:
        X_NRO = X_NRO.mT
    X_NRO = X_NRO / (torch.linalg.vector_norm(X_NRO, dim=(-2, -1), keepdim=True) + eps)
    for c0, c1, c2 in coeffs:
        A_NRR = torch.bmm(X_NRO, X_NRO.mT)
        B_NRR = torch.baddbmm(A_NRR, A_NRR, A_NRR, beta=c1, alpha=c2)
        X_NRO = torch.baddbmm(X_NRO, B_NRR, X_NRO, beta=c0)
    if is_tall:
        X_NRO = X_NRO.mT
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    return _permuted(X_NRO.reshape([x.shape[d] for d in order]), inverse)


def scale_by_muon(
    ns_coeffs: NsCoeffs = NS_COEFFS,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    dimension_numbers: DimensionNumbersOrFn | None = None,
) -> GradientTransformation:
    """The orthogonalized momentum of each matrix; see :func:`orthogonalize_via_newton_schulz`.

    Args:
        beta: decay rate of the momentum, in [0, 1).
        eps: added to the norm that the iteration starts by dividing by.
        mu_dtype: dtype in which the momentum is kept; the arithmetic stays in float32. None: float32.
        nesterov: Nesterov momentum.
        dimension_numbers: for every leaf; None: the last two dims, batched over the leading ones.

    Raises:
        ValueError: beta outside [0, 1), a negative eps; a leaf without two dims (from ``update``).
    """
    check_decay_rate("scale_by_muon", "beta", beta)
    check_not_negative("scale_by_muon", "eps", eps)
    _coefficients("scale_by_muon", ns_coeffs, ns_steps)

    def init(params: Any) -> MuonState:
        return MuonState(zero_count(params), zeros_like(params, mu_dtype))

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        numbers = _for_each_leaf(dimension_numbers, updates if params is None else params)
        count = increment(state.count)
        correction = bias_correction(beta, count)
        # optax's Nesterov momentum: the average is corrected as that of the next step.
        ahead = beta * correction / bias_correction(beta, increment(count)) if nesterov else None

        def leaf(g: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
            g = g.to(at_least_float32(mu.dtype))
            m = torch.lerp(mu.to(g.dtype), g, 1 - beta)
            numerator = m if ahead is None else torch.add(m * ahead, g, alpha=1 - beta)
            return numerator / correction, m.to(mu.dtype)

        momentum, mu = map_matching("scale_by_muon", leaf, updates, mu=state.mu, outputs=2)
        new = tree.map(
            lambda x, dims: orthogonalize_via_newton_schulz(x, ns_coeffs, ns_steps, eps, dims), momentum, numbers
        )
        return new, MuonState(count, mu)

    return GradientTransformation(init, update)


def scale_by_shape(
    dimension_numbers: DimensionNumbersOrFn | None = None, consistent_rms: float | None = None
) -> GradientTransformation:
    """Scales each update by a factor of the shape of its matrix.

    ``sqrt(max(1, output / reduction))``, so that the learning rate carries over between widths; or
    ``consistent_rms · sqrt(max(reduction, output))``, so that the root mean square of an update is about
    ``consistent_rms`` (Liu et al., https://arxiv.org/abs/2502.16982; 0.2 is that of AdamW).
    """
    if consistent_rms is not None:
        check_not_negative("scale_by_shape", "consistent_rms", consistent_rms)

    def scaled(x: Tensor, numbers: MuonDimensionNumbers) -> Tensor:
        _, reduction, output = _resolve_dims(x, numbers)
        fan_in, fan_out = (math.prod(x.shape[d] for d in dims) for dims in (reduction, output))
        if consistent_rms is not None:
            return x * (consistent_rms * math.sqrt(max(fan_in, fan_out)))
        return x * math.sqrt(fan_out / fan_in) if fan_out > fan_in else x

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        numbers = _for_each_leaf(dimension_numbers, updates if params is None else params)
        return tree.map(scaled, updates, numbers), state

    return GradientTransformation(init_empty_state, update)


def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: NsCoeffs = NS_COEFFS,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float | Schedule = 0.0,
    weight_decay_mask: MaskOrFn | None = None,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = True,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float | Schedule = 0.0,
    adam_learning_rate: ScalarOrSchedule | None = None,
    dimension_numbers: DimensionNumbersOrFn | None = None,
    consistent_rms: float | None = None,
) -> GradientTransformation:
    """Muon for the matrices, AdamW for the rest.

    By default every leaf with 2 dims or more is a matrix in its last two dims, batched over the leading ones
    (optax: leaves with exactly 2 dims). That is seldom what a transformer wants: attention weights have two dims for
    their heads, and embedding and output head do better with AdamW. Give
    ``dimension_numbers=muon_dimension_numbers(declare(cfg))``, or a tree of your own with None for AdamW's leaves.

    Args:
        learning_rate: of the matrices, and of the rest unless ``adam_learning_rate`` is given.
        weight_decay: of the matrices, decoupled, multiplied by the learning rate.
        weight_decay_mask: for both kinds of leaves; see :func:`add_decayed_weights` (norms and biases do not decay).
        dimension_numbers: a tree of :class:`MuonDimensionNumbers` and None, or a function of the parameters.
        consistent_rms: see :func:`scale_by_shape`.

    The other arguments are those of :func:`scale_by_muon` and :func:`scale_by_adam`.
    """

    def labels(params: Any) -> Any:
        numbers = _for_each_leaf(dimension_numbers, params)
        return tree.map(lambda _, n: "adam" if isinstance(n, MaskedNode) else "muon", params, numbers)

    matrices = chain(
        scale_by_muon(
            ns_coeffs, ns_steps, beta, eps, mu_dtype, nesterov=nesterov, dimension_numbers=dimension_numbers
        ),
        scale_by_shape(dimension_numbers, consistent_rms),
        add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_learning_rate(learning_rate),
    )
    rest = adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        mask=weight_decay_mask,
        nesterov=nesterov,
    )
    return partition({"muon": matrices, "adam": rest}, labels)


def muon_dimension_numbers(
    specs: Any,
    batch: Sequence[str] = ("layers", "experts"),
    adam: Sequence[str] = ("vocab",),
    grouped: Sequence[str] = ("heads", "kv_heads", "head_dim"),
) -> Any:
    """The dimension numbers that follow from the logical names of the parameters.

    ``("layers", "embed", "heads", "head_dim")`` is a stack of matrices from embed to heads × head_dim. Of the dims that
    are not batch, the first (or the first run of grouped ones) is summed over and the other is the result.

    Args:
        specs: a tree of ``sharding_specs.Param``.
        batch: names of dims along which independent matrices lie.
        adam: names that only parameters for AdamW have.
        grouped: names of which neighbours form one side of the matrix.

    Returns:
        The tree with a :class:`MuonDimensionNumbers` for each matrix and None for each other parameter (norms, biases,
        embedding, output head).

    Raises:
        ValueError: a parameter whose names make more than two sides; the message has the path.
    """

    def numbers(path: str, spec: Any) -> MuonDimensionNumbers | None:
        sides: list[tuple[bool, list[int]]] = []
        for dim, name in enumerate(spec.names):
            if name in batch:
                continue
            is_grouped = name in grouped
            if is_grouped and sides and sides[-1][0]:
                sides[-1][1].append(dim)
            else:
                sides.append((is_grouped, [dim]))
        if len(sides) < 2 or set(spec.names) & set(adam):
            return None
        if len(sides) > 2:
            raise ValueError(
                f"muon_dimension_numbers: {path} with dims {spec.names} is no matrix: its sides would be "
                f"{[[spec.names[d] for d in dims] for _, dims in sides]}. Name batch dims in batch=, dims that belong "
                "together in grouped=, or leave the parameter to AdamW by one of its names in adam="
            )
        return MuonDimensionNumbers(*(dims for _, dims in sides))

    return tree.map_with_path(numbers, specs)


def _for_each_leaf(numbers: DimensionNumbersOrFn | None, params: Any) -> Any:
    """A tree of dimension numbers with MaskedNode for AdamW's leaves.

    ``params`` may be partitioned already, so that a leaf of the numbers can stand where there is a MaskedNode.
    """
    if callable(numbers):
        numbers = numbers(params)
    if numbers is None:
        return tree.map(lambda p: MuonDimensionNumbers() if p.ndim >= 2 else MaskedNode(), params)
    for path, n in tree.leaves_with_path(numbers):
        if not isinstance(n, MuonDimensionNumbers):
            raise TypeError(
                f"muon: dimension numbers at {path or 'the root'} are {type(n).__name__}; "
                "give a MuonDimensionNumbers, or None for AdamW"
            )
    fill = lambda n, sub: tree.map(lambda _: MaskedNode() if n is None else n, sub)  # noqa: E731
    try:
        return tree.map(fill, numbers, params, is_leaf=lambda n: n is None)
    except ValueError as error:
        raise ValueError(f"muon: the dimension numbers do not fit the tree of parameters: {error}") from error


def _resolve_dims(x: Tensor, numbers: MuonDimensionNumbers) -> tuple[list[int], list[int], list[int]]:
    """The batch, reduction and output dims of ``x``, none negative."""
    for d in numbers.reduction_dims + numbers.output_dims:
        if not -x.ndim <= d < x.ndim:
            raise ValueError(f"muon: dim {d} of {numbers} for a parameter of shape {tuple(x.shape)}")
    reduction, output = ([d % x.ndim for d in dims] for dims in (numbers.reduction_dims, numbers.output_dims))
    if len({*reduction, *output}) != len(reduction) + len(output):
        raise ValueError(f"muon: {numbers} names a dim twice for a parameter of shape {tuple(x.shape)}")
    return [d for d in range(x.ndim) if d not in reduction and d not in output], reduction, output


def _permuted(x: Tensor, order: list[int]) -> Tensor:
    return x if order == sorted(order) else x.permute(order)


def _coefficients(where: str, coeffs: NsCoeffs, steps: int) -> list[tuple[float, float, float]]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{where}: ns_steps={steps!r}; legal: an int >= 1")
    triples = [tuple(c) for c in coeffs] if coeffs and isinstance(coeffs[0], Sequence) else [tuple(coeffs)] * steps
    if any(len(t) != 3 for t in triples) or len(triples) < steps:
        raise ValueError(f"{where}: ns_coeffs={coeffs!r} for {steps} steps; give one triple, or one for each step")
    return triples[-steps:]
