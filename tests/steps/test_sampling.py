"""Sampling against an oracle in float64, and what it must never depend on."""

import functools
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.schedule.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxinfer.steps.noise import fold_in
from jaxinfer.steps.sampling import NO_TOKEN, Sampled, greedy, sample, token_logprobs
from jaxinfer.steps.slots import SlotCaps, Slots, gather_rows, init_slots, pack_row

CAPS = SlotCaps(stop_ids=4, logit_bias=8, bad_words=4, bad_word_len=3)
S = 40
EOS = 2
# Above 4608 ids the candidates are found by groups; 5003 is prime, so groups and mask words are ragged.
SMALL, LARGE = 300, 5003

Request = dict[str, Any]  # SamplingParams' fields, and prompt, output


@jax.jit
def draw(logits: jax.Array, slots: Slots, slot: jax.Array, position: jax.Array) -> Sampled:
    return sample(logits, gather_rows(slots, slot), position)


NUM_DRAWS = 20_000


@jax.jit
def draw_many(logits: jax.Array, slots: Slots, position: jax.Array) -> jax.Array:
    """Draws for many choices of the request in slot 0, all from the same logits."""
    choices = jnp.arange(NUM_DRAWS)
    rows = gather_rows(slots, jnp.zeros_like(choices))
    settings = replace(rows.settings, key=fold_in(rows.settings.key, choices))
    logits = jnp.broadcast_to(logits, (*choices.shape, *logits.shape))
    return sample(logits, replace(rows, settings=settings), jnp.broadcast_to(position, choices.shape)).tokens


def params_of(request: Request) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": None} | request
    return SamplingParams(
        **{name: fields[name] for name in fields if name not in ("prompt", "output", "choice")}
    )


def place(requests: list[Request], vocab_size: int, num_slots: int = 8) -> tuple[Slots, jax.Array, jax.Array]:
    """Returns slots that hold the requests in order, their slots, and the positions of their next tokens."""
    idle = init_slots(1, S, vocab_size, CAPS)
    rows = [jax.tree.map(lambda leaf: leaf[0], idle.packed)] * (num_slots + 1)
    history = np.full((num_slots, S), 1, np.int32)  # what an earlier request may have left
    for slot, request in enumerate(requests):
        params = params_of(request)
        tokens = known(request)
        history[slot, : len(tokens)] = tokens
        rows[slot] = pack_row(
            params,
            CAPS,
            vocab_size=vocab_size,
            prompt_len=len(request.get("prompt", [0])),
            stop_ids=params.end_ids([EOS]),
            seed=params.seed or 0,
            choice=request.get("choice", 0),
        )
    packed = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)
    positions = np.array([len(known(request)) for request in requests], np.int32)
    return (
        Slots(jnp.asarray(history), packed, CAPS, vocab_size),
        jnp.arange(len(requests)),
        jnp.asarray(positions),
    )


def known(request: Request) -> list[int]:
    return [*request.get("prompt", [0]), *request.get("output", [])]


def run(
    requests: list[Request], logits: np.ndarray, vocab_size: int | None = None, num_rows: int = 8
) -> Sampled:
    """Returns a draw for each request; rows up to ``num_rows`` are padding, so that most tests share an executable."""
    slots, slot, position = place(requests, vocab_size or logits.shape[1], num_slots=num_rows)
    spare = num_rows - len(requests)
    logits = np.pad(logits.astype(np.float32), ((0, spare), (0, 0)))
    found = draw(
        logits, slots, jnp.pad(slot, (0, spare), constant_values=num_rows), jnp.pad(position, (0, spare))
    )
    return jax.tree.map(lambda leaf: leaf[: len(requests)], jax.device_get(found))


def edit_oracle(request: Request, logits: np.ndarray) -> np.ndarray:
    """Returns logits in float64 with every edit before temperature; -inf is banned."""
    params = params_of(request)
    prompt, output = request.get("prompt", [0]), request.get("output", [])
    x = logits.astype(np.float32).astype(np.float64)
    for token, amount in (params.logit_bias or {}).items():
        x[int(token)] += amount
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        x[list(params.end_ids([EOS]))] = -np.inf
    for *head, last in params.bad_words_ids or ():
        if len(head) <= len(output) and output[len(output) - len(head) :] == head:
            x[last] = -np.inf
    return x


