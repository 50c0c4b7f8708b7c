"""`jaxinfer selfcheck` where there are several devices, and every policy over a mesh beside one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.arrays.sharding import parse_mesh
from jaxinfer.quality.selfcheck import SelfCheck, measure_error
from jaxinfer.quality.toys import TOYS, Toy
from jaxinfer.quality.trace import Prompts, Way, make_prompts, serve, trace

PROMPTS: Prompts = make_prompts(TOYS["llama"].vocab_size, 8, 11)
# Where activations or pages are rounded to codes, sums in another order bring some across a code's edge.
BOUNDS = {
    "bfloat16": 0.05,
    "w4a16": 1e-5,
    "weights=fp8": 1e-5,
    "kv4": 0.1,
    "w8a8,kv8": 0.05,
}


@pytest.mark.parametrize("name", TOYS)
def test_natural_meshes_are_found_to_be_right(name: str):
    meshes = {"llama": ["tensor=8"], "gemma3": ["data=2,tensor=2"], "qwen3_moe": ["expert=4,tensor=2"]}
    check = SelfCheck(Toy(name, TOYS[name]), meshes[name], policies=(), num_tokens=11)
    found = [run() for name, run in check.checks() if name.startswith("mesh")]
    assert len(found) == 2
    assert [one.largest[1] < 1e-5 for one in found] == [True, True], found


def test_a_share_that_holds_the_wrong_heads_is_named_with_its_layer():
    class Turned(Toy):
        """Has the heads of its last layer in another order on a mesh."""

        def load(self, policy, layout, progress=None):
            params = super().load(policy, layout)
            if layout is not None:
                attn = params["layers"][1]["attn"]
                attn["q"] = attn["q"][::-1]
            return params

    check = SelfCheck(Turned("turned", TOYS["qwen3_moe"]), ["tensor=2"], policies=(), num_tokens=11)
    layers, served = (run() for name, run in check.checks() if name.startswith("mesh"))
    assert (layers.strays, served.strays) == ("layer 1", "prefill")


def test_a_mesh_that_the_model_cannot_have_is_a_failure_with_its_reason():
    check = SelfCheck(Toy("llama", TOYS["llama"]), ["expert=2"], policies=(), num_tokens=11)
    found = [run() for name, run in check.checks() if name.startswith("mesh")]
    assert all("the model has no experts" in one.note and not one.is_ok for one in found)


@pytest.mark.parametrize("policy", BOUNDS)
def test_every_policy_gives_over_a_mesh_what_it_gives_on_one_device(policy: str):
    """Of the served steps; in float32 compute, so that only codes may differ, but for bfloat16."""
    toy = Toy("llama", TOYS["llama"])
    way = Way(Policy.parse(policy if policy == "bfloat16" else f"{policy},compute=float32"), "blocked")
    wanted = serve(toy, PROMPTS, way)
    got = serve(toy, PROMPTS, replace(way, mesh=parse_mesh("tensor=4")))
    for one, other in zip(got, wanted, strict=True):
        assert measure_error(one, other) < BOUNDS[policy]


def test_codes_are_the_same_codes_in_every_layer_of_a_mesh():
    toy = Toy("llama", TOYS["llama"])
    way = Way(Policy.parse("w8a16,compute=float32"), "blocked")
    one, many = (trace(toy, PROMPTS, replace(way, mesh=parse_mesh(mesh))) for mesh in ("", "tensor=4,data=2"))
    for layer in range(3):
        assert measure_error(many.streams[layer][PROMPTS.live], one.streams[layer][PROMPTS.live]) < 1e-5
