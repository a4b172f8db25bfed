"""Writes the golden values of ``tests/test_random.py``: ``python tests/golden/make_random.py`` (needs jax)."""

import json
from pathlib import Path

SEEDS = (0, 42, -1, 2**40 + 7)
PATH = Path(__file__).with_name("random.json")


def golden(seed: int) -> dict[str, list]:
    """What ``jax.random`` (jax 0.10.2 on a CPU, partitionable threefry, no 64-bit types) gives for one seed.

    Floats are written in full, so that they read back exactly.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    key = jax.random.key(seed)
    logits = jnp.linspace(-2.0, 2.0, 5)
    values = {
        "key": jax.random.key_data(key),
        "split": jax.random.key_data(jax.random.split(key, (3, 2))),
        "fold_in": jax.random.key_data(jax.random.fold_in(key, 123456789)),
        "bits8": jax.random.bits(key, (8,), "uint8"),
        "bits16": jax.random.bits(key, (8,), "uint16"),
        "bits32": jax.random.bits(key, (2, 3, 4), "uint32"),
        "uniform": jax.random.uniform(key, (2, 8)),
        "uniform_range": jax.random.uniform(key, (16,), minval=-0.37, maxval=5.91),
        "uniform_bfloat16": jax.random.uniform(key, (16,), "bfloat16"),
        "uniform_float16": jax.random.uniform(key, (16,), "float16"),
        "normal": jax.random.normal(key, (4, 8)),
        "normal_bfloat16": jax.random.normal(key, (16,), "bfloat16"),
        "normal_float16": jax.random.normal(key, (16,), "float16"),
        "truncated_normal": jax.random.truncated_normal(key, -2.0, 2.0, (16,)),
        "exponential": jax.random.exponential(key, (16,)),
        "gumbel": jax.random.gumbel(key, (16,)),
        "bernoulli": jax.random.bernoulli(key, 0.3, (16,)),
        "randint": jax.random.randint(key, (16,), -5, 1000),
        "randint_full": jax.random.randint(key, (8,), -(2**31), 2**31 - 1),
        "randint_uint8": jax.random.randint(key, (16,), 0, 256, "uint8"),
        "categorical": jax.random.categorical(key, logits, shape=(16,)),
        "permutation": jax.random.permutation(key, 20),
        "permutation_rows": jax.random.permutation(key, jnp.arange(12).reshape(3, 4), 1, independent=True),
        "lecun_normal": jax.nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)(key, (2, 3, 4)),
        "glorot_uniform": jax.nn.initializers.glorot_uniform()(key, (3, 4)),
    }
    is_float = {name: jnp.issubdtype(value.dtype, jnp.floating) for name, value in values.items()}
    return {
        name: np.asarray(value).astype("float64" if is_float[name] else value.dtype).tolist()
        for name, value in values.items()
    }


def main() -> None:
    seeds = {str(seed): golden(seed) for seed in SEEDS}
    entries = []
    for seed, values in seeds.items():
        lines = (f'    "{name}": {json.dumps(value)}' for name, value in values.items())
        entries.append(f'  "{seed}": {{\n' + ",\n".join(lines) + "\n  }")
    PATH.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main()