def filter_oracle(params: SamplingParams, x: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the distribution over V in float64, and how close a filter came to deciding otherwise."""
    x = x / params.temperature
    margin = np.inf
    p = np.exp(x - x.max())
    kept = p > 0
    if params.top_k > 0 and params.top_k < len(x):
        kept &= x >= np.sort(x)[-params.top_k]
    if 0 < params.top_p < 1:
        q = np.where(kept, p, 0) / p[kept].sum()
        order = np.sort(q)[::-1]
        likelier = np.concatenate([[0], np.cumsum(order)])[np.searchsorted(-order, -q)]
        margin = np.abs(likelier[kept] - params.top_p).min()
        kept &= likelier < params.top_p
    if params.min_p > 0:
        margin = min(margin, np.abs(p - params.min_p).min())
        kept &= p >= params.min_p
    p = np.where(kept, p, 0)
    return p / p.sum(), margin


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
def jax_bits(seed: jax.Array, choice: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(seed), seed]), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
    return jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token))[0])(ids)


def noise_oracle(requests: list[Request], vocab_size: int) -> np.ndarray:
    """Returns the noise of every row and id in float64, by jax's own generator."""
    seeds = np.array([params_of(request).seed or 0 for request in requests], np.uint32)
    choices = np.array([request.get("choice", 0) for request in requests], np.uint32)
    positions = np.array([len(known(request)) for request in requests], np.uint32)
    bits = np.asarray(jax_bits(seeds, choices, positions, np.arange(vocab_size, dtype=np.uint32)))
    return -np.log(-np.log((bits >> 9).astype(np.float64) * 2.0**-23 + 2.0**-24))


def check_draw(request: Request, logits: np.ndarray, noise: np.ndarray, token: int) -> bool:
    """Checks one draw against oracle and noise, and returns whether it was clear enough to check."""
    params = params_of(request)
    x = edit_oracle(request, logits)
    if params.is_greedy:
        best = np.sort(x)[::-1]
        if best[0] - best[1] < 1e-4:
            return False
        assert token == np.argmax(x)
        return True
    p, margin = filter_oracle(params, x)
    with np.errstate(divide="ignore"):
        noisy = np.log(p) + noise
    best = np.sort(noisy)[::-1]
    if margin < 1e-5 or best[0] - best[1] < 1e-3:
        return False
    assert token == np.argmax(noisy)
    return True


@st.composite
def requests(draw_value: Any, vocab_size: int) -> Request:
    token = st.integers(0, vocab_size - 1)
    rarely = lambda strategy, off: draw_value(st.one_of(st.just(off), st.just(off), strategy))  # noqa: E731
    return {
        "prompt": draw_value(st.lists(token, min_size=1, max_size=12)),
        "output": draw_value(st.lists(token, max_size=12)),
        "choice": draw_value(st.integers(0, 3)),
        "seed": draw_value(st.integers(0, 2**31 - 1)),
        "temperature": draw_value(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        "top_k": rarely(st.sampled_from([1, 5, 64, 71, 72, 100, vocab_size, 2**31 - 1]), 0),
        "top_p": rarely(st.floats(0.01, 0.999), 1.0),
        "min_p": rarely(st.floats(1e-6, 1.0), 0.0),
        "repetition_penalty": rarely(st.floats(0.5, 3), 1.0),
        "presence_penalty": rarely(st.floats(-2, 2), 0.0),
        "frequency_penalty": rarely(st.floats(-2, 2), 0.0),
        "logit_bias": rarely(st.dictionaries(token, st.floats(-100, 100), max_size=8), None),
        "allowed_token_ids": rarely(st.lists(token, min_size=20, max_size=200, unique=True), None),
        "bad_words_ids": rarely(st.lists(st.lists(token, min_size=1, max_size=3), max_size=4), None),
        "min_tokens": rarely(st.integers(0, 13), 0),
        "logprobs": rarely(st.integers(0, 20), None),
    }


@pytest.mark.parametrize(("vocab_size", "examples"), [(SMALL, 40), (LARGE, 12)])
def test_draws_equal_the_oracle_for_any_mix_of_settings(vocab_size: int, examples: int):
    checked = 0

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(requests(vocab_size), min_size=8, max_size=8),
        st.integers(0, 2**32 - 1),
        st.sampled_from([1, 4]),
    )
    def check(mix: list[Request], seed: int, spread: float):
        nonlocal checked
        logits = np.random.default_rng(seed).normal(size=(8, vocab_size)).astype(np.float32) * spread
        tokens = run(mix, logits).tokens
        checked += sum(map(check_draw, mix, logits, noise_oracle(mix, vocab_size), tokens.tolist()))

    check()
    assert checked > 0.7 * 8 * examples


PEAKED = np.random.default_rng(3).normal(size=SMALL) * 4


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.3, "top_k": 12},
        {"top_k": 150},
        {"top_p": 0.8},
        {"top_p": 0.97, "temperature": 1.2},
        {"min_p": 0.05},
        {"top_k": 10, "top_p": 0.7, "min_p": 0.02, "temperature": 1.5},
        {"top_k": 100, "top_p": 0.9, "temperature": 0.8},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3, "top_p": 0.9},
        {"logit_bias": {7: 8.0, 8: -100.0}, "min_tokens": 30, "bad_words_ids": [[7, 9]]},
        {"allowed_token_ids": list(range(0, 300, 7)), "top_k": 20, "temperature": 2},
    ],
    ids=str,
)
def test_20000_draws_have_the_exact_distribution(fields: Request):
    request = {"prompt": [5, 6], "output": [7, 7, int(np.argmax(PEAKED))]} | fields
    slots, _, position = place([request], SMALL)
    tokens = draw_many(jnp.asarray(PEAKED, jnp.float32), slots, position[0])
    exact, _ = filter_oracle(params_of(request), edit_oracle(request, PEAKED))
    assert 0.5 * np.abs(np.bincount(tokens, minlength=SMALL) / NUM_DRAWS - exact).sum() < 0.02


