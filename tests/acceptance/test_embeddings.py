"""Embeddings of TOY: whole, in chunks, beside others and beside generation the same as one full forward."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.runner import DeviceRunner
from jaxinfer.llm import LLM
from jaxinfer.model.cache import init_cache
from jaxinfer.model.decoder import Block, forward
from jaxinfer.schedule.request import Pooling
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.steps.compiled import count_compilations
from tests.acceptance.engines import TOY_VOCAB, renew

POOLINGS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (100, 1, 16, 33, 5, 64)
PROMPTS = [np.random.default_rng(length).integers(3, TOY_VOCAB, length).tolist() for length in LENGTHS]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
Expect = Callable[[list[int], Pooling], np.ndarray]


@pytest.fixture(scope="module")
def expect(toy: LLM) -> Expect:
    """What a prompt's embedding must be: one forward over the whole of it, without engine or chunks."""
    runner = toy.engine.runner
    assert isinstance(runner, DeviceRunner)
    params, static = runner.device.params, runner._table.static
    sizes = [pages.k.shape[0] for pages in runner.device.cache]
    padded = 112

    @jax.jit
    def run(tokens: jax.Array, length: jax.Array) -> jax.Array:
        cache = init_cache(static.cfg, static.policy, sizes, padded // 16, 16)
        block = Block(tokens, jnp.zeros_like(length), length, jnp.arange(padded // 16)[None])
        return forward(params, cache, [block], static)[0]

    def embedding(prompt: list[int], pooling: Pooling) -> np.ndarray:
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(prompt)] = prompt
        states = np.asarray(run(jnp.array(tokens), jnp.array([len(prompt)])))[: len(prompt)]
        return states[-1] if pooling == "last" else states.mean(0)

    return embedding


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("door", ["toy", "toy_whole"])
def test_embeddings_are_those_of_a_full_forward(
    door: str, pooling: Pooling, expect: Expect, request: pytest.FixtureRequest
):
    """In chunks of 16 or whole; one by one and all at once."""
    llm: LLM = request.getfixturevalue(door)
    wanted = [expect(prompt, pooling) for prompt in PROMPTS]
    with count_compilations() as compiled:
        alone = [renew(llm).embed(prompt, pooling=pooling, normalize=False)[0] for prompt in PROMPTS]
        fresh = renew(llm)
        together = fresh.embed(PROMPTS, pooling=pooling, normalize=False)
    assert compiled == []
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(alone, wanted, atol=1e-4)
    np.testing.assert_allclose(together, wanted, atol=1e-4)
    assert fresh.engine.scheduler.pool.num_used == 0


def test_vectors_are_of_length_one_unless_asked_otherwise(toy: LLM):
    plain, unit = (renew(toy).embed(PROMPTS[0], normalize=normalize)[0] for normalize in (False, True))
    assert np.linalg.norm(unit) == pytest.approx(1)
    np.testing.assert_allclose(np.array(plain) / np.linalg.norm(plain), unit, atol=1e-6)
    assert renew(toy).embed([]) == []


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_run_beside_generation_and_change_nothing(toy: LLM, pooling: Pooling, expect: Expect):
    engine = renew(toy).engine
    texts = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[2:5]]
    engine.step()
    vectors = [engine.submit(prompt, pooling=pooling) for prompt in PROMPTS]
    engine.run_until_done()
    for prompt, handle in zip(PROMPTS, vectors, strict=True):
        np.testing.assert_allclose(handle.embedding(normalize=False), expect(prompt, pooling), atol=1e-4)
    alone = renew(toy).generate(PROMPTS[2:5], GREEDY)
    assert [h.output().outputs[0].token_ids for h in texts] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_seen_before_has_the_same_embedding(toy: LLM, pooling: Pooling, expect: Expect):
    """With a prefix cache its pages may be found; a mean needs every position all the same."""
    llm = renew(toy)
    for _ in range(3):
        (got,) = llm.embed(PROMPTS[0], pooling=pooling, normalize=False)
        np.testing.assert_allclose(got, expect(PROMPTS[0], pooling), atol=1e-4)
