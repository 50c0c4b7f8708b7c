"""Everything that a run chooses, as one record: no jax."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from jaxinfer.schedule.policies import POLICIES
from jaxinfer.schedule.sampling_params import DRAWS
from jaxinfer.weights.fetch import DEFAULT_MODEL


@dataclass(frozen=True)
class RunConfig:
    """Everything a run chooses; names follow vLLM where it has them.

    Attributes:
      model: registered name, local path, or ``hf:org/name[@revision]``.
      policy: number formats (`Policy.parse`), or ``auto``: bfloat16 where the device multiplies it, else float32.
      max_model_len: longest sequence in tokens; None takes the model's, cut to what the cache holds.
      max_num_seqs: R, rows that run at once.
      max_num_batched_tokens: tokens of one step.
      page_size: Z, tokens a KV page.
      kv_memory: what the cache may take: ``512MiB``, ``25%`` of the device, ``1000 pages``, or ``auto``.
      mixed_prefill_tokens: tokens of prompts in a step that decodes too, which bounds how long a prompt holds up the
        streams; half of them where no others wait; 0 for no limit but the step's, None chooses by backend.
      num_decode_steps: decode steps without return to the host, taken when nothing waits for prefill.
      scheduling_policy: ``priority`` (lower first, then first come), ``fcfs``, ``lpm`` (longest cached prefix first) or
        ``ferry`` (a batch leaves every ``window_ms``, or when it is full, and runs to its end).
      ageing_s: seconds of waiting that weigh as much as a level of priority. window_ms: milliseconds between ferries.
      max_num_waiting: sequences that may wait for a row, None for any number; who comes after is refused for now.
      enable_prefix_caching: whether requests that begin alike share the pages of their beginning.
      host_cache_bytes: memory of the host for pages that the device has no room for, such as ``1GiB``; 0 keeps none.
      preemption_mode: what becomes of a row that gives way: ``recompute``, ``swap`` (its pages go to the host), or
        ``auto``: the cheaper.
      mesh: devices that share the work, such as ``tensor=4,data=2`` (`parse_mesh`); "" for one.
      attention: what attends to pages: ``native`` (llvmlite and an x86 processor), ``tpu`` or ``gpu`` (Pallas;
        ``tpu-interpret`` and ``gpu-interpret`` anywhere, slowly), ``blocked`` (plain XLA), ``reference`` (the oracle),
        or ``auto``.
      matmul: what multiplies rows by weights: ``xla``, ``native`` (llvmlite and an x86 processor: int8 rows by codes,
        16-bit weights), ``tpu`` or ``gpu`` (Pallas: rows of 16 bits by 4 bits in groups), or ``auto``.
      stack_size: layers a scan, 0 chooses by backend.
      prefill_buckets: ``(rows, tokens a row)`` shapes; empty chooses from ``max_num_batched_tokens``.
      draws: what requests may ask for: ``greedy`` (the likeliest token, nothing else), ``sample`` (anything),
        ``score`` (prompt_logprobs), each of which takes a second to compile, and ``embed`` (pooling), which is cheap.
      compile_cache: keep executables between runs: in jaxinfer's cache folder, in a folder of this name, or False.
      bundle: folder of executables that `jaxinfer compile --bundle` wrote: all are loaded from there and nothing is
        compiled, or the run is refused; "" for none.
    """

    model: str = DEFAULT_MODEL
    policy: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    page_size: int = 16
    kv_memory: str = "auto"
    mixed_prefill_tokens: int | None = None
    num_decode_steps: int = 1
    scheduling_policy: str = "priority"
    ageing_s: float = 60.0
    window_ms: float = 50.0
    max_num_waiting: int | None = None
    enable_prefix_caching: bool = True
    host_cache_bytes: str | int = 0
    preemption_mode: str = "auto"
    mesh: str = ""
    attention: str = "auto"
    matmul: str = "auto"
    stack_size: int = 0
    prefill_buckets: tuple[tuple[int, int], ...] = ()
    draws: tuple[str, ...] = DRAWS
    compile_cache: bool | str = True
    bundle: str = ""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "num_decode_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: got {value!r}, must be a whole number of at least 1")
        if self.max_num_seqs > 1 and self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, must exceed max_num_seqs = "
                f"{self.max_num_seqs}: a step full of decode rows would leave nothing for prompts"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len: got {self.max_model_len}, must be at least 2 (a token of prompt and one of output), "
                "or None for the model's own"
            )
        for name in ("mixed_prefill_tokens", "max_num_waiting"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: got {value}, must be at least 0, or None")
        if self.scheduling_policy not in POLICIES:
            raise ValueError(
                f"scheduling_policy: got {self.scheduling_policy!r}, must be one of {', '.join(POLICIES)}"
            )
        if not (0 < self.ageing_s < math.inf and 0 <= self.window_ms < math.inf):
            raise ValueError(
                f"ageing_s and window_ms: got {self.ageing_s} and {self.window_ms}, must be finite, above 0 "
                "and at least 0"
            )
        if self.preemption_mode not in ("auto", "recompute", "swap"):
            raise ValueError(
                f"preemption_mode: got {self.preemption_mode!r}, must be auto, recompute or swap"
            )
        if self.stack_size < 0:
            raise ValueError(
                f"stack_size: got {self.stack_size}, must be 0 (choose), 1 (unroll) or layers a scan"
            )
        for shape in self.prefill_buckets:
            if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(n, int) for n in shape):
                raise ValueError(f"prefill_buckets: got {shape!r}, must be pairs of rows and tokens")
            if min(shape) < 1:
                raise ValueError(f"prefill_buckets: got {shape}, rows and tokens must be at least 1")
        if not set(self.draws) <= set(DRAWS) or set(self.draws).isdisjoint(("greedy", "sample")):
            raise ValueError(
                f"draws: got {self.draws}, must be of {', '.join(DRAWS)}, with greedy or sample among them"
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Returns the names of all choices."""
        return tuple(f.name for f in fields(cls))
