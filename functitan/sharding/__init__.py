"""Tensors laid out over a mesh: how they are moved, and how an operator runs on the part that a rank holds."""

from functitan.sharding.layout import Layout, current, use_plan

__all__ = ["Layout", "current", "use_plan"]
