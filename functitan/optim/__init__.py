"""Optimizers in optax's shape and with its names: see :class:`GradientTransformation`.

>>> optimizer = chain(clip_by_global_norm(1.0), adamw(warmup_cosine_decay_schedule(0.0, 3e-4, 100, 10_000)))
>>> state = optimizer.init(params)
>>> updates, state = optimizer.update(grads, state, params)
>>> params = apply_updates(params, updates)

Two things differ from optax by design: weight decay skips norms and biases by default (:func:`add_decayed_weights`),
and accumulation over microbatches weights by valid tokens (:func:`multi_steps`).
"""

from functitan.optim.accumulation import (
    AccumulatedGradients,
    MultiStepsState,
    accumulate,
    first_gradients,
    mean_gradients,
    multi_steps,
    zero_gradients,
)
from functitan.optim.aliases import adam, adamw, lion, sgd
from functitan.optim.base import (
    EmptyState,
    GradientTransformation,
    ScalarOrSchedule,
    Schedule,
    apply_updates,
    chain,
    identity,
)
from functitan.optim.masking import (
    MaskedNode,
    MaskedState,
    PartitionState,
    decay_mask,
    default_decay_mask,
    masked,
    partition,
)
from functitan.optim.muon import (
    MuonDimensionNumbers,
    MuonState,
    muon,
    muon_dimension_numbers,
    orthogonalize_via_newton_schulz,
    scale_by_muon,
    scale_by_shape,
)
from functitan.optim.schedules import (
    constant_schedule,
    cosine_decay_schedule,
    join_schedules,
    linear_schedule,
    polynomial_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    wsd_schedule,
)
from functitan.optim.transforms import (
    ScaleByAdamState,
    ScaleByLionState,
    ScaleByScheduleState,
    TraceState,
    WeightDecaySchedule,
    add_decayed_weights,
    clip_by_global_norm,
    global_norm,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_schedule,
    trace,
)

__all__ = [
    "AccumulatedGradients",
    "EmptyState",
    "GradientTransformation",
    "MaskedNode",
    "MaskedState",
    "MultiStepsState",
    "MuonDimensionNumbers",
    "MuonState",
    "PartitionState",
    "ScalarOrSchedule",
    "ScaleByAdamState",
    "ScaleByLionState",
    "ScaleByScheduleState",
    "Schedule",
    "TraceState",
    "WeightDecaySchedule",
    "accumulate",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "decay_mask",
    "first_gradients",
    "global_norm",
    "identity",
    "join_schedules",
    "linear_schedule",
    "lion",
    "masked",
    "default_decay_mask",
    "mean_gradients",
    "multi_steps",
    "muon",
    "muon_dimension_numbers",
    "orthogonalize_via_newton_schulz",
    "partition",
    "polynomial_schedule",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "scale_by_schedule",
    "scale_by_shape",
    "sgd",
    "trace",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "wsd_schedule",
    "zero_gradients",
]
