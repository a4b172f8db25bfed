"""How stages hand tensors to one another: between ranks by point-to-point messages, within a process by reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from functitan.compiler.pipeline.schedules import Action

Box = tuple[str, int, int]
"""("F" or "B", the stage that receives, microbatch)."""


class Local:
    """Within one process: what is sent lies in a dict until it is taken."""

    def __init__(self) -> None:
        self._boxes: dict[Box, list[Tensor]] = {}

    def send(self, box: Box, tensors: Sequence[Tensor], rank: int) -> None:
        self._boxes[box] = list(tensors)

    def expect(self, box: Box, like: Sequence[Tensor], rank: int) -> None:
        """What is received is there when it has been sent."""

    def can_take(self, box: Box) -> bool:
        return box in self._boxes

    def take(self, box: Box) -> list[Tensor]:
        return self._boxes.pop(box)

    def finish(self) -> None:
        if self._boxes:
            raise RuntimeError(f"the pipeline's schedule leaves {len(self._boxes)} messages that nobody takes")


@frozen(eq=False)
class _Arriving:
    buffers: list[Tensor]
    works: list[dist.Work] = field(factory=list)


class Messages:
    """Between the ranks of the axis pp. Every receive is posted in the order in which the other side sends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._here = Local()
        self._rank = dist.get_rank(group)
        self._arriving: dict[Box, _Arriving] = {}
        self._leaving: list[tuple[dist.Work, Tensor]] = []

    def send(self, box: Box, tensors: Sequence[Tensor], rank: int) -> None:
        if rank == self._rank:
            self._here.send(box, tensors, rank)
            return
        for i, x in enumerate(tensors):
            self._leaving.append((dist.isend(x, group=self._group, group_dst=rank, tag=_tag(box, i)), x))

    def expect(self, box: Box, like: Sequence[Tensor], rank: int) -> None:
        if rank == self._rank:
            return
        buffers = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like]
        works = [
            dist.irecv(x, group=self._group, group_src=rank, tag=_tag(box, i)) for i, x in enumerate(buffers)
        ]
        self._arriving[box] = _Arriving(buffers, works)

    def can_take(self, box: Box) -> bool:
        """Of what another rank sends: it can be waited for."""
        return box in self._arriving or self._here.can_take(box)

    def take(self, box: Box) -> list[Tensor]:
        arriving = self._arriving.pop(box, None)
        if arriving is None:
            return self._here.take(box)
        for work in arriving.works:
            work.wait()
        return arriving.buffers

    def finish(self) -> None:
        """Returns when all that was sent has left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()
        self._here.finish()


def _tag(box: Box, number: int) -> int:
    kind, stage, microbatch = box
    return (((microbatch << 12) | stage) << 8 | number) << 1 | (kind == "B")


def box_of(action: Action) -> Box:
    """The box of an action: that of stage s + 1 for ``SEND_F`` of s, of s - 1 for ``SEND_B``, its own for receives."""
    direction = action.kind[-1]
    if action.kind.startswith("RECV"):
        return direction, action.stage, action.microbatch
    return direction, action.stage + (1 if direction == "F" else -1), action.microbatch
