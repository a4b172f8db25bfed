"""Checkpoints and arrays of other libraries."""
