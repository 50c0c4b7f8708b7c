"""One choice of a request as it grows: its text, its log-probabilities, its times."""

from __future__ import annotations

from itertools import chain

import numpy as np

from jaxinfer.engine.outputs import LOGPROB_FLOOR, CompletionOutput, Delta, Logprob, PositionLogprobs
from jaxinfer.engine.pooled import Pooled
from jaxinfer.engine.protocol import TokenLogprobs
from jaxinfer.schedule.request import Request, RequestSpec
from jaxinfer.text import StopMatcher, StreamDecoder, Tokenizer

NOT_FINITE = "the model's logits were not finite; if its numbers are float16, take a wider format (policy)"


class Choice:
    """Turns the ids that the scheduler commits into text and log-probabilities.

    Args:
      spec: what was asked. tokenizer: decodes. eager: whether text is wanted at every step; else it is decoded
        at the end, unless stop strings need it sooner.
    """

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer, *, eager: bool):
        params = spec.params
        self.spec = spec
        self.request = Request(spec)  # stands in until the scheduler takes the spec
        self.times: list[float] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[PositionLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None for _ in spec.prompt]
        )
        self.pooled = None if spec.pooling is None else Pooled(spec.pooling, len(spec.prompt))
        self.error: str | None = None
        self.matched_stop: str | None = None
        self._tokenizer = tokenizer
        self._cumulative = 0.0
        self._texts: list[str] = []
        self._num_decoded = 0
        self._decoder = self._matcher = None
        if params.detokenize:
            skip = params.skip_special_tokens
            self._decoder = StreamDecoder(tokenizer, spec.prompt, skip_special_tokens=skip)
        if params.stop:
            self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._eager = eager or self._matcher is not None

    def decode(self) -> str:
        """Decodes the ids that are new in the request's output, and cuts ids and text at a stop string.

        Returns:
          The new text. `matched_stop` is set when a stop string ended it.
        """
        ended = self.request.finish_reason
        if ended == "error" and self.error is None:
            self.error = NOT_FINITE
        if self._decoder is None or not (self._eager or ended):
            return ""
        first = self._num_decoded
        tokens = self.request.output[first:]
        self._num_decoded += len(tokens)
        if ended == "stop" and not self.spec.params.include_stop_str_in_output:
            tokens.pop()  # the id that ended it is counted, not shown
        if self._matcher is None:
            text = self._decoder.push(tokens)
        else:
            text = self._push_matched(self._decoder, self._matcher, first, tokens)
        if ended and self.matched_stop is None:
            rest = self._decoder.flush()
            text += rest if self._matcher is None else self._matcher.push(rest).emit + self._matcher.flush()
        self._texts.append(text)
        return text

    def add_logprobs(self, result: TokenLogprobs | None, row: int) -> list[PositionLogprobs] | None:
        """Assembles the entries of the ids that have none yet, from a row of a step's result."""
        if self.logprobs is None:
            return None
        if result is None:
            raise RuntimeError("logprobs were asked for and the step brought none")
        new_ids = self.request.output[len(self.logprobs) :]
        entries = self._entries(result, np.s_[row, : len(new_ids)], new_ids, self.spec.params.logprobs or 0)
        self._cumulative += sum(entry[token].logprob for entry, token in zip(entries, new_ids, strict=True))
        self.logprobs += entries
        return entries

    def add_prompt_logprobs(self, result: TokenLogprobs, start: int) -> None:
        """Assembles the entries of the prompt's ids from position ``start + 1`` on."""
        if self.prompt_logprobs is None:
            return
        ids = self.spec.prompt[start + 1 : start + 1 + len(result.chosen)]
        entries = self._entries(result, np.s_[: len(ids)], ids, self.spec.params.prompt_logprobs or 0)
        self.prompt_logprobs[start + 1 : start + 1 + len(ids)] = entries

    def delta(self, request_id: str, text: str, count: int, logprobs: list[PositionLogprobs] | None) -> Delta:
        """Returns what the last ``count`` ids and ``text`` add to a stream."""
        output = self.request.output
        return Delta(
            request_id,
            self.spec.choice,
            text,
            output[len(output) - count :],
            logprobs,
            self.request.finish_reason,
            self.request.stop_reason,
            self.error,
            0 if self.request.prefix.report is None else self.request.prefix.report.num_cached,
        )

    def output(self) -> CompletionOutput:
        """Returns the choice as it stands."""
        return CompletionOutput(
            self.spec.choice,
            "".join(self._texts),
            list(self.request.output),
            None if self.logprobs is None else self._cumulative,
            None if self.logprobs is None else list(self.logprobs),
            self.request.finish_reason,
            self.request.stop_reason,
            self.error,
        )

    def _push_matched(
        self, decoder: StreamDecoder, matcher: StopMatcher, first: int, tokens: list[int]
    ) -> str:
        """Decodes ids one by one, so that the one that completes a stop string is known."""
        parts = []
        for count, token in enumerate(tokens, first + 1):
            text = decoder.push((token,))
            if count <= self.spec.params.min_tokens:
                parts.append(text)  # a stop string may not end it yet, nor begin here
                continue
            match = matcher.push(text)
            parts.append(match.emit)
            if match.stopped:
                self.matched_stop = match.matched
                del self.request.output[count:]
                break
        return "".join(parts)

    def _entries(self, result: TokenLogprobs, where, ids, num_top: int) -> list[PositionLogprobs]:
        """One dict a position: the id itself, then the ``num_top`` likeliest."""
        columns = (result.chosen, result.ranks, result.top_ids, result.top)
        chosen, ranks, top_ids, top = (column[where].tolist() for column in columns)
        entries = []
        for i, token in enumerate(ids):
            rows = chain(
                ((token, chosen[i], ranks[i]),), zip(top_ids[i], top[i], range(1, num_top + 1), strict=False)
            )
            entry: PositionLogprobs = {}
            for one, value, rank in rows:
                if one not in entry:
                    # NaN fails the comparison too, and must not leave the house.
                    finite = value if value > LOGPROB_FLOOR else LOGPROB_FLOOR
                    entry[one] = Logprob(
                        finite, rank, self._tokenizer.token_bytes(one).decode("utf-8", "replace")
                    )
            entries.append(entry)
        return entries
