"""The vocabularies of the two real models against recorded ids.

The prompts' ids and texts are transformers 5.24's, recorded with the smollm pre-tokeniser's digit rule. The licence
text's ids are too, but for one run of 32 spaces: SentencePiece, like Gemma's own model, takes the longest piece first
(31 + 1), transformers' conversion of it takes 16 + 16. That text is not stored: every Python installation has it.
"""

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.text import StreamDecoder, Tokenizer, encode_chat
from jaxinfer.weights.gguf import read_metadata

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Recorded:
    tokenizer: Tokenizer
    facts: dict[str, Any]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    path: Path = request.getfixturevalue(f"{request.param}_gguf")
    facts = json.loads((Path(__file__).parent / "data" / f"{request.param}.json").read_text(encoding="utf-8"))
    return Recorded(Tokenizer.from_gguf(read_metadata(path)), facts)


def test_prompts(recorded: Recorded) -> None:
    assert len(recorded.facts["prompts"]) == 14
    for prompt, ids in recorded.facts["prompts"]:
        assert recorded.tokenizer.encode(prompt) == ids


def test_generated_text_whole_and_streamed(recorded: Recorded) -> None:
    for ids, text in recorded.facts["generated"]:
        assert recorded.tokenizer.decode(ids, skip_special_tokens=False) == text
        decoder = StreamDecoder(
            recorded.tokenizer, recorded.facts["prompts"][0][1], skip_special_tokens=False
        )
        assert "".join([decoder.push([i]) for i in ids]) + decoder.flush() == text


def test_licence_text(recorded: Recorded) -> None:
    facts = recorded.facts["licence"]
    path = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    text = path.read_text(encoding="utf-8")[: facts["characters"]] if path.is_file() else ""
    if hashlib.sha256(text.encode()).hexdigest() != facts["sha256"]:
        pytest.skip("this Python's licence text is another one")
    assert recorded.tokenizer.encode(text) == facts["ids"]
    assert recorded.tokenizer.decode(facts["ids"]) == text


def test_every_token_has_bytes_and_decoding_joins_them(recorded: Recorded) -> None:
    tokenizer = recorded.tokenizer
    ids = range(tokenizer.vocab_size)
    assert all(tokenizer.token_bytes(i) for i in ids)
    sample = list(ids)[:: max(1, tokenizer.vocab_size // 2000)]
    joined = b"".join(tokenizer.token_bytes(i) for i in sample).decode("utf-8", "replace")
    assert tokenizer.decode(sample, skip_special_tokens=False) == joined


def test_smollm2_chat(smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_metadata(smollm2_gguf))
    facts = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text(encoding="utf-8"))
    prompt, ids = next(row for row in facts["prompts"] if "pirate" in row[0])
    messages = [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Say hello in one sentence."},
    ]
    assert encode_chat(tokenizer, messages) == ids
    assert tokenizer.encode(prompt) == ids
    assert tokenizer.eos_ids == (2,)
