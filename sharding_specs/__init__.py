"""Layouts as data: what a parameter is, what its dims mean, and how they are split over named mesh axes.

Pure Python: no tensor library, no process group, no other package of this repository. ``check`` says everything that is
wrong with a layout before anything is launched.
"""

from sharding_specs.check import BatchSpec, check, check_leaves
from sharding_specs.context import ContextParallel
from sharding_specs.mesh import STANDARD_AXES, MeshSpec
from sharding_specs.param import DTYPE_BYTES, Param, param_bytes, param_count, param_leaves
from sharding_specs.partition import P
from sharding_specs.problem import Problem, SpecError
from sharding_specs.region import region
from sharding_specs.rules import PRESETS, STANDARD_NAMES, Rules
from sharding_specs.stages import stage_layers

__all__ = [
    "DTYPE_BYTES",
    "PRESETS",
    "STANDARD_AXES",
    "STANDARD_NAMES",
    "BatchSpec",
    "ContextParallel",
    "MeshSpec",
    "P",
    "Param",
    "Problem",
    "Rules",
    "SpecError",
    "check",
    "check_leaves",
    "param_bytes",
    "param_count",
    "param_leaves",
    "region",
    "stage_layers",
]
