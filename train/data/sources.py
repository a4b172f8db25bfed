"""Files and the documents in them: which ones, in a fixed order, with names that do not depend on the machine."""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from train.data.errors import DataError

SUFFIXES = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".py": "text",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
}  # fmt: skip
# Not the library's own text: what pip put there, and tests, which are half of it and full of generated tables.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@attrs.frozen
class Source:
    """One file. `name` is its path below the fixed part of its glob, the same on any machine; it decides the split."""

    path: Path
    name: str
    format: str
    explicit: bool = False
    """Named by the user and not found through a glob: then it is a mistake when it is empty."""


def find_sources(patterns: Sequence[str], format: str = "auto", option: str = "data.path") -> list[Source]:
    """The files of paths and globs, in the order of `patterns`, by name within a glob, each file once.

    Raises :class:`DataError` for a missing file, a folder, a glob without files, and a suffix that says no format.
    """
    found: dict[Path, Source] = {}
    for pattern in patterns:
        full = os.path.expanduser(pattern)
        # A file whose name has brackets or stars is taken by its name.
        is_glob = glob.has_magic(full) and not os.path.exists(full)
        if is_glob:
            root = _fixed_part(full)
            paths = [Path(p) for p in glob.glob(full, recursive=True) if os.path.isfile(p)]
            if not paths:
                raise DataError(f"{option}: no file matches {pattern!r} (seen from {os.getcwd()})")
        else:
            paths = [Path(full)]
            root = paths[0].parent
            if paths[0].is_dir():
                raise DataError(
                    f"{option}: {pattern} is a folder; name its files with a glob, as in '{pattern}/**/*.txt'"
                )
            if not paths[0].exists():
                raise DataError(f"{option}: there is no file {pattern} (seen from {os.getcwd()})")
        named = sorted((path.relative_to(root).as_posix(), path) for path in paths)
        for name, path in named:
            kind = _format_of(path, format)
            found.setdefault(path.resolve(), Source(path.absolute(), name, kind, explicit=not is_glob))
    return list(found.values())


def stdlib_sources() -> list[Source]:
    """The source files of the running Python's standard library, without its tests; about 600 files, 11 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        for file in files:
            # _sysconfigdata_* is written when Python is built: it differs between machines.
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                sources.append(Source(path, path.relative_to(root).as_posix(), "text"))
    if not sources:
        raise DataError(
            f"the standard library has no source files in {root}: give a text of your own (--data.path FILE)"
        )
    return sorted(sources, key=lambda source: source.name)


def read_documents(source: Source, text_field: str, utf8: bool) -> Iterator[tuple[str, bytes]]:
    """Yields `(name, text)` for each document of a file: text is UTF-8, or any bytes of a text file unless `utf8`.

    A document's name is the file's, with the line (from 1) or row (from 0) where a file holds several. Empty documents
    and nulls are left out. Raises :class:`DataError` with the file and line for whatever cannot be read.
    """
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}
    count = 0
    try:
        for name, text in readers[source.format](source, text_field, utf8):
            if text:
                count += 1
                yield name, text
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror or error}") from error
    if count == 0 and source.explicit:
        raise DataError(f"{source.path} has no text: leave it out of the paths, or see whether it was written in full")


def _read_text(source: Source, text_field: str, utf8: bool) -> Iterator[tuple[str, bytes]]:
    text = source.path.read_bytes()
    if utf8:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.path} is not UTF-8 (byte {error.start}): "
                "convert it (iconv -t utf-8), or use --data.tokenizer bytes"
            ) from error
    yield source.name, text


def _read_jsonl(source: Source, text_field: str, utf8: bool) -> Iterator[tuple[str, bytes]]:
    with source.path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{source.path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # JSONDecodeError, no UTF-8, or nested too deeply
                raise DataError(f"{place}: invalid JSON: {error}; each line must be one whole JSON object") from error
            if not isinstance(record, dict):
                raise DataError(
                    f"{place}: a JSON {type(record).__name__}, where an object with a field {text_field!r} must be"
                )
            if text_field not in record:
                names = ", ".join(map(repr, record)) or "none"
                raise DataError(f"{place}: no field {text_field!r}; it has {names}: set --data.text-field")
            yield f"{source.name}:{number}", _to_utf8(record[text_field], place, text_field)


def _read_parquet(source: Source, text_field: str, utf8: bool) -> Iterator[tuple[str, bytes]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{source.path}: Parquet files need pyarrow; install it with: pip install 'functitan[parquet]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            columns = file.schema_arrow.names
            if text_field not in columns:
                names = ", ".join(map(repr, columns)) or "none"
                raise DataError(f"{source.path}: no column {text_field!r}; it has {names}: set --data.text-field")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    yield f"{source.name}:{row}", _to_utf8(value, f"{source.path}, row {row}", text_field)
                    row += 1
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{source.path}: not a whole Parquet file: {reason}") from error


def _to_utf8(value: object, place: str, text_field: str) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, str):
        raise DataError(f"{place}: {text_field!r} holds a {type(value).__name__}, not a string (--data.text-field)")
    # JSON can spell half a surrogate pair, which no UTF-8 text can hold.
    return value.encode(errors="replace")


def _format_of(path: Path, format: str) -> str:
    if format != "auto":
        return format
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise DataError(
            f"{path}: the suffix {path.suffix!r} does not say what it holds; known are {', '.join(SUFFIXES)}: "
            "say it with --data.format text, jsonl or parquet"
        )
    return kind


def _fixed_part(pattern: str) -> Path:
    parts = Path(pattern).parts
    first_magic = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first_magic])
