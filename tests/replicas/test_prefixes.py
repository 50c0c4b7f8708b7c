"""Which replica a prompt goes to: by what it was sent before, and by who else waits there."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.replicas.prefixes import PrefixMap, text_of

SYSTEM = {"role": "system", "content": "You are a helper. " * 20}


def chat(*contents: str) -> bytes:
    said = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": [SYSTEM, *said], "stream": True}).encode()


def test_a_longer_conversation_begins_as_the_shorter_one():
    short, long = (
        text_of(chat("What is Bella doing?")),
        text_of(chat("What is Bella doing?", "And tomorrow?")),
    )
    assert long.startswith(short)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"3", b"[" * 100_000, b'{"model": "m"}'])
def test_a_body_without_a_prompt_has_no_text(body: bytes):
    assert text_of(body) == ""


def test_a_salt_keeps_equal_prompts_apart():
    texts = [text_of(json.dumps({"prompt": "p" * 200, "cache_salt": salt}).encode()) for salt in "ab"]
    assert PrefixMap[str]()._keys(texts[0])[0] != PrefixMap[str]()._keys(texts[1])[0]  # pyright: ignore


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2, 3], [[1, 2], [3]], "text"])
def test_every_form_of_prompt_has_a_text(prompt: object):
    assert text_of(json.dumps({"prompt": prompt}).encode())


def test_the_longest_beginning_wins():
    prefixes: PrefixMap[str] = PrefixMap(block=4)
    prefixes.note("aaaabbbb", "x")
    prefixes.note("aaaacccc", "y")
    idle = {"x": 0, "y": 0, "z": 0}
    assert prefixes.matches("aaaabbbbdddd") == {"x": 2, "y": 1}
    assert prefixes.order("aaaabbbbdddd", idle, 1) == ["x", "y", "z"]
    assert prefixes.order("aaaacccc", idle, 1)[0] == "y"
    assert prefixes.order("unseen text", idle, 1)[0] == "z"  # who was sent the fewest
    assert prefixes.order("aaa", idle, 1)[0] == "z"  # less than a block


def test_a_middle_counts_only_behind_its_beginning():
    prefixes: PrefixMap[str] = PrefixMap(block=2)
    prefixes.note("aabbcc", "x")
    prefixes.note("aa", "y")
    assert prefixes.matches("aabbcc") == {"x": 3, "y": 1}
    assert prefixes.matches("ddbbcc") == {}


def test_who_is_behind_gives_way():
    prefixes: PrefixMap[str] = PrefixMap(block=2)
    prefixes.note("aabb", "x")
    assert prefixes.order("aabb", {"x": 4, "y": 0}, 4)[0] == "x"
    assert prefixes.order("aabb", {"x": 5, "y": 0}, 4) == ["y", "x"]


def test_who_is_gone_is_forgotten():
    prefixes: PrefixMap[str] = PrefixMap(block=2)
    prefixes.note("aabb", "x")
    prefixes.note("aacc", "y")
    prefixes.keep({"y": 0})
    assert prefixes.matches("aabb") == {"y": 1}
    assert len(prefixes) == 2


def test_nobody_can_be_asked_for():
    assert PrefixMap[str]().order("a", {}, 1) == []


def test_sizes_must_be_at_least_one():
    with pytest.raises(ValueError, match="got 0 and 5, must be at least 1"):
        PrefixMap(block=0, capacity=5)


@given(
    st.lists(st.tuples(st.text("ab", max_size=24), st.sampled_from("xyz")), max_size=40),
    st.text("ab", max_size=24),
)
def test_matches_are_those_of_all_that_was_sent(sent: list[tuple[str, str]], text: str):
    prefixes: PrefixMap[str] = PrefixMap(block=3)
    for one, name in sent:
        prefixes.note(one, name)

    def count(one: str) -> int:
        return next((n for n in range(len(text) // 3, 0, -1) if one.startswith(text[: 3 * n])), 0)

    # A name holds whole blocks, of which several texts may have brought some.
    longest = {
        name: max(count(one[: len(one) // 3 * 3]) for one, to in sent if to == name) for _, name in sent
    }
    assert prefixes.matches(text) == {name: n for name, n in longest.items() if n}


@given(st.lists(st.text("ab", min_size=1, max_size=30), max_size=60))
def test_memory_is_bounded_and_beginnings_stay_longest(texts: list[str]):
    prefixes: PrefixMap[str] = PrefixMap(block=2, capacity=8)
    for text in texts:
        prefixes.note(text, "x")
        assert len(prefixes) <= 8
        assert prefixes.matches(text)["x"] == min(8, len(text) // 2)
