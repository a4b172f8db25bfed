"""How stages hand tensors to one another: between ranks by point-to-point messages, within a process by reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def receipts(lists: Sequence[Sequence[Action]], stage_ranks: Sequence[int]) -> dict[Box, tuple[Box, ...]]:
    """Of each message, which messages the other way its sender has taken by then, and not by the message before.

    So who receives it knows that these have left, and lets go of what was in them.

    Args:
        lists: of every rank what it does in turn, with sends.
        stage_ranks: of every stage its rank.
    """
    found: dict[Box, tuple[Box, ...]] = {}
    for actions in lists:
        taken: dict[int, list[Box]] = {}
        for action in actions:
            if action.kind.startswith("SEND"):
                box = box_of(action)
                found[box] = tuple(taken.pop(stage_ranks[box[1]], ()))
            elif action.kind in ("F", "B", "I"):
                direction, source = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
                if 0 <= source < len(stage_ranks):
                    taken.setdefault(stage_ranks[source], []).append((direction, action.stage, action.microbatch))
    return found


class Messages:
    """Between the ranks of the axis pp. Every receive is posted in the order in which the other side sends.

    Args:
        receipts: of :func:`receipts`, of the actions that run.
    """

    def __init__(self, group: dist.ProcessGroup, receipts: Mapping[Box, Sequence[Box]]) -> None:
        self._group = group
        self._receipts = receipts
        self._here = Local()
        self._rank = dist.get_rank(group)
        self._arriving: dict[Box, _Arriving] = {}
        self._leaving: dict[Box, list[tuple[dist.Work, Tensor]]] = {}

    def send(self, box: Box, tensors: Sequence[Tensor], rank: int) -> None:
        if rank == self._rank:
            self._here.send(box, tensors, rank)
            return
        self._let_go(box)  # of the batch's parts before: it was taken before anything of these is
        self._leaving[box] = [
            (dist.isend(x, group=self._group, group_dst=rank, tag=_tag(box, i)), x) for i, x in enumerate(tensors)
        ]

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
        for sent in self._receipts.get(box, ()):
            self._let_go(sent)
        return arriving.buffers

    def finish(self) -> None:
        """Returns when all that was sent has left."""
        for box in list(self._leaving):
            self._let_go(box)
        self._here.finish()

    def _let_go(self, box: Box) -> None:
        for work, _ in self._leaving.pop(box, ()):
            work.wait()


def _tag(box: Box, number: int) -> int:
    kind, stage, microbatch = box
    return (((microbatch << 12) | stage) << 8 | number) << 1 | (kind == "B")


def box_of(action: Action) -> Box:
    """The box of an action: that of stage s + 1 for ``SEND_F`` of s, of s - 1 for ``SEND_B``, its own for receives."""
    direction = action.kind[-1]
    if action.kind.startswith("RECV"):
        return direction, action.stage, action.microbatch
    return direction, action.stage + (1 if direction == "F" else -1), action.microbatch
