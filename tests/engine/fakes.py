"""A runner that follows scripts, and a tokenizer with a table of pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.intake import Check
from jaxinfer.engine.protocol import StepResult, TokenLogprobs
from jaxinfer.schedule.pages import PagePool
from jaxinfer.schedule.plan import Admission, Plan
from jaxinfer.schedule.prefix import PrefixCache
from jaxinfer.schedule.sampling_params import DRAWS
from jaxinfer.schedule.scheduler import Scheduler, SchedulerConfig
from jaxinfer.text import Tokenizer

EOS = 3
VOCAB = 1000
TABLE = {EOS: b"</s>", 9: b""} | {token: bytes([token]) for token in range(32, 127)}


class TableTokenizer(Tokenizer):
    """One piece a token; ids that the table lacks are written as ``<id>``, id 666 cannot be decoded."""

    def __init__(
        self, table: Mapping[int, bytes] | None = None, *, bos: int | None = None, strips_space: bool = False
    ):
        self._table = TABLE | dict(table or {})
        self._bos = bos
        self._strips_space = strips_space

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        prefix = [] if self._bos is None or not add_special_tokens else [self._bos]
        return prefix + list(text.encode("ascii"))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == 666:
            raise KeyError("no such piece")
        return self._table.get(token_id, f"<{token_id}>".encode())

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    @property
    def strips_space(self) -> bool:
        return self._strips_space


class ScriptRunner:
    """Answers the token at output index i of a request with ``script(request id, choice)[i]`` (the last repeats).

    Log-probability of token t is -t / 10, its rank t; the likeliest are tokens 0, 1, 2, ... at -0, -0.1, ...
    """

    def __init__(self, script: Callable[[str, int], Sequence[int]]):
        self.script = script
        self.slots: dict[int, Admission] = {}
        self.admitted: list[Admission] = []
        self.events: list[tuple[str, int]] = []
        self.pending: deque[int] = deque()
        self.fails: Callable[[Plan], bool] = lambda plan: False
        self.chosen: Callable[[int], float] = lambda token: -token / 10

    def dispatch(self, plan: Plan) -> tuple[Plan, StepResult]:
        self.events.append(("dispatch", plan.step))
        self.pending.append(plan.step)
        self.slots |= {admission.slot: admission for admission in plan.admitted}
        self.admitted += plan.admitted
        ends = [(row.slot, row.position + 1) for row in plan.decode]
        ends += [(piece.slot, piece.total) for piece in plan.prefill if piece.is_last]
        tokens = [[self._token(slot, end + i) for i in range(plan.num_decode_steps)] for slot, end in ends]
        admissions = [self.slots[slot] for slot, _ in ends]
        asks = any(admission.params.logprobs is not None for admission in admissions)
        return plan, StepResult(
            np.asarray(tokens, np.int32).reshape(len(ends), plan.num_decode_steps),
            self._logprobs(np.asarray(tokens)) if asks else None,
            tuple(self._prompt_logprobs(piece) for piece in plan.prefill),
        )

    def collect(self, pending: tuple[Plan, StepResult]) -> StepResult:
        plan, result = pending
        self.events.append(("collect", plan.step))
        assert self.pending.popleft() == plan.step
        if self.fails(plan):
            raise RuntimeError("the device is gone")
        return result

    def _token(self, slot: int, end: int) -> int:
        admission = self.slots[slot]
        script = self.script(admission.request_id.split("/")[0], admission.choice)
        return script[min(end - admission.prompt_len, len(script) - 1)]

    def _logprobs(self, tokens: np.ndarray) -> TokenLogprobs:
        top_ids = np.broadcast_to(np.arange(4), (*tokens.shape, 4))
        chosen = np.vectorize(self.chosen, otypes=[np.float32])(tokens)
        return TokenLogprobs(chosen, tokens, top_ids, (-top_ids / 10).astype(np.float32))

    def _prompt_logprobs(self, piece) -> TokenLogprobs | None:
        if self.slots[piece.slot].params.prompt_logprobs is None:
            return None
        return self._logprobs(np.asarray([*piece.tokens[1:], piece.next_token]))


class Clock:
    """Counts its own readings."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_engine(
    script: Callable[[str, int], Sequence[int]] | Sequence[int],
    tokenizer: Tokenizer | None = None,
    *,
    num_pages: int = 256,
    eos_ids: Sequence[int] = (EOS,),
    draws: Sequence[str] = DRAWS,
    check: Check | None = None,
    prefix_caching: bool = False,
    **limits: Any,
) -> tuple[Engine, ScriptRunner]:
    """An engine over a script, one for all requests or one by request id and choice."""
    runner = ScriptRunner(script if callable(script) else lambda *_: script)
    config: dict[str, Any] = {"max_num_seqs": 8, "max_len": 1024, "max_num_batched_tokens": 256} | limits
    pool = PagePool(num_pages, 16)
    scheduler = Scheduler(SchedulerConfig(**config), pool, PrefixCache(pool, enabled=prefix_caching))
    engine = Engine(
        scheduler,
        runner,
        tokenizer or TableTokenizer(),
        vocab_size=VOCAB,
        eos_ids=eos_ids,
        draws=draws,
        check=check,
        clock=Clock(),
    )
    return engine, runner
