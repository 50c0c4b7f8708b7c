"""An engine in this process as a client of the load generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.load import MakeTokens, Shot, make_ids
from jaxinfer.bench.results import Clock, RequestFailed, Result

if TYPE_CHECKING:
    from jaxinfer.llm import AsyncLLM
    from jaxinfer.schedule.sampling_params import SamplingParams

_FIRST_ID, _MOST_IDS = 1000, 32_000  # as of endpoints: the same seed gives the same prompts


class InProcess:
    """Sends requests to an `AsyncLLM`.

    Args:
      llm: who answers. params: of every request but for ``max_tokens``. clock: seconds.
    """

    def __init__(self, llm: AsyncLLM, params: SamplingParams, clock: Clock) -> None:
        self._llm, self._params, self._clock = llm, params, clock

    @property
    def make_tokens(self) -> MakeTokens:
        """Ids of the model that are not special."""
        num_ids = self._llm.engine.vocab_size
        special = self._llm.get_tokenizer().special_ids
        first = _FIRST_ID if num_ids > 2 * _FIRST_ID else 0
        return make_ids([i for i in range(first, min(num_ids, _MOST_IDS)) if i not in special])

    async def send(self, shot: Shot, result: Result) -> None:
        """Sends one request and reads its deltas; see `Client`."""
        params = self._params.replace(max_tokens=shot.max_tokens)
        prompt: Any = shot.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], Mapping):
            from jaxinfer.text import encode_chat

            prompt = encode_chat(self._llm.get_tokenizer(), prompt)
        result.sent, result.counted = self._clock(), "ids"
        result.prompt_tokens = shot.num_prompt or len(
            self._llm.encode(prompt) if isinstance(prompt, str) else prompt
        )
        try:
            async for delta in self._llm.stream(prompt, params):
                result.times += [self._clock()] * len(delta.token_ids)
                result.finish_reason = delta.finish_reason or result.finish_reason
                result.cached_tokens = max(
                    result.cached_tokens, getattr(delta, "num_cached_tokens", None) or 0
                )
                if delta.error:
                    raise RequestFailed("finish_reason error", delta.error)
        except ValueError as error:
            raise RequestFailed(f"refused: {type(error).__name__}", str(error)) from None
        except RuntimeError as error:  # EngineError: the loop is dead, or drains
            raise RequestFailed(type(error).__name__, str(error)) from None
        result.end = self._clock()
        result.output_tokens = len(result.times)
        if result.finish_reason not in ("stop", "length"):
            raise RequestFailed(f"finish_reason {result.finish_reason}", "")
