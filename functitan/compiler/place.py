"""From a plan to tensors: initial values, each a function of the key and the parameter's path alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functitan import init, random, tree
from functitan.compiler.plan import Plan
from functitan.optim import GradientTransformation
from functitan.state import TrainState


def init_params(plan: Plan, key: Tensor) -> Any:
    """The initial parameters of a plan: a tree of tensors.

    A parameter's key is :func:`functitan.init.param_key` of its path, so its values depend neither on the order of
    declaration nor on the other parameters.

    Raises:
        ValueError: the plan's mesh needs more devices than there are.
    """
    check_one_device(plan)

    def make(path: str, param) -> Tensor:
        value = param.init(init.param_key(key, path), param.shape, getattr(torch, param.dtype))
        if tuple(value.shape) != param.shape:
            raise ValueError(
                f"the initialiser {param.init} of {path} gave shape {tuple(value.shape)}; declared is {param.shape}"
            )
        return value

    return tree.map_with_path(make, plan.params)


def init_state(plan: Plan, key: Tensor, optimizer: GradientTransformation) -> TrainState:
    """The state before the first step.

    Args:
        plan: from ``compile_specs``.
        key: uint32 [2]; one half makes the parameters, the other stays in the state for dropout.
        optimizer: gives the optimizer's state.
    """
    params_key, state_key = random.split(key)
    params = init_params(plan, params_key)
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=zero,
        key=state_key.clone(),
        data={"position": zero.clone()},
        skipped=zero.clone(),
    )


def abstract_state(plan: Plan, optimizer: GradientTransformation) -> TrainState:
    """The state's structure, shapes and dtypes without its values: what a checkpoint is loaded into."""
    with torch.device("meta"):
        params = tree.map(lambda param: torch.empty(param.shape, dtype=getattr(torch, param.dtype)), plan.params)
        zero = torch.empty((), dtype=torch.int64)
        return TrainState(
            params=params,
            opt_state=optimizer.init(params),
            step=zero,
            key=torch.empty(2, dtype=torch.uint32),
            data={"position": zero},
            skipped=zero,
        )


def check_one_device(plan: Plan) -> None:
    """Raises ValueError where the plan's mesh is larger than one device."""
    if plan.mesh.size != 1:
        raise ValueError(
            f"the plan's mesh {plan.mesh} needs {plan.mesh.size} devices, and this version runs on one; use MeshSpec()"
        )
