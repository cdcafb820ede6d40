"""Text in and out: tokenizers from GGUF metadata or a Hugging Face directory, chat templates, streaming decode.

Built on the `tokenizers` and `jinja2` libraries directly: importing transformers costs seconds at every start, and
the tokenizer that it derives from a GGUF file lacks the digit split of SmolLM2 (llama.cpp has it).
"""

from __future__ import annotations

import codecs
import datetime
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jetspec_jax.errors import InputError, ModelFileError
from jetspec_jax.weights.gguf import GGUFSource
from jetspec_jax.weights.hf_config import eos_ids as hf_eos_ids
from jetspec_jax.weights.hf_config import read_json
from jetspec_jax.weights.source import resolve_model

Message = Mapping[str, Any]

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _Backend(Protocol):
    """What `Tokenizer` needs from a tokenizer implementation."""

    def encode(self, text: str, add_special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def token_id(self, token: str) -> int | None: ...
    def size(self) -> int: ...
    def special_ids(self) -> frozenset[int]: ...
    def byte_level(self) -> bool: ...


class _Fast:
    """The Rust library's tokenizer."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        inner.no_padding()
        inner.no_truncation()

    def encode(self, text: str, add_special: bool) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str | None:
        return self.inner.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self.inner.token_to_id(token)

    def size(self) -> int:
        return self.inner.get_vocab_size()

    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, t in self.inner.get_added_tokens_decoder().items() if t.special)

    def byte_level(self) -> bool:
        return isinstance(self.inner.decoder, decoders.ByteLevel)


class _Slow:
    """A transformers tokenizer, for directories without tokenizer.json."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, add_special: bool) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special))

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def token(self, token_id: int) -> str | None:
        return self.inner.convert_ids_to_tokens(token_id) if 0 <= token_id < len(self.inner) else None

    def token_id(self, token: str) -> int | None:
        return self.inner.get_vocab().get(token)

    def size(self) -> int:
        return len(self.inner)

    def special_ids(self) -> frozenset[int]:
        return frozenset(self.inner.all_special_ids)

    def byte_level(self) -> bool:
        return False


class Tokenizer:
    """Ids from text or chat messages and back. Make one with `load_tokenizer`.

    Attributes:
        eos_ids: ids that end a generation.
        special: names of special tokens (`bos_token`, `eos_token`, ...) to their text, as chat templates see them.
        chat_template: Jinja source, None for a base model.
    """

    def __init__(
        self,
        backend: _Backend,
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

    def token_id(self, token: str) -> int | None:
        """Id of one token's text, None when there is no such token."""
        return self._backend.token_id(token)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised.

        Args:
            text: any text.
            add_special: add what the model expects around raw text (such as a beginning-of-sequence token).

        Raises:
            InputError: not a text, or lone surrogates that UTF-8 cannot carry.
        """
        if not isinstance(text, str):
            raise InputError(f"prompt {text!r:.60} is a {type(text).__name__}; give text")
        try:
            return self._backend.encode(text, add_special)
        except UnicodeEncodeError as err:
            raise InputError(f"prompt holds {text[err.start]!r} at character {err.start}, which is not Unicode text; remove it") from err

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; ids without a token (padding rows of the embedding) give no text."""
        return self._backend.decode(ids, skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for (a token need not be whole characters); empty without a token."""
        token = self._backend.token(token_id)
        if token is None:
            return b""
        if not self._backend.byte_level():
            return self._backend.decode([token_id], False).encode("utf-8")
        table = _byte_table()
        try:
            return bytes(table[char] for char in token)
        except KeyError:  # an added token, whose text is literal
            return token.encode("utf-8")

    def incremental(self, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder for a stream of ids."""
        return IncrementalDecoder(self, skip_special)

    def chat(
        self, messages: Sequence[Message], system: str | None = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation (arguments and errors of `render_chat`)."""
        # The template writes the special tokens itself.
        return self.encode(self.render_chat(messages, system, add_generation_prompt, **kwargs), add_special=False)

    def render_chat(
        self, messages: Sequence[Message], system: str | None = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Text of a conversation under the model's chat template.

        Args:
            messages: dicts with `role` and `content`, oldest first.
            system: system message to put in front.
            add_generation_prompt: end with the header of the assistant's answer.
            **kwargs: variables of the template (such as Qwen3's `enable_thinking`).

        Raises:
            InputError: no template, no or malformed messages, unknown variable, or the template refused.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template; send a plain prompt (--no-chat)")
        plain = _plain_messages(messages, system)
        template, variables = _compile(self.chat_template)
        for name in kwargs:
            if name not in variables:
                known = ", ".join(sorted(variables - {"messages", "add_generation_prompt", *_SPECIAL_ROLES})) or "none"
                raise InputError(f"chat template variable {name!r} is not used by this model's template; it knows: {known}")
        context = {"tools": None, "documents": None} | self.special | kwargs
        try:
            return template.render(messages=plain, add_generation_prompt=add_generation_prompt, **context)
        except jinja2.TemplateError as err:
            raise InputError(f"the chat template refused the messages: {_line(err)}") from err
        except (TypeError, ValueError, KeyError, AttributeError) as err:
            raise InputError(f"the chat template cannot render the messages: {_line(err)}; check each role and content") from err


class IncrementalDecoder:
    """Turns a stream of token ids into text pieces whose concatenation is `Tokenizer.decode` of all ids.

    A character whose bytes are spread over tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer._backend.byte_level() else None
        # Other tokenizers: the text of a token depends on its neighbours, so decode a window that starts at
        # `_ids[0]` and give out what goes beyond the text already given.
        self._ids: list[int] = []
        self._given = 0  # tokens of the window whose text is out

    def push(self, ids: int | Sequence[int]) -> str:
        """Text that becomes certain with these ids ("" while a character is incomplete)."""
        fresh = [ids] if isinstance(ids, int) else [int(i) for i in ids]
        fresh = [i for i in fresh if i not in self._skip]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(self._tokenizer.token_bytes(i) for i in fresh))
        self._ids += fresh
        return self._window(final=False)

    def flush(self) -> str:
        """The rest, at the end of the stream: incomplete bytes become U+FFFD, as in `decode`."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._window(final=True)

    def _window(self, final: bool) -> str:
        decode = self._tokenizer._backend.decode
        before, now = decode(self._ids[: self._given], False), decode(self._ids, False)
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        # Keep the last given token as the left neighbour of what follows.
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return now[len(before) :]


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Tokenizer and chat template of a model: a .gguf file, a Hugging Face directory, or a hub id.

    Raises:
        ModelFileError: missing, damaged or unsupported tokenizer, with the file and the remedy.
    """
    local = resolve_model(path)
    return _from_directory(local) if local.is_dir() else tokenizer_from_gguf(GGUFSource(local))


def tokenizer_from_gguf(source: GGUFSource) -> Tokenizer:
    """Byte-level BPE tokenizer from a GGUF file's metadata (pre-tokenizers smollm, qwen2 and llama-bpe).

    Raises:
        ModelFileError: another tokenizer model or pre-tokenizer, or missing keys.
    """
    meta, path = source.metadata, source.path
    for key in ("model", "tokens", "merges", "token_type"):
        if f"tokenizer.ggml.{key}" not in meta:
            raise ModelFileError(f"{path}: metadata key 'tokenizer.ggml.{key}' is missing; convert the model again with its tokenizer")
    kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelFileError(f"{path}: tokenizer.ggml.model={kind!r} is not supported (only byte-level BPE, 'gpt2'); use the model's Hugging Face directory")
    if pre not in _PRE_TOKENIZERS:
        raise ModelFileError(
            f"{path}: tokenizer.ggml.pre={pre!r} is not supported (known: {', '.join(_PRE_TOKENIZERS)}); use the model's Hugging Face directory"
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    try:
        model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")  # type: ignore[arg-type]
    except Exception as err:  # noqa: BLE001 - the Rust library raises bare Exception
        raise ModelFileError(f"{path}: tokenizer.ggml.merges does not fit tokenizer.ggml.tokens ({_line(err)}); convert the model again") from err
    inner = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()  # as in Qwen's own tokenizer
    inner.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    inner.decoder = decoders.ByteLevel()
    kinds = [int(k) for k in meta["tokenizer.ggml.token_type"]]
    inner.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL])
    inner.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _USER_DEFINED])
    special = {}
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[role] = tokens[token_id]
    around = ["$A"]
    if meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        around.insert(0, special["bos_token"])
    if meta.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special:
        around.append(special["eos_token"])
    if len(around) > 1:
        named = [(t, inner.token_to_id(t)) for t in dict.fromkeys(around) if t != "$A"]
        inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=named)
    template = meta.get("tokenizer.chat_template")
    return Tokenizer(_Fast(inner), eos_ids=source.eos_ids(), special=special, chat_template=template)


