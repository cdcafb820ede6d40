"""Chat messages to text, rendered as transformers' `apply_chat_template` does it."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from jetspec_jax.errors import InputError, ModelFileError

Message = Mapping[str, Any]

# Variables that the caller does not set through template_kwargs.
_OWN = frozenset({"messages", "add_generation_prompt"})


def render(
    source: str,
    messages: Sequence[Message],
    *,
    system: str | None,
    add_generation_prompt: bool,
    special: Mapping[str, str],
    variables: Mapping[str, Any],
) -> str:
    """Text of a conversation.

    Args:
        source: Jinja template.
        messages: dicts with `role` and `content`, oldest first.
        system: system message to put in front, or None.
        add_generation_prompt: end with the header of the assistant's answer.
        special: special tokens by role (`bos_token`, ...).
        variables: further variables; each must occur in the template.

    Raises:
        InputError: malformed messages, an unknown variable, or the template refused.
        ModelFileError: the template is not valid Jinja.
    """
    plain = plain_messages(messages, system)
    template, used = _compile(source)
    for name in variables:
        if name in _OWN or name not in used:
            known = ", ".join(sorted(used - _OWN - set(special))) or "none"
            raise InputError(
                f"chat template variable {name!r} cannot be set for this model; "
                f"its template has: {known}"
            )
    context = {"tools": None, "documents": None, **special, **variables}
    try:
        return template.render(
            messages=plain, add_generation_prompt=add_generation_prompt, **context
        )
    except jinja2.TemplateError as err:
        raise InputError(
            f"the chat template refused the messages: {_line(err)}; change them accordingly"
        ) from err
    except (TypeError, ValueError, KeyError, AttributeError) as err:
        raise InputError(
            f"the chat template cannot render the messages: {_line(err)}; "
            "check each role and content"
        ) from err


def plain_messages(messages: Sequence[Message], system: str | None) -> list[dict[str, Any]]:
    """Checked copies: keys with None dropped (templates print "None" otherwise), text parts joined.

    Raises:
        InputError: empty list, or a message without role or text; names its index.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(
            f"messages is a {type(messages).__name__}; "
            "give a list of {'role': ..., 'content': ...}"
        )
    if not messages:
        raise InputError("messages is empty; give at least one message with role and content")
    plain = [_plain(message, i) for i, message in enumerate(messages)]
    if system is not None:
        if plain[0]["role"] == "system":
            raise InputError(
                "a system message was given twice (system and messages[0]); give one of them"
            )
        plain.insert(0, {"role": "system", "content": system})
    return plain


def _plain(message: Message, i: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise InputError(f"messages[{i}] is a {kind}; give {{'role': ..., 'content': ...}}")
    fields = {key: value for key, value in message.items() if value is not None}
    if not isinstance(fields.get("role"), str) or not fields["role"]:
        raise InputError(f"messages[{i}] has no role; add 'role': 'user' (or system, assistant)")
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = _joined(content, i)
    elif content is None and "tool_calls" not in fields:
        raise InputError(f"messages[{i}] has no content; add 'content' with the text")
    elif content is not None and not isinstance(content, str):
        raise InputError(f"messages[{i}].content is a {type(content).__name__}; give text")
    return fields


def _joined(parts: list[Any], i: int) -> str:
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InputError(
                f"messages[{i}].content holds a part of type {kind!r}; give text parts only"
            )
    return "".join(part["text"] for part in parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training masks; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models have never seen.
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compiled template and the variables it uses (environment of transformers' chat templates).

    Templates come with downloaded models, hence the sandbox.
    """
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    try:
        used = jinja2.meta.find_undeclared_variables(env.parse(source))
        return env.from_string(source), frozenset(used)
    except jinja2.TemplateSyntaxError as err:
        raise ModelFileError(
            f"the model's chat template is not valid Jinja (line {err.lineno}: {_line(err)}); "
            "send plain prompts (--no-chat) or repair the template"
        ) from err


def _line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return (lines[0] if lines else type(err).__name__)[:160].rstrip(".;")
