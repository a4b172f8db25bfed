"""The Threefry-2x32 hash on torch tensors, its counters, and the keys and bits made from it.

Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
maps a key of two 32-bit words and a counter of two 32-bit words to two random words. As in JAX with
``jax_threefry_partitionable`` (its default), element ``i`` of an array, in row-major order, is the hash of the counter
``(i >> 32, i & 0xffffffff)``: a value depends on the key and the global index alone, so that any slice of an array can
be computed without the rest.

Words are held as int32, whose addition and multiplication wrap as those of uint32 do (torch.uint32 has neither
addition nor shifts); only keys and the results of :func:`bits` are unsigned.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from functitan._torch import inside_transform, is_distributed, is_traced

Region = Sequence[tuple[int, int]]
"""A rectangular slice of a global array: ``(start, size)`` for every dim."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
# Elements hashed at a time. A CPU block's temporaries stay in the cache, 3 times faster than whole arrays, and torch
# runs operations of this size on one thread, as a barrier after each of the 130 would cost more than it gains.
# Elsewhere the block only bounds the memory of the temporaries, about 6 times its own.
_CPU_BLOCK = 1 << 15
_DEVICE_BLOCK = 1 << 24


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as another integer type of the same size."""
    # torch 2.11 has no batching rule for view(dtype); between integers of one size a cast keeps the bits, in a copy.
    return x.to(dtype) if inside_transform() else x.view(dtype)


def threefry2x32(key0: Tensor, key1: Tensor, x0: Tensor | int, x1: Tensor) -> tuple[Tensor, Tensor]:
    """The hash of the counters ``(x0, x1)`` under the key ``(key0, key1)``: all int32, broadcast together."""
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0 = key0 + x0
    x1 = key1 + x1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            # x1 rotated left: int32 >> copies the sign, hence the mask; adding alpha * x1 is `| (x1 << rotation)`.
            low = (x1 >> (32 - rotation)) & ((1 << rotation) - 1)
            x1 = torch.add(low, x1, alpha=1 << rotation) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + (group + 1))
    return x0, x1


def key(seed: int | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """A key: uint32 ``[2]``, equal to ``jax.random.key_data(jax.random.key(seed))``.

    Args:
        seed: an int of at most 64 bits, or an integer tensor of shape ``()``. As in JAX without 64-bit types, only the
            low 32 bits count: ``key(-1) == key(2**32 - 1)`` and ``key(2**32) == key(0)``.
        device: where to put the key; by default the seed's device, or torch's default device for an int.

    Raises:
        TypeError: the seed is no integer, or a tensor of another shape.
        OverflowError: the seed does not fit in 64 bits.
    """
    if isinstance(seed, Tensor):
        if seed.dim() or seed.is_floating_point() or seed.is_complex():
            raise TypeError(
                f"random.key: seed must be an integer scalar, got {seed.dtype} of shape {tuple(seed.shape)}"
            )
        low = _low32(_replica("random.key", seed)).to(device)
        return as_dtype(torch.stack([torch.zeros_like(low), low]), torch.uint32)
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"random.key: seed must be an integer, got {seed!r}") from None
    if not -(2**63) <= seed < 2**63:
        raise OverflowError(f"random.key: seed must be in [-2**63, 2**63), got {seed}")
    return torch.tensor([0, _signed32(seed)], dtype=torch.int32, device=device).view(torch.uint32)


def split(key: Tensor, num: int | Sequence[int] = 2) -> Tensor:
    """``num`` new keys: uint32 ``[num, 2]``, or ``[*num, 2]`` where ``num`` is a shape.

    A batch of keys ``[..., 2]`` is split key by key, as by ``vmap``: ``[..., num, 2]``.
    """
    words = _key_words("random.split", key, batched=True)
    shape = check_shape("random.split", (num,) if hasattr(num, "__index__") else num, what="num")
    key0, key1 = (word.reshape(word.shape + (1,) * len(shape)) for word in words.unbind(-1))
    x0, x1 = _counters([(0, n) for n in shape], shape, words.device)
    out = torch.stack(threefry2x32(key0, key1, x0, x1), dim=-1)
    return as_dtype(out, torch.uint32)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and 32 bits of data: uint32 ``[2]``.

    A batch of keys ``[..., 2]`` and a tensor of data are broadcast together: ``fold_in(key, torch.arange(n))`` is
    ``n`` keys, ``[n, 2]``.

    Args:
        data: an int in ``[0, 2**32)``, or an integer tensor, of which the low 32 bits count.

    Raises:
        TypeError: the data is no integer. OverflowError: it is an int outside ``[0, 2**32)``.
    """
    words = _key_words("random.fold_in", key, batched=True)
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex():
            raise TypeError(f"random.fold_in: data must be an integer, got {data.dtype}")
        data = _low32(_replica("random.fold_in", data))
    else:
        try:
            data = operator.index(data)
        except TypeError:
            raise TypeError(f"random.fold_in: data must be an integer, got {data!r}") from None
        if not 0 <= data < 2**32:
            raise OverflowError(f"random.fold_in: data must be in [0, 2**32), got {data}")
        data = torch.full((), _signed32(data), dtype=torch.int32, device=words.device)
    batch, sizes = tuple(words.shape[:-1]), tuple(data.shape)
    if any(1 != m != n != 1 for m, n in zip(reversed(batch), reversed(sizes))):
        raise ValueError(f"random.fold_in: data of shape {sizes} and keys of shape {batch} do not broadcast together")
    out = torch.stack(threefry2x32(words[..., 0], words[..., 1], torch.zeros_like(data), data), dim=-1)
    return as_dtype(out, torch.uint32)


