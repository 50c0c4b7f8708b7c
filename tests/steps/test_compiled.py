"""Executables of a run: what is compiled, and that nothing else is."""

import jax
import jax.numpy as jnp

from jaxinfer.steps.compiled import count_compilations


def test_compilations_are_counted_by_name():
    def doubled(x):
        return x * 2

    fn = jax.jit(doubled)
    fn(jnp.ones(3))
    x = jnp.ones(5)
    with count_compilations() as seen:
        fn(jnp.ones(3))
    again = list(seen)
    with count_compilations() as seen:
        fn(x)
    after = list(seen)
    fn(jnp.ones((2, 2)))
    assert again == []
    assert len(after) == 1
    assert "doubled" in after[0]
    assert seen == after
