"""Regeneration: the target's own tokens and features, every prompt accounted for, resumable."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.engine import LLM
from jetspec_jax.errors import ConfigError, ModelFileError
from jetspec_jax.models.decoder import Numerics, forward_full
from jetspec_jax.testing import EOS, tiny_target
from jetspec_jax.weights import bundled_model_path, open_source
from train import answers
from train.prompts import training_prompts
from train.regenerate import main, restore
from train.shards import ShardWriter
from train.slots import RegenConfig, Regenerator

TAPS, MAX_NEW = (0, 1), 24
PROMPTS = ([72, 105, 33], [72, 105] + [40] * 70, [9, 8, 7, 6])  # one longer than a prefill chunk


def prompt_of(prompt_id: str, *texts: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"id": prompt_id, "source": "t", "messages": messages}


@pytest.fixture(scope="module")
def target():
    return tiny_target(engine=EngineConfig())


@pytest.fixture(scope="module")
def written(target):
    """Three prompts through three slots, two of them prefilled together."""
    native = target.kernels == "cpu"
    cfg = RegenConfig(3, 2, 96, MAX_NEW, 120, TAPS, Numerics(native=native, attention_chunk=128))
    regen = Regenerator(target, cfg)
    # a group of two whose shorter prompt is padded, then one that joins them on the way
    queue, done = list(enumerate(PROMPTS)), []
    while queue or any(regen.writing):
        if len(regen.free()) >= min(2, len(queue)) and queue:
            group, queue = queue[:2], queue[2:]
            regen.start([(prompt_of(str(i), str(i)), ids, SamplingParams()) for i, ids in group])
        done += regen.advance({EOS})
    return {int(seq.prompt_id): seq for seq in done}


def test_the_answers_are_the_targets_own(target, written):
    llm = LLM.from_parts(target, engine=EngineConfig(capacity=192))
    plain = llm.generate(
        [list(p) for p in PROMPTS], SamplingParams(max_tokens=MAX_NEW), spec=SpecConfig(mode="off")
    )
    for i, result in enumerate(plain):
        assert written[i].ids == [*PROMPTS[i], *result.token_ids]
        assert written[i].spans == [(len(PROMPTS[i]), len(written[i].ids))]


def test_the_features_are_those_of_a_forward_over_the_sequence(target, written):
    for seq in written.values():
        rows = np.concatenate(seq.features).astype(np.float32)
        # the last id was never fed to the model
        assert len(rows) == len(seq.ids) - 1
        out = forward_full(
            target.params, target.config, jnp.asarray([seq.ids[:-1]], jnp.int32), taps=TAPS
        )
        expected = np.concatenate([np.asarray(out.taps[0]), np.asarray(out.hidden[0])[:, None]], 1)
        np.testing.assert_allclose(rows, expected, rtol=0.02, atol=0.02)  # stored in bfloat16


def test_every_prompt_is_accounted_for_and_a_second_run_goes_on(tmp_path, written):
    writer = ShardWriter(tmp_path, per_shard=2)
    for seq in written.values():
        writer.add(seq)
    writer.drop("too-long", "skipped", "900 prompt tokens")
    assert writer.seen == {"0", "1", "too-long"}  # the third waits for its shard
    writer.flush()
    again = ShardWriter(tmp_path)
    assert again.seen == {"0", "1", "2", "too-long"}
    assert again.tokens == sum(s.written for s in written.values())
    shards = [line["shard"] for line in again.lines if line["verdict"] == "done"]
    assert shards == ["shard_00000.npz", "shard_00001.npz"]
    with np.load(tmp_path / shards[0]) as data:
        length = int(data["length"][0])
        first = json.loads((tmp_path / "manifest.jsonl").read_text().splitlines()[0])["ids"][0]
        assert data["tokens"][0, :length].tolist() == written[int(first)].ids
        assert data["taps"].shape[2:] == (len(TAPS), 32)
    assert not list(tmp_path.glob("*.part"))


def test_packed_answers_bring_the_same_shards_back(target, written, tmp_path) -> None:
    """Tokens exactly, features up to bfloat16; another target's pack and a damaged one are
    refused."""
    meta = {"target": "tiny", "vocab_size": 259, "temperature": 0.0, "for_evaluation": False}
    first = ShardWriter(tmp_path / "a", per_shard=8)
    for i, seq in written.items():
        first.add(dataclasses.replace(seq, prompt_id=f"{i:016d}"))
    first.flush()
    (tmp_path / "a" / "meta.json").write_text(json.dumps(meta))
    assert answers.main(["--data", str(tmp_path / "a"), "--out", str(tmp_path / "p.npz")]) == 0
    pack = answers.read(tmp_path / "p.npz")
    answers.check(pack, meta, "p.npz")

    class Told:  # the prompts' ids, whatever their text
        def chat(self, messages: Any) -> list[int]:
            return list(PROMPTS[int(messages[0]["content"])])

    prompts = {f"{i:016d}": prompt_of(f"{i:016d}", str(i)) for i in written}
    told = dataclasses.replace(target, tokenizer=Told())
    cfg = RegenConfig(3, 2, 96, MAX_NEW, 120, TAPS, Numerics(attention_chunk=128))
    second = ShardWriter(tmp_path / "b", per_shard=8)
    assert restore(told, cfg, second, pack, prompts) == len(PROMPTS)
    assert restore(told, cfg, second, pack, prompts) == 0  # they are there already
    shards = {}
    for name in ("a", "b"):
        entry = json.loads((tmp_path / name / "manifest.jsonl").read_text().splitlines()[0])
        with np.load(tmp_path / name / entry["shard"]) as data:
            for row, prompt_id in enumerate(entry["ids"]):
                stop = int(data["length"][row])
                bits = data["taps"][row, : stop - 1].astype(np.uint32) << 16
                shards[name, prompt_id] = data["tokens"][row, :stop], bits.view(np.float32)
    for i in prompts:
        np.testing.assert_array_equal(shards["b", i][0], shards["a", i][0])
        np.testing.assert_allclose(shards["b", i][1], shards["a", i][1], rtol=0.02, atol=0.02)

    with pytest.raises(ConfigError, match="target 'tiny' \\(here 'other'\\)"):
        answers.check(pack, meta | {"target": "other"}, "p.npz")
    (tmp_path / "p.npz").write_bytes((tmp_path / "p.npz").read_bytes()[:-40])
    with pytest.raises(ModelFileError, match="is no pack of answers"):
        answers.read(tmp_path / "p.npz")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--slots", "0"], "--slots 0"),
        (["--max-new", "0"], "--max-new 0"),
        (["--max-seconds", "-1"], "--max-seconds -1"),
        (["--temperature", "nan"], "temperature"),
        (["--for-evaluation"], "--prompts-file"),
        (["--answers", __file__], "is no pack of answers"),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(tmp_path, capsys, words, said) -> None:
    assert main(["--out", str(tmp_path / "out"), *words]) in (1, 2)
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        (["--max-tokens", "100000"], "exceed the target's context of 8192; give less"),
        (["--slots", "100000"], "GB of keys and values, the machine has"),
        (["--num-taps", "99"], "--num-taps 99 takes a layer more than once"),
        (["--taps", "3", "3"], "--taps [3, 3] takes a layer more than once"),
        (["--out", __file__], f"--out {__file__}: cannot be made"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: cannot be made"),
    ],
)
def test_what_the_target_or_the_machine_refuses(tmp_path, capsys, words, said) -> None:
    out = tmp_path / "out"
    assert main(["--out", str(out), "--prompts", "4", "--slots", "2", *words]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and said in err
    assert not out.exists()


@pytest.mark.slow
def test_a_folder_goes_on_with_what_it_was_made_of(tmp_path, capsys) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"Say {name}."}))
    fixed = ["--out", str(tmp_path / "out"), "--slots", "2", "--max-new", "2"]
    assert main([*fixed, "--prompts-file", str(tmp_path / "a.jsonl")]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (first["done"], first["input"], first["open"]) == (1, 1, 0)
    meta = (tmp_path / "out" / "meta.json").read_text()
    assert main([*fixed, "--prompts-file", str(tmp_path / "b.jsonl")]) == 2
    assert "another prompts_file" in capsys.readouterr().err
    assert main([*fixed, "--prompts-file", str(tmp_path / "a.jsonl"), "--max-new", "3"]) == 2
    assert "another max_new, max_tokens" in capsys.readouterr().err
    assert (tmp_path / "out" / "meta.json").read_text() == meta


def test_the_packed_answers_of_the_repository_fit_the_bundled_target() -> None:
    """The command in configs/train/smollm2_135m.toml: same target, known prompts, ids in range."""
    source = open_source(bundled_model_path()).config()
    meta = {"target": source.name, "vocab_size": source.vocab_size, "temperature": 0.0}
    path = "train/assets/smollm2_135m_answers.npz"
    pack = answers.read(Path(__file__).parents[2] / path)
    answers.check(pack, meta | {"for_evaluation": False}, path)
    assert len(pack.ids) == len(set(pack.ids)) and pack.count > 400_000
    assert max(int(answer.tokens.max()) for answer in pack.flat) < source.vocab_size
    known = {p["id"] for p in training_prompts(200, pack.meta["seed"])}
    assert len(known & set(pack.ids)) > 150
