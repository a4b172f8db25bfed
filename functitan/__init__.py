"""functitan: train transformers as pure functions over trees of parameters, on a PyTorch backend.

    import functitan as ft
    from sharding_specs import MeshSpec, P, Param, Rules

    plan = ft.compile_specs(declare(cfg), Rules(), MeshSpec())
    state = ft.init_state(plan, key=ft.random.key(0), optimizer=ft.optim.adamw(1e-3))
    step = ft.jit(train_step, plan, donate=("state",))
    state, metrics = step(state, batch)
"""

from functitan import init, nn, optim, random, tree
from functitan.compiler.capture import CaptureError
from functitan.compiler.donation import DonatedError
from functitan.compiler.jit import disable_jit, jit
from functitan.compiler.mesh import device_mesh
from functitan.compiler.pipeline.stages import make_pipeline
from functitan.compiler.place import (
    abstract_batch,
    abstract_state,
    gather,
    init_params,
    init_state,
    replicate,
    shard_batch,
)
from functitan.compiler.plan import Plan, compile_specs
from functitan.fold import fold
from functitan.microbatches import sum_and_grad, sum_over
from functitan.remat import remat
from functitan.sharding.layout import one_process, use_plan
from functitan.state import TrainState
from functitan.transforms import constrain, grad, jvp, scan, value_and_grad, vjp, vmap

__all__ = [
    "CaptureError",
    "DonatedError",
    "Plan",
    "TrainState",
    "abstract_batch",
    "abstract_state",
    "compile_specs",
    "constrain",
    "device_mesh",
    "disable_jit",
    "fold",
    "gather",
    "grad",
    "init",
    "init_params",
    "init_state",
    "jit",
    "jvp",
    "make_pipeline",
    "nn",
    "one_process",
    "optim",
    "random",
    "remat",
    "replicate",
    "scan",
    "shard_batch",
    "sum_and_grad",
    "sum_over",
    "tree",
    "use_plan",
    "value_and_grad",
    "vjp",
    "vmap",
]
