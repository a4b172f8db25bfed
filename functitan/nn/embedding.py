"""Rows of a table, by token id."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """The row of ``table`` for each id.

    Args:
        table: [vocab, embed].
        ids: int32 or int64, [...]. That they are less than ``vocab`` is not checked here, because values are not
            known while a step is captured: torch raises IndexError on a CPU, and data loaders check it before.

    Returns:
        [..., embed], of the table's dtype.

    Raises:
        ValueError: the table has not two dims.
        TypeError: the ids are not integers.
    """
    if table.ndim != 2:
        raise ValueError(f"embedding: table must be [vocab, embed]; it is {list(table.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"embedding: ids must be int32 or int64; they are {str(ids.dtype).removeprefix('torch.')}")
    return F.embedding(ids, table)
