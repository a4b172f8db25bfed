"""What the text is, how it becomes tokens, and in which order they are read."""

from __future__ import annotations

from typing import Literal

import attrs

from train.data.errors import DataError

Format = Literal["auto", "text", "jsonl", "parquet"]
FORMATS: tuple[str, ...] = ("auto", "text", "jsonl", "parquet")


@attrs.frozen
class DataConfig:
    """The data of a run. A change of path, tokenizer, held_out, seed or shuffle changes which batch comes next."""

    path: tuple[str, ...] = ()
    """Files or globs to train on (`**` crosses folders). Empty: the source text of this Python's standard library."""

    format: Format = "auto"
    """What the files hold. auto: by suffix (.txt .text .md .rst .py: text; .jsonl .ndjson: jsonl; .parquet: parquet).
    A text file is one document (read whole into memory), as is a line of JSON and a row of Parquet."""

    text_field: str = "text"
    """The JSON field or Parquet column that holds the text."""

    tokenizer: str = "bytes"
    """`bytes` (ids 0..255, end of document 256), or the path of a Hugging Face tokenizer.json or of its folder."""

    held_out: float = 0.05
    """Share of the documents kept for validation, chosen by a hash of their names; where they are too few for that,
    the end of the text. Not used with eval_path."""

    eval_path: tuple[str, ...] = ()
    """Files or globs to validate on, instead of a held-out share of `path`."""

    documents: bool = True
    """Documents packed into one sample do not see each other: attention, positions and labels end with the document.
    False: a sample is one stretch of text, as in GPT-2."""

    shuffle: bool = True
    """A new order of the samples in each epoch. False: in the order of the text."""

    seed: int = 0
    """Seed of the shuffle, 0 to 2**32 - 1."""

    prefetch: int = 4
    """Batches prepared ahead by a background thread. 0: each is made when it is asked for."""

    cache_dir: str = ""
    """Where tokens of large texts are kept between runs. Empty: $XDG_CACHE_HOME/functitan, or ~/.cache/functitan."""


def config_problems(config: DataConfig) -> list[str]:
    """What is outside its legal range, one line each: the option, its value, the legal ones. Reads no file."""
    problems = []
    if config.format not in FORMATS:
        problems.append(f"data.format: is {config.format!r}, give {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    problems += [
        f"data.{name}: has an empty name, give files or globs"
        for name in ("path", "eval_path")
        if any(not path.strip() for path in getattr(config, name))
    ]
    if not 0 <= config.held_out < 1:
        problems.append(f"data.held_out: is {config.held_out}, give a share of 0 or more and less than 1")
    if not 0 <= config.seed < 2**32:
        problems.append(f"data.seed: is {config.seed}, give 0 to 2**32 - 1")
    if config.prefetch < 0:
        problems.append(f"data.prefetch: is {config.prefetch}, give 0 (none) or more")
    return problems


def check_config(config: DataConfig) -> None:
    """Raises one :class:`DataError` with all of :func:`config_problems`, parted by "; "."""
    if problems := config_problems(config):
        raise DataError("; ".join(problems))
