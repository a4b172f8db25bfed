"""One checkpoint folder: writing it durably, checking it, reading it without running code from it.

Functions that take ``ranks`` are collectives: every rank calls them, and all of them return or all raise.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import pickle
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from functitan import Plan, tree
from train.checkpoint.pieces import Piece, PieceSavePlanner, SliceLoadPlanner
from train.checkpoint.ranks import RankFailed, Ranks, os_error_of, portable
from train.errors import UserError

FORMAT = 1
"""Version of the layout of a folder. A checkpoint of another version is refused, not guessed at."""

_METADATA = "metadata.json"
_INDEX = ".metadata"  # the name is DCP's


@attrs.frozen
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@attrs.frozen
class FileInfo:
    bytes: int
    crc32: int


@attrs.frozen
class Metadata:
    """``metadata.json``: what a checkpoint holds, for people and for the checks at loading."""

    format: int
    step: int
    functitan: str
    torch: str
    tensors: dict[str, TensorInfo]
    """By path in the state tree. Shapes are of the whole tensors, however they were split over ranks."""
    files: dict[str, FileInfo]
    """Every other file in the folder."""


class Damaged(Exception):
    """A folder that is named as complete and is not; the text says what is wrong with it."""


def write(folder: Path, step: int, own: list[Piece], ranks: Ranks) -> None:
    """Writes a checkpoint into the new ``folder``; on return all of it is on the disk, its own name aside.

    Every rank writes its ``own`` pieces into a file of its own; rank 0 writes the two indices, after the others.
    """
    ranks.first(folder.mkdir)
    _silence_single_process_warning()
    writer, planner = _Writer(folder, ranks), PieceSavePlanner(own)
    try:
        with ranks.reaching():
            # The planner has the tensors: there is no state dict.
            index = dcp.save(
                {}, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=ranks.alone
            )
    except dcp.CheckpointException as error:
        if ranks.alone:
            raise
        raise RankFailed({rank: portable(failure) for rank, (failure, _) in error.failures.items()}) from error
    written = ranks.each(lambda: _own_files(folder, ranks))
    metadata = Metadata(
        format=FORMAT,
        step=step,
        functitan=_own_version(),
        torch=torch.__version__,
        tensors={path: TensorInfo(tuple(t.size), _dtype_name(t.properties.dtype)) for path, t in _entries(index)},
        files={name: info for files in written for name, info in files.items()},
    )
    ranks.first(lambda: _complete(folder, metadata))


def _own_files(folder: Path, ranks: Ranks) -> dict[str, FileInfo]:
    """Of the files that this rank wrote; the index is rank 0's."""
    own = sorted(folder.glob(f"__{ranks.rank}_*"))
    if ranks.rank == 0:
        own.append(folder / _INDEX)
    return {file.name: FileInfo(file.stat().st_size, _crc32(file)) for file in own}


