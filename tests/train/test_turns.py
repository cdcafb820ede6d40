"""Conversations of several turns: only what the target wrote is learned."""

import dataclasses
import functools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import EngineConfig
from jetspec_jax.errors import ModelFileError
from jetspec_jax.loading import tokenizer_of
from jetspec_jax.models.decoder import Numerics, forward_full
from jetspec_jax.testing import EOS, byte_tokenizer, tiny_target
from jetspec_jax.weights import bundled_model_path, open_source
from tests.train.test_step import HEAD
from train import answers, regenerate
from train.config import DataConfig
from train.data import (
    Dataset,
    Sample,
    coverage,
    draft_vocabulary,
    draw_anchors,
    held_out_batches,
    load_dataset,
    train_batch,
)
from train.evaluate import Rounds, walk_tau
from train.shards import REFUSED, ShardWriter, Writing, split_turns
from train.show import tokens_of
from train.slots import RegenConfig, Regenerator
from train.step import Batch, Frozen, slot_targets


def message(role: str, content: str) -> dict[str, str]:
    return {"role": {"s": "system", "u": "user", "a": "assistant"}[role], "content": content}


def conversation(*parts: str) -> dict[str, Any]:
    """ "u 5 6" is a user's message "5 6"."""
    messages = [message(part[0], part[2:]) for part in parts]
    return {"id": parts[0], "source": "t", "messages": messages}


@pytest.mark.parametrize(
    ("roles", "parts"),
    [
        ("u", ["u"]),
        ("su", ["su"]),
        ("uau", ["uau"]),
        ("uuu", ["u", "u", "u"]),
        ("suauu", ["suau", "u"]),
        ("uuaau", ["u", "uaau"]),
        ("usu", ["u", "su"]),
    ],
)
def test_users_are_answered_where_no_answer_is_given(roles: str, parts: list[str]) -> None:
    found = split_turns([message(role, str(i)) for i, role in enumerate(roles)])
    assert ["".join(m["role"][0] for m in part) for part in found] == parts
    assert [m["content"] for part in found for m in part] == [str(i) for i in range(len(roles))]


def test_spans_are_those_of_a_conversation_written_by_hand(tmp_path: Path) -> None:
    """The bundled template and tokenizer; a given answer in the middle, an answer that is cut."""
    tokenizer = tokenizer_of(open_source(bundled_model_path()))
    hand = [  # text, and whether the target wrote it
        ("<|im_start|>system\nBe brief.<|im_end|>\n", False),
        ("<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n", False),
        ("The Danube.<|im_end|>", True),
        ("\n<|im_start|>user\nAnd a lake?<|im_end|>\n", False),
        ("<|im_start|>assistant\nLake Como.<|im_end|>\n", False),
        ("<|im_start|>user\nHow deep is it?<|im_end|>\n<|im_start|>assistant\n", False),
        ("It is 410 metres", True),
        ("<|im_end|>\n<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n", False),
        ("You're welcome!<|im_end|>", True),
    ]
    prompt = conversation(
        "s Be brief.", "u Name a river.", "u And a lake?", "a Lake Como.", "u How deep is it?",
        "u Thanks!",
    )  # fmt: skip
    seq = Writing.begin(prompt, tokenizer.chat(split_turns(prompt["messages"])[0]))
    for text in (text for text, own in hand if own):
        if seq.spans:
            assert seq.next_turn(tokenizer, 200)
        seq.ids += tokenizer.encode(text, add_special=False)
        seq.spans.append((seq.start, len(seq.ids)))
    assert not seq.next_turn(tokenizer, 200) and seq.refused is None
    pieces = [(tokenizer.encode(text, add_special=False), own) for text, own in hand]
    assert seq.ids == [i for ids, _ in pieces for i in ids]
    own = np.asarray([own for ids, own in pieces for _ in ids])

    seq.features.append(np.zeros((len(seq.ids) - 1, 2, 4), jnp.bfloat16))
    writer = ShardWriter(tmp_path)
    writer.add(seq)
    writer.flush()
    assert (writer.lines[0]["answers"], writer.lines[0]["answer_tokens"]) == (3, own.sum())
    cfg = DataConfig(path=str(tmp_path), held_out=0.0, bucket=16)
    data = load_dataset(cfg)
    [sample] = data.train
    np.testing.assert_array_equal(sample.span_stop > 0, own)
    np.testing.assert_array_equal(sample.anchors, np.flatnonzero(own[1:]))
    assert data.answer_tokens == own.sum()
    np.testing.assert_array_equal(sample.answer, np.asarray(seq.ids)[own])
    marks = tokens_of(data, 0, 60, 0, None, tokenizer)
    assert [t.answer for t in marks] == own.tolist()
    assert [t.anchor for t in marks] == [*own[1:].tolist(), False]