ORDERED = {
    "temperature before top_p": ([0.4, 0.3, 0.2, 0.1], {"temperature": 2, "top_p": 0.65}, [0, 1, 2]),
    "min_p by probability": ([0.5, 0.3, 0.15, 0.05], {"min_p": 0.4}, [0, 1]),
}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("spread", [1, 40])
def test_trap_07_filters_apply_in_order_on_every_path(name: str, spread: int):
    """With a spread of 40 each token is 40 equal ones, so that the filters keep more than the candidates."""
    p, fields, support = ORDERED[name]
    logits = np.full(SMALL, -60.0)
    logits[: 4 * spread] = np.log(np.repeat(p, spread))
    slots, _, position = place([fields], SMALL)
    tokens = draw_many(jnp.asarray(logits, jnp.float32), slots, position[0])
    counts = np.bincount(np.asarray(tokens) // spread, minlength=4)
    assert list(np.flatnonzero(counts)) == support
    tempered = np.array([p[i] for i in support]) ** (1 / fields.get("temperature", 1))
    np.testing.assert_allclose(counts[support] / NUM_DRAWS, tempered / tempered.sum(), atol=0.02)


def test_ties_at_the_last_kept_value_are_all_kept():
    logits = np.full(SMALL, -60.0)
    logits[100:150] = 1.0
    for fields in ({"top_k": 3}, {"top_p": 0.1}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.5}):
        slots, _, position = place([fields], SMALL)
        tokens = draw_many(jnp.asarray(logits, jnp.float32), slots, position[0])
        assert set(np.asarray(tokens).tolist()) == set(range(100, 150))


def test_trap_08_penalties_know_prompt_from_output():
    P, Q = 5, 6
    high, low = np.full((1, SMALL), -9.0), np.full((1, SMALL), -9.0)
    high[0, [P, Q]], low[0, [P, Q]] = (5.0, 4.8), (-1.0, -1.1)

    def pick(logits: np.ndarray, output: tuple[int, ...] = (), **fields: float) -> int:
        return int(
            run([{"temperature": 0, "prompt": [P, 1], "output": list(output), **fields}], logits).tokens[0]
        )

    assert pick(high, repetition_penalty=1.2) == Q
    assert pick(high, presence_penalty=2) == P
    assert pick(high, frequency_penalty=2) == P
    assert pick(low, repetition_penalty=1.2) == Q
    assert pick(high, (P,), presence_penalty=0.15) == P
    assert pick(high, (P,), frequency_penalty=0.15) == P
    assert pick(high, (P,), presence_penalty=0.25) == Q
    assert pick(high, (P, P), presence_penalty=0.15) == P  # once, however often
    assert pick(high, (P, P), frequency_penalty=0.15) == Q  # once each


def test_penalties_count_only_what_is_before_the_position():
    logits = np.full((1, SMALL), -9.0)
    logits[0, [1, 6]] = 5.0, 4.8  # 1 fills what is left of an earlier request in the history
    assert run([{"temperature": 0, "prompt": [9], "repetition_penalty": 2.0}], logits).tokens[0] == 1
    full = {"temperature": 0, "prompt": [9] * (S - 2), "output": [1], "frequency_penalty": 2.0}
    assert run([full], logits).tokens[0] == 6


