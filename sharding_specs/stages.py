"""Which layers belong to which pipeline stage."""

from __future__ import annotations

from itertools import pairwise


def stage_layers(n_layers: int, n_stages: int) -> list[range]:
    """The layers of each stage: consecutive, every layer once, no stage empty, sizes at most one apart.

    The larger stages come first, since the last one also holds the output head: 5 layers over 4 stages are
    ``[0, 1], [2], [3], [4]``.

    Raises:
      ValueError: a number is below 1, or there are fewer layers than stages.
    """
    if n_stages < 1 or n_layers < n_stages:
        raise ValueError(
            f"{n_layers} layers cannot fill {n_stages} pipeline stages: each stage needs a layer; "
            f"legal numbers of stages: {f'1 to {n_layers}' if n_layers > 1 else '1, with at least one layer'}"
        )
    size, larger = divmod(n_layers, n_stages)
    starts = [stage * size + min(stage, larger) for stage in range(n_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