def _complete(folder: Path, metadata: Metadata) -> None:
    for name, info in metadata.files.items():
        if (folder / name).stat().st_size != info.bytes:
            raise OSError(f"{name} has {(folder / name).stat().st_size:,} bytes and its rank wrote {info.bytes:,}")
    with (folder / _METADATA).open("w", encoding="utf-8") as file:
        json.dump(cattrs.unstructure(metadata), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def inspect(path: Path) -> Metadata:
    """Reads the metadata and compares the files' sizes; Damaged if something is missing or cut short."""
    if not path.is_dir():
        raise UserError(f"there is no checkpoint {path}; name a folder such as OUT/checkpoints/step-00000010")
    try:
        raw = json.loads((path / _METADATA).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(f"{_METADATA} is missing") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{_METADATA} is no JSON ({error})") from error
    version = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(version, int) and version != FORMAT:
        raise UserError(
            f"the checkpoint {path} has format {version}, written by functitan {raw.get('functitan')}; this functitan "
            f"reads format {FORMAT}: use that version of functitan, or another --out for a new run"
        )
    try:
        metadata = cattrs.structure(raw, Metadata)
    except (cattrs.BaseValidationError, TypeError) as error:
        raise Damaged(f"{_METADATA} lacks some of its fields") from error
    if path.name.startswith("step-") and "." not in path.name and path.name != f"step-{metadata.step:08d}":
        raise Damaged(f"the folder's name is {path.name}, and {_METADATA} says step {metadata.step}")
    for name, expected in metadata.files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        if size != expected.bytes:
            raise Damaged(f"{name} has {size:,} bytes and should have {expected.bytes:,}")
    return metadata


def read_index(path: Path, metadata: Metadata) -> dcp.Metadata:
    """DCP's own metadata, checked against ours; Damaged if the two disagree."""
    if _INDEX not in metadata.files:
        raise Damaged(f"{_METADATA} does not list {_INDEX}")
    _verify_file(path, _INDEX, metadata)
    try:
        with (path / _INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
        infos = {name: TensorInfo(tuple(t.size), _dtype_name(t.properties.dtype)) for name, t in _entries(index)}
        files = {info.relative_path for info in index.storage_data.values()}
    except OSError:
        raise
    except Exception as error:  # a pickle of unknown bytes can fail with any exception
        raise Damaged(f"{_INDEX} is not an index of tensors as this program writes it ({error})") from error
    if infos != metadata.tensors or not files <= metadata.files.keys():
        raise Damaged(f"{_INDEX} and {_METADATA} do not belong together")
    return index


def check_fit(path: Path, metadata: Metadata, wanted: dict[str, Any], subset: bool) -> None:
    """UserError that names the paths whose shape or dtype differs, or that only one side has."""
    saved, here = metadata.tensors, {name: _info(leaf) for name, leaf in wanted.items()}
    problems = []
    for name, info in here.items():
        if name not in saved:
            problems.append(f"{name} {info} is not in it")
        elif saved[name] != info:
            problems.append(f"{name} is {saved[name]} in it and {info} here")
    if not subset:
        problems += [f"{name} {saved[name]} is only in it" for name in saved if name not in here]
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise UserError(
            f"the checkpoint {path} does not fit this model and optimizer ({len(problems)} of {len(here | saved)} "
            f"tensors): {shown}. Use the configuration it was made with, or another --out for a new run"
        )


def verify(path: Path, metadata: Metadata, ranks: Ranks) -> None:
    """Reads every byte once, a part of the files on each rank, to compare the checksums; Damaged if one differs."""
    for name in sorted(metadata.files)[ranks.rank :: ranks.size]:
        _verify_file(path, name, metadata)


def _verify_file(path: Path, name: str, metadata: Metadata) -> None:
    found, expected = _crc32(path / name), metadata.files[name].crc32
    if found != expected:
        raise Damaged(f"the bytes of {name} have changed (CRC-32 {found:08x}, was {expected:08x})")


def read(
    path: Path, index: dcp.Metadata, wanted: dict[str, Any], device: torch.device | str | None, plan: Plan | None
) -> dict[str, torch.Tensor]:
    """New tensors for the leaves ``wanted``, filled from the folder; OSError if it cannot be read."""
    targets = {name: _empty(leaf, device) for name, leaf in wanted.items()}
    _silence_single_process_warning()
    planner = SliceLoadPlanner(targets, plan)
    try:
        # The planner has the tensors: there is no state dict.
        dcp.load({}, storage_reader=_Reader(path, index), planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        cause, os_error = causes(error)
        raise (os_error or cause) from error
    return targets


def _entries(index: dcp.Metadata) -> Iterator[tuple[str, dcp.TensorStorageMetadata]]:
    for name, entry in index.state_dict_metadata.items():
        # DCP unpickles an entry of any other kind without restriction, which may run code.
        if not isinstance(entry, dcp.TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is no tensor")
        yield name, entry


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles DCP's index and nothing else: a pickle may name any function to be called."""

    allowed = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.allowed or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, for a folder that is there already."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        super().__init__(path, sync_files=True)
        self._ranks = ranks

    def storage_meta(self) -> None:
        return None  # DCP's holds the path of the temporary folder

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # DCP's makes the folder: a rank that does not see rank 0's would write into another one

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if self._ranks.alone:
                raise
            # DCP sends it to the other ranks, where the pickle of an exception has lost its cause.
            raise portable(error) from error


class _Reader(dcp.FileSystemReader):
    """Reads with an index that was unpickled safely, where DCP's own way is an unrestricted pickle.load."""

    def __init__(self, path: Path, index: dcp.Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._index


def named_leaves(state: Any) -> dict[str, Any]:
    """The leaves by path; TypeError for one without shape and dtype, ValueError for two of one path."""
    named: dict[str, Any] = {}
    for path, leaf in tree.leaves_with_path(state):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(f"{path or 'the state'} is a {type(leaf).__name__}, which has no shape and dtype")
        if path in named:
            raise ValueError(f"two leaves of the state have the path {path!r}; rename one")
        named[path] = leaf
    return named


def named_tensors(state: Any) -> dict[str, torch.Tensor]:
    """As :func:`named_leaves`, for leaves that must all be tensors."""
    named = named_leaves(state)
    for path, leaf in named.items():
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{path or 'the state'} is a {type(leaf).__name__}; a checkpoint holds tensors only")
        if isinstance(leaf, DTensor) and any(placement.is_partial() for placement in leaf.placements):
            raise ValueError(f"{path or 'the state'} has placements {leaf.placements}: redistribute what is Partial")
    return named


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _info(leaf: Any) -> TensorInfo:
    return TensorInfo(tuple(int(size) for size in leaf.shape), _dtype_name(leaf.dtype))


def _empty(leaf: Any, device: torch.device | str | None) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        mesh, dtype = leaf.device_mesh, leaf.dtype
        with torch.no_grad():
            local = torch.empty(leaf.to_local().shape, dtype=dtype, device=mesh.device_type)
        shape, stride = leaf.shape, torch.empty(leaf.shape, dtype=dtype, device="meta").stride()
        return DTensor.from_local(local, mesh, leaf.placements, run_check=False, shape=shape, stride=stride)
    own = getattr(leaf, "device", None)
    if device is None and isinstance(own, torch.device) and own.type != "meta":
        device = own
    return torch.empty(tuple(leaf.shape), dtype=getattr(torch, _dtype_name(leaf.dtype)), device=device or "cpu")


def _own_version() -> str:
    try:
        return importlib.metadata.version("functitan")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a checkout: no reason to fail a save


def _crc32(path: Path) -> int:
    crc, buffer = 0, bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:size], crc)
    return crc


def sync_folder(folder: Path) -> None:
    """Makes the names in ``folder`` durable, as fsync of a file does for its bytes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def causes(error: BaseException) -> tuple[BaseException, OSError | None]:
    """The error inside DCP's wrapper, and the operating system's error that led to it, on whichever rank."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error, os_error_of(error.error if isinstance(error, RankFailed) else error)


def os_error_text(error: OSError) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            advice = "; free some, or keep fewer checkpoints (--checkpoint.keep)"
        case errno.EFBIG:
            advice = "; raise the limit on the size of files (ulimit -f)"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOTDIR | errno.EEXIST:
            advice = "; change its permissions, or use another folder (--out)"
        case _:
            advice = "; see to it, or use another folder (--out)"
    return f"{error.strerror or error}{advice}"


def _silence_single_process_warning() -> None:
    # Called each time, as it does nothing the second time and others reset the filters. Not catch_warnings: that
    # swaps the filters of all threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
