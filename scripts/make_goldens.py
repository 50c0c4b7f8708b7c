"""Writes tests/families/goldens and tests/model/rope.json: what transformers computes on tiny random checkpoints.

    python scripts/make_goldens.py [case ...]

Needs torch and transformers 5, which jaxinfer and its tests never import. Each case is a configuration; weights come
from `tests.families.cases.make_arrays`, so that only names, shapes and results are stored (about 3 MB in all). The
configuration of transformers 4 is checked to give the same logits before it is written.
"""

# The reference is not in the project's environment.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.families.cases import GOLDENS, make_arrays, write_checkpoint

ROPE_GOLDENS = GOLDENS.parent.parent / "model" / "rope.json"
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47)
HIDDEN_ROW = 3
STD = 0.2
VOCAB = 128

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = {"max_position_embeddings": 256, "lengths": (17, 32, 47, 100, 200), "vocab_size": 64}
GEMMA = {"head_dim": 32, "norm_center": 0.0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 6, "head_dim": 24}


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    """Returns a rope_parameters block of transformers 5."""
    return {"rope_type": kind, "rope_theta": 10_000.0, **numbers}


SHORT_FACTORS = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5]
LONG_FACTORS = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# name -> model_type and what differs from BASE; `lengths`, `norm_center` are ours, the rest is the configuration's.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": rope("default", rope_theta=500_000.0)}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama_head_dim": ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama_llama3": (
        "llama",
        LONG | {"rope_parameters": rope(
            "llama3", rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )},
    ),
    "llama_linear": ("llama", LONG | {"rope_parameters": rope("linear", factor=4.0)}),
    "llama_dynamic": ("llama", LONG | {"max_position_embeddings": 32, "rope_parameters": rope("dynamic", factor=2.0)}),
    "qwen2_yarn": (
        "qwen2", LONG | {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=32)}
    ),
    "mistral_yarn": (
        "mistral",
        LONG | {"sliding_window": None, "head_dim": 32, "rope_parameters": rope(
            "yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0, mscale=1.0,
            mscale_all_dim=0.5, truncate=False,
        )},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": rope("default", rope_theta=1e6)}),
    "qwen2_window": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", MOE | {"norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3_moe_raw": ("qwen3_moe", MOE | {"norm_topk_prob": False}),
    "gemma": ("gemma", GEMMA | {"num_key_value_heads": 1}),
    "gemma2": ("gemma2", GEMMA | {
        "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0,
    }),
    "gemma3": ("gemma3_text", GEMMA | {
        "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24,
    }),
    "gemma3_linear": ("gemma3_text", GEMMA | {
        "num_hidden_layers": 3, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 1
        + ["sliding_attention"],
        "rope_parameters": {
            "full_attention": rope("linear", rope_theta=1e6, factor=8.0),
            "sliding_attention": rope("default", rope_theta=20_000.0),
        },
    }),
    "phi3": ("phi3", {
        "sliding_window": 8, "rope_parameters": rope("default", partial_rotary_factor=0.75),
        "original_max_position_embeddings": 64,
    }),
    "phi3_longrope": ("phi3", {
        "max_position_embeddings": 128, "original_max_position_embeddings": 32, "tie_word_embeddings": True,
        "rope_parameters": rope(
            "longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS, partial_rotary_factor=0.75
        ),
    }),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB, "bos_token_id": 1,
        "eos_token_id": 2,
    }),
}  # fmt: skip

