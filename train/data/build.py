"""From the config to datasets: the one function that a run calls."""

from __future__ import annotations

import attrs

from train.data.config import DataConfig, check_config
from train.data.corpus import Corpus, load_corpora
from train.data.errors import DataError
from train.data.packing import Dataset
from train.data.sources import find_sources, stdlib_sources
from train.data.tokenizer import Tokenizer, check_vocab, load_tokenizer


@attrs.frozen(eq=False)
class Data:
    """What a run reads: samples to train on, samples to validate on (perhaps none), and how ids become text."""

    train: Dataset
    held_out: Dataset
    tokenizer: Tokenizer

    def summary(self) -> str:
        """One line for the log: tokens, documents and samples of both sides."""
        sides = {"train": self.train, "held out": self.held_out}
        return "; ".join(
            f"{name}: {len(side.corpus.tokens):,} tokens in {len(side.corpus.ends):,} documents, "
            f"{len(side):,} samples of {side.seq_len}"
            for name, side in sides.items()
        )

    def fingerprint(self) -> str:
        """Of the tokens of both sides: equal where they are, and different where any of the samples read for it are."""
        return " ".join(side.corpus.fingerprint() for side in (self.train, self.held_out))


def build_data(config: DataConfig, seq_len: int, vocab_size: int | None = None) -> Data:
    """Reads and tokenises the text of `config` for samples of `seq_len` tokens.

    With `vocab_size`, that of the model, also checks that the model has a row for every id. Raises :class:`DataError`
    for all that is wrong with options, files or tokenizer, and for a text shorter than one sample.
    """
    check_config(config)
    if seq_len < 1:
        raise DataError(f"seq_len is {seq_len}: legal are 1 and up")
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab_size is not None:
        check_vocab(tokenizer, vocab_size)
    sources = find_sources(config.path, config.format) if config.path else stdlib_sources()
    if config.eval_path:
        eval_sources = find_sources(config.eval_path, config.format, "data.eval_path")
        train = load_corpora(sources, tokenizer, config, held_out=0.0)["train"]
        held_out = load_corpora(eval_sources, tokenizer, config, held_out=0.0)["train"]
    else:
        corpora = load_corpora(sources, tokenizer, config, config.held_out)
        train, held_out = corpora["train"], corpora["held_out"]
    _check_length(train, seq_len, config)
    return Data(
        train=Dataset(train, seq_len, tokenizer.eod, config),
        held_out=Dataset(held_out, seq_len, tokenizer.eod, config, partial=True),
        tokenizer=tokenizer,
    )


def _check_length(train: Corpus, seq_len: int, config: DataConfig) -> None:
    n = len(train.tokens)
    if n < seq_len + 1:
        where = ", ".join(config.path) or "the standard library"
        shorter = f" or a seq_len of at most {n - 1}" if n > 1 else ""
        raise DataError(
            f"the text to train on ({where}) has {n} tokens, fewer than one sample of seq_len + 1 = {seq_len + 1}: "
            f"use more text (--data.path){shorter}, or hold out less (--data.held-out is {config.held_out})"
        )
