"""Chat messages to one prompt, by the model's own Jinja template in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

# What a request says by arguments of their own, so not among the template's further variables.
_OWN_ARGUMENTS = ("messages", "tools", "chat_template", "add_generation_prompt")


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Turn chat messages into the ids of one prompt.

    The template writes BOS where the model wants one, and no other is added.

    Args:
        tokenizer: its special tokens are the template's variables.
        messages: role and content each, as the OpenAI API has them.
        tools: descriptions of functions the model may call.
        chat_template: a Jinja source, or the name of one of the model's templates; None takes the default
            one (with tools, the one named `tool_use` where there is one).
        add_generation_prompt: end with the opening of the assistant's turn.
        chat_template_kwargs: further variables of the template, such as `enable_thinking`.

    Returns:
        The ids.

    Raises:
        ValueError: no template, an argument or messages of the wrong shape, or an error in the template.
    """
    variables = _check_variables(chat_template_kwargs)
    if not isinstance(add_generation_prompt, bool):
        raise ValueError(f"add_generation_prompt: got {add_generation_prompt!r}, expected true or false")
    source = find_template(tokenizer, chat_template, with_tools=bool(tools))
    text = render_chat(
        source,
        messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        **{**tokenizer.special_tokens, **variables},
    )
    return tokenizer.encode(text, add_special_tokens=False)


def find_template(tokenizer: Tokenizer, chat_template: str | None = None, *, with_tools: bool = False) -> str:
    """Choose a chat template.

    Args:
        tokenizer: holds the model's templates.
        chat_template: a Jinja source, the name of one of them, or None.
        with_tools: prefer the one named `tool_use`.

    Returns:
        The Jinja source.

    Raises:
        ValueError: the model has none and none was given.
    """
    named = tokenizer.chat_templates
    if not isinstance(chat_template, str | None):
        raise ValueError(
            f"chat_template: got {type(chat_template).__name__}, expected a Jinja source or one of the names "
            f"{', '.join(sorted(named)) or '(this model has none)'}"
        )
    if chat_template is not None:
        return named.get(chat_template, chat_template)
    source = named.get("tool_use") if with_tools else None
    source = source or named.get("default")
    if source is None:
        have = f" (it has {', '.join(sorted(named))}; give one of these names)" if named else ""
        raise ValueError(
            f"this model has no default chat template{have}: pass a Jinja source as chat_template, "
            "or write the whole prompt yourself and use plain completion"
        )
    return source


def render_chat(
    template: str,
    /,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """Render chat messages by a Jinja template, as transformers does.

    Args:
        template: the Jinja source.
        messages: role and content each; a list of text parts as content is joined.
        tools: descriptions of functions the model may call.
        documents: texts for retrieval, for templates that know them.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: further variables, `bos_token` and `eos_token` among them.

    Returns:
        The prompt.

    Raises:
        ValueError: messages or tools of the wrong shape, or an error in the template.
    """
    cleaned = [_clean_message(i, message) for i, message in enumerate(_check_list("messages", messages))]
    if not cleaned:
        raise ValueError("messages: got an empty list, expected at least one message")
    given: dict[str, object] = {
        **variables,
        "messages": cleaned,
        "tools": list(_check_list("tools", tools)) if tools else None,
        "documents": list(_check_list("documents", documents)) if documents else None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compile(template).render(given)
    except TemplateError as error:
        raise ValueError(f"chat template: {error}") from error
    except Exception as error:  # a template is a program, and may fail in any way
        raise ValueError(f"chat template: {type(error).__name__}: {error}") from error


def _check_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(given, Mapping | None):
        raise ValueError(f"chat_template_kwargs: got {type(given).__name__}, expected an object")
    variables = dict(given or {})
    if taken := [name for name in _OWN_ARGUMENTS if name in variables]:
        raise ValueError(f"chat_template_kwargs: got {', '.join(taken)}; give it beside chat_template_kwargs")
    return variables


def _check_list(name: str, value: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"{name}: got {type(value).__name__}, expected a list of objects")
    for index, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            raise ValueError(f"{name}[{index}]: got {type(entry).__name__}, expected an object")
    return value


def _clean_message(index: int, message: Message) -> dict[str, Any]:
    """Check one message; drop what is None, join text parts, read the arguments of tool calls."""
    where = f"messages[{index}]"
    cleaned = {key: value for key, value in message.items() if value is not None}
    role = cleaned.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role: got {role!r}, expected a string such as 'user' or 'assistant'")
    if "content" in cleaned:
        cleaned["content"] = _join_content(where, cleaned["content"])
    elif "tool_calls" not in cleaned:
        raise ValueError(f"{where}.content is missing, expected a string or a list of text parts")
    if "tool_calls" in cleaned:
        where += ".tool_calls"
        calls = _check_list(where, cleaned["tool_calls"])
        cleaned["tool_calls"] = [_read_arguments(f"{where}[{i}]", call) for i, call in enumerate(calls)]
    return cleaned


def _join_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}.content: got {type(content).__name__}, expected a string or text parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}.content[{index}]: got type {kind!r}, only text parts are supported")
    return "".join(part["text"] for part in content)


def _read_arguments(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    # The OpenAI API sends a call's arguments as JSON in a string; templates expect the object.
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}.function.arguments: not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where}.function.arguments: got {type(arguments).__name__}, expected a JSON object"
        )
    return {**call, "function": {**function, "arguments": arguments}}


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses at once what the sandbox would only turn into an undefined value, which prints as nothing."""

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model has never seen.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)
