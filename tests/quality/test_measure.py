"""Policies measured beside each other."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.llm import LLM
from jaxinfer.quality.measure import CHUNK, measure
from jaxinfer.text.windows import cut_windows
from jaxinfer.weights.model import Model, open_model
from tests.acceptance.engines import TOY_VOCAB, write_toy

IDS = np.random.default_rng(0).integers(3, TOY_VOCAB, 150).tolist()
WINDOWS = cut_windows(IDS, 63, None)


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_toy(tmp_path_factory.mktemp("toy"))))


def test_perplexity_is_the_engines(toy_model: Model):
    ticks = []
    quality, _ = measure(toy_model, Policy.parse("float32"), WINDOWS, tick=lambda: ticks.append(1))
    llm = LLM(model=toy_model, policy="float32", max_num_seqs=1, max_model_len=64, draws=["greedy", "score"])
    assert quality.perplexity == pytest.approx(llm.score(IDS).perplexity, rel=1e-5)
    assert (quality.kl, quality.agreement, quality.speeds) == (0, 1, {})
    assert len(ticks) == len(WINDOWS) == 3
    assert CHUNK > 64  # a window is a chunk here


def test_windows_in_chunks_are_windows_whole(toy_model: Model, monkeypatch: pytest.MonkeyPatch):
    whole, reference = measure(toy_model, Policy.parse("float32"), WINDOWS)
    monkeypatch.setattr("jaxinfer.quality.measure.CHUNK", 16)
    chunked, _ = measure(toy_model, Policy.parse("float32"), WINDOWS, reference)
    assert chunked.nats == pytest.approx(whole.nats, rel=1e-6)
    assert chunked.kl == pytest.approx(0, abs=1e-6)


def test_fewer_bits_stray_further_in_fewer_bytes(toy_model: Model):
    exact, reference = measure(toy_model, Policy.parse("float32"), WINDOWS)
    texts = (
        "weights=int8,kv=int8,compute=float32",
        "weights=int4:g32,head=int4:g32,kv=int4:g32,compute=float32",
    )
    found = [measure(toy_model, Policy.parse(text), WINDOWS, reference)[0] for text in texts]
    assert 0 < found[0].kl < found[1].kl
    for narrower, wider in zip(found, [exact, found[0]], strict=True):
        assert sum(narrower.weight_bytes.values()) < sum(wider.weight_bytes.values())
        assert narrower.kv_bytes < wider.kv_bytes
        assert narrower.agreement <= wider.agreement


def test_speeds_are_measured_for_each_number_of_rows(toy_model: Model):
    quality, _ = measure(toy_model, Policy.parse("float32"), WINDOWS, rows=(1, 3))
    assert quality.speeds.keys() == {"prefill 64", "decode x1", "decode x3"}
    assert all(speed > 0 for speed in quality.speeds.values())


def test_parameters_are_let_go_of(toy_model: Model):
    measure(toy_model, Policy.parse("float32"), WINDOWS, rows=(2,))
    before = len(jax.live_arrays())
    _, reference = measure(toy_model, Policy.parse("float32"), WINDOWS, rows=(2,))
    assert len(jax.live_arrays()) - before <= len(jax.tree.leaves(reference.table)) + 2
