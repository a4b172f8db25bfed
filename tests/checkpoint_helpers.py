"""What the tests of checkpoints share: a state with every kind of leaf, and how to compare and spoil things."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from functitan import tree
from train.checkpoint import Checkpointer, latest, load


class AdamState(NamedTuple):
    count: torch.Tensor
    mu: Any
    nu: Any


@tree.node
@attrs.frozen
class State:
    params: Any
    opt_state: Any
    step: torch.Tensor
    key: torch.Tensor
    note: str = tree.static(default="kept by `like`")


def make_state(seed: int = 0, dim: int = 8) -> State:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tied = normal(16, dim)
    tied[0, 0] = float("nan")
    tied[0, 1] = -0.0
    params = {
        "layers": [{"wq": normal(dim, dim, dtype=torch.bfloat16), "bias": None}, {"wq": normal(dim, dim)}],
        "embed": tied,
        "head": tied,
        "empty": torch.zeros(0, dim),
        "transposed": normal(3, dim).T,
        "expanded": normal(1, dim).expand(3, dim),
        "row": normal(4, dim)[2],
        "flags": torch.tensor([True, False]),
        "float8": normal(4).to(torch.float8_e4m3fn),
        "grad": normal(2).requires_grad_(),
    }
    optimizer = (AdamState(torch.tensor(7, dtype=torch.int32), {"a": normal(3)}, {"a": normal(3).double()}), (), None)
    key = torch.tensor([0xFFFFFFFF, 7 + seed], dtype=torch.uint32)
    return State(params, optimizer, torch.tensor(2**40 + seed), key)


def abstract(state: Any) -> Any:
    return tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), state)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def assert_bit_equal(got: Any, want: Any) -> None:
    assert tree.structure(got) == tree.structure(want)
    for (path, a), (_, b) in zip(tree.leaves_with_path(got), tree.leaves_with_path(want)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        assert raw(a) == raw(b), path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def records(caplog: pytest.LogCaptureFixture) -> list:
    """Without those of DCP's own logger."""
    return [record for record in caplog.records if record.name == "train.checkpoint"]


def save(folder: Path, *steps: int, keep: int = 10, **kwargs: Any) -> None:
    checkpointer = Checkpointer(folder, keep, asynchronous=False)
    for step in steps:
        checkpointer.save(step, make_state(step, **kwargs))


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run_python(
    code: str, *args: object, prefix: tuple[str, ...] = (), env: Mapping[str, str] = os.environ, **kwargs: Any
) -> subprocess.CompletedProcess:
    """Runs a program that may import what stands here."""
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    env = {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), env.get("PYTHONPATH"))))}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **kwargs)


def changes_disk(event: str, args: tuple, folder: str) -> bool:
    """Whether an audit event is one of a save that changes what is on the disk."""
    if event in ("os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree"):
        return True
    return event == "open" and isinstance(args[1], str) and "w" in args[1] and folder in str(args[0])


def whole_step(folder: str, like: Any, step: int, done: bool) -> int:
    """The step of the checkpoint that is found after a save of ``step``, ``done`` or cut off; it has to be whole."""
    notices: list[str] = []
    found = latest(folder, notices.append)
    loaded = load(found.path, like)
    assert found.step in (step - 1, step) and not (done and found.step != step)
    assert bool((loaded["w"] == found.step).all()) and int(loaded["step"]) == found.step
    assert all("partial" in notice for notice in notices), notices
    return found.step


def place(whole: torch.Tensor, mesh: DeviceMesh, *placements: Placement, meta: bool = False) -> DTensor:
    """This rank's shard of ``whole``, without communication: Gloo has no uint32. As `like`, where ``meta``."""
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size = -(-local.shape[placement.dim] // mesh.size(axis))
            start = min(mesh.get_local_rank(axis) * size, local.shape[placement.dim])
            local = local.narrow(placement.dim, start, min(size, local.shape[placement.dim] - start))
    local = torch.empty_like(local, device="meta") if meta else local.contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
