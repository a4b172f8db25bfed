"""Checkpoints: the whole state tree, through torch.distributed.checkpoint (DCP), never half visible.

::

    OUT/checkpoints/step-00000010/                    complete: this name is only ever given by an atomic rename
                        metadata.json                 what is inside (:class:`Metadata`)
                        .metadata                     DCP's index: which slice of which tensor lies where
                        __0_0.distcp                  rank 0's part of the tensors
                        __1_0.distcp                  rank 1's
    OUT/checkpoints/step-00000020.tmp-3f9c02ab71d4/   being written, or left by a killed process
    OUT/checkpoints/step-00000010.old-8be0417fa2c6/   a step that is being saved for the second time, for a moment

The tree is saved flat, ``{"params/layers/wq": tensor, …}`` with the paths of :mod:`functitan.tree`, and the files say
where in the whole tensor a piece lies, not which mesh or stages it came from: so any layout loads into any other, one
process included. Without a process group, or in one of a single rank, that process writes everything and meets nobody.

A save over ranks, in this order, each step on all ranks before the next: take a snapshot of the own pieces; rank 0
makes the folder; each rank writes and syncs its file, and reads it once for the checksum; rank 0 writes the indices
with all sizes and checksums, and renames. A step that fails on one rank fails on all of them.

The background threads of an asynchronous save meet in a Gloo group of their own, made by the :class:`Checkpointer`. In
the default group their collectives would fall between those of training, in another order on every rank. Leaving
collectives out would mean that rank 0 waits for files to appear, and could not tell a slow rank from a dead one, which
Gloo reports at once. :meth:`Checkpointer.check` is called from the training thread meanwhile and has a second group;
:func:`latest` and :func:`load`, which nothing runs beside, use the default one.
"""

from train.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from train.checkpoint.finding import Checkpoint, latest, load, path_of
from train.checkpoint.storage import FORMAT, Metadata

__all__ = ["FORMAT", "Checkpoint", "CheckpointConfig", "Checkpointer", "Metadata", "latest", "load", "path_of"]
