"""Context parallelism: attention, and the order of tokens, where a sequence is split over the mesh axis cp."""

from functitan.sharding.context.calls import Pattern, Work, work

__all__ = ["Pattern", "Work", "work"]
