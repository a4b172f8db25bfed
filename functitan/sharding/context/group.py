"""The ranks of cp that share a sequence, and what they send each other: functional collectives, started and waited for.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


@frozen
class Group:
    """A process group.

    Attributes:
        name: as torch's functional collectives take it.
        size: of how many ranks.
        rank: this one's place in it.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh, axis: int) -> Group:
        """The ranks that differ from this one along one axis of a mesh."""
        return cls(mesh.get_group(axis).group_name, mesh.size(axis), mesh.get_local_rank(axis))

    def shift(self, x: Tensor, by: int) -> Tensor:
        """Starts to send ``x`` to the rank ``by`` further on: what the one ``by`` before sends, to be waited for."""
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        rows = x.shape[0]
        sent = [rows if rank == to else 0 for rank in range(self.size)]
        arriving = [rows if rank == source else 0 for rank in range(self.size)]
        return _ops.all_to_all_single(x.contiguous(), arriving, sent, self.name)

    def exchange(self, x: Tensor) -> Tensor:
        """``x[i]`` to rank ``i``; of the result, ``[i]`` is from rank ``i``. Dim 0 has the size of the group."""
        return wait(_ops.all_to_all_single(x.contiguous(), [1] * self.size, [1] * self.size, self.name))


def wait(x: Tensor) -> Tensor:
    """What a collective that was started has brought."""
    return _ops.wait_tensor(x)
