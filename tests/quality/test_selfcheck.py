"""A machine that computes as it should is found so, and what is broken is found with its layer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.cli.main import main
from jaxinfer.kernels.attention import api
from jaxinfer.model.layout import Layout
from jaxinfer.quality.selfcheck import SAME, Finding, SelfCheck, measure_error, natural_meshes
from jaxinfer.quality.toys import TOYS, Toy
from jaxinfer.quality.trace import Way, make_prompts, trace

FLOAT32 = Policy.parse("float32")


def run(check: SelfCheck, *wanted: str) -> dict[str, Finding]:
    """Returns the findings of the checks whose names begin so, all for none."""
    return {name: each() for name, each in check.checks() if not wanted or name.startswith(tuple(wanted))}


@pytest.mark.parametrize("name", TOYS)
def test_this_machine_computes_as_it_should(name: str):
    policies = ("w8a8",) if name == "llama" else ("w4a16,kv8",)
    found = run(SelfCheck(Toy(name, TOYS[name]), policies=policies))
    assert not [one for one in found.values() if not one.is_ok]
    same = {check: one for check, one in found.items() if one.bound == SAME}
    assert {"solo = batch", "served steps = layers", "attention blocked = reference"} < same.keys()
    same = {check: one for check, one in same.items() if not one.note}
    assert len(same) >= 5
    assert all(one.largest[1] < 1e-5 for one in same.values())
    exact = found["attention blocked = reference"]
    layers = [f"layer {i}" for i in range(TOYS[name].num_layers)]
    assert list(exact.errors) == ["embedding", *layers, "logits"]
    rounded = [one.largest[1] for check, one in found.items() if check.startswith("precision")]
    assert min(rounded) > 1e-3


def test_a_kernel_that_is_wrong_in_one_kind_of_layer_is_named_with_the_layer(monkeypatch: pytest.MonkeyPatch):
    """It forgets the window: in this model of its last two layers alone."""
    toy = TOYS["gemma3"]
    toy = replace(toy, layers=(toy.layers[1], toy.layers[0], toy.layers[0]))

    def forgetful(*args: Any, window: Any = None, **options: Any) -> Any:
        return api.paged_attention_blocked(*args, window=None, **options)

    monkeypatch.setitem(api.IMPLEMENTATIONS, "forgetful", forgetful)
    found = run(SelfCheck(Toy("broken", toy), policies=()), "attention")
    assert found["attention blocked = reference"].is_ok
    wrong = found["attention forgetful = reference"]
    assert (wrong.is_ok, wrong.strays) == (False, "layer 1")
    assert wrong.errors["layer 0"] < 1e-5 < SAME < wrong.errors["layer 1"]


class Damaged(Toy):
    """Has a matrix of its second layer scaled wrongly wherever it lies in codes."""

    def load(self, policy: Policy, layout: Layout | None, progress: Any = None) -> Any:
        params = super().load(policy, layout)
        w = params["layers"][1]["mlp"]["down"]
        if not policy.weights.is_plain:
            params["layers"][1]["mlp"]["down"] = replace(w, scale=8 * w.scale)
        return params


def test_weights_that_are_wrong_in_one_layer_are_named_with_it():
    found = run(SelfCheck(Damaged("damaged", TOYS["llama"]), policies=("w8a16", "kv8")), "precision")
    assert found["precision kv8"].is_ok
    assert found["precision w8a16"].strays == "layer 1"


def test_what_cannot_run_is_a_failure_and_what_is_not_here_is_none(monkeypatch: pytest.MonkeyPatch):
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such instruction")

    def choose(name: str, *rest: Any) -> tuple[str, str]:
        if name == "elsewhere":
            raise ValueError("attention: elsewhere is for other devices")
        return name, "asked for"

    monkeypatch.setitem(api.IMPLEMENTATIONS, "fails", fails)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "elsewhere", fails)
    monkeypatch.setattr("jaxinfer.quality.selfcheck.choose_attention", choose)
    found = run(SelfCheck(Toy("llama", TOYS["llama"]), policies=()), "attention fails", "attention elsewhere")
    failed, elsewhere = found.values()
    assert "no such instruction" in failed.note
    assert (failed.is_ok, elsewhere.is_ok) == (False, True)
    assert "for other devices" in elsewhere.note


def test_numbers_that_are_not_finite_are_beyond_any_bound():
    wanted = np.ones((3, 4), np.float32)
    got = wanted.copy()
    assert measure_error(got, wanted) == 0
    got[1] *= 1.5
    assert measure_error(got, wanted) == pytest.approx(0.5)
    assert measure_error(got, wanted, mean=True) == pytest.approx(0.5 / 3**0.5)
    got[2, 0] = np.nan
    assert measure_error(got, wanted) == measure_error(got, wanted, mean=True) == np.inf
    assert not Finding("m", "c", 1e9, {"logits": np.inf}).is_ok


def test_meshes_are_those_that_the_devices_and_the_model_can_have():
    assert natural_meshes(TOYS["llama"], 1) == []
    assert natural_meshes(TOYS["llama"], 2) == ["tensor=2", "data=2"]
    assert natural_meshes(TOYS["llama"], 9) == ["tensor=8", "data=8", "data=2,tensor=4"]
    assert natural_meshes(TOYS["qwen3_moe"], 8)[3:] == ["expert=8", "expert=2,tensor=4"]


def test_the_command_line_tells_each_check_and_the_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = ["selfcheck", "--toys", "llama", "--policies", "none", "--mesh", "none"]
    every = SelfCheck._list
    monkeypatch.setattr(SelfCheck, "_list", lambda check: iter(list(every(check))[:1]))
    assert main(words) == 0
    out, err = capsys.readouterr()
    first, errors, verdict = out.splitlines()
    assert first.startswith("ok      llama: attention blocked = reference: ")
    assert errors.split()[0] == "embedding:0e+00"
    assert verdict == "ok: 1 checks"
    assert "1 of 1 checks" in err
    monkeypatch.setitem(TOYS, "llama", replace(TOYS["llama"], embed_scale=float("nan")))
    assert main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert told["checks"][0]["verdict"] == "beyond"
    assert told["checks"][0]["first_stray"] == "embedding"
    assert told["checks"][0]["errors"]["logits"] is None
    assert main(words) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "NOT ok: 1 of 1 checks: llama: attention blocked = reference (embedding)"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--toys", "gpt"], "there are: llama, gemma3, qwen3_moe"),
        (["--model", "x", "--toys", "llama"], "give one of the two"),
        (["--toys", "llama", "--mesh", "tensor=999"], "takes 999 devices"),
        (["--toys", "llama", "--policies", "int3"], "int3"),
    ],
)
def test_what_cannot_be_asked_for_is_said_at_once(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["selfcheck", *words]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_trace_has_every_layer_of_every_token():
    toy = Toy("llama", TOYS["llama"])
    prompts = make_prompts(toy.cfg.vocab_size, 2, 7)
    got = trace(toy, prompts, Way(FLOAT32, "blocked"))
    assert got.streams.shape == (3, 2, 7, 64)
    params = toy.load(FLOAT32, None)
    np.testing.assert_array_equal(
        got.streams[0, 0], jnp.asarray(params["embed"]["tokens"])[prompts.tokens[0]]
    )
    assert prompts.live.sum() == 8
