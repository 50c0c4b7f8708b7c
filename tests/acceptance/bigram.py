"""BIGRAM: checkpoints of one layer whose next-token logits are a table that a test chooses.

The layer adds nothing to the stream (its output matrices are zero), the embedding of token i is the unit vector i, and
the final norm makes it ``sqrt(D)`` long: the head holds the table divided by that. So any script and any distribution
go through the public loader and the whole engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.cases import write_checkpoint
from tests.text.vocabularies import ALPHABET, byte_level_json, write_folder

NEVER = -30.0  # the logit of what a table does not name: less than once in 10**10 draws
HEAD_DIM = 8


class Table:
    """Logits ``[V, V]`` of the next token (column) by the last one (row).

    Args:
      vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        self.logits = np.full((vocab_size, vocab_size), NEVER, np.float32)

    def row(self, last: int | Sequence[int], logits: Mapping[int, float]) -> None:
        """Sets what may follow a token, or any of several."""
        for one in [last] if isinstance(last, int) else last:
            self.logits[one, list(logits)] = list(logits.values())

    def chain(self, *ids: int) -> None:
        """Makes each id the one that follows the id before it."""
        for last, following in pairwise(ids):
            self.row(last, {following: 0.0})

    def loop(self, probabilities: Mapping[int, float]) -> None:
        """Makes the ids draw each other for ever, each draw by the same probabilities."""
        self.row(list(probabilities), {i: float(np.log(p)) for i, p in probabilities.items()})


def write_bigram(
    folder: Path, table: Table, generation: Mapping[str, Any] | None = None, **config: Any
) -> Path:
    """Writes a checkpoint in Llama's form.

    Args:
      folder: where to; a tokenizer may be there already. table: the logits.
      generation: generation_config.json, none when None. config: further keys of config.json.
    """
    V = len(table.logits)
    D = -(-V // HEAD_DIM) * HEAD_DIM
    head = np.zeros((V, D), np.float32)
    head[:, :V] = table.logits.T / np.sqrt(D)
    layer = {
        "input_layernorm": np.ones(D),
        "post_attention_layernorm": np.ones(D),
        "self_attn.q_proj": np.eye(2 * HEAD_DIM, D),
        "self_attn.k_proj": np.eye(HEAD_DIM, D),
        "self_attn.v_proj": np.eye(HEAD_DIM, D),
        "self_attn.o_proj": np.zeros((D, 2 * HEAD_DIM)),
        "mlp.gate_proj": np.eye(8, D),
        "mlp.up_proj": np.eye(8, D),
        "mlp.down_proj": np.zeros((D, 8)),
    }
    arrays = {f"model.layers.0.{name}.weight": array for name, array in layer.items()}
    arrays |= {
        "model.embed_tokens.weight": np.eye(V, D),
        "model.norm.weight": np.ones(D),
        "lm_head.weight": head,
    }
    if generation is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps(generation))
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": D,
        "vocab_size": V,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "intermediate_size": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-12,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return write_checkpoint(folder, {k: v.astype(np.float32) for k, v in arrays.items()}, shape | config)


def spell(data: bytes) -> str:
    """Returns bytes as a byte-level vocabulary spells them: GPT-2's table of printable characters."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(other)}
    return "".join(table[byte] for byte in data)


class Words:
    """A byte-level tokenizer with the pieces that a test wants: the 256 bytes, the pieces, the special tokens.

    Args:
      pieces: bytes of tokens beyond single bytes. special: texts of special tokens.
    """

    def __init__(self, pieces: Sequence[bytes] = (), special: Sequence[str] = ("<s>", "</s>")) -> None:
        self._pieces, self._special = [spell(piece) for piece in pieces], list(special)
        self._ids = {text: i for i, text in enumerate([*ALPHABET, *self._pieces, *self._special])}

    def __len__(self) -> int:
        return len(self._ids)

    def __call__(self, *pieces: bytes | str) -> list[int]:
        """Returns the ids of pieces (bytes) and special tokens (texts)."""
        return [self._ids[piece if isinstance(piece, str) else spell(piece)] for piece in pieces]

    def write(self, folder: Path, **config: Any) -> Path:
        """Writes tokenizer.json, and tokenizer_config.json with the given keys."""
        return write_folder(folder, byte_level_json(self._pieces, self._special), **config)