def test_what_the_template_renders_otherwise_is_refused() -> None:
    tokenizer = byte_tokenizer()
    prompt = conversation("u Hi", "u More")

    def after(answer: list[int], template: str | None = None, room: int = 200) -> Writing:
        seq = Writing.begin(prompt, tokenizer.chat(prompt["messages"][:1]))
        seq.ids += answer
        seq.spans.append((seq.start, len(seq.ids)))
        if template is not None:
            tokenizer.chat_template = template
        before = list(seq.ids)
        went_on = seq.next_turn(tokenizer, room)
        assert went_on == (len(seq.ids) > len(before)) and seq.ids[: len(before)] == before
        return seq

    template = tokenizer.chat_template
    assert template is not None
    kept = after([*b" Hello "])
    assert kept.refused is None
    assert kept.ids == [*b"[user] Hi\n[assistant]  Hello \n[user] More\n[assistant] "]
    assert kept.start == len(kept.ids)
    for room, fits in ((len(kept.ids) + 1, True), (len(kept.ids), False)):
        cut = after([*b" Hello "], room=room)
        assert (cut.refused, len(cut.ids) == len(kept.ids)) == (None, fits)
    assert after([*b"Hel", 0xE2, 0x82]).refused == REFUSED  # half a character
    assert after([*b"Hello", EOS]).refused == REFUSED  # this template writes no end
    assert (
        after([*b" Hello "], template.replace("m.content", "m.content | trim")).refused == REFUSED
    )
    refusing = "{% if messages[2:] %}{{ raise_exception('one turn only') }}{% endif %}" + template
    assert "one turn only" in str(after([*b"Hello"], refusing).refused)


# ---- data ----


def shard(folder: Path, spans: Sequence[Sequence[tuple[int, int]]] | None, rows: int = 40) -> Path:
    """Three sequences without features."""
    folder.mkdir()
    rng = np.random.default_rng(2)
    arrays: dict[str, np.ndarray] = {
        "tokens": rng.integers(3, 32, (3, rows)).astype(np.int32),
        "length": np.asarray([rows, rows - 9, rows - 3], np.int32),
        "prompt_len": np.asarray([6, 9, 4], np.int32),
    }
    if spans is not None:
        arrays["spans"] = np.zeros((3, max(map(len, spans)), 2), np.int32)
        for row, found in enumerate(spans):
            arrays["spans"][row, : len(found)] = np.reshape(found, (-1, 2))
    np.savez(folder / "a.npz", **arrays)
    return folder


def all_batches(path: Path) -> tuple[Dataset, list[dict[str, np.ndarray]]]:
    cfg = DataConfig(path=str(path), held_out=0.4, sequences=2, anchors=5, bucket=8)
    data = load_dataset(cfg)
    assert data.train and data.held_out
    return data, [
        *(train_batch(data, cfg, i) for i in range(4)),
        *held_out_batches(data, cfg, 3, 7),
    ]


def test_a_shard_without_spans_is_one_answer_from_the_prompt_on(tmp_path: Path) -> None:
    old, before = all_batches(shard(tmp_path / "old", None))
    new, after = all_batches(shard(tmp_path / "new", [[(6, 40)], [(9, 31)], [(4, 37)]]))
    assert [s.spans for s in old.train + old.held_out] == [
        s.spans for s in new.train + new.held_out
    ]
    for a, b in zip(before, after, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name], err_msg=name)
    # the draws of the format's first version, so that its runs resume
    sample = next(s for s in old.train + old.held_out if s.length == 40)
    drawn, valid = draw_anchors(sample, 5, np.random.default_rng(8))
    every = np.arange(5, 39, dtype=np.int32)
    np.testing.assert_array_equal(drawn, np.sort(np.random.default_rng(8).permutation(every)[:5]))
    assert valid.all() and (sample.span_stop[drawn + 1] == 40).all()


def test_no_anchor_and_no_label_is_outside_the_answers(tmp_path: Path) -> None:
    spans = [[(6, 9), (15, 16), (20, 37)], [(9, 12), (12, 30)], [(4, 20), (30, 37)]]
    data, batches = all_batches(shard(tmp_path / "a", spans))
    by_tokens = {s.tokens.tobytes(): s for s in data.train + data.held_out}
    frozen = Frozen(jnp.zeros((32, 16)), jnp.zeros((32, 16)), jnp.arange(32, dtype=jnp.int32))
    seen = 0
    for arrays in batches:
        features = {"taps": np.zeros(0), "final": np.zeros(0)}
        batch = Batch(**{k: jnp.asarray(v) for k, v in (arrays | features).items()})
        label, inside, _, _ = (np.asarray(x) for x in slot_targets(HEAD, frozen, batch))
        for b, tokens in enumerate(arrays["tokens"]):
            sample = next(s for s in by_tokens.values() if (tokens[: s.length] == s.tokens).all())
            for a, anchor in enumerate(arrays["anchors"][b]):
                span = next((x for x in sample.spans if x[0] <= anchor + 1 < x[1]), None)
                assert span is not None
                for d in range(HEAD.depth):
                    learned = bool(arrays["valid"][b, a]) and anchor + 1 + d < span[1]
                    assert inside[b, a, d] == learned
                    assert label[b, a, d] == (sample.tokens[anchor + 1 + d] if learned else -1)
                    seen += learned
    assert seen > 50
    # vocabulary and coverage: answers only
    own = np.concatenate([s.tokens[a:b] for s in data.train for a, b in s.spans])
    assert data.answer_tokens == len(own)
    ids = draft_vocabulary(data.train, len(set(own.tolist())), 32, ())
    assert set(ids.tolist()) == set(own.tolist()) and coverage(data.train, ids, 32) == 1.0


