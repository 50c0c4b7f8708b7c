"""The example in the docstring of steps.py is run as it stands there, on a real model and on a tiny one."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.arrays.precision import Policy
from jaxinfer.model.cache import init_cache
from jaxinfer.model.decoder import Block, Static, stack_layers, stack_sizes
from jaxinfer.steps import steps
from jaxinfer.steps.steps import decode, full_logits, prefill
from jaxinfer.weights.model import open_model
from tests.families.cases import make_checkpoint
from tests.text.vocabularies import word_level

MODEL = "smollm2-135m"


def run_example(model: str, ids: list[int]) -> dict[str, Any]:
    """Runs the code block with the names that its imports would bring; returns what it leaves."""
    assert steps.__doc__ is not None
    _, block = steps.__doc__.split("::\n\n")
    code = textwrap.dedent(block)
    assert code.count(repr(MODEL).replace("'", '"')) == 1
    names: dict[str, Any] = {
        **{
            "jax": jax,
            "jnp": jnp,
            "Policy": Policy,
            "Block": Block,
            "Static": Static,
            "init_cache": init_cache,
        },
        **{"stack_layers": stack_layers, "stack_sizes": stack_sizes, "open_model": open_model},
        **{"prefill": prefill, "decode": decode, "cfg": open_model(model).cfg, "ids": ids},
    }
    exec(code.replace(MODEL, model), names)
    return names


def test_the_example_s_steps_are_those_of_the_whole_prompt(tmp_path: Path):
    word_level(tmp_path, ["<unk>", "a", "b"])
    ids = [5, 9, 17, 33, 2, 101]
    left = run_example(str(make_checkpoint("llama", tmp_path)), ids)
    whole = jnp.array([[*ids, int(left["token"][0])]])
    wanted = full_logits(left["params"], left["static"], whole, jnp.array([whole.shape[1]]))
    assert int(left["token"][0]) == int(wanted[0, -2].argmax())
    assert jnp.abs(left["logits"][0] - wanted[0, -1]).max() < 1e-4


@pytest.mark.slow
def test_the_example_runs_on_the_default_model(smollm2_gguf: Path):
    tokenizer = open_model(str(smollm2_gguf)).tokenizer
    left = run_example(MODEL, tokenizer.encode("The capital of France is"))
    assert tokenizer.decode([int(left["token"][0]), int(left["logits"].argmax())]) == " Paris."
