"""Tokenizers, chat templates and incremental decoding."""

from __future__ import annotations

import functools
import json
import sysconfig
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jetspec_jax.chat_template import render
from jetspec_jax.errors import InputError, ModelFileError
from jetspec_jax.text import Tokenizer, load_tokenizer
from jetspec_jax.tokenizer_files import PRE_TOKENIZERS, FastBackend
from jetspec_jax.weights import bundled_model_path
from tests.weights.files import one_line

ASK = [{"role": "user", "content": "What is 2+2?"}]

# llama.cpp, src/llama-vocab.cpp: the expressions of each pre-tokenizer, applied one after another.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NEW = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_CPP = {
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_NEW % "",),
    "llama-bpe": (_NEW % "{1,3}",),
}


def stdlib_texts(count: int, limit: int = 12_000) -> list[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    small = [path for path in files if 2_000 < path.stat().st_size < limit]
    return [path.read_text(encoding="utf-8") for path in small[:: max(1, len(small) // count)]][
        :count
    ]


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    return _bundled()


@functools.cache
def _bundled() -> Tokenizer:
    return load_tokenizer(bundled_model_path())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    write_tokenizer_gguf(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found = stdlib_texts(25)
    assert len(found) == 25
    return found


# --- ids ----------------------------------------------------------------------------------------


def test_round_trip_and_streaming_on_stdlib_files(smol: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = smol.encode(text)
        assert smol.decode(ids) == text
        stream = smol.incremental()
        pieces = [stream.push(ids[i : i + 3]) for i in range(0, len(ids), 3)]
        assert "".join([*pieces, stream.flush()]) == text


def test_digits_are_single_tokens_as_in_llama_cpp(smol: Tokenizer, texts: list[str]) -> None:
    assert [smol.decode([i]) for i in smol.encode("a1234b 56")] == list("a1234b 56")
    for text in texts[:5]:
        for token in map(smol.token_bytes, smol.encode(text)):
            assert len(token) == 1 or not any(48 <= byte <= 57 for byte in token)


def isolate(pattern: str, pieces: list[str]) -> list[str]:
    """Cut every piece at the matches; matches and what lies between them stay pieces."""
    out = []
    for piece in pieces:
        end = 0
        for match in regex.finditer(pattern, piece):
            out += [piece[end : match.start()], match.group()]
            end = match.end()
        out.append(piece[end:])
    return [piece for piece in out if piece]


TRICKY = (
    "I'm SURE'S it's 12345 x² ½ \uff14\uff15",
    "  two  spaces\n\n\n   after\r\n\ttabs \n",
    "naïve café — “quotes” ... !!! ???\n\nx",
    "日本語のテキスト 한국어 العربية हिन्दी \U0001f600\U0001f468‍\U0001f469",
    "don't WE'LL they'Ve 3.14e-10 0xFF a_b-c",
    " ",
    "\n",
)


@pytest.mark.parametrize("pre", sorted(LLAMA_CPP))
def test_words_are_cut_as_in_llama_cpp(pre: str, texts: list[str]) -> None:
    assert set(PRE_TOKENIZERS) == set(LLAMA_CPP)
    splitter = PRE_TOKENIZERS[pre]()
    for text in (*TRICKY, *texts[:6]):
        expected = [text]
        for pattern in LLAMA_CPP[pre]:
            expected = isolate(pattern, expected)
        got = [text[a:b] for _, (a, b) in splitter.pre_tokenize_str(text)]
        assert got == expected


def test_special_tokens(smol: Tokenizer) -> None:
    assert (smol.vocab_size, smol.eos_ids) == (49_152, (2,))
    assert smol.special["bos_token"] == "<|im_start|>"
    assert (smol.token_id("<|im_end|>"), smol.token_id("no such token")) == (2, None)
    ids = smol.encode("a<|im_end|>b")
    assert 2 in ids
    assert smol.decode(ids) == "ab"
    assert smol.decode(ids, skip_special=False) == "a<|im_end|>b"
    assert smol.encode("") == []
    assert smol.decode([]) == ""
    assert smol.decode([49_152, 60_000]) == ""  # spare rows of an embedding
    assert smol.token_bytes(60_000) == b""


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused(smol: Tokenizer, text: str) -> None:
    with pytest.raises(InputError, match="not a Unicode character"):
        smol.encode(text)


def test_other_than_text_is_refused(smol: Tokenizer) -> None:
    for value in (None, 3, b"x", ["a"]):
        with pytest.raises(InputError, match="give text"):
            smol.encode(value)  # type: ignore[arg-type]


# --- incremental --------------------------------------------------------------------------------


def test_characters_spread_over_tokens_come_out_whole(smol: Tokenizer) -> None:
    text = "\U0001f9d1\u200d\U0001f680 naïve \U0001d518\U0001d52b 漢字 ok"
    ids = smol.encode(text)
    stream = smol.incremental()
    pieces = [stream.push(i) for i in ids]
    assert any(piece == "" for piece in pieces)  # some token did end inside a character
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement(smol: Tokenizer) -> None:
    ids = smol.encode("\U0001f9d1")
    assert len(ids) > 1
    stream = smol.incremental()
    assert stream.push(ids[:-1]) == ""
    assert stream.flush() == smol.decode(ids[:-1]) == "\ufffd"


@given(ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans(), data=st.data())
def test_pieces_of_any_ids_add_up(ids: list[int], skip: bool, data: st.DataObject) -> None:
    tokenizer = _bundled()
    low = [i % 400 for i in ids]  # the low ids hold special tokens and single bytes
    chosen = data.draw(st.sampled_from([ids, low]))
    stream = tokenizer.incremental(skip_special=skip)
    pieces = [stream.push(i) for i in chosen]
    assert "".join([*pieces, stream.flush()]) == tokenizer.decode(chosen, skip_special=skip)


def sentencepiece_like() -> Tokenizer:
    """Byte fallback and word marks, as in Llama 2's tokenizer.json."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {
        "<unk>": 256,
        "▁": 257,
        "▁hello": 258,
        "▁world": 259,
    }
    merges: list[Any] = []
    for word in ("hello", "world"):
        for i, char in enumerate(word):
            vocab.setdefault(char, len(vocab))
            left = "▁" + word[:i]
            vocab.setdefault(left + char, len(vocab))
            merges.append((left, char))
    merges = list(dict.fromkeys(merges))
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(FastBackend(inner))


@pytest.mark.parametrize(
    "text", ["hello world", "hello 漢 world", "\U0001f600\U0001f600", "hello hello"]
)
def test_incremental_with_byte_fallback(text: str) -> None:
    tokenizer = sentencepiece_like()
    assert not tokenizer.byte_level
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for step in (1, 2, 5):
        stream = tokenizer.incremental()
        pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join([*pieces, stream.flush()]) == text
    stream = tokenizer.incremental()
    stream.push(tokenizer.encode("漢")[:-1])
    assert "\ufffd" in stream.flush()
    assert tokenizer.token_bytes(0xE6) == b"\xe6"


# --- chat ---------------------------------------------------------------------------------------

QWEN_LIKE = """
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{ {"é": "<b>", "last": ns.last} | tojson }} {{ strftime_now('%Y') }} {{ bos_token }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
CHATS = [
    ASK,
    [{"role": "system", "content": "Be brief."}, *ASK],
    [
        *ASK,
        {"role": "assistant", "content": "  4 \n"},
        {"role": "user", "content": '<b>ü & "q"</b>'},
    ],
    [*ASK, {"role": "tool", "content": "ignored"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "hi", "name": None}],
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("which", ["bundled", "qwen"])
def test_rendering_equals_transformers(
    smol: Tokenizer, tiny: Tokenizer, which: str, add_generation_prompt: bool
) -> None:
    from transformers import PreTrainedTokenizerFast

    template = smol.chat_template if which == "bundled" else QWEN_LIKE
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tiny._backend.inner, chat_template=template, **tiny.special
    )
    ours = Tokenizer(tiny._backend, special=tiny.special, chat_template=template)
    options: list[dict[str, Any]] = [{}]
    if which == "qwen":
        options += [{"enable_thinking": False}, {"tools": [{"type": "function", "x": "é"}]}]
    for messages in CHATS:
        for more in options:
            text = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **more
            )
            assert ours.render_chat(messages, None, add_generation_prompt, **more) == text
            ids = ours.chat(messages, None, add_generation_prompt, **more)
            assert ids == theirs.encode(text, add_special_tokens=False)


def test_bundled_template_in_full(smol: Tokenizer) -> None:
    text = smol.render_chat(ASK, system="Be brief.")
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert smol.chat(ASK, system="Be brief.")[0] == 1
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}],
        }
    ]
    assert smol.render_chat(parts) == smol.render_chat(ASK)


