"""The Python door: `LLM` as vLLM's users know it, and `AsyncLLM` for asyncio."""

from __future__ import annotations

import difflib
import logging
import math
import random
import sys
import types
import typing
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from jaxinfer.build import RunConfig, Say, build_engine
from jaxinfer.config import GenerationDefaults
from jaxinfer.engine.aio import AsyncEngine
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.handle import Handle
from jaxinfer.engine.intake import Prompt, Prompts, read_prompts
from jaxinfer.engine.outputs import Delta, RequestOutput
from jaxinfer.schedule.request import Pooling
from jaxinfer.schedule.sampling_params import SamplingParams
from jaxinfer.steps.bundle import read_manifest
from jaxinfer.text import Tokenizer, encode_chat
from jaxinfer.text.windows import cut_windows
from jaxinfer.weights.model import Model, open_model

_log = logging.getLogger("jaxinfer")

Conversation = Sequence[Mapping[str, Any]]

# vLLM's engine arguments that mean the same as one of ours.
ALIASES = {"dtype": "policy", "block_size": "page_size"}
# Those that are not served, with the values that ask for nothing, and what to write instead of others.
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "data_parallel_size": ((1,), ""),
    "enable_chunked_prefill": ((True, None), "prompts are always cut to what a step holds"),
    "enforce_eager": ((False,), "every step is compiled"),
    "gpu_memory_utilization": ((), "give the cache's share of the device as kv_memory='50%'"),
    "kv_cache_dtype": (("auto",), "give it as policy='compute=bfloat16,kv=float16'"),
    "pipeline_parallel_size": ((1,), ""),
    "quantization": ((None,), "give the number formats as policy"),
    "revision": ((None,), "give it in the name: hf:org/name@revision"),
    "tensor_parallel_size": ((1,), ""),
    "tokenizer": ((None,), "the model's own is taken"),
    "trust_remote_code": ((False,), "no code of a checkpoint is ever run"),
}


