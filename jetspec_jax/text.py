"""Text in and out: tokenizers of GGUF files and Hugging Face directories, chat, streaming decode.

Built on the `tokenizers` and `jinja2` libraries directly, each imported when first used: importing
transformers costs seconds at every start, and the tokenizer that it derives from a GGUF file lacks
the digit split of SmolLM2, which llama.cpp has.
"""

from __future__ import annotations

import codecs
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_jax.errors import InputError
from jetspec_jax.weights.gguf import GGUFSource
from jetspec_jax.weights.hf_config import eos_ids as hf_eos_ids
from jetspec_jax.weights.hf_config import read_json
from jetspec_jax.weights.source import resolve_model

if TYPE_CHECKING:
    from jetspec_jax.chat_template import Message
    from jetspec_jax.tokenizer_files import Backend

_SPECIAL_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_GGUF_ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte token of SentencePiece


class Tokenizer:
    """Ids from text or chat messages and back. Made by `load_tokenizer`.

    Attributes:
        eos_ids: ids that end a generation.
        special: special tokens by role (`bos_token`, `eos_token`, ...), as chat templates see them.
        chat_template: Jinja source, None for a base model.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Sequence[int] = (),
        special: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.eos_ids = tuple(eos_ids)
        self.special = dict(special or {})
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Number of tokens (the model's embedding may have more rows)."""
        return self._backend.size()

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._backend.special_ids()

    @property
    def byte_level(self) -> bool:
        """Whether the text of ids is the concatenation of their `token_bytes`."""
        return self._backend.byte_level()

    def token_id(self, token: str) -> int | None:
        """Id of one token's text, None when there is no such token."""
        return self._backend.token_id(token)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised.

        Args:
            text: any text.
            add_special: add what the model expects around raw text (such as a beginning token).

        Raises:
            InputError: not a text, or lone surrogates, which UTF-8 cannot carry.
        """
        if not isinstance(text, str):
            raise InputError(f"prompt {text!r:.60} is a {type(text).__name__}; give text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as err:
            raise InputError(
                f"prompt holds {text[err.start]!r} at character {err.start}, "
                "which is not a Unicode character; remove it"
            ) from err
        return self._backend.encode(text, add_special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; ids without a token (spare rows of the embedding) give no text."""
        return self._backend.decode([int(i) for i in ids], skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token (not always whole characters); empty for an id without a token."""
        token = self._backend.token(int(token_id))
        if token is None:
            return b""
        if not self._backend.byte_level():
            fallback = _FALLBACK_BYTE.fullmatch(token)
            if fallback:
                return bytes([int(fallback[1], 16)])
            return self._backend.decode([int(token_id)], False).encode("utf-8")
        table = _byte_alphabet()
        try:
            return bytes(table[char] for char in token)
        except KeyError:  # an added token, whose text is literal
            return token.encode("utf-8")

    def incremental(self, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder for one stream of ids."""
        return IncrementalDecoder(self, skip_special)

    def chat(
        self,
        messages: Sequence[Message],
        system: str | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation (arguments and errors of `render_chat`)."""
        text = self.render_chat(messages, system, add_generation_prompt, **kwargs)
        return self.encode(text, add_special=False)  # the template writes special tokens itself

    def render_chat(
        self,
        messages: Sequence[Message],
        system: str | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Text of a conversation under the model's chat template.

        Args:
            messages: dicts with `role` and `content`, oldest first.
            system: system message to put in front.
            add_generation_prompt: end with the header of the assistant's answer.
            **kwargs: variables of the template (such as Qwen3's `enable_thinking`).

        Raises:
            InputError: no template, no or malformed messages, unknown variable, or the template
                refused (it may refuse a role).
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template; send a plain prompt (--no-chat)")
        from jetspec_jax.chat_template import render  # jinja2: not for raw prompts

        return render(
            self.chat_template,
            messages,
            system=system,
            add_generation_prompt=add_generation_prompt,
            special=self.special,
            variables=kwargs,
        )


class IncrementalDecoder:
    """Turns a stream of token ids into text pieces that add up to `Tokenizer.decode` of all ids.

    A character whose bytes are spread over several tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Other than byte-level: a token's text depends on its neighbours, so a window of ids is
        # decoded, and what goes beyond its first `_given` ids' text is new.
        self._window: list[int] = []
        self._given = 0

    def push(self, ids: int | Sequence[int]) -> str:
        """Text that becomes certain with these ids ("" while a character is incomplete)."""
        fresh = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        fresh = [i for i in fresh if i not in self._skip]
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"".join(self._tokenizer.token_bytes(i) for i in fresh))
        self._window += fresh
        return self._advance(final=False)

    def flush(self) -> str:
        """The rest, at the end of the stream: incomplete bytes become U+FFFD, as in `decode`."""
        if self._tokenizer.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._given], skip_special=False)
        now = self._tokenizer.decode(self._window, skip_special=False)
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        # The ids just given out stay as the left neighbours of what follows.
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return now[len(before) :]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Tokenizer and chat template of a model: a .gguf file, a Hugging Face directory or a hub id.

    Raises:
        ModelFileError: missing, damaged or unsupported tokenizer, with the file and the remedy.
    """
    local = resolve_model(path)
    return _from_directory(local) if local.is_dir() else tokenizer_from_gguf(GGUFSource(local))


def tokenizer_from_gguf(source: GGUFSource) -> Tokenizer:
    """Tokenizer and chat template of an opened GGUF file (saves reading its header twice).

    Raises:
        ModelFileError: see `gguf_backend`.
    """
    from jetspec_jax.tokenizer_files import gguf_backend  # a library of its own: only to load one

    meta = source.metadata
    tokens = meta.get("tokenizer.ggml.tokens", [])
    special = {}
    for key, role in _GGUF_ROLES.items():
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[role] = tokens[token_id]
    return Tokenizer(
        gguf_backend(meta, source.path, special),
        eos_ids=source.eos_ids(),
        special=special,
        chat_template=meta.get("tokenizer.chat_template"),
    )


def _from_directory(path: Path) -> Tokenizer:
    from jetspec_jax.tokenizer_files import directory_backend

    backend = directory_backend(path)
    config = _optional_json(path / "tokenizer_config.json")
    named = any(role in config for role in _SPECIAL_ROLES)
    names = config if named else _optional_json(path / "special_tokens_map.json")
    special = {}
    for role in _SPECIAL_ROLES:
        value = names.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[role] = text
    ends = hf_eos_ids(path, _optional_json(path / "config.json"))
    if not ends and "eos_token" in special:
        end = backend.token_id(special["eos_token"])
        ends = () if end is None else (end,)
    template = _directory_template(path, config)
    return Tokenizer(backend, eos_ids=ends, special=special, chat_template=template)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Character to byte of GPT-2's printable byte alphabet (Radford et al. 2019, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = [b for b in range(256) if b not in printable]
    return table | {chr(256 + n): b for n, b in enumerate(rest)}
