"""Packing: the stream of tokens cut into samples of one length, any of which is found by its index."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from train.data.config import DataConfig
from train.data.corpus import Corpus

IGNORED = -100
"""The label of a token that is not predicted; the `ignore_index` of `functitan.nn.cross_entropy`."""

Batch = dict[str, torch.Tensor]


@attrs.frozen(eq=False)
class Dataset:
    """Sample i is `tokens[i*S : i*S + S + 1]` of the stream (S is `seq_len`): its first S and, as labels, its last S.

    Nothing is kept between samples, so that a place in the data is one integer. What is left after the last whole
    sample is dropped, or with `partial` filled up to one with ignored labels: then each label counts exactly once.
    """

    corpus: Corpus
    seq_len: int
    eod: int
    config: DataConfig = attrs.field(factory=DataConfig)
    partial: bool = False

    def __len__(self) -> int:
        labels = max(len(self.corpus.tokens) - 1, 0)
        return -(-labels // self.seq_len) if self.partial else labels // self.seq_len

    @property
    def padding(self) -> int:
        """The index of a sample behind the text: end-of-document tokens, no label."""
        return -(-len(self.corpus.tokens) // self.seq_len)

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples `indices: [B]` as int64 tensors [B, S].

        tokens     the text; behind its end, end-of-document
        labels     the next token; -100 where that is in another document, or behind the end of the text
        positions  from 0, again from 0 in each document
        documents  from 0, one more with each document of the sample

        Without `config.documents` the sample is one document: positions 0..S-1, documents 0, and only labels behind
        the end of the text ignored.
        """
        tokens, ends = self.corpus.tokens, self.corpus.ends
        n = len(tokens)
        begin = np.asarray(indices, np.int64)[:, None] * self.seq_len  # [B, 1]
        at = begin + np.arange(self.seq_len + 1)  # [B, S + 1]
        inside = at < n
        text = np.full(at.shape, self.eod, np.int64)
        text[inside] = tokens[at[inside]]
        if self.config.documents:
            document = np.searchsorted(ends, at, side="right")  # behind the end of the text: len(ends), one more
            document_begin = np.where(document > 0, ends[np.maximum(document, 1) - 1], 0)
            positions = at - np.maximum(document_begin, begin)
        else:
            document = np.zeros_like(at)
            positions = at - begin
        predicted = inside[:, 1:] & (document[:, 1:] == document[:, :-1])
        arrays = {
            "tokens": text[:, :-1],
            "labels": np.where(predicted, text[:, 1:], IGNORED),
            "positions": positions[:, :-1],
            "documents": (document - document[:, :1])[:, :-1],
        }
        return {name: torch.from_numpy(np.ascontiguousarray(array, np.int64)) for name, array in arrays.items()}

    def __getitem__(self, index: int) -> Batch:
        """One sample, tensors [S]; raises IndexError outside `0 .. len - 1`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: rows[0] for name, rows in self.batch(np.array([index])).items()}