def read_run_config(given: Mapping[str, Any]) -> RunConfig:
    """Returns the run that keyword arguments describe, by our names or vLLM's; the rest is its bundle's, if it has one.

    Raises:
      ValueError: a name that is unknown, not served or given twice, or a value of the wrong type.
    """
    hints = typing.get_type_hints(RunConfig)
    values: dict[str, Any] = {}
    for name, value in given.items():
        ours = ALIASES.get(name, name)
        if ours in values:
            raise ValueError(f"{name}: the same as {ours}, which is given too; give one of them")
        if ours in hints:
            values[ours] = _typed(name, value, hints[ours])
        elif name not in NEUTRAL:
            known = [*hints, *ALIASES]
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"no setting {name!r}; {hint}")
        elif not any(value is v or value == v for v in NEUTRAL[name][0]):
            allowed, instead = NEUTRAL[name]
            only = f"only {' or '.join(map(repr, allowed))} is served" if allowed else "it is not served"
            raise ValueError(f"{name}: got {value!r}, but {only}{'; ' if instead else ''}{instead}")
    if values.get("bundle"):
        made_for = read_manifest(Path(values["bundle"]).expanduser())["run"]
        values = {name: _typed(name, value, hints[name]) for name, value in made_for.items()} | values
    return RunConfig(**values)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Returns a value that has the type of its field, lists as tuples."""
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{name}: got {value!r}, must be a list")
        return tuple(tuple(item) if isinstance(item, list | tuple) else item for item in value)
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{name}: got {value!r}, must be {names}")
    return value


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text.

    Attributes:
      token_ids: the text's, the tokenizer's own BOS included.
      logprobs: natural logarithm of each token's probability after those before it in its window, None for the
        first token of a window.
    """

    token_ids: list[int]
    logprobs: list[float | None]

    @property
    def num_scored(self) -> int:
        """Tokens that have a log-probability."""
        return sum(value is not None for value in self.logprobs)

    @property
    def log_likelihood(self) -> float:
        """Their sum, in nats."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-probability; NaN when nothing was scored."""
        return -self.log_likelihood / self.num_scored if self.num_scored else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(nats_per_token)``."""
        return math.exp(self.nats_per_token)


class _Door:
    """What the two doors share: an engine, a tokenizer, and defaults for what a caller left open."""

    def __init__(
        self,
        model: str | Model | None = None,
        *,
        say: Say | None = None,
        seed: int | None = None,
        **settings: Any,
    ):
        self._say: Say = say or _log.info
        opened = model if isinstance(model, Model) else None
        name = opened.name if opened else model
        config = read_run_config(settings if name is None else {**settings, "model": name})
        opened = opened or open_model(config.model)
        self._open(build_engine(config, opened, self._say), opened.defaults, seed)

    @classmethod
    def from_engine(
        cls, engine: Engine, defaults: GenerationDefaults | None = None, say: Say | None = None
    ) -> Self:
        """Returns a door to an engine that was built elsewhere."""
        door = cls.__new__(cls)
        door._say = say or _log.info
        door._open(engine, defaults or GenerationDefaults(), None)
        return door

    def _open(self, engine: Engine, defaults: GenerationDefaults, seed: int | None) -> None:
        self._engine: Engine | None = engine
        self._defaults = defaults.sampling
        self._seeds = None if seed is None else random.Random(seed)
        self._told = False

    @property
    def engine(self) -> Engine:
        """What runs the requests."""
        if self._engine is None:
            raise RuntimeError("this model was closed; open it anew")
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.scheduler.config.max_len

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer."""
        return self.engine.tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text as a prompt has them, with the BOS that the model wants."""
        return self.engine.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, special tokens left out."""
        return self.engine.tokenizer.decode(ids)

    def fill_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """Returns settings with the model's own defaults, then vLLM's, in what the caller left open."""
        given = SamplingParams() if params is None else params
        if not isinstance(given, SamplingParams):
            raise ValueError(
                f"sampling_params: got {type(given).__name__}, must be SamplingParams, or a list of them; "
                "SamplingParams.from_dict reads a dict"
            )
        filled = given.with_defaults(self._defaults)
        applied = [name for name, _ in self._defaults if getattr(filled, name) != getattr(given, name)]
        if applied and not self._told:
            self._told = True
            named = ", ".join(f"{name}={getattr(filled, name)}" for name in applied)
            self._say(f"sampling defaults of the model, where a request gives none: {named}")
        if filled.seed is None and self._seeds is not None:
            filled = filled.replace(seed=self._seeds.getrandbits(63))
        return filled

    def _each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if isinstance(params, Sequence):
            if len(params) != count:
                raise ValueError(
                    f"sampling_params: got {len(params)} for {count} prompts, give one or as many"
                )
            return [self.fill_params(one) for one in params]
        return [self.fill_params(params) for _ in range(count)]

    def _one(self, prompt: Prompts) -> Prompt:
        prompts = read_prompts(prompt)
        if len(prompts) != 1:
            raise ValueError(f"prompt: got {len(prompts)} prompts, give one")
        return prompts[0]