MIX: list[Request] = [
    {"temperature": 0.9, "seed": 1234},
    {"temperature": 0},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 5, "logprobs": 5},
    {"top_p": 0.999, "temperature": 2, "seed": 7, "choice": 2},
    {"top_k": 90, "min_p": 0.001, "seed": 8, "repetition_penalty": 1.2, "prompt": [9, 8, 7]},
    {
        "seed": 9,
        "logit_bias": {4: 3.0},
        "allowed_token_ids": list(range(50)),
        "output": [4, 4],
        "frequency_penalty": 1,
    },
    {"temperature": 0, "bad_words_ids": [[3], [4, 5]], "output": [4], "logprobs": 0},
    {"min_tokens": 3, "seed": 11, "presence_penalty": -1, "output": [7], "top_k": 1},
]


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_trap_09_a_row_is_the_same_alone_and_in_any_batch(vocab_size: int):
    rng = np.random.default_rng(0)
    for _ in range(3):
        logits = rng.normal(size=(8, vocab_size)).astype(np.float32) * 2
        together = run(MIX, logits)
        order = rng.permutation(8)
        shuffled = run([MIX[i] for i in order], logits[order])
        for i, request in enumerate(MIX):
            alone = run([request], logits[i : i + 1], num_rows=1)
            moved = int(np.flatnonzero(order == i)[0])
            for name in ("tokens", "logprob", "rank", "top_ids", "top_logprobs"):
                whole, single, other = (getattr(part, name) for part in (together, alone, shuffled))
                np.testing.assert_array_equal(whole[i], single[0])
                np.testing.assert_array_equal(whole[i], other[moved])


def test_trap_09_neighbours_without_a_seed_change_nothing():
    logits = np.random.default_rng(1).normal(size=(2, SMALL)).astype(np.float32)
    first = {"temperature": 0.9, "seed": 1234}
    outputs = {int(run([first, {"temperature": 0.9, "seed": seed}], logits).tokens[0]) for seed in range(5)}
    assert outputs == {int(run([first], logits[:1]).tokens[0])}


def test_draws_differ_by_seed_choice_and_position():
    logits = np.zeros((4, LARGE))
    same = {"seed": 1}
    changed = [same, {"seed": 2}, {"seed": 1, "choice": 1}, {"seed": 1, "output": [5]}]
    assert len(set(run(changed, logits).tokens.tolist())) == 4


def test_one_executable_serves_every_mix():
    traces = 0

    @jax.jit
    def step(logits: jax.Array, slots: Slots, slot: jax.Array, position: jax.Array) -> Sampled:
        nonlocal traces
        traces += 1
        return sample(logits, gather_rows(slots, slot), position)

    for request in MIX:
        step(jnp.zeros((1, SMALL)), *place([request], SMALL))
    assert traces == 1


@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_greedy_takes_the_lowest_id_on_ties(vocab_size: int):
    logits = np.random.default_rng(2).integers(-3, 3, size=(8, vocab_size)).astype(np.float32)
    expected = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(greedy(jnp.asarray(logits), vocab_size), expected)
    np.testing.assert_array_equal(run([{"temperature": 0}] * 8, logits).tokens, expected)
    np.testing.assert_array_equal(run([{"do_sample": False, "top_k": 9}] * 8, logits).tokens, expected)


def logprob_oracle(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def check_finite(found: Sampled) -> None:
    plain = {
        name: np.asarray(getattr(found, name)).tolist()
        for name in ("logprob", "rank", "top_ids", "top_logprobs")
    }
    json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"temperature": 0, "logit_bias": {5: -100}},
        {"temperature": 0},
        {"allowed_token_ids": [7]},
        {"temperature": 1e6},
    ],
    ids=str,
)
def test_trap_10_logprobs_are_the_models_own_and_finite(fields: Request):
    logits = np.random.default_rng(4).normal(size=(1, SMALL)).astype(np.float32) * 30
    found = run([{"logprobs": 5, **fields}], logits)
    check_finite(found)
    exact = logprob_oracle(logits[0])
    np.testing.assert_allclose(found.logprob[0], exact[found.tokens[0]], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(found.top_ids[0], np.argsort(-logits[0], kind="stable")[:MAX_LOGPROBS])
    np.testing.assert_allclose(found.top_logprobs[0], exact[found.top_ids[0]], rtol=1e-5, atol=1e-4)
    assert found.rank[0] == 1 + (logits[0] > logits[0, found.tokens[0]]).sum()


def test_trap_10_even_logits_of_minus_infinity_have_finite_logprobs():
    logits = np.full((1, SMALL), -np.inf)
    logits[0, 9] = 1.0
    for fields in ({"temperature": 0}, {"top_p": 0.5}, {}, {"top_k": 5}, {"min_p": 0.1, "top_k": 100}):
        found = run([{"logprobs": 5, **fields}], logits)
        assert found.tokens[0] == 9
        check_finite(found)


def test_prompt_tokens_are_scored():
    logits = np.random.default_rng(5).normal(size=(6, LARGE)).astype(np.float32)
    targets = np.array([0, 5, 70, 5002, 9, 1])
    found = token_logprobs(jnp.asarray(logits), jnp.asarray(targets))
    exact = np.stack([logprob_oracle(row) for row in logits])
    np.testing.assert_allclose(found.logprob, exact[np.arange(6), targets], atol=1e-5)
    np.testing.assert_array_equal(found.rank, 1 + (logits > logits[np.arange(6), targets][:, None]).sum(1))
    np.testing.assert_array_equal(found.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS])