def test_conversations_without_labels_are_counted_and_bad_spans_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "a", [[(30, 40)], [(9, 12), (26, 31)], []])
    data = load_dataset(DataConfig(path=str(path), held_out=0.0, max_tokens=28))
    assert data.rejected == 2  # one begins behind the cut, one has no answer
    assert [s.spans for s in data.train] == [((9, 12), (26, 28))]
    for i, bad in enumerate(([(6, 10), (9, 12)], [(6, 41)])):
        with pytest.raises(ModelFileError, match=r"a\.npz: row 0: answers .* overlap, or end"):
            load_dataset(DataConfig(path=str(shard(tmp_path / str(i), [bad, [], []]))))


def test_a_walk_decodes_each_answer_and_nothing_else() -> None:
    sample = Sample(np.arange(40, dtype=np.int32), ((6, 12), (20, 33)), None, None, "here")
    visited = []

    def evaluator(params: Any, batch: Any, frozen: Any, ids: Any) -> Any:
        del params, frozen, ids
        where = batch["anchors"].reshape(-1)
        visited.append(where[batch["valid"].reshape(-1)])
        none = np.zeros((len(where), 1))
        # two accepted in the first answer, none in the second; whole blocks of three
        accepted = np.where(where < 12, 2, 0)[:, None].repeat(5, 1)
        whole = where + 3 < batch["stop"].reshape(-1)
        return None, Rounds(accepted, none, none, none, none, whole)

    taus = walk_tau(evaluator, {}, [sample], lambda arrays: arrays, Any, None, anchors=8)
    assert np.concatenate(visited).tolist() == [*range(5, 11), *range(19, 32)]
    # rounds at 5 and 8 of three tokens (11 is no anchor), then at 19 to 29 of one
    assert set(taus.values()) == {round((6 + 11) / (2 + 11), 4)}


# ---- regeneration ----


class Numbers:
    """Text of ids is their numbers, which keeps any answer; a prompt with 99 forgets answers."""

    eos_ids = (EOS,)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids if i != EOS)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        out: list[int] = []
        for m in messages:
            ids = [int(word) for word in m["content"].split()]
            if m["role"] == "user":
                out += [1, *ids, 2]
            elif "99" not in messages[0]["content"]:
                out += [*ids, EOS]
        return out


CONVERSATIONS = [
    conversation("u 7 8", "u 20 21 22", "u 30"),
    conversation("u 9 9 9 9", "u " + "40 " * 30, "u 31"),  # a turn longer than a call's steps
    conversation("u 11"),
    conversation("u 12 13", "a 50 51", "u 14", "u 15 16"),
    conversation("u 99 1", "u 2"),
    conversation("u " + "3 " * 70, "u 5"),  # longer than --max-prompt
    conversation("u 17", "u " + "60 " * 50, "u 61"),  # its last turn has no room
]
MAX_NEW, MAX_TOKENS = 20, 100


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[dict[str, Any]]]:
    """A run that is stopped in the middle of a conversation, and its resumption."""
    root = tmp_path_factory.mktemp("turns")
    file = root / "p.jsonl"
    file.write_text("".join(json.dumps(c) + "\n" for c in CONVERSATIONS))
    target = dataclasses.replace(
        tiny_target(engine=EngineConfig(kernels="xla")), tokenizer=Numbers()
    )
    words = ["--out", str(root / "out"), "--prompts-file", str(file), "--for-evaluation"]
    words += ["--slots", "2", "--group", "2", "--max-prompt", "60", "--taps", "0", "1"]
    words += ["--max-new", str(MAX_NEW), "--max-tokens", str(MAX_TOKENS), "--kernels", "xla"]
    handlers: dict[int, Any] = {}
    results = []
    advance = Regenerator.advance

    def stopped(self: Regenerator, stop_ids: set[int]) -> list[Writing]:
        ended = advance(self, stop_ids)
        if any(seq is not None and seq.spans and seq.turns for seq in self.writing):
            handlers[signal.SIGTERM](signal.SIGTERM, None)
        return ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "load_target", lambda *_: target)
        patch.setattr(regenerate, "ShardWriter", functools.partial(ShardWriter, per_shard=2))
        patch.setattr(signal, "signal", handlers.__setitem__)
        for method in (stopped, advance):
            patch.setattr(Regenerator, "advance", method)
            results.append(regenerate.run(regenerate.parser().parse_args(words)))
    return target, root / "out", results


