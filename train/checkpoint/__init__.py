"""Checkpoints: the whole state tree, through torch.distributed.checkpoint (DCP), never half visible.

::

    OUT/checkpoints/step-00000010/                    complete: this name is only ever given by an atomic rename
                        metadata.json                 what is inside (:class:`Metadata`)
                        .metadata                     DCP's index: which slice of which tensor lies where
                        __0_0.distcp                  the tensors
    OUT/checkpoints/step-00000020.tmp-3f9c02ab71d4/   being written, or left by a killed process
    OUT/checkpoints/step-00000010.old-8be0417fa2c6/   a step that is being saved for the second time, for a moment

The tree is saved flat, ``{"params/layers/wq": tensor, …}`` with the paths of :mod:`functitan.tree`, so that DCP can
reshard every tensor for itself. There is no process group here: one process writes everything. With ranks, DCP's
``no_dist`` goes, each rank lists the files that it wrote, and rank 0 writes ``metadata.json`` and renames.
"""

from train.checkpoint.checkpointer import Checkpoint, CheckpointConfig, Checkpointer, latest, load, path_of
from train.checkpoint.storage import FORMAT, Metadata

__all__ = ["FORMAT", "Checkpoint", "CheckpointConfig", "Checkpointer", "Metadata", "latest", "load", "path_of"]
