"""Families: what checkpoints call things, and how their configurations become a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.config import GenerationDefaults, ModelConfig
from jaxinfer.weights.families.base import Family, Recipe
from jaxinfer.weights.families.gemma import GEMMA, GEMMA2, GEMMA3
from jaxinfer.weights.families.generation import read_gguf_generation, read_hf_generation
from jaxinfer.weights.families.gpt2 import GPT2
from jaxinfer.weights.families.llama import LLAMA, SMOLLM3
from jaxinfer.weights.families.mistral import MISTRAL
from jaxinfer.weights.families.mixtral import MIXTRAL
from jaxinfer.weights.families.olmo2 import OLMO2
from jaxinfer.weights.families.phi3 import PHI3
from jaxinfer.weights.families.qwen2 import QWEN2
from jaxinfer.weights.families.qwen3 import QWEN3, QWEN3_MOE
from jaxinfer.weights.families.reader import (
    ConfigError,
    ConfigReader,
    ConfigValueError,
    MissingConfigKeyError,
    UnknownConfigKeyError,
)
from jaxinfer.weights.source import TensorSource

__all__ = [
    "FAMILIES",
    "ConfigError",
    "ConfigValueError",
    "Family",
    "MissingConfigKeyError",
    "Recipe",
    "UnknownConfigKeyError",
    "find_family",
    "read_config",
]

FAMILIES = (
    *(LLAMA, SMOLLM3, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE),
    *(GEMMA, GEMMA2, GEMMA3, PHI3, OLMO2, GPT2),
)

# Keys of Hugging Face configurations that do not change what a trained decoder computes: bookkeeping, training,
# other tasks, and what generation and tokenizers read.
_HARMLESS_HF = frozenset(
    """
    _name_or_path architectures model_type transformers_version torch_dtype dtype auto_map is_llama_config
    transformers.js_config unsloth_fixed unsloth_version use_cache cache_implementation _attn_implementation
    _attn_implementation_autoset attn_implementation pretraining_tp return_dict output_attentions
    output_hidden_states torchscript use_return_dict chunk_size_feed_forward gradient_checkpointing
    initializer_range initializer_factor attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop
    output_router_logits router_aux_loss_coef router_jitter_noise reorder_and_upcast_attn
    id2label label2id num_labels _num_labels problem_type task_specific_params finetuning_task tie_encoder_decoder
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    do_sample temperature top_k top_p max_length max_new_tokens max_sequence_length
    """.split()  # noqa: SIM905
)
_HARMLESS_MULTIMODAL = frozenset(
    """
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id eoi_token_id
    image_token_id
    """.split()  # noqa: SIM905
)
_HARMLESS_GGUF = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")


def find_family(source: TensorSource) -> Family:
    """Returns the family of a checkpoint.

    Raises:
      ConfigError: none claims it; the message lists those that there are.
    """
    if source.kind == "gguf":
        return _find_gguf(source)
    said = [source.config.get("model_type"), *(source.config.get("architectures") or ())]
    for family in FAMILIES:
        if any(name in family.architectures for name in said):
            classes = [name for name in said[1:] if name not in family.architectures]
            if classes:
                raise ConfigValueError(
                    _where(source), "architectures", classes, ", ".join(family.architectures)
                )
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures[:1])
    raise ConfigError(f"{_where(source)}: model_type {said[0]!r} is of no known family; known: {known}")


def _find_gguf(source: TensorSource) -> Family:
    name = source.config.get("general.architecture")
    found = [family for family in FAMILIES if name in family.gguf_architectures]
    if not found:
        known = ", ".join(sorted({name for family in FAMILIES for name in family.gguf_architectures}))
        raise ConfigError(
            f"{_where(source)}: general.architecture {name!r} is of no known family; known: {known}"
        )
    mixed = bool(source.config.get(f"{name}.expert_count"))
    return MIXTRAL if mixed and LLAMA in found else found[0]


def read_config(source: TensorSource) -> tuple[ModelConfig, GenerationDefaults]:
    """Returns what a checkpoint's configuration says of the model and of generating with it.

    A head beside a tied embedding is used if it differs, as transformers does; an equal copy is left out.

    Raises:
      UnknownConfigKeyError: keys that are neither handled nor known to be harmless, all of them.
      ConfigError: no family claims it, a needed key is absent, or a value cannot be served.
    """
    family = find_family(source)
    if source.kind == "gguf":
        prefix = f"{source.config['general.architecture']}."
        keys = ConfigReader(source.config, _where(source), harmless=_HARMLESS_GGUF, prefix=prefix)
        cfg = family.parse_gguf(keys, source)
        keys.finish()
        return cfg, read_gguf_generation(source.config)
    config = _text_config(family, source)
    keys = ConfigReader(config, _where(source), defaults=family.defaults, harmless=_HARMLESS_HF)
    keys.require("is_encoder_decoder", False)
    keys.require("is_decoder", False)
    keys.require("add_cross_attention", False)
    cfg = family.parse_hf(keys)
    keys.finish()
    if cfg.tied and _has_other_head(family, cfg, source):
        cfg = replace(cfg, tied=False)
    return cfg, read_hf_generation(config, source.generation)


def _text_config(family: Family, source: TensorSource) -> Mapping[str, Any]:
    """Returns the text model's part of the configuration, with the end tokens and tying that stand around it."""
    section = family.text_section
    if section is None or section not in source.config:
        return source.config
    outer = ConfigReader(source.config, _where(source), harmless=_HARMLESS_HF | _HARMLESS_MULTIMODAL)
    inner = dict(outer.get(section))
    shared = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
    around = {key: value for key in shared if (value := outer.get(key)) is not None}
    outer.finish()
    return {**inner, **around}


def _has_other_head(family: Family, cfg: ModelConfig, source: TensorSource) -> bool:
    untied = family.mapping(replace(cfg, tied=False), source.kind, source.tensors)
    (head,), (embedding,) = untied["head.w"].names, untied["embed.tokens"].names
    if head not in source.tensors or embedding not in source.tensors:
        return False
    return not np.array_equal(source.read(head), source.read(embedding))


def _where(source: TensorSource) -> str:
    return f"{source.path}: {'config.json' if source.kind == 'hf' else 'metadata'}"