def bits(
    key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.uint32, *, region: Region | None = None
) -> Tensor:
    """Uniform random bits as unsigned integers, equal to ``jax.random.bits``.

    Args:
        key: uint32 ``[2]``.
        shape: the shape of the global array.
        dtype: torch.uint8, uint16, uint32 or uint64.
        region: ``(start, size)`` for every dim of ``shape``: compute only that slice. The result has the sizes of the
            region and equals the same slice of the whole array.

    Raises:
        TypeError: a wrong key, or a shape that is no sequence of ints.
        ValueError: a wrong dtype, a negative dim, or a region outside of ``shape``.
    """
    if dtype not in _WORDS_TO_BITS:
        legal = ", ".join(map(str, _WORDS_TO_BITS))
        raise ValueError(f"random.bits: dtype must be one of {legal}, got {dtype}")
    return draw("random.bits", key, shape, region, _WORDS_TO_BITS[dtype])


def words64(x0: Tensor, x1: Tensor) -> Tensor:
    """Two int32 words as one int64."""
    return (x0.to(torch.int64) << 32) | (x1.to(torch.int64) & 0xFFFFFFFF)


_WORDS_TO_BITS: dict[torch.dtype, Callable[[Tensor, Tensor], Tensor]] = {
    torch.uint8: lambda x0, x1: (x0 ^ x1).to(torch.uint8),
    torch.uint16: lambda x0, x1: (x0 ^ x1).to(torch.uint16),
    torch.uint32: lambda x0, x1: as_dtype(x0 ^ x1, torch.uint32),
    torch.uint64: lambda x0, x1: as_dtype(words64(x0, x1), torch.uint64),
}


def draw(
    name: str,
    key: Tensor,
    shape: Sequence[int],
    region: Region | None,
    finish: Callable[[Tensor, Tensor], Tensor],
    params: Sequence[object] = (),
) -> Tensor:
    """``finish(x0, x1)`` of the two random words (int32) of every element of ``shape``, or of ``region`` of it.

    Args:
        name: the public function that errors name: ``random.normal``.
        finish: element by element; also called on flat parts of the region, unless one of ``params`` has a dim.
        params: what ``finish`` combines with the words: numbers, or tensors that broadcast to the result.
    """
    words = _key_words(name, key)
    shape = check_shape(name, shape)
    region = check_region(name, shape, region)
    sizes = tuple(size for _, size in region)
    extents, spans = _merge_dims(shape, region)

    def hash_span(span: Region) -> tuple[Tensor, Tensor]:
        return threefry2x32(words[0], words[1], *_counters(span, extents, words.device))

    check_params(name, sizes, params)
    limit = None if any(isinstance(param, Tensor) and param.dim() for param in params) else _block_size(words)
    if limit is None or math.prod(sizes) <= limit:
        x0, x1 = hash_span(spans)
        return finish(x0.reshape(sizes), x1.reshape(sizes))
    return torch.cat([finish(*hash_span(block)).reshape(-1) for block in _blocks(spans, limit)]).reshape(sizes)


def _block_size(key: Tensor) -> int | None:
    """Elements to hash at a time; None for all at once, where a loop would be unrolled into a captured graph."""
    if torch.compiler.is_compiling() or type(key) is not Tensor or is_traced():
        return None
    if key.device.type == "cpu":
        return _CPU_BLOCK
    return None if key.device.type == "meta" else _DEVICE_BLOCK


def _merge_dims(shape: tuple[int, ...], region: Region) -> tuple[list[int], list[tuple[int, int]]]:
    """The same elements in the same order with the fewest dims: a whole array or its leading rows have one dim."""
    extents, spans = [1], [(0, 1)]
    for extent, (start, size) in zip(shape, region):
        outer_start, outer_size = spans[-1]
        if outer_size == 1:
            spans[-1] = (outer_start * extent + start, size)
            extents[-1] *= extent
        elif size == extent:
            spans[-1] = (outer_start * extent, outer_size * extent)
            extents[-1] *= extent
        else:
            spans.append((start, size))
            extents.append(extent)
    return extents, spans


