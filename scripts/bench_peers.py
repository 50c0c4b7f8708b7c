"""Runs one engine for `bench_cpu.py`: load a model, then measure on demand, as JSON lines over stdin and stdout.

    python scripts/bench_peers.py llama.cpp

Started by the interpreter that has the engine installed, so nothing but the standard library is imported before it is
known which. A request is one object: ``{"op": "load", "model": ..., "threads": 2, ...}``, then any number of
``{"op": "prefill", "prompt": ids}`` and ``{"op": "decode", "prompts": [ids, ...], "num_tokens": 128}``. Every answer
has ``cpu_seconds`` that the request took and the process's ``peak_bytes`` so far, or ``error``.
"""

# The engines are in environments of their own.
# pyright: reportMissingImports=false
from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

Ids = list[int]


class Peer(Protocol):
    """What an engine has to offer; seconds are wall time, ids are taken greedily and no end token stops them."""

    def load(self, model: str, threads: int, **options: Any) -> dict[str, Any]:
        """Loads, and returns ``versions`` and whatever else is worth knowing."""
        ...

    def prefill(self, prompt: Ids) -> dict[str, Any]:
        """Returns the ``seconds`` from a prompt to its first token, and that in ``tokens``."""
        ...

    def decode(self, prompts: list[Ids], num_tokens: int) -> dict[str, Any]:
        """Returns the ``seconds`` from the first token of all to the last, the ``count`` that came in them, and the
        first token of each in ``tokens``."""
        ...


class Jaxinfer:
    """This repository by its public door; options are LLM's own."""

    def load(self, model: str, threads: int, **options: Any) -> dict[str, Any]:
        """Loads and compiles; XLA takes the cores that the process may run on."""
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        from jaxinfer import LLM, __version__
        from jaxinfer.arrays.precision import Policy
        from jaxinfer.arrays.specs import flatten_specs
        from jaxinfer.model.decoder import param_specs
        from jaxinfer.weights.model import open_model

        opened = open_model(model)
        # Turns repeat their prompts, and each is to be computed.
        self.llm = LLM(opened, **{"enable_prefix_caching": False, **options})
        policy = Policy.parse(options["policy"])
        leaves = [leaf for _, leaf in flatten_specs(param_specs(opened.cfg))]
        return {
            "versions": {"jaxinfer": __version__, "jax": version("jax")},
            "weight_bytes": sum(
                math.prod(leaf.shape) * policy.dtype_of(leaf.role).itemsize for leaf in leaves
            ),
        }

    def prefill(self, prompt: Ids) -> dict[str, Any]:
        """See `Peer`."""
        start = time.perf_counter()
        (output,) = self._generate([prompt], 1)
        return {"seconds": time.perf_counter() - start, "tokens": output.outputs[0].token_ids}

    def decode(self, prompts: list[Ids], num_tokens: int) -> dict[str, Any]:
        """See `Peer`; prompts that do not fit into one step start one after the other."""
        outputs = self._generate(prompts, num_tokens)
        times = [output.metrics.token_times[0] for output in outputs]
        start = max(one[0] for one in times)
        return {
            "seconds": max(one[-1] for one in times) - start,
            "count": sum(moment > start for one in times for moment in one),
            "tokens": [output.outputs[0].token_ids[0] for output in outputs],
        }

    def _generate(self, prompts: list[Ids], num_tokens: int) -> list[Any]:
        from jaxinfer import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return self.llm.generate(prompts, params, use_tqdm=False)


