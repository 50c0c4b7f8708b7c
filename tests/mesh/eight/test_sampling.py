"""Drawing from logits that lie over a mesh by token id: the draws of one device, and no id that there is not."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxinfer.arrays.sharding import parse_mesh, partition
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.steps.sampling import greedy, sample, token_logprobs
from jaxinfer.steps.slots import SlotCaps, gather_rows, init_slots, install_row, pack_row, write_tokens

VOCAB, WIDTH, LEN = 61, 128, 16  # ids, and columns of logits on two or four devices

SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=2.0, seed=2, top_k=3, logprobs=5),
    SamplingParams(temperature=1.5, seed=3, top_p=0.7, logprobs=0),
    SamplingParams(temperature=5.0, seed=4, top_p=0.99, min_p=0.01),
    SamplingParams(temperature=1.0, seed=5, top_k=60, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0, allowed_token_ids=[0, 31, 32, 60], logprobs=2),
    SamplingParams(temperature=1.0, seed=6, logit_bias={60: 9.0, 33: 9.0, 0: -50.0}, frequency_penalty=1.0),
]


def make_rows() -> Any:
    caps = SlotCaps()
    slots = init_slots(len(SETTINGS), LEN, VOCAB, caps)
    for slot, params in enumerate(SETTINGS):
        row = pack_row(params, caps, vocab_size=VOCAB, prompt_len=4, seed=params.seed or 0)
        slots = install_row(slots, jnp.int32(slot), row)
    R = len(SETTINGS)
    where, position = jnp.repeat(jnp.arange(R), 8), jnp.tile(jnp.arange(8), R)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, 8 * R))
    return write_tokens(slots, where, position, tokens, position >= 0)


def over(mesh_text: str, fn: Any) -> Any:
    """Returns ``fn(logits, ...)`` with the logits cut by token id."""
    mesh = parse_mesh(mesh_text)
    assert mesh is not None
    cut = partition((None, "vocab"))

    def run(logits: jax.Array, *rest: Any) -> Any:
        specs = (cut, *(PartitionSpec() for _ in rest))
        return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(
            logits, *rest
        )

    return jax.jit(run)


@pytest.mark.parametrize("mesh", ["tensor=4"])
def test_draws_are_those_of_one_device(mesh: str):
    slots, R = make_rows(), len(SETTINGS)

    def draw(logits: jax.Array, slots: Any) -> Any:
        return sample(logits, gather_rows(slots, jnp.arange(R)), jnp.full(R, 8))

    one, many = jax.jit(draw), over(mesh, draw)
    rng = np.random.default_rng(0)
    for scale in (1.0, 6.0, 0.0):  # few and many candidates, and nothing but ties
        real = (scale * rng.normal(size=(R, VOCAB)) - 9).astype(np.float32)
        # What fills up is 0, above every real logit (trap 29).
        filled = np.pad(real, ((0, 0), (0, WIDTH - VOCAB)))
        wanted, got = one(real, slots), many(filled, slots)
        np.testing.assert_array_equal(got.tokens, wanted.tokens)
        assert np.all(np.asarray(got.tokens) < VOCAB)
        np.testing.assert_allclose(got.logprob, wanted.logprob, atol=1e-4)
        np.testing.assert_array_equal(got.rank, wanted.rank)
        np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, atol=1e-4)
        assert np.all(np.asarray(got.top_ids) < VOCAB)


def test_greedy_and_scores_are_those_of_one_device_and_no_logits_are_gathered():
    real = np.random.default_rng(1).normal(size=(4, VOCAB)).astype(np.float32) - 9
    real[1, [7, 50]] = 3.0  # a tie across devices
    real[2, 60] = np.nan
    filled = np.pad(real, ((0, 0), (0, WIDTH - VOCAB)))
    pick = over("tensor=4", lambda x: greedy(x, VOCAB))
    np.testing.assert_array_equal(pick(filled), greedy(jnp.asarray(real), VOCAB))
    assert pick(filled)[1] == 7
    assert "all-gather" not in pick.lower(filled).compile().as_text()
    targets = jnp.array([0, 33, 5, 60])
    score = over("tensor=4", lambda x, t: token_logprobs(x, t, VOCAB))
    wanted, got = token_logprobs(jnp.asarray(real), targets, VOCAB), score(filled, targets)
    np.testing.assert_allclose(got.logprob, wanted.logprob, atol=1e-5)
    gathered = re.findall(r"\w+\[([\d,]+)\]\S* all-gather", score.lower(filled, targets).compile().as_text())
    assert gathered  # candidates of each share
    assert all(int(shape.split(",")[-1]) < WIDTH for shape in gathered)
