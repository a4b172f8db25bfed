"""Rows of a table, by token id."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from functitan._torch import is_distributed


def embedding(table: Tensor, ids: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The row of ``table`` for each id.

    Args:
        table: [vocab, embed].
        ids: int32 or int64, [...]. That they are less than ``vocab`` is not checked here, because values are not
            known while a step is captured: torch raises IndexError on a CPU, a table that is split over
            ranks gives NaN, and data loaders check it before.
        dtype: of the result, in which a model goes on computing; None: the table's.

    Returns:
        [..., embed].

    Raises:
        ValueError: the table has not two dims.
        TypeError: the ids are not integers.
    """
    if table.ndim != 2:
        raise ValueError(f"embedding: table must be [vocab, embed]; it is {list(table.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"embedding: ids must be int32 or int64; they are {str(ids.dtype).removeprefix('torch.')}")
    dtype = table.dtype if dtype is None else dtype

    def lookup(rows: Tensor, local_ids: Tensor) -> Tensor:
        return F.embedding(local_ids, rows)

    if is_distributed(table) or is_distributed(ids):
        from functitan.sharding import ops

        return ops.embedding(lookup, table, ids, dtype)
    return lookup(table.to(dtype), ids)
