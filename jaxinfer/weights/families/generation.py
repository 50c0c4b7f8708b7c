"""What a checkpoint says about generating: where a sequence ends, and its own sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jaxinfer.config import GenerationDefaults

_LOG = logging.getLogger(__name__)

# generation_config's name -> SamplingParams' name.
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# Keys that would change which tokens are drawn and that are not applied; with these values they do nothing.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "top_h": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": (),
}


def read_hf_generation(config: Mapping[str, Any], generation: Mapping[str, Any]) -> GenerationDefaults:
    """Returns the generation defaults of a Hugging Face checkpoint.

    End tokens: ``eos_token_id`` of generation_config.json, a number or a list; of config.json where that file or key
    is absent. Sampling, by vLLM's rule: temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of
    generation_config.json become the defaults of a request, whatever ``do_sample`` says; a request that wants greedy
    asks for temperature 0. Other keys that would change the draw are not applied, and a warning names them.

    Args:
      config: config.json, or the text model's section of it.
      generation: generation_config.json, empty when there is none.
    """

    def first(key: str) -> Any:
        value = generation.get(key)
        return config.get(key) if value is None else value

    dropped = [
        key
        for key, neutral in _NOT_APPLIED.items()
        if generation.get(key) is not None and generation[key] not in neutral
    ]
    if dropped:
        _LOG.warning(
            "generation_config.json: %s not applied; set sampling fields yourself", ", ".join(dropped)
        )
    return GenerationDefaults(
        eos_ids=_ids(first("eos_token_id")),
        bos_id=_first_id(first("bos_token_id")),
        pad_id=_first_id(first("pad_token_id")),
        sampling=tuple(
            (ours, generation[k]) for k, ours in _SAMPLING.items() if generation.get(k) is not None
        ),
    )


def read_gguf_generation(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Returns the generation defaults of a GGUF file: its tokenizer's special ids.

    Args:
      metadata: all of it. End of sequence, of turn and of message (``eos``, ``eot``, ``eom``) all end a sequence.
    """
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(int(i) for i in ids if i is not None)),
        bos_id=_first_id(metadata.get("tokenizer.ggml.bos_token_id")),
        pad_id=_first_id(metadata.get("tokenizer.ggml.padding_token_id")),
    )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) else (int(value),)


def _first_id(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids and ids[0] >= 0 else None
