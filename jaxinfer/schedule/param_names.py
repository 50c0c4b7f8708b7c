"""Names of sampling fields as users of vLLM and transformers spell them, and what is said to those not served."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.schedule.param_checks import SamplingParamsError

# GenerationConfig's names for our fields; `eos_token_id` is apart, for it replaces the model's own.
ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
# Names that users of vLLM and transformers know and that are not served, with the value that asks for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "assistant_early_exit": (None,),
    "begin_suppress_tokens": (None,),
    "best_of": (None, 1),
    "constraints": (None,),
    "diversity_penalty": (None, 0),
    "dola_layers": (None,),
    "early_stopping": (None, False),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "extra_args": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "guided_decoding": (None,),
    "length_penalty": (None, 1),
    "logits_processors": (None,),
    "max_length": (None,),
    "max_time": (None,),
    "min_length": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_logits": (None, False),
    "output_scores": (None, False),
    "penalty_alpha": (None, 0),
    "prompt_lookup_num_tokens": (None,),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False),
    "sequence_bias": (None,),
    "structured_outputs": (None,),
    "suppress_tokens": (None,),
    "token_healing": (None, False),
    "top_h": (None,),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "watermarking_config": (None,),
}
# These say nothing about how tokens are chosen, whatever their value.
HARMLESS = ("_from_model_config", "bos_token_id", "pad_token_id", "transformers_version", "use_cache")


def translate(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns values under our names; None means not given, except for max_tokens.

    Args:
      given: values by any spelling. known: our names.

    Raises:
      SamplingParamsError: a name that is unknown, not served, or given under two spellings.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "eos_token_id":
            # It replaces the model's own end tokens, as it does in transformers.
            ids = [value] if isinstance(value, int) else value
            found = {} if value is None else {"stop_token_ids": ids, "ignore_eos": True}
        elif name in HARMLESS or any(
            value is v or (v == value and v is not None) for v in NEUTRAL.get(name, ())
        ):
            found = {}
        elif name in known or name in ALIASES:
            found = {} if value is None and name != "max_tokens" else {ALIASES.get(name, name): value}
        else:
            raise refuse_name(name, value, known)
        if twice := found.keys() & values.keys():
            raise SamplingParamsError(name, value, f"one spelling of {', '.join(sorted(twice))}, not two")
        values |= found
    return values


def refuse_name(name: str, value: object, known: Collection[str]) -> SamplingParamsError:
    """Returns the error for a name that is not one of ours, with what to write instead."""
    if name in NEUTRAL:
        neutral = " or ".join(repr(v) for v in NEUTRAL[name])
        return SamplingParamsError(name, value, f"{neutral}, for anything else is not supported")
    if name in ALIASES or name in HARMLESS or name == "eos_token_id":
        allowed = "only in SamplingParams.from_dict, which knows GenerationConfig's names"
        ours = {"eos_token_id": "stop_token_ids"}.get(name, ALIASES.get(name))
        return SamplingParamsError(name, value, allowed + (f"; here it is {ours}" if ours else ""))
    names = [*known, *ALIASES, "eos_token_id"]
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(known))}"
    return SamplingParamsError(name, value, f"no field of this name; {hint}")
