"""The record that every source of a tokenizer fills in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxinfer.text.backends import Backend


@dataclass(frozen=True)
class Vocabulary:
    """A backend and the facts around it.

    Attributes:
        backend: text to ids and back.
        special_tokens: token strings by role, as templates name them (`bos_token`, `eos_token`, ...).
        eos_ids: ids that end a text; generation_config may name more.
        prefix_ids: put before an encoded text (BOS or nothing).
        suffix_ids: put after an encoded text.
        chat_templates: Jinja sources by name; `default` is the one used unless another is asked for.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    eos_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
