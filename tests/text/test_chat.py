"""Chat templates: the prompt that the model was trained on, and nothing that a template should not do."""

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.text import Tokenizer, encode_chat, render_chat
from jaxinfer.text.chat import find_template
from tests.text.vocabularies import CHATML, byte_level, byte_level_metadata

HI = [{"role": "user", "content": "Hi"}]

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
)
TOOLS_TEMPLATE = """
{%- if tools %}
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{%- endif %}
{% for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
<call>{{ call.function.name }}:
        {%- for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}</call>
        {%- endfor %}
    {%- else %}
{{ message.role }}={{ message.content }}
    {%- endif %}
{%- endfor %}"""
WEATHER = {"type": "function", "function": {"name": "weather", "description": 'it\'s <b>é</b> & "now"'}}


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be kind."}, *HI]
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render_chat(CHATML, messages) == expected + "<|im_start|>assistant\n"
    assert render_chat(CHATML, messages, add_generation_prompt=False) == expected


def test_llama3() -> None:
    assert render_chat(LLAMA3, [{"role": "user", "content": "  Hi "}], bos_token="<|begin_of_text|>") == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_gemma() -> None:
    messages = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    assert render_chat(GEMMA, messages, bos_token="<bos>") == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_mistral() -> None:
    messages = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    rendered = render_chat(MISTRAL, messages, bos_token="<s>", eos_token="</s>")
    assert rendered == "<s>[INST] Hi [/INST]Hello</s>[INST] Bye [/INST]"


def test_what_a_template_raises_is_the_reason() -> None:
    with pytest.raises(ValueError, match="chat template: System role not supported"):
        render_chat(GEMMA, [{"role": "system", "content": "x"}], bos_token="")


def test_tools_are_json_without_html_escapes_and_call_arguments_are_objects() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render_chat(TOOLS_TEMPLATE, messages, [WEATHER]) == (
        '{"type": "function", "function": {"name": "weather", "description": "it\'s <b>é</b> & \\"now\\""}}\n'
        "user=Hi<call>weather:city=Köln;</call>"
    )


def test_blocks_are_trimmed_and_loop_controls_work() -> None:
    template = (
        "{% for m in messages %}\n    {% if m.role == 'x' %}\n{% continue %}\n    {% endif %}\n"
        "{{ m.content }}\n{% endfor %}"
    )
    messages = [{"role": "x", "content": "no"}, {"role": "user", "content": "yes"}]
    assert render_chat(template, messages) == "yes\n"


def test_other_variables_documents_and_the_generation_tag() -> None:
    template = (
        "{% generation %}{{ documents[0].text }}{% endgeneration %}|{{ thinking }}|{{ strftime_now('%%') }}"
    )
    rendered = render_chat(template, HI, documents=[{"text": "doc"}], thinking=False)
    assert rendered == "doc|False|%"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<" in render_chat(CHATML, [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages: got an empty list"),
        ("Hi", "messages: got str"),
        (["Hi"], r"messages\[0\]: got str"),
        ([{"content": "x"}], r"messages\[0\]\.role: got None"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([*HI, {"role": "user", "content": 7}], r"messages\[1\]\.content: got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]: got type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: got type 'text'"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "arguments: not valid JSON",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], r"tool_calls: got str"),
    ],
)
def test_bad_messages_are_named(messages: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render_chat(CHATML, messages)


def test_bad_tools_are_named() -> None:
    with pytest.raises(ValueError, match=r"tools\[0\]: got str"):
        render_chat(CHATML, HI, ["weather"])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(ValueError, match="chat template: "):
        render_chat(template, HI)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{% if %}", "{{ nothing.at.all }}", "{{ messages['x'] + 1 }}"]
)
def test_a_broken_template_is_a_value_error(template: str) -> None:
    with pytest.raises(ValueError, match="chat template: "):
        render_chat(template, HI)


@pytest.mark.parametrize("add_bos", [True, False])
def test_trap_25_a_chat_prompt_has_the_bos_of_its_template_only(tmp_path: Path, add_bos: bool) -> None:
    with_bos = byte_level(tmp_path / "with", add_bos_token=add_bos, chat_template="{{ bos_token }}" + CHATML)
    assert with_bos.bos_id is not None
    ids = encode_chat(with_bos, HI)
    assert ids.count(with_bos.bos_id) == 1
    assert ids[0] == with_bos.bos_id
    # As transformers: none is added to a template without one.
    without = byte_level(tmp_path / "without", add_bos_token=add_bos, chat_template=CHATML)
    assert encode_chat(without, HI) == ids[1:]


def test_trap_32_one_empty_message_still_makes_a_prompt(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, chat_template=CHATML)
    assert encode_chat(tokenizer, [{"role": "user", "content": ""}])


def test_no_template_says_how_to_give_one() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata([]))
    with pytest.raises(ValueError, match="no default chat template: pass a Jinja source as chat_template"):
        encode_chat(tokenizer, HI)
    assert tokenizer.decode(encode_chat(tokenizer, HI, chat_template="{{ messages[0].content }}")) == "Hi"


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "rag", "template": "r"},
    ]
    tokenizer = byte_level(tmp_path, chat_template=named)
    assert tokenizer.chat_template == "d"
    assert find_template(tokenizer) == "d"
    assert find_template(tokenizer, with_tools=True) == "t"
    assert find_template(tokenizer, "rag") == "r"
    assert find_template(tokenizer, "{{ x }}") == "{{ x }}"


def test_a_model_with_named_templates_only_lists_them() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata([]) | {"tokenizer.chat_template.rag": "r"})
    with pytest.raises(ValueError, match=r"it has rag; give one of these names"):
        encode_chat(tokenizer, HI)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs: got list, expected an object"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: got tools; give it beside"),
        ({"chat_template": 5}, "chat_template: got int, expected a Jinja source"),
        ({"add_generation_prompt": 0}, "add_generation_prompt: got 0, expected true or false"),
    ],
)
def test_arguments_of_the_wrong_shape_are_refused(tmp_path: Path, arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode_chat(byte_level(tmp_path, chat_template=CHATML), HI, **arguments)


def test_variables_may_have_any_other_name(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, chat_template="{{ template }}{{ tokenizer }}")
    ids = encode_chat(tokenizer, HI, chat_template_kwargs={"template": "a", "tokenizer": "b"})
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("[1]", r"messages\[0\].tool_calls\[0\].function.arguments: got list, expected a JSON object"),
        ("7", "got int"),
        ('{"a":' * 100_000, "not valid JSON"),
    ],
)
def test_arguments_of_a_call_that_are_no_object_are_refused(arguments: str, says: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ValueError, match=says):
        render_chat("{{ messages }}", [{"role": "assistant", "content": None, "tool_calls": [call]}])


def test_a_turn_of_tools_is_rendered_as_the_openai_api_sends_it() -> None:
    """Content null beside calls, arguments in a string, a tool's answer in parts; pictures are refused by name."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.id }}={{ c.function.arguments.city }}{% endfor %};{% endfor %}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Ulm"}'}}
    parts = [{"type": "text", "text": "9 "}, {"type": "text", "text": "degrees"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": parts},
    ]
    assert render_chat(template, messages) == "user:?;assistant:call_1=Ulm;tool:9 degrees;"
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\]: got type 'image_url'"):
        render_chat(template, [{"role": "user", "content": [*parts[:1], picture]}])
