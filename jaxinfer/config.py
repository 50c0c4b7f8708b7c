"""What a model is, as plain records: no jax, no checkpoint names.

A family (``weights/families``) reads a checkpoint's configuration into a `ModelConfig`; the device tower reads
nothing else. Letters are those of the house: D model width, N query heads, K kv heads, H head dim, F ffn width,
V vocabulary, L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
QKNorm = Literal["none", "head", "full"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    Attributes:
      theta: base of the geometric frequencies.
      kind: how frequencies are stretched beyond the trained length.
      rotary_dim: leading numbers of a head that rotate (even, at most H); the rest passes through.
      factor: stretch of the trained length, at least 1 for every kind but ``default``.
      original_max_len: trained length in tokens before stretching (yarn, llama3, longrope, dynamic).
      attention_factor: multiplies cos and sin; None computes the kind's own default.
      extra: numbers that only one kind reads, by the configuration's own key, e.g.
        ``(("low_freq_factor", 1.0), ("high_freq_factor", 4.0))``; lists are tuples. ``freq_factors`` divide the
        frequencies of any kind (GGUF keeps Llama 3's stretching so).
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_len: int | None = None
    attention_factor: float | None = None
    extra: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the number that ``extra`` holds for ``key``, or ``default``."""
        return dict(self.extra).get(key, default)


@dataclass(frozen=True)
class AttentionConfig:
    """Heads and what is done to their scores.

    Attributes:
      num_heads: N. num_kv_heads: K (divides N). head_dim: H, read from the checkpoint, never derived when given.
      scale: multiplies q.k, e.g. ``H ** -0.5``.
      softcap: ``cap * tanh(score / cap)`` when set.
      qkv_bias, out_bias: whether projections add a bias.
      qk_norm: ``head`` normalises each head over H (Qwen3, Gemma 3), ``full`` all heads together (OLMo 2).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm = "none"


@dataclass(frozen=True)
class MlpConfig:
    """The feed-forward block: gated (three matrices) or not (two), dense or a mixture of experts.

    Attributes:
      ffn_dim: F of the dense block. gated: ``down(act(gate(x)) * up(x))`` if set, else ``down(act(up(x)))``.
      num_experts: E, 0 when dense. experts_per_token: experts each token visits. expert_dim: F of one expert.
      normalize_router: whether the chosen experts' probabilities are scaled to sum to 1.
    """

    ffn_dim: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    normalize_router: bool = True


@dataclass(frozen=True)
class NormConfig:
    """Where and how a layer normalises.

    Attributes:
      kind: ``rms`` (scale only) or ``layer`` (mean, variance, scale and bias).
      eps: added to the variance. pre: before attention and ffn. post: after them, before the residual sum
      (Gemma 2 and 3 do both, OLMo 2 only ``post``). Weights are stored so that they multiply as they are
      (Gemma's ``1 + w`` is folded in when a checkpoint is read).
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    pre: bool = True
    post: bool = False


@dataclass(frozen=True)
class LayerKind:
    """What sets one layer apart from its neighbours.

    Attributes:
      window: keys a query sees, itself included (row i sees ``min(i + 1, window)``); None sees all.
      rope: index into `ModelConfig.ropes`; None leaves positions out (NoPE layers of SmolLM3).
      moe: whether the feed-forward block is the mixture.
    """

    window: int | None = None
    rope: int | None = 0
    moe: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoder, whole.

    Attributes:
      family: the family that read it, e.g. ``llama``.
      vocab_size: V, rows of the embedding (ids at or above it cannot be sampled).
      d_model: D. max_len: the longest context in tokens that the model was made for.
      layers: one `LayerKind` a layer. ropes: the rotary tables that layers point into.
      tied: the head is the embedding, transposed. learned_positions: GPT-2's position table is added.
      embed_scale: multiplies embeddings (Gemma: sqrt(D)). final_softcap: caps logits.
    """

    family: str
    vocab_size: int
    d_model: int
    max_len: int
    layers: tuple[LayerKind, ...]
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig = field(default_factory=NormConfig)
    ropes: tuple[RopeConfig, ...] = ()
    tied: bool = False
    learned_positions: bool = False
    embed_scale: float = 1.0
    final_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.layers)


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint says about generating: end tokens and default sampling.

    Attributes:
      eos_ids: every id that ends a sequence (generation_config first, then config, then the tokenizer).
      bos_id, pad_id: None when the checkpoint names none.
      sampling: the checkpoint's own defaults under `SamplingParams` names, e.g. ``(("temperature", 0.6),)``.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    sampling: tuple[tuple[str, float | int | bool], ...] = ()