def test_trap_29_padding_of_the_vocabulary_is_never_drawn_nor_counted():
    rng = np.random.default_rng(6)
    real = rng.uniform(-9, -1, size=61)
    padded = np.concatenate([real, np.zeros(3)])
    every = [
        {"temperature": 0, "logprobs": 5},
        {"seed": 3, "logprobs": 5},
        {"top_k": 64, "top_p": 0.9, "seed": 4},
    ]
    wide = run(every, np.tile(padded, (3, 1)), vocab_size=61)
    narrow = run(every, np.tile(real, (3, 1)), vocab_size=61)
    jax.tree.map(np.testing.assert_array_equal, wide, narrow)
    np.testing.assert_allclose(wide.logprob[0], logprob_oracle(real.astype(np.float32)).max(), atol=1e-5)
    assert int(greedy(jnp.asarray(padded)[None], 61)[0]) == real.argmax()
    slots, _, position = place([{}], 61)
    tokens = draw_many(jnp.asarray(padded, jnp.float32), slots, position[0])
    assert int(tokens.max()) < 61


@pytest.mark.parametrize("vocab_size", [3, 73])
def test_small_vocabularies_are_served(vocab_size: int):
    logits = np.random.default_rng(7).normal(size=(4, vocab_size)).astype(np.float32)
    found = run([{"top_k": 2, "logprobs": 20}, {"temperature": 0}, {"top_p": 0.5, "seed": 1}, {}], logits)
    assert set(found.tokens[0:1].tolist()) <= set(np.argsort(-logits[0])[:2].tolist())
    assert found.tokens.max() < vocab_size
    check_finite(found)
    assert (found.top_ids[0, min(20, vocab_size) :] == -1).all()


def test_trap_31_bias_forces_and_bans_under_greedy():
    logits = np.random.default_rng(8).normal(size=(2, SMALL)).astype(np.float32)
    logits[1, 5] = 20
    mix = [{"temperature": 0, "logit_bias": {"5": 100}}, {"temperature": 0, "logit_bias": {"5": -100}}]
    tokens = run(mix, logits).tokens
    assert tokens[0] == 5
    assert tokens[1] != 5


def test_end_ids_wait_for_min_tokens():
    logits = np.full((4, SMALL), -9.0)
    logits[:, [EOS, 6, 7]] = 5.0, 4.0, 3.0
    base = {"temperature": 0, "min_tokens": 2}
    mix = [
        base | {"output": [9]},
        base | {"output": [9, 9]},
        base | {"output": [9], "stop_token_ids": [6]},
        base | {"output": [9], "ignore_eos": True},
    ]
    assert run(mix, logits).tokens.tolist() == [6, EOS, 7, EOS]


def test_bad_words_are_banned_where_the_output_would_complete_them():
    logits = np.full((4, SMALL), -9.0)
    logits[:, [5, 6]] = 5.0, 4.0
    base = {"temperature": 0, "bad_words_ids": [[3, 4, 5]], "prompt": [3, 4]}
    mix = [base | {"output": [3, 4]}, base | {"output": [4]}, base, base | {"bad_words_ids": [[5]]}]
    assert run(mix, logits).tokens.tolist() == [6, 5, 5, 6]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 100}, {"min_p": 0.1}], ids=str
)
def test_broken_logits_draw_nothing_and_leave_other_rows_alone(broken: float, fields: Request):
    logits = np.random.default_rng(0).normal(size=(3, SMALL))
    logits[0] = broken
    logits[2, 7] = broken
    found = run([fields | {"logprobs": 5}] * 3, logits)
    assert found.tokens[0] == found.tokens[2] == NO_TOKEN
    assert 0 <= found.tokens[1] < SMALL
    check_finite(found)
    assert greedy(jnp.asarray(logits), SMALL).tolist() == [NO_TOKEN, logits[1].argmax(), NO_TOKEN]
