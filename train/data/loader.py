"""Batches in order, prepared ahead by a thread: where they start is one integer, which no rank count changes.

The order and the thread are grain's. It is imported where it is first used: that takes a second, of which most is
JAX where that is installed (grain looks for its profiler; no JAX device is touched).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from train.data.errors import DataError
from train.data.packing import Batch, Dataset


class Loader:
    """An iterator over batches, read ahead by one background thread.

    position: index of the next sample in the run's endless row of samples, after the batch returned last: epoch
        `position // n`, place `position % n` in it. It is all that a checkpoint needs.
    wait_s: seconds that `next` has waited for data so far.
    """

    def __init__(self, read: Callable[[int], Batch], count: int, prefetch: int, position: int = 0, stride: int = 1):
        """Iterates over `read(0) .. read(count - 1)`; each moves `position` by `stride`. An exception of `read` is
        raised by the `next` that would have returned its batch; the loader is closed then."""
        grain = _grain()
        # One thread: packing is numpy on memory, which more threads would only hold up at the interpreter's lock.
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        self._batches = iter(grain.MapDataset.range(count).map(read).to_iter_dataset(options))
        self._batches.start_prefetch()
        self._stride = stride
        self._closed = False
        self.position = position
        self.wait_s = 0.0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise RuntimeError("this Loader is closed: make another, from its position")
        start = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            # grain would go on with the batch after, and position would be wrong from there.
            self.close()
            raise
        finally:
            self.wait_s += time.perf_counter() - start
        self.position += self._stride
        return batch

    def close(self) -> None:
        """Stops the thread; batches that were read ahead are dropped. May be called twice."""
        self._closed = True
        self._batches.close()


def train_batches(dataset: Dataset, batch_size: int, position: int = 0, *, rows: range | None = None) -> Loader:
    """Endless batches of `batch_size` samples from global sample `position` on, epoch after epoch.

    Each epoch is a permutation of the samples, a new one if `dataset.config.shuffle`; a batch may span two. With
    `rows`, a batch holds only those rows of the global batch ([len(rows), S]): which samples are in the global batch
    depends on neither the rank nor their number. Raises :class:`DataError` if there is no sample.
    """
    rows = _check_rows(batch_size, rows)
    n = len(dataset)
    if n == 0:
        raise DataError("there is no sample to train on")
    if position < 0:
        raise DataError(f"the data position is {position}: it counts samples from 0")
    order = sample_order(n, dataset.config.shuffle, dataset.config.seed)

    def read(batch: int) -> Batch:
        first = position + batch * batch_size
        return dataset.batch(np.array([order(first + row) for row in rows]))

    return Loader(read, sys.maxsize, dataset.config.prefetch, position, batch_size)


def eval_batches(dataset: Dataset, batch_size: int, limit: int | None = None, *, rows: range | None = None) -> Loader:
    """Every sample of the dataset once, in order; the last batch is filled up with samples whose labels are ignored.

    With `limit`, at most that many batches, of samples spread evenly over the dataset. Each rank gets the same number
    of batches, whatever its `rows` of them (as in :func:`train_batches`). No sample, no batch.
    """
    rows = _check_rows(batch_size, rows)
    if limit is not None and limit < 1:
        raise DataError(f"the limit of validation batches is {limit}: legal are 1 and up, or none")
    n = len(dataset)
    used = n if limit is None else min(n, limit * batch_size)

    def read(batch: int) -> Batch:
        places = batch * batch_size + np.asarray(rows, np.int64)
        return dataset.batch(np.where(places < used, places * n // max(used, 1), dataset.padding))

    return Loader(read, -(-used // batch_size), dataset.config.prefetch, 0, batch_size)


def sample_order(n: int, shuffle: bool, seed: int) -> Callable[[int], int]:
    """Maps the index of a sample in the run (any integer from 0) to that of a sample in a dataset of `n`.

    Indices `e*n .. e*n + n - 1` are epoch e, a permutation of `0 .. n - 1`. It is computed index by index (grain's
    `index_shuffle`, a block cipher on `0 .. n - 1`), so that going on in the middle costs nothing.
    """
    if not shuffle:
        return lambda index: index % n
    if n >= 2**32:
        raise DataError(f"{n} samples, and a shuffle can have 2**32: set --data.no-shuffle or a longer sequence")
    grain = _grain()
    # grain adds the epoch to the seed: unmixed, seed 1 would start with the second epoch of seed 0. Its own mixing,
    # `.seed(seed)`, depends on the shape of the pipeline, and with it would the order that a run resumes in.
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return grain.MapDataset.range(n).shuffle(seed=mixed).repeat().__getitem__


def _grain() -> Any:
    """grain, without its warning that JAX, whose profiler it would use, is not installed."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import grain
    finally:
        log.setLevel(level)
    return grain


def _check_rows(batch_size: int, rows: range | None) -> range:
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}: legal are 1 and up")
    rows = range(batch_size) if rows is None else rows
    if len(rows) == 0 or min(rows) < 0 or max(rows) >= batch_size:
        raise ValueError(f"{rows} are no rows of a batch of {batch_size}")
    return rows