@pytest.mark.parametrize(
    "messages,reason",
    [
        ([], "messages is empty"),
        ("hi", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        (None, "messages is a NoneType"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "hi"}], r"messages\[0\] has no role"),
        ([{"role": None, "content": "hi"}], r"messages\[0\] has no role"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\] has no role"),
        ([*ASK, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is a int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": ["x"]}], "'str'"),
    ],
)
def test_bad_messages_say_why(smol: Tokenizer, messages: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        smol.chat(messages)
    assert "\n" not in str(caught.value)


def test_template_refusals_and_unknown_variables(smol: Tokenizer) -> None:
    strict = (
        "{% if messages[0].role != 'user' %}"
        "{{ raise_exception('Unknown role: ' + messages[0].role) }}{% endif %}x{{ mood }}"
    )

    def run(messages: list[dict[str, Any]], source: str = strict, **more: Any) -> str:
        return render(
            source, messages, system=None, add_generation_prompt=True, special={}, variables=more
        )

    assert run(ASK, mood="y") == "xy"
    with pytest.raises(InputError, match="Unknown role: wizard"):
        run([{"role": "wizard", "content": "x"}])
    with pytest.raises(
        InputError, match="'moot' cannot be set for this model; its template has: mood"
    ):
        run(ASK, moot=1)
    with pytest.raises(InputError, match="cannot be set"):
        run(ASK, "{{ tools }}", add_generation_prompt=False)
    with pytest.raises(InputError, match="cannot render"):
        run([{"role": "user", "content": "x"}], "{{ messages[0].content + 3 }}")
    with pytest.raises(InputError, match="refused"):
        run(ASK, "{{ messages.append(1) }}")  # the sandbox
    with pytest.raises(ModelFileError, match="not valid Jinja"):
        run(ASK, "{% if %}")
    with pytest.raises(InputError, match="twice"):
        smol.chat([{"role": "system", "content": "a"}, *ASK], system="b")
    with pytest.raises(InputError, match="no chat template"):
        Tokenizer(smol._backend).chat(ASK)


# --- files --------------------------------------------------------------------------------------


def write_tokenizer_gguf(path: Path, **change: Any) -> list[str]:
    """A GGUF with a byte tokenizer and a few merges; `change` replaces or (None) drops keys."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "ll", "hell", "12", "<|end|>", "<tool>"]
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "merges": ["h e", "l l", "he ll", "1 2"],
        "token_type": [1] * (len(tokens) - 2) + [3, 4],
        "eos_token_id": len(tokens) - 2,
        "bos_token_id": len(tokens) - 2,
    }
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in (keys | change).items():
        full = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif value is not None:
            writer.add_array(full, value)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def test_gguf_tokenizers_of_other_families(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokens = write_tokenizer_gguf(path)
    qwen = load_tokenizer(path)
    assert [tokens[i] for i in qwen.encode("hell12<|end|><tool>")] == [
        "hell",
        "1",
        "2",
        "<|end|>",
        "<tool>",
    ]
    assert qwen.decode(qwen.encode("<|end|><tool>")) == "<tool>"
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"  # Qwen composes characters
    assert qwen.chat_template is None
    write_tokenizer_gguf(path, pre="llama-bpe")
    llama = load_tokenizer(path)
    assert [tokens[i] for i in llama.encode("hell12")] == ["<|end|>", "hell", "12"]
    assert [tokens[i] for i in llama.encode("hell12", add_special=False)] == ["hell", "12"]
    assert llama.decode(llama.encode("e\u0301")) == "e\u0301"
    write_tokenizer_gguf(path, pre="llama-bpe", add_bos_token=False, add_eos_token=True)
    assert load_tokenizer(path).encode("he")[-1] == tokens.index("<|end|>")


@pytest.mark.parametrize(
    "change,fragment",
    [
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre='deepseek-llm'"),
        ({"pre": None}, "tokenizer.ggml.pre='default'"),
        ({"model": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": ["h e", "absent x"]}, "tokenizer.ggml.merges"),
        ({"merges": ["he"]}, "tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type"),
    ],
)
def test_unsupported_gguf_tokenizers_are_refused_by_name(
    tmp_path: Path, change: dict, fragment: str
) -> None:
    path = tmp_path / "m.gguf"
    write_tokenizer_gguf(path, **change)
    one_line(path, lambda: load_tokenizer(path), fragment)


def test_directory_tokenizer(tmp_path: Path, tiny: Tokenizer) -> None:
    tiny._backend.inner.save(str(tmp_path / "tokenizer.json"))
    end, tool = tiny.token_id("<|end|>"), tiny.token_id("<tool>")
    config: dict[str, Any] = {
        "eos_token": {"content": "<|end|>", "lstrip": False},
        "bos_token": "<tool>",
        "pad_token": None,
        "chat_template": "old {{ messages[0].content }}",
    }

    def load() -> Tokenizer:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(tmp_path)

    tokenizer = load()
    text = "hell 123 times: naïve 漢字<|end|>"
    assert tokenizer.encode(text) == tiny.encode(text)
    assert tokenizer.special == {"eos_token": "<|end|>", "bos_token": "<tool>"}
    assert tokenizer.eos_ids == (end,)
    assert tokenizer.render_chat(ASK) == "old What is 2+2?"
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    config["chat_template"] = named
    assert load().render_chat(ASK) == "d"
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].role }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load().render_chat(ASK) == "new user"
    assert load().eos_ids == (2, 0)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<tool>"}')
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_ids == (tool,)


def test_padding_and_truncation_of_a_training_run_are_dropped(
    tmp_path: Path, tiny: Tokenizer
) -> None:
    inner = tokenizers.Tokenizer.from_str(tiny._backend.inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("hell " * 4) == tiny.encode("hell " * 4)
    assert load_tokenizer(tmp_path).encode("h") == tiny.encode("h")


def test_directory_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert [tokens[i] for i in tokenizer.encode("he h")] == ["he", "Ġ", "h"]
    assert tokenizer.decode(tokenizer.encode("he h é")) == "he h é"
    assert tokenizer.eos_ids == (len(tokens) - 1,)


def test_damaged_or_missing_tokenizers(tmp_path: Path) -> None:
    one_line(tmp_path, lambda: load_tokenizer(tmp_path), "holds no tokenizer")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    one_line(tmp_path / "tokenizer.json", lambda: load_tokenizer(tmp_path), "download it again")
    one_line("absent-dir", lambda: load_tokenizer("absent-dir"), "no such file")
