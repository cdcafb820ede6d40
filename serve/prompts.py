"""Prompts from the command line, JSON lines files and stdin, checked before anything heavy is
loaded."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import ConfigError, InputError

SAMPLING_KEYS = tuple(f.name for f in dataclasses.fields(SamplingParams))
ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt. Exactly one of `prompt` and `messages` is set; `where` is for error messages."""

    where: str
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    id: Any = None
    sampling: tuple[
        tuple[str, Any], ...
    ] = ()  # SamplingParams fields that the line sets for itself

    def sampling_params(self, base: SamplingParams) -> SamplingParams:
        """`base` with the line's own values; an impossible value is an error that names the
        line."""
        try:
            return dataclasses.replace(base, **dict(self.sampling))
        except (ConfigError, TypeError) as error:
            raise InputError(f"{self.where}: {error}") from error

    def as_messages(self) -> list[Message]:
        return (
            [{"role": "user", "content": self.prompt}]
            if self.messages is None
            else list(self.messages)
        )


def check_text(text: Any, where: str) -> str:
    """Raises InputError for text that is missing, blank or not text."""
    if not isinstance(text, str):
        raise InputError(f"{where}: the prompt must be text, not {type(text).__name__}")
    if not text.strip():
        raise InputError(f"{where}: the prompt is empty; give at least one visible character")
    return text


def check_messages(messages: Any, where: str) -> tuple[Message, ...]:
    """Raises InputError unless `messages` is a non-empty list of {"role", "content"}."""
    if not isinstance(messages, list) or not messages:
        raise InputError(
            f'{where}: "messages" must be a non-empty list of {{"role", "content"}} objects'
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise InputError(f'{where}: messages[{number}] needs "role" and a text "content"')
        if message.get("role") not in ROLES:
            raise InputError(
                f"{where}: messages[{number}] role {message.get('role')!r} is not one of "
                f"{', '.join(ROLES)}"
            )
    check_text(messages[-1]["content"], where)
    return tuple(messages)


def parse_lines(lines: Iterable[str], name: str) -> list[Request]:
    """One {"prompt": ...} or {"messages": [...]} object per line; blank lines are skipped.

    A line may carry an "id" and any field of `SamplingParams` ("seed", "max_tokens", ...); other
    keys are data columns of somebody else's file and are left alone.
    """
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{where}: not valid JSON ({error.msg}, column {error.colno})"
            ) from error
        if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
            raise InputError(f'{where}: needs exactly one of "prompt" and "messages"')
        own = tuple(
            (k, tuple(v) if isinstance(v, list) else v)
            for k, v in row.items()
            if k in SAMPLING_KEYS
        )
        common: dict[str, Any] = {"id": row.get("id"), "sampling": own}
        if "prompt" in row:
            requests.append(Request(where, prompt=check_text(row["prompt"], where), **common))
        else:
            requests.append(
                Request(where, messages=check_messages(row["messages"], where), **common)
            )
    if not requests:
        raise InputError(f'{name}: no prompts; write one {{"prompt": "..."}} per line')
    return requests


def read_prompts(path: str) -> list[Request]:
    """Reads a JSON lines file, or stdin for "-". Raises InputError naming file and line."""
    if path == "-":
        return parse_lines(sys.stdin, "stdin")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            f"--prompts {path}: {error.strerror}; give a readable JSON lines file or -"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"--prompts {path}: not UTF-8 text (byte {error.start}); save the file as UTF-8"
        ) from error
    return parse_lines(text.split("\n"), path)  # not splitlines: U+2028 may stand inside JSON text