# RopeConfig fields -> what transformers makes of them; `length` as `inv_freq` takes it.
ROPES: list[dict[str, Any]] = [
    {"kind": "default", "theta": 500_000.0, "rotary_dim": 64},
    {"kind": "linear", "theta": 10_000.0, "rotary_dim": 16, "factor": 4.0},
    *({"kind": "dynamic", "theta": 10_000.0, "rotary_dim": 16, "factor": 2.0, "original_max_len": 32, "length": n}
      for n in (None, 20, 32, 33, 100)),
    *({"kind": "yarn", "theta": 10_000.0, "rotary_dim": H, "factor": 4.0, "original_max_len": 32} | more
      for H in (16, 64)
      for more in (
          {},
          {"extra": {"beta_fast": 32, "beta_slow": 1, "truncate": False}},
          {"extra": {"mscale": 1.0, "mscale_all_dim": 0.7}},
          {"extra": {"mscale": 1.0}, "attention_factor": 1.25},
      )),
    {"kind": "yarn", "theta": 1e6, "rotary_dim": 128, "factor": 4.0, "original_max_len": 32_768},
    {"kind": "llama3", "theta": 500_000.0, "rotary_dim": 128, "factor": 8.0, "original_max_len": 8192,
     "extra": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"kind": "llama3", "theta": 10_000.0, "rotary_dim": 16, "factor": 8.0, "original_max_len": 32,
     "extra": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    *({"kind": "longrope", "theta": 10_000.0, "rotary_dim": 12, "factor": 4.0, "original_max_len": 32, "length": n,
       "extra": {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}} | more
      for n in (None, 32, 33) for more in ({}, {"attention_factor": 1.5})),
]  # fmt: skip


def make_case(name: str, folder: Path) -> None:
    """Computes one case and writes its two files."""
    model_type, told = CASES[name]
    told = dict(told)
    lengths, center = told.pop("lengths", LENGTHS), told.pop("norm_center", 1.0)
    values = told if model_type == "gpt2" else BASE | told
    config = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(values)))
    shapes = read_shapes(config, folder)
    written = json.loads((folder / "config.json").read_text())
    seed = 1 + list(CASES).index(name)
    arrays = make_arrays(shapes, seed, STD, center)
    write_checkpoint(folder, arrays, written)
    stream = np.random.RandomState(1000 + seed)
    rows = [stream.randint(0, config.vocab_size, n).astype(np.int32) for n in lengths]
    results = [run(folder, row) for row in rows]
    old = old_spelling(written)
    if old is not None:
        write_checkpoint(folder, arrays, old)
        again = run(folder, rows[-1])[0]
        if not np.array_equal(again, results[-1][0]):
            raise SystemExit(
                f"{name}: the old spelling gives other logits by {abs(again - results[-1][0]).max()}"
            )
    story = {
        "config": written,
        "old_config": old,
        "shapes": {key: list(shape) for key, shape in sorted(shapes.items())},
        "seed": seed,
        "std": STD,
        "norm_center": center,
        "hidden_row": min(HIDDEN_ROW, len(rows) - 1) if name != "llama_dynamic" else 0,
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in story.items())
    (GOLDENS / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
    np.savez_compressed(
        GOLDENS / f"{name}.npz",
        lengths=np.array([len(row) for row in rows], np.int32),
        tokens=np.concatenate(rows),
        logits=np.concatenate([logits for logits, _ in results]),
        hidden=results[story["hidden_row"]][1],
    )
    spread = np.concatenate([logits for logits, _ in results])
    print(f"{name}: logits std {spread.std():.2f}, largest {abs(spread).max():.2f}")


def read_shapes(config: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the tensors that transformers itself writes for a configuration, by name."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def run(folder: Path, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits ``[T, V]`` and hidden states ``[L + 1, T, D]`` of one prompt, by eager attention in float32.

    The model is opened anew, because a dynamic rotary embedding remembers the longest prompt that it has seen.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        out = model(torch.from_numpy(row)[None].long(), output_hidden_states=True, use_cache=False)
    return out.logits[0].numpy(), torch.cat(out.hidden_states).numpy()


def old_spelling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a configuration as transformers 4 wrote it, None where that is the same."""
    old = dict(config)
    block = old.pop("rope_parameters", None)
    if block is None:
        return None
    old["torch_dtype"] = old.pop("dtype", "float32")
    if old["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if "full_attention" in block:  # Gemma 3
        old["rope_local_base_freq"] = block["sliding_attention"]["rope_theta"]
        block = block["full_attention"]
        if "sliding_window_pattern" not in old and set(old["layer_types"][:5]) == {"sliding_attention"}:
            old["sliding_window_pattern"] = 6
            del old["layer_types"]
        old.pop("_sliding_window_pattern", None)
    numbers = dict(block)
    old["rope_theta"] = numbers.pop("rope_theta")
    kind = numbers.pop("rope_type")
    if "partial_rotary_factor" in numbers:
        old["partial_rotary_factor"] = numbers.pop("partial_rotary_factor")
    if old["model_type"] == "phi3":
        numbers.pop("original_max_position_embeddings", None)  # it stood beside the block
    # "type" came first; the files of Llama 3 and Gemma 3 have "rope_type" (and for Gemma's no other is read).
    key = "rope_type" if old["model_type"] in ("llama", "gemma3_text") else "type"
    old["rope_scaling"] = None if kind == "default" else {key: kind, **numbers}
    if old["model_type"] in ("llama", "mistral") and old.get("head_dim") == 16:
        old["head_dim"] = None if old["model_type"] == "llama" else old.pop("head_dim")
    return old


def make_ropes() -> None:
    """Writes what transformers makes of every entry of `ROPES`."""
    stories = []
    for entry in ROPES:
        numbers = dict(entry.get("extra", {}))
        for ours, theirs in (("factor", "factor"), ("attention_factor", "attention_factor")):
            if ours in entry:
                numbers[theirs] = entry[ours]
        trained = entry.get("original_max_len")
        if entry["kind"] in ("yarn", "llama3", "longrope"):
            numbers["original_max_position_embeddings"] = trained
        max_len = trained if entry["kind"] == "dynamic" else 4 * (trained or 64)
        config = transformers.LlamaConfig(
            hidden_size=256, num_attention_heads=4, head_dim=entry["rotary_dim"], max_position_embeddings=max_len,
            rope_parameters={"rope_type": entry["kind"], "rope_theta": entry["theta"], **numbers},
        )  # fmt: skip
        if entry["kind"] == "default":
            from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

            make = LlamaRotaryEmbedding.compute_default_rope_parameters
            frequencies, factor = make(config)
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[entry["kind"]](config, seq_len=entry.get("length"))
        stories.append({**entry, "inv_freq": [float(f) for f in frequencies], "attention": float(factor)})
    ROPE_GOLDENS.write_text("[\n" + ",\n".join(json.dumps(story) for story in stories) + "\n]\n")


def main() -> None:
    """Makes the cases named on the command line, or all of them."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    make_ropes()
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            make_case(name, Path(folder))


if __name__ == "__main__":
    main()
