"""Tool calls in answers: every format's way of writing, cut anywhere, cut short, malformed, and mere look-alikes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer.text import tools
from jaxinfer.text.tools import (
    ArgumentsAdded,
    CallBegun,
    Event,
    TextAdded,
    ToolFormat,
    gather,
    tool_format_of,
)

FORMATS = [tools.HERMES, tools.MISTRAL, tools.PHI4, tools.FUNCTOOLS, tools.NEMOTRON, tools.LLAMA]
Calls = list[tuple[str, str]]


def run(
    format: ToolFormat, pieces: Sequence[str], names: Collection[str] | None = None
) -> tuple[list[Event], str, Calls]:
    """Returns the events of an answer in pieces, its text, and name and arguments of its calls."""
    serial = itertools.count()
    parser = format.parser(names=names, make_id=lambda: f"id{next(serial)}")
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    text, calls = gather(events)
    assert [ident for ident, _, _ in calls] == [f"id{i}" for i in range(len(calls))]
    return events, text, [(name, arguments) for _, name, arguments in calls]


WEATHER = '{"name": "weather", "arguments": {"city": "Ulm"}}'
ULM = ("weather", '{"city": "Ulm"}')
CASES: list[tuple[ToolFormat, str, str, Calls]] = [
    (tools.HERMES, "No tools here.\n", "No tools here.\n", []),
    (tools.HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", "", [ULM]),
    (
        tools.HERMES,
        f"<think>\nhm\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>",
        "<think>\nhm\n</think>",
        [ULM],
    ),
    (tools.HERMES, f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>\n", "", [ULM, ULM]),
    (tools.HERMES, f"One <tool_call>{WEATHER}</tool_call> two.", "One  two.", [ULM]),
    (tools.HERMES, f"<tool_call>{WEATHER}", "", [ULM]),  # the end came first
    (tools.HERMES, f"<tool_call>{WEATHER}\n</tool", "", [ULM]),
    (tools.HERMES, f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>", "", [ULM, ULM]),
    (tools.HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (tools.HERMES, '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", [("now", "{}")]),
    (
        tools.HERMES,
        '<tool_call>{"name": "say", "arguments": {"t": "</tool_call>}"}}</tool_call>',
        "",
        [("say", '{"t": "</tool_call>}"}')],
    ),
    (
        tools.HERMES,
        r'<tool_call>{"name": "say", "arguments": {"t": "a\\\"}"}}</tool_call>',
        "",
        [("say", r'{"t": "a\\\"}"}')],
    ),
    (
        tools.HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        tools.HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1e999, "b": 1.50}}',
        "",
        [("add", '{"a": 1e999, "b": 1.50}')],
    ),
    (tools.HERMES, "a <tool_call> b", "a <tool_call> b", []),
    (tools.HERMES, "if a <tool", "if a <tool", []),
    (tools.HERMES, f"<tool_call> oops <tool_call>{WEATHER}</tool_call>", "<tool_call> oops", [ULM]),
    (tools.MISTRAL, f"[TOOL_CALLS] [{WEATHER}]", "", [ULM]),
    (tools.MISTRAL, f'[TOOL_CALLS][{WEATHER[:-1]}, "id": "abcdefghi"}}, {WEATHER}]', "", [ULM, ULM]),
    (tools.MISTRAL, f"[TOOL_CALLS] {WEATHER}", "", [ULM]),
    (tools.MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}', "", [ULM]),
    (
        tools.MISTRAL,
        'Well: [TOOL_CALLS]weather{"city": "Ulm"}[TOOL_CALLS]now[CALL_ID]a1b2[ARGS]{}',
        "Well:",
        [ULM, ("now", "{}")],
    ),
    (tools.MISTRAL, "[TOOL_CALLS] is a marker", "[TOOL_CALLS] is a marker", []),
    (tools.MISTRAL, "[TOOL_CALLS]weather[ARGS]{'city'}", "[TOOL_CALLS]weather[ARGS]{'city'}", []),
    (tools.MISTRAL, f'[TOOL_CALLS] [{WEATHER}, {{"na', ', {"na', [ULM]),
    (tools.MISTRAL, f"[TOOL_CALLS] [{WEATHER},", "", [ULM]),
    (tools.MISTRAL, f"[TOOL_CALLS] [{WEATHER}, 1]", ", 1]", [ULM]),
    (tools.PHI4, f"<|tool_call|>[{WEATHER}]<|/tool_call|>", "", [ULM]),
    (tools.PHI4, f"<|tool_call|>{WEATHER}<|/tool_call|>Done.", "Done.", [ULM]),
    (tools.FUNCTOOLS, f"functools[{WEATHER}]", "", [ULM]),
    (tools.FUNCTOOLS, "functools.reduce", "functools.reduce", []),
    (tools.NEMOTRON, f"<TOOLCALL>[{WEATHER}, {WEATHER}]</TOOLCALL>", "", [ULM, ULM]),
    (tools.LLAMA, '{"name": "weather", "parameters": {"city": "Ulm"}}', "", [ULM]),
    (
        tools.LLAMA,
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Ulm"}}',
        "",
        [ULM],
    ),
    (tools.LLAMA, f"\n{WEATHER}; {WEATHER}\n{WEATHER};", "", [ULM, ULM, ULM]),
    (tools.LLAMA, f"{WEATHER} Here it is.", "Here it is.", [ULM]),
    (tools.LLAMA, f"It is {WEATHER}", f"It is {WEATHER}", []),
    (tools.LLAMA, '{"city": "Ulm"}', '{"city": "Ulm"}', []),
    (tools.LLAMA, '{"name": "Ada"}', '{"name": "Ada"}', []),  # an answer in JSON
    (tools.LLAMA, '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    (tools.LLAMA, " { not json", " { not json", []),
]


@pytest.mark.parametrize(("format", "answer", "text", "calls"), CASES, ids=lambda value: str(value)[:40])
def test_an_answer_is_text_and_calls_wherever_it_is_cut(
    format: ToolFormat, answer: str, text: str, calls: Calls
):
    """Whole, in two pieces at each place, and letter by letter."""
    for pieces in ([answer], list(answer), *([answer[:i], answer[i:]] for i in range(len(answer)))):
        assert run(format, pieces)[1:] == (text, calls), pieces


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": {"a": }}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\n"}}',  # a line break within a string is no JSON
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "1"}',
        '{"name": "f", "arguments": {}]',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": {"a": "\ud800"}}',
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"a": 1',
        "{" * 20_000,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        "[]",
        "[1]",
        "",
    ],
    ids=lambda body: body.encode("ascii", "replace").decode()[:30],
)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_what_is_malformed_is_given_back_to_the_letter(format: ToolFormat, body: str):
    for answer in (f"{format.open}{body}{format.close}", f"a {format.open} {body}\n"):
        assert run(format, [answer])[1:] == (answer, [])
        assert run(format, [answer[i : i + 7] for i in range(0, len(answer), 7)])[1:] == (answer, [])


def test_a_call_is_told_once_it_is_whole_and_text_at_once():
    parser = tools.HERMES.parser(make_id=lambda: "id")
    assert parser.push("Let me see. ") == [TextAdded("Let me see.")]
    assert parser.push("<tool") == []
    assert parser.push("_tip> is") == [TextAdded(" <tool_tip> is")]
    assert parser.push(f"\n<tool_call>{WEATHER[:-1]}") == []
    assert parser.push("}") == [CallBegun(0, "id", "weather"), ArgumentsAdded(0, '{"city": "Ulm"}')]
    assert parser.push("\n</tool_call>\n") == []
    assert parser.flush() == []


def test_json_that_no_call_begins_with_streams_as_it_comes():
    parser = tools.LLAMA.parser()
    assert parser.push('{"na') == []
    assert parser.push("tion") == [TextAdded('{"nation')]
    assert parser.push('": "D') == [TextAdded('": "D')]


def test_a_name_without_end_is_no_name():
    parser = tools.MISTRAL.parser()
    assert parser.push("[TOOL_CALLS]" + "a" * 256) == []
    assert gather(parser.push("a")) == ("[TOOL_CALLS]" + "a" * 257, [])
    assert run(tools.MISTRAL, ["[TOOL_CALLS]" + "a" * 257 + "{}"])[2] == []


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_only_functions_on_offer_are_called(format: ToolFormat):
    answer = f"{format.open}[{WEATHER}]{format.close}"
    assert run(format, [answer], names={"weather", "time"})[1:] == ("", [ULM])
    assert run(format, [answer], names={"time"})[1:] == (answer, [])


def test_ids_are_as_long_as_clients_and_templates_want_them():
    ids = {tools.HERMES.make_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(one.startswith("call_") and len(one) == 29 and one[5:].isalnum() for one in ids)
    assert all(len(one) == 9 and one.isalnum() for one in (tools.MISTRAL.make_id() for _ in range(100)))
    (begun, _), _, _ = run(tools.HERMES, [f"<tool_call>{WEATHER}"])
    assert begun == CallBegun(0, "id0", "weather")
    parser = tools.HERMES.parser()
    ((ident, _, _),) = gather(parser.push(f"<tool_call>{WEATHER}"))[1]
    assert ident.startswith("call_")


names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,12}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
bodies = st.lists(
    st.tuples(names, st.dictionaries(st.text(max_size=5), values, max_size=3)), min_size=1, max_size=3
)


def cut(answer: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(answer) + 1) for place in places} | {0, len(answer)})
    return [answer[a:b] for a, b in itertools.pairwise(ends)]


def write(format: ToolFormat, calls: Sequence[tuple[str, object]], indent: int | None, listed: bool) -> str:
    """Writes calls as a model of a format does."""
    if format is tools.MISTRAL and not listed:
        return "".join(
            f"{format.open}{name}[ARGS]{json.dumps(value, indent=indent)}" for name, value in calls
        )
    key = "parameters" if format is tools.LLAMA else "arguments"
    objects = [json.dumps({"name": n, key: v}, indent=indent, ensure_ascii=False) for n, v in calls]
    if format is tools.LLAMA:
        return "; ".join(objects)
    if listed or format is tools.FUNCTOOLS:
        return f"{format.open}[{', '.join(objects)}]{format.close}"
    return "\n".join(f"{format.open}{one}{format.close}" for one in objects)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.sampled_from(FORMATS),
    bodies,
    st.sampled_from([None, 2]),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=8),
)
def test_every_call_comes_through_whatever_its_arguments_say(
    format: ToolFormat,
    calls: list[tuple[str, dict[str, object]]],
    indent: int | None,
    listed: bool,
    places: list[int],
):
    events, text, found = run(format, cut(write(format, calls, indent, listed), places))
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    begun = [event.index for event in events if isinstance(event, CallBegun)]
    assert begun == list(range(len(calls)))


scraps = st.sampled_from(
    [
        WEATHER,
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        '"',
        "\\",
        " ",
        "\n",
        "a",
        "name",
        '{"name": "f"}',
        "[ARGS]",
        "[CALL_ID]",
    ]
    + [marker for format in FORMATS for marker in (format.open, format.close, format.open[:4]) if marker]
)
answers = st.lists(scraps | st.text(max_size=6), max_size=14).map("".join)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.sampled_from(FORMATS), answers, st.lists(st.integers(0, 200), max_size=10))
@example(tools.MISTRAL, f"[TOOL_CALLS]a{' ' * 300}{{}}", [5, 290])
def test_any_text_is_parsed_the_same_wherever_it_is_cut_and_nothing_is_lost(
    format: ToolFormat, answer: str, places: list[int]
):
    _, text, calls = run(format, [answer])
    assert run(format, cut(answer, places))[1:] == (text, calls)
    if not calls:
        assert text == answer
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    left = iter(answer)
    assert all(letter in left for letter in text)  # what is text stands in the answer, in this order


@pytest.mark.parametrize(
    ("template", "family", "format"),
    [
        (None, "llama", None),
        ("{{ messages[0].content }}", "qwen2", None),
        ("<|im_start|>{% for t in tools %}{{ t }}{% endfor %}", "llama", None),
        ('return <tool_call>\\n{"name": ...}\\n</tool_call>', "qwen3", tools.HERMES),
        ("<tool_call>\\n<function=name>\\n<parameter=a>", "qwen3", None),
        ('{{- "[TOOL_CALLS] [" }}', "mistral", tools.MISTRAL),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral", tools.MISTRAL),
        ("respond in this format: <|tool_call|>{...}<|/tool_call|>", "phi3", tools.PHI4),
        ("'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>'", "phi3", tools.PHI4),
        ("'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>'", "llama", None),
        ("formatted as functools[{...}]", "phi3", tools.FUNCTOOLS),
        ("<TOOLCALL>[{...}]</TOOLCALL>", "llama", tools.NEMOTRON),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama", tools.LLAMA),
        ("<|start_header_id|>ipython {{- '\"parameters\": ' }}", "llama", tools.LLAMA),
    ],
)
def test_a_format_is_known_by_its_template(template: str | None, family: str, format: ToolFormat | None):
    assert tool_format_of(template, family) is format
