"""Noise: it is jax's own cipher, and belongs to seed, choice, position and token id alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.steps.noise import fold_in, gumbel, request_key


@pytest.mark.parametrize(("seed", "choice"), [(0, 0), (1234, 3), (2**31 - 1, 7)])
def test_keys_are_those_of_jax(seed: int, choice: int):
    ours = request_key(seed, choice)
    theirs = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), choice)
    np.testing.assert_array_equal(ours, jax.random.key_data(theirs))
    positions = jnp.array([0, 5, 100_000])
    folded = jax.vmap(lambda p: jax.random.key_data(jax.random.fold_in(theirs, p)))(positions)
    np.testing.assert_array_equal(fold_in(jnp.tile(ours, (3, 1)), positions), folded)


def test_all_64_bits_of_a_seed_and_its_sign_count():
    keys = [tuple(request_key(seed, 0)) for seed in (1, -1, 2**32 + 1, 2**63 - 1, -(2**63))]
    assert len(set(keys)) == len(keys)


def test_noise_belongs_to_the_token_id():
    key = jnp.stack([request_key(1, 0), request_key(2, 0)])
    whole = jax.jit(gumbel)(key, jnp.arange(1000)[None])
    picked = jnp.array([[999, 3, 3], [0, 500, 17]])
    np.testing.assert_array_equal(gumbel(key, picked), jnp.take_along_axis(whole, picked, 1))
    np.testing.assert_array_equal(gumbel(key[1:], jnp.arange(77)[None])[0], whole[1, :77])


def test_noise_is_gumbel():
    noise = np.sort(np.asarray(gumbel(jnp.asarray(request_key(5, 0))[None], jnp.arange(100_000)[None]))[0])
    assert np.isfinite(noise).all()
    expected = np.exp(-np.exp(-noise.astype(np.float64)))  # the distribution function, so uniform
    assert np.abs(expected - np.linspace(0, 1, len(noise))).max() < 0.006  # Kolmogorov-Smirnov at 0.1 %
