"""Configuration errors name key and remedy; data is split by content, batches depend on (seed,
step) only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jetspec_jax.errors import ConfigError, ModelFileError
from tests.train.conftest import Tiny
from train.config import DataConfig, TrainConfig, build, changed_keys, load_config, to_json
from train.data import (
    assemble,
    coverage,
    draft_vocabulary,
    draw_anchors,
    held_out_batches,
    load_dataset,
    step_sequences,
    train_batch,
)

ROOT = Path(__file__).parents[2]


def test_shipped_configs_load_and_overrides_win() -> None:
    paths = sorted((ROOT / "configs" / "train").glob("*.toml"))
    assert paths
    for path in paths:
        assert load_config(path) != TrainConfig()
    cfg = load_config(
        paths[0],
        ["optim.lr=3e-4", "run.out=runs/a", "draft.target_layer_ids=[1, 2]", "optim.clip=1"],
    )
    assert (cfg.optim.lr, cfg.run.out, cfg.draft.target_layer_ids, cfg.optim.clip) == (
        3e-4,
        "runs/a",
        (1, 2),
        1.0,
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "did you mean 'optim.lr'"),
        ("optm.steps=1", "did you mean 'optim.steps'"),
        ("optim.lr", "no '='"),
        ("optim.lr=fast", "does not fit"),
        ("optim.steps=1.5", "does not fit"),
        ("draft.causal=1", "does not fit"),
        ("draft.target_layer_ids=[1.0]", "whole numbers"),
        ("optim.steps=0", "at least 1"),
        ("data.held_out=1.0", "no share"),
        ("optim.lr=-1.0", "above 0"),
        ("optim.precision=float8", "float32 or bfloat16"),
    ],
)
def test_bad_overrides_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[data\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "flat.toml").write_text("lr = 1\n")
    with pytest.raises(ConfigError, match="unknown training key 'lr'"):
        load_config(tmp_path / "flat.toml")
    with pytest.raises(ConfigError, match="nothing to learn"):
        build({"loss.ce": 0.0, "loss.kl": 0.0})


def test_changed_keys_leave_the_run_section_free() -> None:
    a, b = (
        to_json(TrainConfig()),
        to_json(load_config(None, ["optim.lr=1e-3", "run.max_seconds=5"])),
    )
    assert changed_keys(a, b) == ["optim.lr"]


def test_load_splits_by_prompt_rejects_empty_answers_and_cuts(tiny: Tiny) -> None:
    cfg = DataConfig(path=str(tiny.data), held_out=0.3, max_tokens=24)
    data = load_dataset(cfg)
    assert data.rejected == 1  # length 6 with a prompt of 6
    assert len(data.train) + len(data.held_out) == 23 and data.held_out
    assert max(s.length for s in data.train) == 24
    assert data.target_layer_ids == (0, 2)
    bare = load_dataset(dataclasses.replace(cfg, path=str(tiny.bare)))
    assert {s.origin for s in bare.held_out} == {s.origin for s in data.held_out}
    assert bare.train[0].taps is None
    # fewer sequences: some of the same, chosen by content and not by place, and more keep them
    few, more = (load_dataset(dataclasses.replace(cfg, limit=n)) for n in (4, 8))
    origins = [[x.origin for x in d.train] for d in (few, more, data)]
    assert [len(o) for o in origins[:2]] == [4, 8]
    assert set(origins[0]) < set(origins[1]) < set(origins[2])
    assert origins[0] != origins[2][:4] and origins[0] == [o for o in origins[2] if o in origins[0]]
    assert len(few.held_out) == len(data.held_out)
    # a larger share keeps what was held out before
    wider = load_dataset(dataclasses.replace(cfg, held_out=0.5))
    assert {s.origin for s in data.held_out} <= {s.origin for s in wider.held_out}


def test_damaged_data_is_named(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such data folder"):
        load_dataset(DataConfig(path=str(tmp_path / "none")))
    with pytest.raises(ModelFileError, match="holds no shards"):
        load_dataset(DataConfig(path=str(tmp_path)))
    (tmp_path / "manifest.jsonl").write_text('{"shard": "a.npz"}\n{"sha')
    with pytest.raises(ModelFileError, match=r"manifest.jsonl:2"):
        load_dataset(DataConfig(path=str(tmp_path)))
    (tmp_path / "manifest.jsonl").write_text('{"shard": "a.npz"}\n')
    (tmp_path / "a.npz").write_bytes((tiny.data / "shard-0.npz").read_bytes()[:500])
    with pytest.raises(ModelFileError, match=r"a.npz: cannot be read"):
        load_dataset(DataConfig(path=str(tmp_path)))
    np.savez(tmp_path / "a.npz", tokens=np.zeros((1, 4), np.int32))
    with pytest.raises(ModelFileError, match="'length' is missing"):
        load_dataset(DataConfig(path=str(tmp_path)))
    (tmp_path / "meta.json").write_text(json.dumps([1]))
    with pytest.raises(ModelFileError, match="not a JSON object"):
        load_dataset(DataConfig(path=str(tmp_path)))


def test_every_sequence_once_an_epoch_and_only_seed_and_step_matter() -> None:
    lengths = np.random.default_rng(0).integers(5, 50, 40)
    epoch = np.concatenate([step_sequences(40, 4, s, 7, lengths) for s in range(10)])
    assert sorted(epoch) == list(range(40))
    again = np.concatenate([step_sequences(40, 4, s, 7, lengths) for s in range(10, 20)])
    assert sorted(again) == list(range(40)) and list(again) != list(epoch)
    np.testing.assert_array_equal(
        step_sequences(40, 4, 13, 7, lengths), step_sequences(40, 4, 13, 7, lengths)
    )
    assert step_sequences(2, 4, 0, 0, lengths[:2]).shape == (
        4,
    )  # fewer sequences than a step takes


def test_anchors_are_distinct_answer_positions(tiny: Tiny) -> None:
    data = load_dataset(DataConfig(path=str(tiny.data)))
    sample = next(s for s in data.train if s.length == 32)
    rng = np.random.default_rng(0)
    anchors, valid = draw_anchors(sample, 8, rng)
    assert valid.all() and len(set(anchors)) == 8
    assert anchors.min() >= sample.spans[0][0] - 1 and anchors.max() <= sample.length - 2
    every, real = draw_anchors(sample, 40, rng)
    assert real.sum() == 26 and set(every[real]) == set(range(5, 31))


def test_batches_are_reproducible_padded_to_the_bucket_and_finite(tiny: Tiny) -> None:
    cfg = DataConfig(path=str(tiny.data), sequences=2, anchors=4, bucket=16)
    data = load_dataset(cfg)
    a, b = train_batch(data, cfg, 3), train_batch(data, cfg, 3)
    assert all(np.array_equal(a[k], b[k]) for k in ("tokens", "anchors", "stop"))
    assert a["tokens"].shape[1] % 16 == 0 and a["taps"].shape == (*a["tokens"].shape, 2, 32)
    held = list(held_out_batches(data, cfg, 3, 5))
    assert all(h["anchors"].shape == (2, 5) for h in held)
    broken = dataclasses.replace(data.train[0], final=np.full_like(data.train[0].final, 0x7F80))
    with pytest.raises(ModelFileError, match=rf"final of {broken.origin}: holds inf or NaN"):
        assemble([broken], [draw_anchors(broken, 4, np.random.default_rng(0))], 16)


def test_draft_vocabulary_holds_specials_and_the_most_frequent(tiny: Tiny) -> None:
    data = load_dataset(DataConfig(path=str(tiny.data)))
    ids = draft_vocabulary(data.train, 20, 64, always=(2, 1))
    assert len(ids) == 20 and {1, 2} <= set(ids) and list(ids) == sorted(ids)
    counts = np.bincount(
        np.concatenate([s.tokens[s.spans[0][0] :] for s in data.train]), minlength=64
    )
    assert counts[np.setdiff1d(ids, [1, 2])].min() >= np.delete(counts, ids).max()
    assert coverage(data.train, ids, 64) == pytest.approx(counts[ids].sum() / counts.sum())
    assert len(draft_vocabulary(data.train, 64, 64, ())) == 64


@pytest.mark.parametrize(
    "override",
    [
        "draft.path_head=foo",
        "data.target_dtype=int4",
        "optim.optimiser=sgd",
        "loss.tv=-1.0",
        "loss.survival=2.0",
    ],
)
def test_values_that_cannot_be_are_refused_by_name(override: str) -> None:
    key, value = override.split("=")
    with pytest.raises(ConfigError, match=rf"{key}='?{value}'? "):
        load_config(None, [override])