def _blocks(spans: Sequence[tuple[int, int]], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Parts of a region, in row-major order, of at most ``limit`` elements each."""
    (start, size), rest = spans[0], list(spans[1:])
    inner = math.prod(size for _, size in rest)
    if inner > limit:
        for i in range(size):
            for block in _blocks(rest, limit):
                yield [(start + i, 1), *block]
    else:
        rows = limit // inner
        for i in range(0, size, rows):
            yield [(start + i, min(rows, size - i)), *rest]


def _counters(span: Region, extents: Sequence[int], device: torch.device) -> tuple[Tensor | int, Tensor]:
    """The counter words (high, low) of a region of a global array: int32 of the sizes of the region.

    The high word is an int where all elements share it, as they do in any array of up to 2**32 elements.
    """
    strides = [math.prod(extents[dim + 1 :]) for dim in range(len(extents))]
    first = sum(start * stride for (start, _), stride in zip(span, strides))
    last = first + sum((size - 1) * stride for (_, size), stride in zip(span, strides))
    index = torch.full((), first, dtype=torch.int64, device=device)
    for (_, size), stride in zip(span, strides):
        index = index.unsqueeze(-1) + torch.arange(size, dtype=torch.int64, device=device) * stride
    if first >> 32 == last >> 32:
        return first >> 32, _low32(index)
    return _low32(index >> 32), _low32(index)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of any integer tensor as int32: narrowing keeps them, as C++20 demands and CUDA does."""
    return x.to(torch.int64).to(torch.int32)


def _signed32(x: int) -> int:
    """The int32 with the low 32 bits of ``x``."""
    return ((x + 2**31) & 0xFFFFFFFF) - 2**31


def _key_words(name: str, key: Tensor, *, batched: bool = False) -> Tensor:
    """The key's words as int32, or the error that says what a key is."""
    wanted = f"{name}: key must be a torch.uint32 tensor of shape {'[..., 2]' if batched else '[2]'}"
    if not isinstance(key, Tensor):
        raise TypeError(f"{wanted}, got {type(key).__name__}; make one with functitan.random.key(seed)")
    if key.dtype != torch.uint32:
        raise TypeError(f"{wanted}, got dtype {key.dtype}; make one with functitan.random.key(seed)")
    shape = tuple(key.shape)
    if shape[-1:] != (2,):
        raise TypeError(f"{wanted}, got shape {shape}; make one with functitan.random.key(seed)")
    if len(shape) > 1 and not batched:
        raise TypeError(f"{wanted}, got a batch of keys of shape {shape}; map over it with torch.func.vmap")
    return as_dtype(_replica(name, key), torch.int32)


def _replica(name: str, x: Tensor) -> Tensor:
    """What every rank holds of a replicated DTensor: keys and counts are the same everywhere, and so is what follows
    from them, which is computed on plain tensors."""
    if not is_distributed(x):
        return x
    if not all(placement.is_replicate() for placement in x.placements):
        raise ValueError(f"{name}: a key and its data must be replicated over the mesh, got placements {x.placements}")
    return x.to_local()


def check_shape(name: str, shape: Sequence[int], *, what: str = "shape") -> tuple[int, ...]:
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError:
        raise TypeError(f"{name}: {what} must be a sequence of ints such as (2, 3), got {shape!r}") from None
    if any(dim < 0 for dim in dims):
        raise ValueError(f"{name}: {what} must have no negative dim, got {dims}")
    if math.prod(dims) > 2**63:
        raise ValueError(f"{name}: {what} {dims} has more than 2**63 elements, which no counter numbers")
    return dims


def check_params(name: str, sizes: Sequence[int], params: Sequence[object]) -> None:
    """Refuses a tensor that does not broadcast to ``sizes``: it would enlarge the result, by values drawn once."""
    for param in params:
        if isinstance(param, Tensor) and not _broadcasts_to(tuple(param.shape), tuple(sizes)):
            raise ValueError(
                f"{name}: a parameter of shape {tuple(param.shape)} does not broadcast to the result, {tuple(sizes)}"
            )


def _broadcasts_to(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    aligned = sizes[len(sizes) - len(shape) :]
    return len(shape) <= len(sizes) and all(dim in (1, size) for dim, size in zip(shape, aligned))


def check_region(name: str, shape: tuple[int, ...], region: Region | None) -> Region:
    if region is None:
        return tuple((0, dim) for dim in shape)
    try:
        spans = tuple((operator.index(start), operator.index(size)) for start, size in region)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: region must be a pair (start, size) for every dim of shape {shape}, got {region!r}"
        ) from None
    if len(spans) != len(shape):
        raise ValueError(f"{name}: region {spans} has {len(spans)} dims, but shape {shape} has {len(shape)}")
    for dim, ((start, size), extent) in enumerate(zip(spans, shape)):
        if start < 0 or size < 0 or start + size > extent:
            raise ValueError(
                f"{name}: region (start, size) = {(start, size)} of dim {dim} is outside of its {extent} "
                f"elements (shape {shape})"
            )
    return spans