class LlamaCpp:
    """llama.cpp by its C interface: one batch holds the next token of every sequence."""

    def load(self, model: str, threads: int, **options: Any) -> dict[str, Any]:
        """Maps the GGUF file."""
        import llama_cpp

        self.lib = llama_cpp
        # Held here, for the library keeps the pointer.
        self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silence, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise ValueError(f"model: llama.cpp cannot read {model}")
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads, self.context, self.shape = threads, None, (0, 0)
        info = llama_cpp.llama_print_system_info().decode()
        return {"versions": {"llama-cpp-python": llama_cpp.__version__}, "features": info}

    def prefill(self, prompt: Ids) -> dict[str, Any]:
        """See `Peer`."""
        self._open(1, len(prompt) + 1)
        start = time.perf_counter()
        tokens = self._run([prompt], [0])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def decode(self, prompts: list[Ids], num_tokens: int) -> dict[str, Any]:
        """See `Peer`."""
        self._open(len(prompts), max(map(len, prompts)) + num_tokens)
        tokens = first = [self._run([prompt], [0], sequence=i)[0] for i, prompt in enumerate(prompts)]
        start = time.perf_counter()
        for step in range(num_tokens - 1):
            tokens = self._run([[token] for token in tokens], [len(prompt) + step for prompt in prompts])
        count = (num_tokens - 1) * len(prompts)
        return {"seconds": time.perf_counter() - start, "count": count, "tokens": first}

    def _open(self, num_sequences: int, length: int) -> None:
        """Empties the context, or makes one of another shape."""
        lib = self.lib
        if self.shape != (num_sequences, length):
            if self.context:
                lib.llama_free(self.context)
            params = lib.llama_context_default_params()
            params.n_ctx = num_sequences * (-(-length // 256) * 256)  # llama.cpp's step of a sequence's share
            params.n_seq_max = num_sequences
            params.n_threads = params.n_threads_batch = self.threads
            self.context = lib.llama_init_from_model(self.model, params)
            self.shape = num_sequences, length
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)

    def _run(self, pieces: list[Ids], positions: Sequence[int], sequence: int = 0) -> Ids:
        """Runs a piece a sequence, from ``sequence`` on, and returns the likeliest token after each."""
        import numpy as np

        lib = self.lib
        batch = lib.llama_batch_init(sum(map(len, pieces)), 0, 1)
        ends = []
        for number, (piece, position) in enumerate(zip(pieces, positions, strict=True), sequence):
            for i, token in enumerate(piece):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, position + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                batch.logits[at] = i == len(piece) - 1
                batch.n_tokens += 1
            ends.append(batch.n_tokens - 1)
        status = lib.llama_decode(self.context, batch)
        lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = [lib.llama_get_logits_ith(self.context, end) for end in ends]
        return [int(np.ctypeslib.as_array(row, (self.num_vocab,)).argmax()) for row in rows]


class Transformers:
    """transformers by its forward pass and a cache: without `generate`, whose own work costs it a few percent.

    Options: ``dtype``; ``cache``, dynamic or static; ``folder`` with the checkpoint in that dtype, see `prepare`.
    """

    def prepare(self, model: str, folders: dict[str, str]) -> dict[str, Any]:
        """Writes a GGUF file's weights, as transformers expands them, into a folder for each dtype."""
        import torch
        from transformers import AutoModelForCausalLM

        file = Path(model)
        expanded = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
        vars(expanded.config).pop(
            "quantization_config", None
        )  # else it counts as quantised, and is not saved
        plain = AutoModelForCausalLM.from_config(expanded.config, dtype=torch.float32)
        plain.load_state_dict(expanded.state_dict())
        for dtype, folder in folders.items():
            plain.to(getattr(torch, dtype)).save_pretrained(folder)
        return {}

    def load(self, model: str, threads: int, **options: Any) -> dict[str, Any]:
        """Loads the prepared folder."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch, self.cache = torch, options["cache"]
        dtype = getattr(torch, options["dtype"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(options["folder"], dtype=dtype).eval()
        return {"versions": {name: version(name) for name in ("transformers", "torch")}}

    def prefill(self, prompt: Ids) -> dict[str, Any]:
        """See `Peer`."""
        with self.torch.inference_mode():
            start = time.perf_counter()
            token = self._forward(self.torch.tensor([prompt]), self._new_cache(len(prompt) + 1))
            return {"seconds": time.perf_counter() - start, "tokens": token.flatten().tolist()}

    def decode(self, prompts: list[Ids], num_tokens: int) -> dict[str, Any]:
        """See `Peer`; the prompts are equally long."""
        with self.torch.inference_mode():
            cache = self._new_cache(len(prompts[0]) + num_tokens)
            token = first = self._forward(self.torch.tensor(prompts), cache)
            start = time.perf_counter()
            for _ in range(num_tokens - 1):
                token = self._forward(token, cache)
            token.tolist()
            seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "count": (num_tokens - 1) * len(prompts),
            "tokens": first.flatten().tolist(),
        }

    def _new_cache(self, length: int) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.cache == "static":
            return StaticCache(config=self.model.config, max_cache_len=length)
        return DynamicCache(config=self.model.config)

    def _forward(self, ids: Any, cache: Any) -> Any:
        logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)


class OpenVino:
    """OpenVINO GenAI by its continuous batching, 8-bit weights.

    Options: ``folder`` with the model in OpenVINO's form, see `prepare`.
    """

    def prepare(self, source: str, folder: str) -> dict[str, Any]:
        """Writes a checkpoint's weights in 8 bits, as optimum-intel converts them, into a folder."""
        from optimum.intel import OVModelForCausalLM

        model = OVModelForCausalLM.from_pretrained(source, export=True, load_in_8bit=True, compile=False)
        model.save_pretrained(folder)
        return {}

    def load(self, model: str, threads: int, **options: Any) -> dict[str, Any]:
        """Loads the prepared folder."""
        import openvino
        import openvino_genai

        self.openvino, self.genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = False  # each turn measures the same prompts
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["folder"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.num_requests = 0
        return {"versions": {name: version(name) for name in ("openvino-genai", "openvino")}}

    def prefill(self, prompt: Ids) -> dict[str, Any]:
        """See `Peer`."""
        start = time.perf_counter()
        ((token,),) = self._run([prompt], 1)[0]
        return {"seconds": time.perf_counter() - start, "tokens": [token]}

    def decode(self, prompts: list[Ids], num_tokens: int) -> dict[str, Any]:
        """See `Peer`; prompts that do not fit into one step start one after the other."""
        tokens, moments = self._run(prompts, num_tokens)
        start = max(one[0] for one in moments)
        return {
            "seconds": max(one[-1] for one in moments) - start,
            "count": sum(moment > start for one in moments for moment in one),
            "tokens": [one[0] for one in tokens],
        }

    def _run(self, prompts: list[Ids], num_tokens: int) -> tuple[list[Ids], list[list[float]]]:
        """Returns each prompt's new tokens, and when each came."""
        import numpy as np

        config = self.genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        handles = []
        for prompt in prompts:
            ids = self.openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self.pipeline.add_request(self.num_requests, ids, config))
            self.num_requests += 1
        tokens: list[Ids] = [[] for _ in prompts]
        moments: list[list[float]] = [[] for _ in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter()
            for handle, ids, times in zip(handles, tokens, moments, strict=True):
                if handle.can_read():
                    new = [token for output in handle.read().values() for token in output.generated_ids]
                    ids += new
                    times += [now] * len(new)
        return tokens, moments


PEERS: dict[str, type[Peer]] = {
    "jaxinfer": Jaxinfer,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
    "openvino": OpenVino,
}


def peak_bytes() -> int:
    """Returns the most memory that this process held so far, 0 where the kernel does not say."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found.group(1)) * 1024 if found else 0


def main() -> None:
    """Answers requests until stdin ends."""
    peer = PEERS[sys.argv[1]]()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        start = time.process_time()
        try:
            answer = getattr(peer, request.pop("op"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        usage = {"cpu_seconds": time.process_time() - start, "peak_bytes": peak_bytes()}
        print(json.dumps({**answer, **usage}), file=answers, flush=True)


if __name__ == "__main__":
    main()
