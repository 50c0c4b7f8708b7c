"""What is drawn, and what is refused."""

from __future__ import annotations

import random
import re
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from jaxinfer.bench.load import Arrivals, Lengths, Load, Prefixes, Shot, make_ids, make_words
from jaxinfer.bench.trace import has_arrivals, read_trace

IDS = make_ids(range(1000, 2000))


def draw_lengths(text: str | int, count: int = 4000) -> list[int]:
    rng = random.Random(1)
    lengths = Lengths.parse("input_len", text)
    return [lengths.draw(rng) for _ in range(count)]


def test_lengths_follow_their_distribution():
    assert set(draw_lengths(7)) == set(draw_lengths("7")) == {7}
    uniform = draw_lengths("8:256")
    assert (min(uniform), max(uniform)) == (8, 256)
    assert statistics.fmean(uniform) == pytest.approx(132, rel=0.05)
    lognormal = draw_lengths("lognormal:100:0.5")
    assert statistics.median(lognormal) == pytest.approx(100, rel=0.05)
    assert statistics.fmean(lognormal) == pytest.approx(100 * 2.718 ** (0.5**2 / 2), rel=0.05)
    assert max(draw_lengths("lognormal:100:0.5:120")) == 120
    assert min(draw_lengths("lognormal:1:3")) == 1


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "8:", "9:8", "0:8", "1:2:3", "lognormal:100", "lognormal:0:1", "lognormal:9:-1", "x"],
)
def test_wrong_lengths_say_what_works(text: str):
    with pytest.raises(ValueError, match=r"input_len: got .*LEAST:MOST"):
        Lengths.parse("input_len", text)


def test_arrivals_follow_their_process():
    rng = random.Random(1)
    times = [time or 0.0 for time in Arrivals.parse("a", "poisson:20").draw(rng, 4000)]
    gaps = [late - soon for soon, late in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)  # an exponential's mean is its deviation
    assert min(gaps) > 0
    assert Arrivals.parse("a", "fixed:4").draw(rng, 3) == [0.0, 0.25, 0.5]
    assert Arrivals.parse("a", "all").draw(rng, 3) == [0.0, 0.0, 0.0]
    assert Arrivals.parse("a", "closed:2").draw(rng, 3) == [None, None, None]


@pytest.mark.parametrize(
    "text", ["", "closed", "closed:0", "closed:1.5", "poisson:0", "fixed:inf", "all:3", "burst"]
)
def test_wrong_arrivals_say_what_works(text: str):
    with pytest.raises(ValueError, match=r"arrivals: got .*closed:16"):
        Arrivals.parse("arrivals", text)


def make_load(seed: int = 0, prefixes: Prefixes | None = None, count: int = 20) -> Load:
    input_len, output_len = Lengths.parse("i", "10:30"), Lengths.parse("o", "1:9")
    return Load(count, Arrivals("poisson", 5.0), input_len, output_len, prefixes or Prefixes(), seed)


def test_seed_and_repetition_choose_the_load():
    first = make_load().draw(IDS)
    assert make_load().draw(IDS) == first
    assert [shot.index for shot in first] == list(range(20))
    assert all(shot.num_prompt == len(shot.prompt) for shot in first)
    prompts = {tuple(shot.prompt) for shot in first if isinstance(shot.prompt, list)}
    for other in (make_load(seed=1).draw(IDS), make_load().draw(IDS, repetition=1)):
        assert [shot.at for shot in other] != [shot.at for shot in first]
        assert prompts.isdisjoint(tuple(shot.prompt) for shot in other)


def test_shape_of_a_load_is_the_same_in_words_and_in_ids():
    """So that two endpoints of which one takes no ids get the same lengths at the same times."""

    def shape(shots: list[Shot]) -> list[object]:
        return [(shot.at, shot.num_prompt, shot.max_tokens) for shot in shots]

    words = make_load().draw(make_words)
    assert shape(words) == shape(make_load().draw(IDS))
    assert all(isinstance(shot.prompt, str) and len(shot.prompt.split()) == shot.num_prompt for shot in words)


def test_prefixes_are_shared_by_their_share():
    load = make_load(prefixes=Prefixes(share=0.6, length=50, count=3), count=50)
    starts = [tuple(shot.prompt[:50]) for shot in load.draw(IDS) if (shot.num_prompt or 0) > 50]
    assert len(starts) == 30  # the others are 10 to 30 tokens long
    assert len(set(starts)) == 3


def test_everything_shares_one_prefix_when_asked():
    shots = make_load(prefixes=Prefixes(share=1.0, length=512)).draw(IDS)
    assert len({tuple(shot.prompt[:512]) for shot in shots}) == 1
    assert len({tuple(shot.prompt) for shot in shots}) == 20


LINES = """{"prompt": "late", "max_tokens": 5, "arrival": 2.5}

{"prompt_token_ids": [5, 6], "arrival": 0}
{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "arrival": 1}
"""


def test_trace_is_read_in_the_order_of_arrival(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES)
    assert has_arrivals(str(path))
    assert read_trace(str(path), Lengths("constant", (9,)), None, 0) == [
        Shot(0, 0.0, [5, 6], 9, 2),
        Shot(1, 1.0, [{"role": "user", "content": "hi"}], 1),
        Shot(2, 2.5, "late", 5),
    ]
    closed = read_trace(str(path), Lengths("constant", (9,)), Arrivals("closed", 2), 0)
    assert [(shot.at, shot.max_tokens) for shot in closed] == [(None, 5), (None, 9), (None, 1)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", ":2: not a line of JSON"),
        ("[1]", ":2: got list"),
        ("{}", ":2: got no prompt, expected one of prompt, prompt_token_ids, messages"),
        ('{"prompt": "a", "messages": []}', ":2: got prompt and messages"),
        ('{"prompt": 5}', ":2: prompt: got 5, must be a text"),
        ('{"prompt": ""}', ":2: prompt: got "),
        ('{"prompt_token_ids": [1, "2"]}', ":2: prompt_token_ids: got"),
        ('{"prompt_token_ids": [true]}', ":2: prompt_token_ids: got"),
        ('{"messages": ["hi"]}', ":2: messages: got"),
        ('{"prompt": "a", "max_tokens": 0}', ":2: max_tokens: got 0"),
        ('{"prompt": "a", "max_tokens": true}', ":2: max_tokens: got True"),
        ('{"prompt": "a", "arrival": -1}', ":2: arrival: got -1"),
        ('{"prompt": "a", "arrival": "now"}', ":2: arrival: got 'now'"),
        ('{"prompt": "a", "max_token": 5}', ":2: max_token: no such field"),
        ('{"prompt": "a"}', ":2: arrival: missing"),
    ],
)
def test_wrong_lines_are_named_by_line_and_field(tmp_path: Path, line: str, says: str):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "arrival": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path) + says)}"):
        read_trace(str(path), Lengths("constant", (9,)), None, 0)


def test_empty_trace_is_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    assert not has_arrivals(str(path))
    with pytest.raises(ValueError, match="holds no request"):
        read_trace(str(path), Lengths("constant", (9,)), None, 0)
