"""Data: files to documents to tokens to packed samples to batches, in an order that one integer resumes.

`build_data(config, seq_len)` reads; `train_batches(data.train, batch_size, position)` and
`eval_batches(data.held_out, batch_size)` iterate. A batch is a dict of int64 tensors [B, S]: tokens, labels,
positions, documents.
"""

from train.data.build import Data, build_data
from train.data.config import DataConfig
from train.data.corpus import Corpus, corpus_of
from train.data.errors import DataError
from train.data.loader import Loader, eval_batches, train_batches
from train.data.packing import IGNORED, Batch, Dataset
from train.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, check_vocab, load_tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "Data",
    "DataConfig",
    "DataError",
    "Dataset",
    "HFTokenizer",
    "Loader",
    "Tokenizer",
    "build_data",
    "check_vocab",
    "corpus_of",
    "eval_batches",
    "load_tokenizer",
    "train_batches",
]
