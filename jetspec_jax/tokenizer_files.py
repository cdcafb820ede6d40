"""Tokenizer implementations behind `jetspec_jax.text`, and how each kind of file becomes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jetspec_jax.errors import ModelFileError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_NEEDED_KEYS = ("model", "tokens", "merges", "token_type")


class Backend(Protocol):
    """What `Tokenizer` needs from an implementation."""

    def encode(self, text: str, add_special: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...
    def token(self, token_id: int) -> str | None: ...
    def token_id(self, token: str) -> int | None: ...
    def size(self) -> int: ...
    def special_ids(self) -> frozenset[int]: ...
    def byte_level(self) -> bool: ...


class FastBackend:
    """The Rust library's tokenizer."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        # A tokenizer.json may carry the padding and truncation of its training run.
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
        added = self.inner.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def byte_level(self) -> bool:
        return isinstance(self.inner.decoder, decoders.ByteLevel)


class SlowBackend:
    """A tokenizer of transformers, for directories without tokenizer.json."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, add_special: bool) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special))

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self.inner.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def token(self, token_id: int) -> str | None:
        known = 0 <= token_id < len(self.inner)
        return self.inner.convert_ids_to_tokens(token_id) if known else None

    def token_id(self, token: str) -> int | None:
        return self.inner.get_vocab().get(token)

    def size(self) -> int:
        return len(self.inner)

    def special_ids(self) -> frozenset[int]:
        return frozenset(self.inner.all_special_ids)

    def byte_level(self) -> bool:
        return False


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm,
    "qwen2": lambda: _words(""),
    "llama-bpe": lambda: _words("{1,3}"),
}
"""Values of tokenizer.ggml.pre, with the splits that llama.cpp and the original tokenizers make."""


def gguf_backend(meta: Mapping[str, Any], path: Path, special: Mapping[str, str]) -> Backend:
    """Byte-level BPE from GGUF metadata.

    Args:
        meta: the file's metadata.
        path: for messages.
        special: special tokens by role (`bos_token`, ...).

    Raises:
        ModelFileError: another tokenizer model or pre-tokenizer, or missing or damaged keys.
    """
    for key in _NEEDED_KEYS:
        if f"tokenizer.ggml.{key}" not in meta:
            raise ModelFileError(
                f"{path}: metadata key 'tokenizer.ggml.{key}' is missing; "
                "convert the model again with its tokenizer"
            )
    kind, pre = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelFileError(
            f"{path}: tokenizer.ggml.model={kind!r} is not supported (only byte-level BPE, "
            "'gpt2'); "
            "use the model's Hugging Face directory"
        )
    if pre not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"{path}: tokenizer.ggml.pre={pre!r} is not supported (known: "
            f"{', '.join(PRE_TOKENIZERS)}); use the model's Hugging Face directory"
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds = [int(k) for k in meta["tokenizer.ggml.token_type"]]
    if len(kinds) != len(tokens):
        raise ModelFileError(
            f"{path}: {len(tokens)} tokens but {len(kinds)} values in tokenizer.ggml.token_type; "
            "convert the model again"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: Any = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as err:  # the Rust library raises bare Exception
        raise ModelFileError(
            f"{path}: tokenizer.ggml.merges does not fit tokenizer.ggml.tokens "
            f"({first_line(err)}); "
            "convert the model again"
        ) from err
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()  # as in Qwen's own tokenizer
    inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
    inner.decoder = decoders.ByteLevel()
    for wanted, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, k in zip(tokens, kinds, strict=True) if k == wanted]
        added = [AddedToken(token, normalized=False, special=is_special) for token in chosen]
        (inner.add_special_tokens if is_special else inner.add_tokens)(added)
    around = ["$A"]
    if meta.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        around.insert(0, special["bos_token"])
    if meta.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special:
        around.append(special["eos_token"])
    if len(around) > 1:
        named: Any = [(text, vocab[text]) for text in dict.fromkeys(around) if text != "$A"]
        template: Any = around
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    return FastBackend(inner)


def directory_backend(path: Path) -> Backend:
    """Tokenizer of a Hugging Face directory: tokenizer.json, else what transformers makes of it.

    Raises:
        ModelFileError: no tokenizer, or a damaged one.
    """
    fast = path / "tokenizer.json"
    if fast.is_file():
        try:
            return FastBackend(tokenizers.Tokenizer.from_file(str(fast)))
        except Exception as err:  # the Rust library raises bare Exception
            raise ModelFileError(
                f"{fast}: not a readable tokenizer ({first_line(err)}); download it again"
            ) from err
    slow_files = ("tokenizer.model", "vocab.json", "spiece.model")
    if not any((path / name).is_file() for name in slow_files):
        raise ModelFileError(
            f"{path}: holds no tokenizer (tokenizer.json or tokenizer.model); "
            "download the model's tokenizer files into it"
        )
    from transformers import AutoTokenizer  # seconds of import; only where it is the one reader

    try:
        slow = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as err:  # transformers raises many unrelated types
        raise ModelFileError(
            f"{path}: transformers cannot load the tokenizer ({first_line(err)}); "
            "add a tokenizer.json"
        ) from err
    inner = getattr(slow, "backend_tokenizer", None)
    return FastBackend(inner) if isinstance(inner, tokenizers.Tokenizer) else SlowBackend(slow)


def first_line(err: BaseException) -> str:
    """The first line of an error's text, short enough for a one-line message."""
    lines = str(err).strip().splitlines()
    return (lines[0] if lines else type(err).__name__)[:160]
