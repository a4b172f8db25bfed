"""What the tests of functitan.random share."""

import numpy as np
import torch

from functitan import random

# Name -> a draw from one key; the golden file has the same names.
DRAWS = {
    "key": lambda key: key,
    "split": lambda key: random.split(key, (3, 2)),
    "fold_in": lambda key: random.fold_in(key, 123456789),
    "bits8": lambda key: random.bits(key, (8,), torch.uint8),
    "bits16": lambda key: random.bits(key, (8,), torch.uint16),
    "bits32": lambda key: random.bits(key, (2, 3, 4)),
    "uniform": lambda key: random.uniform(key, (2, 8)),
    "uniform_range": lambda key: random.uniform(key, (16,), minval=-0.37, maxval=5.91),
    "uniform_bfloat16": lambda key: random.uniform(key, (16,), torch.bfloat16),
    "uniform_float16": lambda key: random.uniform(key, (16,), torch.float16),
    "normal": lambda key: random.normal(key, (4, 8)),
    "normal_bfloat16": lambda key: random.normal(key, (16,), torch.bfloat16),
    "normal_float16": lambda key: random.normal(key, (16,), torch.float16),
    "truncated_normal": lambda key: random.truncated_normal(key, -2.0, 2.0, (16,)),
    "exponential": lambda key: random.exponential(key, (16,)),
    "gumbel": lambda key: random.gumbel(key, (16,)),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (16,)),
    "randint": lambda key: random.randint(key, (16,), -5, 1000),
    "randint_full": lambda key: random.randint(key, (8,), -(2**31), 2**31 - 1),
    "randint_uint8": lambda key: random.randint(key, (16,), 0, 256, torch.uint8),
    "categorical": lambda key: random.categorical(key, torch.linspace(-2.0, 2.0, 5, device=key.device), shape=(16,)),
    "permutation": lambda key: random.permutation(key, 20),
    "permutation_rows": lambda key: random.permutation(
        key, torch.arange(12, device=key.device).reshape(3, 4), 1, independent=True
    ),
}


def as_signed(x: torch.Tensor) -> torch.Tensor:
    """torch compares and stacks few unsigned dtypes; the bits as signed integers."""
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return x.view(signed[x.dtype]) if x.dtype in signed else x


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(as_signed(actual), as_signed(expected))


def threefry_numpy(key: np.ndarray, index: np.ndarray) -> np.ndarray:
    """bits[index] of an array of any size, from the definition: rotations and all in numpy's uint32."""
    k = np.array([[key[0]], [key[1]], [key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]])  # arrays wrap, scalars warn
    shape, index = index.shape, index.reshape(-1)
    x0, x1 = (index >> np.uint64(32)).astype(np.uint32) + k[0], index.astype(np.uint32) + k[1]
    for i, rotation in enumerate([13, 15, 26, 6, 17, 29, 16, 24] * 2 + [13, 15, 26, 6]):
        x0 = x0 + x1
        x1 = (x1 << np.uint32(rotation) | x1 >> np.uint32(32 - rotation)) ^ x0
        if i % 4 == 3:
            group = i // 4 + 1
            x0, x1 = x0 + k[group % 3], x1 + k[(group + 1) % 3] + np.uint32(group)
    return (x0 ^ x1).reshape(shape)
