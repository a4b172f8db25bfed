"""A corpus: one stream of tokens, made of documents that each end with the end of document, in memory or in a cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np

from train.data.config import DataConfig
from train.data.errors import DataError
from train.data.sources import Source, read_documents
from train.data.tokenizer import ByteTokenizer, Tokenizer

logger = logging.getLogger(__name__)

# A change of what is kept in a cache folder changes this number, so that old folders are not read.
_CACHE_VERSION = 1
# Bytes of text up to which byte tokens stay in memory (two bytes a token).
_IN_MEMORY = 256 << 20
# Documents are encoded in groups of about this many bytes: enough for a tokenizer's threads, little memory.
_GROUP = 4 << 20
# Elements of an array that a fingerprint reads.
_FINGERPRINT = 10_000
_SIDES = ("train", "held_out")


@attrs.frozen(eq=False)
class Corpus:
    """tokens: [n], unsigned, the documents one after another; ends: [documents] int64, rising, where each stops in
    `tokens` (its end-of-document token included); the last is n."""

    tokens: np.ndarray
    ends: np.ndarray

    def part(self, start: int, stop: int) -> Corpus:
        """The tokens from `start` to `stop`, as views; a document that is cut has no end-of-document there."""
        inside = self.ends[(self.ends > start) & (self.ends < stop)]
        ends = np.append(inside, stop) if stop > start else inside
        return Corpus(self.tokens[start:stop], ends - start)

    def fingerprint(self) -> str:
        """Its length, and a hash of some ten thousand tokens and ends of documents, spread evenly: cheap for any size.
        Other text is told by it; so is changed text, unless the change is small and leaves every length as it is."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.tokens, self.ends):
            part = array[:: max(len(array) // _FINGERPRINT, 1)]
            digest.update(np.ascontiguousarray(part, np.int64).tobytes())
        return f"{len(self.tokens)} tokens ({digest.hexdigest()})"


def corpus_of(documents: Iterable[Sequence[int] | np.ndarray], eod: int) -> Corpus:
    """A corpus in memory of documents given as token ids, each closed with `eod`."""
    arrays = [np.append(np.asarray(document, np.int64), eod) for document in documents]
    ends = np.cumsum([len(array) for array in arrays], dtype=np.int64)
    tokens = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
    return Corpus(tokens.astype(np.uint32), ends)


def load_corpora(
    sources: Sequence[Source], tokenizer: Tokenizer, config: DataConfig, held_out: float
) -> dict[str, Corpus]:
    """Reads `{"train": Corpus, "held_out": Corpus}`, the second with about a share `held_out` of the documents.

    Byte tokens of up to 256 MiB of text are made anew and kept in memory; all else is tokenised once, kept in the
    cache folder and memory-mapped. Raises :class:`DataError`.
    """
    stats = _stat(sources)
    small = sum(stat.st_size for stat in stats) <= _IN_MEMORY and all(source.format != "parquet" for source in sources)
    if small and isinstance(tokenizer, ByteTokenizer):
        corpora = _in_memory(sources, tokenizer, config.text_field, held_out)
    else:
        corpora = _cached(sources, stats, tokenizer, config, held_out)
    if not any(len(corpus.tokens) for corpus in corpora.values()):
        raise DataError(
            f"no text in {_first_paths(sources)}: every document is empty (see --data.path, --data.text-field)"
        )
    return _with_both_sides(corpora, held_out) if held_out > 0 else corpora


def is_held_out(name: str, share: float) -> bool:
    """Whether a document is kept for validation: by a hash of its name alone, so that neither the order of the files,
    nor the machine, nor other documents that come or go, move it to the other side."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _with_both_sides(corpora: dict[str, Corpus], held_out: float) -> dict[str, Corpus]:
    """Where the documents are so few that one side got none, the end of the text is held out instead."""
    if all(len(corpus.tokens) for corpus in corpora.values()):
        return corpora
    whole = next(corpus for corpus in corpora.values() if len(corpus.tokens))
    n = len(whole.tokens)
    cut = n - max(2, round(n * held_out))  # one token and its label are the least that can be validated on
    return {"train": whole.part(0, max(cut, 0)), "held_out": whole.part(max(cut, 0), n)}


def _in_memory(sources: Sequence[Source], tokenizer: Tokenizer, text_field: str, held_out: float) -> dict[str, Corpus]:
    files = {side: (io.BytesIO(), io.BytesIO()) for side in _SIDES}
    _write_documents(sources, tokenizer, text_field, held_out, files)
    return {
        side: Corpus(np.frombuffer(tokens.getbuffer(), _dtype(tokenizer)), np.frombuffer(ends.getbuffer(), np.int64))
        for side, (tokens, ends) in files.items()
    }


def _cached(
    sources: Sequence[Source],
    stats: Sequence[os.stat_result],
    tokenizer: Tokenizer,
    config: DataConfig,
    held_out: float,
) -> dict[str, Corpus]:
    files = [
        [source.name, str(source.path), source.format, stat.st_size, stat.st_mtime_ns]
        for source, stat in zip(sources, stats, strict=True)
    ]
    key = json.dumps([_CACHE_VERSION, tokenizer.fingerprint, config.text_field, held_out, files])
    root = _cache_root(config)
    folder = root / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    if not folder.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _only_one(root / f"{folder.name}.lock"):
                if not folder.exists():
                    _build_cache(folder, sources, tokenizer, config.text_field, held_out)
        except OSError as error:
            raise DataError(
                f"cannot write the token cache {folder}: {error.strerror or error}; "
                "free some space or name another folder with --data.cache-dir"
            ) from error
    return {side: _map_corpus(folder, side, _dtype(tokenizer)) for side in _SIDES}


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """One of the processes that come here with this path at a time: the ranks of a machine tokenise a text once."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file, however that ends
        try:
            yield
        finally:
            # Who waits has the file open, and finds the work done; if it failed, two may do it, which is no harm.
            path.unlink(missing_ok=True)


def _build_cache(
    folder: Path, sources: Sequence[Source], tokenizer: Tokenizer, text_field: str, held_out: float
) -> None:
    """Writes under another name, then renames: a folder with the right name is whole, whatever was killed when."""
    logger.info("tokenising %d files into %s", len(sources), folder)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        files = {
            side: ((temporary / f"{side}.tokens").open("wb"), (temporary / f"{side}.ends").open("wb"))
            for side in _SIDES
        }
        try:
            _write_documents(sources, tokenizer, text_field, held_out, files)
        finally:
            for pair in files.values():
                for file in pair:
                    file.close()
        sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
        (temporary / "sizes.json").write_text(json.dumps(sizes))
        try:
            temporary.rename(folder)
        except OSError:
            # Another machine was first, where they share the folder and not the lock; both wrote the same.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _map_corpus(folder: Path, side: str, dtype: np.dtype) -> Corpus:
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        arrays = []
        for name, kind in ((f"{side}.tokens", dtype), (f"{side}.ends", np.dtype(np.int64))):
            file = folder / name
            if file.stat().st_size != sizes[name]:
                raise ValueError(f"{name} has {file.stat().st_size} bytes and not {sizes[name]}")
            # An empty file cannot be mapped.
            arrays.append(np.asarray(np.memmap(file, kind, "r")) if sizes[name] else np.empty(0, kind))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"the token cache {folder} is damaged ({error}): remove that folder, it will be made anew"
        ) from error
    return Corpus(*arrays)


def _write_documents(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    text_field: str,
    held_out: float,
    files: dict[str, tuple[BinaryIO, BinaryIO]],
) -> None:
    """Appends the tokens and ends of each document to the `(tokens, ends)` files of its side."""
    dtype = _dtype(tokenizer)
    position = dict.fromkeys(files, 0)
    for names, texts in _groups(sources, text_field, tokenizer.needs_utf8):
        for name, ids in zip(names, tokenizer.encode_documents(texts), strict=True):
            side = "held_out" if is_held_out(name, held_out) else "train"
            tokens_file, ends_file = files[side]
            tokens_file.write(np.append(ids, tokenizer.eod).astype(dtype).tobytes())
            position[side] += len(ids) + 1
            ends_file.write(np.int64(position[side]).tobytes())


def _groups(sources: Sequence[Source], text_field: str, utf8: bool) -> Iterator[tuple[list[str], list[bytes]]]:
    names: list[str] = []
    texts: list[bytes] = []
    size = 0
    for source in sources:
        for name, text in read_documents(source, text_field, utf8):
            names.append(name)
            texts.append(text)
            size += len(text)
            if size >= _GROUP:
                yield names, texts
                names, texts, size = [], [], 0
    yield names, texts


def _stat(sources: Sequence[Source]) -> list[os.stat_result]:
    stats = []
    for source in sources:
        try:
            stats.append(source.path.stat())
        except OSError as error:
            raise DataError(f"cannot read {source.path}: {error.strerror or error}") from error
    return stats


def _cache_root(config: DataConfig) -> Path:
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "functitan"


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def _first_paths(sources: Sequence[Source], most: int = 3) -> str:
    rest = f" and {len(sources) - most} more" if len(sources) > most else ""
    return ", ".join(str(source.path) for source in sources[:most]) + rest