class LLM(_Door):
    """A model that is ready to generate.

    Args:
      model: registered name, local path, or ``hf:org/name[@revision]``; the default model when None; or what
        `open_model` returned.
      say: is told what was chosen and compiled, a line at a time; the logger ``jaxinfer`` when None.
      seed: makes requests without a seed of their own reproducible, in the order in which they come.
      settings: fields of `RunConfig`, such as ``policy`` and ``max_num_seqs``; vLLM's ``dtype`` and
        ``block_size`` are understood.

    Raises:
      ValueError, FetchError: what is wrong with a setting or the checkpoint, named.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of parameters and cache; the object is of no use after it."""
        self._engine = None

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts together.

        Args:
          prompts: see `read_prompts`. sampling_params: one for all, or one each.
          use_tqdm: show a progress bar, on a terminal.

        Returns:
          One result a prompt, in their order.

        Raises:
          ValueError: a request that can never run; none has run then.
        """
        listed = read_prompts(prompts)
        params = self._each(sampling_params, len(listed))
        hidden = not (use_tqdm and sys.stderr.isatty())
        with tqdm(total=len(listed), desc="generating", unit="prompt", disable=hidden, leave=False) as bar:

            def count(_: Handle) -> None:
                bar.update()

            return self.engine.generate(listed, params, on_finish=count)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation or a list of them, by the model's chat template.

        Args:
          messages: role and content each. sampling_params, use_tqdm: see `generate`.
          tools, add_generation_prompt, chat_template: see `encode_chat`.
          chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            encode_chat(
                self.engine.tokenizer,
                typing.cast(Conversation, conversation),
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompts, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Completes one prompt and yields what every step adds; leaving early ends the request.

        It is checked at once, and runs from the first delta that is asked for.
        """
        handle = self.engine.prepare(self._one(prompt), self.fill_params(sampling_params), stream=True)

        def run() -> Iterator[Delta]:
            self.engine.enqueue(handle)
            yield from self.engine.stream(handle)

        return run()

    def embed(
        self, prompts: Prompts, *, pooling: Pooling = "last", normalize: bool = True
    ) -> list[list[float]]:
        """Returns a vector a prompt, made of the model's final normed stream.

        Args:
          prompts: see `read_prompts`. pooling: the state at the ``last`` token, or the ``mean`` over the prompt.
          normalize: scale each to length 1.

        Raises:
          ValueError: a prompt that can never run; none has run then.
        """
        handles = [self.engine.prepare(prompt, pooling=pooling) for prompt in read_prompts(prompts)]
        self.engine.run(handles)
        return [handle.embedding(normalize=normalize) for handle in handles]

    def score(self, text: str | Sequence[int]) -> Score:
        """Returns the log-probability of every token of a text, or of token ids as they are.

        A text longer than the context is cut into windows that do not overlap, each as long as the context allows.
        Where the ids begin with BOS, every window does, and every other token is scored; else the first token of a
        window has nothing before it and is not.
        """
        ids = self.encode(text) if isinstance(text, str) else list(text)
        bos = ids[:1] if ids[:1] == [self.engine.tokenizer.bos_id] else []
        length = self.max_model_len - 1 - len(bos)  # a request makes a token, and that needs a place
        if length < 1:
            raise ValueError(
                f"max_model_len: got {self.max_model_len}, scoring needs at least {2 + len(bos)}: a token, the one "
                "that a request makes, and BOS where the text has it"
            )
        windows = cut_windows(ids, length, self.engine.tokenizer.bos_id)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        logprobs: list[float | None] = [None] * len(bos)
        for window, output in zip(windows, self.engine.generate(windows, params), strict=True):
            entries = output.prompt_logprobs or [None] * len(window)
            values = [None if e is None else e[t].logprob for t, e in zip(window, entries, strict=True)]
            logprobs += values[len(bos) :]
        return Score(ids, logprobs)


class AsyncLLM(_Door):
    """A model for asyncio: any number of requests at once, from any task; the arguments are those of `LLM`.

    An async context manager; its loop runs in a thread of its own until `close`.
    """

    def _open(self, engine: Engine, defaults: GenerationDefaults, seed: int | None) -> None:
        super()._open(engine, defaults, seed)
        self._async_engine = AsyncEngine(engine)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs, and the thread."""
        self._async_engine.close()

    async def generate(self, prompt: Prompts, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Completes one prompt; being cancelled ends the request."""
        return await self._async_engine.generate(self._one(prompt), self.fill_params(sampling_params))

    async def embed(
        self, prompt: Prompts, *, pooling: Pooling = "last", normalize: bool = True
    ) -> list[float]:
        """Returns the vector of one prompt, see `LLM.embed`; being cancelled ends the request."""
        vector, _ = await self._async_engine.embed(self._one(prompt), pooling, normalize=normalize)
        return vector

    def stream(self, prompt: Prompts, sampling_params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Completes one prompt and yields what every step adds: ``async for delta in llm.stream(prompt)``."""
        return self._async_engine.stream(self._one(prompt), self.fill_params(sampling_params))
