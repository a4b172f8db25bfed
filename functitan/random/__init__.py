"""Random numbers as a function of a key: ``jax.random`` on torch tensors.

A key is a torch.uint32 tensor of shape ``[2]`` and equals ``jax.random.key_data(jax.random.key(seed))``; nothing here
has a hidden state. Use each key once: :func:`split` it, or :func:`fold_in` a number, for the next draw.

    >>> k = key(0)
    >>> normal(k, (2,))
    tensor([ 1.6227,  2.0253])

Every value depends on the key and on its global index alone. With ``region=`` a rank computes its slice of a global
array, bit-equal to the same slice of the whole. The functions are pure and traceable by ``make_fx``, and map over a
batch of keys under ``torch.func.vmap``.
"""

from functitan.random.distributions import (
    bernoulli,
    categorical,
    exponential,
    gumbel,
    normal,
    permutation,
    randint,
    truncated_normal,
    uniform,
)
from functitan.random.threefry import Region, bits, fold_in, key, split

__all__ = [
    "Region",
    "bernoulli",
    "bits",
    "categorical",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]