def _byte_bpe(digits: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": lambda: _byte_bpe(""),
    "llama-bpe": lambda: _byte_bpe("{1,3}"),
}


def _from_directory(path: Path) -> Tokenizer:
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    fast = path / "tokenizer.json"
    backend: _Backend
    if fast.is_file():
        try:
            backend = _Fast(tokenizers.Tokenizer.from_file(str(fast)))
        except Exception as err:  # noqa: BLE001 - the Rust library raises bare Exception
            raise ModelFileError(f"{fast}: not a readable tokenizer ({_line(err)}); download it again") from err
    else:
        backend = _slow_backend(path)
    special = {}
    names = config if any(role in config for role in _SPECIAL_ROLES) else _optional_json(path / "special_tokens_map.json")
    for role in _SPECIAL_ROLES:
        value = names.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[role] = text
    ends = hf_eos_ids(path, _optional_json(path / "config.json"))
    if not ends and "eos_token" in special:
        ends = tuple(i for i in [backend.token_id(special["eos_token"])] if i is not None)
    return Tokenizer(backend, eos_ids=ends, special=special, chat_template=_directory_template(path, config))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _slow_backend(path: Path) -> _Backend:
    if not any((path / name).is_file() for name in ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")):
        raise ModelFileError(f"{path}: holds no tokenizer (tokenizer.json or tokenizer.model); download the model's tokenizer files")
    from transformers import AutoTokenizer  # seconds of import, so only where nothing else reads the files

    try:
        slow = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as err:  # noqa: BLE001 - transformers raises many unrelated types
        raise ModelFileError(f"{path}: transformers cannot load the tokenizer ({_line(err)}); add a tokenizer.json") from err
    inner = getattr(slow, "backend_tokenizer", None)
    return _Fast(inner) if isinstance(inner, tokenizers.Tokenizer) else _Slow(slow)


def _plain_messages(messages: Sequence[Message], system: str | None) -> list[dict[str, Any]]:
    """Checked copies: keys with None dropped (templates print "None" otherwise), text parts joined."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"messages is a {type(messages).__name__}; give a list of {{'role': ..., 'content': ...}}")
    if not messages:
        raise InputError("messages is empty; give at least one message with role and content")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{i}] is a {type(message).__name__}; give {{'role': ..., 'content': ...}}")
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
        plain.append(fields)
    if system is not None:
        if plain[0]["role"] == "system":
            raise InputError("a system message was given twice (system and messages[0]); give one of them")
        plain.insert(0, {"role": "system", "content": system})
    return plain


def _joined(parts: list[Any], i: int) -> str:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            what = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InputError(f"messages[{i}].content holds a part of type {what!r}; only text parts are supported")
    return "".join(part["text"] for part in parts)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training masks; rendering passes it through."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Compiled template and the variables it uses; same environment as transformers' apply_chat_template."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda fmt: datetime.datetime.now().strftime(fmt)
    try:
        return env.from_string(source), frozenset(jinja2.meta.find_undeclared_variables(env.parse(source)))
    except jinja2.TemplateSyntaxError as err:
        raise ModelFileError(f"the model's chat template is not valid Jinja, line {err.lineno}: {_line(err)}; send a plain prompt (--no-chat)") from err


@functools.cache
def _byte_table() -> dict[str, int]:
    """Character to byte of GPT-2's printable byte alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    return table | {chr(256 + n): b for n, b in enumerate(rest)}


def _line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return (lines[0] if lines else type(err).__name__)[:160]