def test_every_conversation_is_accounted_for_though_a_run_stopped_in_one(written: Any) -> None:
    _, out, (first, second) = written
    for result in (first, second):
        counts = [result[k] for k in ("done", "skipped", "failed", "open")]
        assert sum(counts) == result["input"] == len(CONVERSATIONS)
    assert first["open"] > 0 and second["open"] == 0
    assert second["reasons"] == {REFUSED: 1, "first turn not of 2 to 60 tokens": 1}
    lines = [json.loads(x) for x in (out / "manifest.jsonl").read_text().splitlines()]
    ids = [i for line in lines for i in line["ids"]]
    assert len(ids) == len(set(ids)) == len(CONVERSATIONS)
    data = load_dataset(DataConfig(path=str(out), held_out=0.0))
    assert second["answers"] == sum(len(s.spans) for s in data.train) == 3 + 3 + 1 + 2 + 2
    assert second["answer_tokens"] == data.answer_tokens


def test_each_answer_is_the_targets_own_and_ends_where_it_should(written: Any) -> None:
    target, out, _ = written
    data = load_dataset(DataConfig(path=str(out), held_out=0.0))
    tokens = np.zeros((len(data.train), MAX_TOKENS), np.int32)
    for row, sample in enumerate(data.train):
        tokens[row, : sample.length] = sample.tokens
    forward = forward_full(target.params, target.config, jnp.asarray(tokens), taps=(0, 1))
    chosen, taps = np.asarray(forward.logits).argmax(-1), np.asarray(forward.taps)
    for row, sample in enumerate(data.train):
        own = sample.span_stop > 0
        np.testing.assert_array_equal(
            sample.tokens[1:][own[1:]], chosen[row][:-1][: sample.length - 1][own[1:]]
        )
        assert sample.taps is not None
        stored = (sample.taps[:-1].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(stored, taps[row, : sample.length - 1], rtol=0.02, atol=0.02)
        for start, stop in sample.spans:
            assert sample.tokens[start - 1] == 2  # behind a header
            ended = sample.tokens[stop - 1] == EOS
            assert ended or stop - start == MAX_NEW or stop == MAX_TOKENS
            assert EOS not in sample.tokens[start : stop - 1]
        assert sample.length == sample.spans[-1][1] <= MAX_TOKENS


def test_packed_conversations_come_back_as_far_as_they_still_fit(
    written: Any, tmp_path: Path
) -> None:
    target, out, _ = written
    pack = answers.collect(out)
    answers.write(pack, tmp_path / "p.npz")
    again = answers.read(tmp_path / "p.npz")
    assert again.ids == pack.ids and again.count == pack.count
    assert [len(a) for a in again.answers] == [len(a) for a in pack.answers]
    cfg = RegenConfig(2, 2, 60, MAX_NEW, MAX_TOKENS, (0, 1), Numerics(attention_chunk=128))
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(c) + "\n" for c in CONVERSATIONS))
    prompts = {p["id"]: p for p in regenerate.prompts_from_file(file, evaluation=True)}
    first = data_of(out)
    changed = next(i for i, p in prompts.items() if p["messages"][0]["content"] == "7 8")
    prompts[changed] = prompts[changed] | {
        "messages": [*prompts[changed]["messages"][:2], message("u", "33")]
    }
    assert regenerate.restore(target, cfg, ShardWriter(tmp_path / "b"), again, prompts) == 5
    second = data_of(tmp_path / "b")
    assert second.keys() == first.keys()
    for name, (tokens, spans) in second.items():
        was, spans_before = first[name]
        if name == changed:  # its third question is another one: the answer to it is left out
            assert spans == spans_before[:2]
            was = was[: spans[-1][1]]
        else:
            assert spans == spans_before
        np.testing.assert_array_equal(tokens, was)


def data_of(folder: Path) -> dict[str, tuple[np.ndarray, tuple[tuple[int, int], ...]]]:
    lines = [json.loads(x) for x in (folder / "manifest.jsonl").read_text().splitlines()]
    ids = [i for line in lines if "shard" in line for i in line["ids"]]
    data = load_dataset(DataConfig(path=str(folder), held_out=0.0))
    return {i: (s.tokens, s.spans) for i, s in zip(ids, data.train, strict=True)}
