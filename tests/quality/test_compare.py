"""How far apart two distributions are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxinfer.quality.compare import Comparison, compare_logits

DRAW = np.random.default_rng(0)


def draw(rows: int = 20, vocab: int = 50) -> np.ndarray:
    return (4 * DRAW.standard_normal((rows, vocab))).astype(np.float32)


def compare(*arrays: np.ndarray) -> Comparison:
    logits, reference, targets = map(jnp.asarray, arrays)
    return compare_logits(logits, reference, targets)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_figures_are_those_of_float64():
    logits, reference, targets = draw(), draw(), DRAW.integers(0, 50, 20)
    found = compare(logits, reference, targets)
    q, p = log_softmax(logits), log_softmax(reference)
    np.testing.assert_allclose(found.kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found.nll, -q[np.arange(20), targets], rtol=1e-5)
    assert list(found.agree) == list((logits.argmax(-1) == reference.argmax(-1)).astype(float))
    assert (np.asarray(found.kl) > 0).all()


def test_a_model_is_not_apart_from_itself_nor_from_itself_moved():
    logits, targets = draw(), np.zeros(20, np.int32)
    same, moved = compare(logits, logits, targets), compare(logits + 3, logits, targets)
    assert not np.any(same.kl)
    np.testing.assert_allclose(moved.kl, 0, atol=1e-5)
    assert np.all(same.agree)
    assert np.all(moved.agree)


def test_what_neither_can_say_adds_nothing():
    logits, reference, targets = draw(), draw(), np.zeros(20, np.int32)
    barred = np.full((20, 5), -np.inf, np.float32)
    wider = compare(np.hstack([logits, barred]), np.hstack([reference, barred]), targets)
    np.testing.assert_allclose(wider.kl, compare(logits, reference, targets).kl, rtol=1e-5)
