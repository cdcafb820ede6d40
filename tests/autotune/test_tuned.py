"""Tuned entries at run time: which is taken, what of it, and what never is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jetspec_jax import engine as engine_module
from jetspec_jax.autotune import lookup
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.key import DeploymentKey, key_of
from jetspec_jax.autotune.lookup import Lookup, choose
from jetspec_jax.autotune.space import SPACE_VERSION
from jetspec_jax.autotune.tuned import TunedEntry, entry_of, install, read, write
from jetspec_jax.config import EngineConfig, SamplingParams, SpecConfig, explicit
from jetspec_jax.engine import LLM
from jetspec_jax.errors import ConfigError, KernelError
from jetspec_jax.testing import tiny_head, tiny_target
from tests.autotune.samples import KEY
from tests.serve.tiny_files import write_head, write_target

ENGINE = EngineConfig(capacity=192, attention_chunk=64, prefill_chunk=32)
VERDICT = {
    "accepted": True,
    "tokens_identical": True,
    "speed_ratio": 1.07,
    "speed_ratio_low": 1.03,
    "speed_ratio_high": 1.11,
}
TREE = {"spec.width": 3, "spec.head_depth": 2, "policy.decay": 0.8}


def entry(params: dict[str, Any] | None = None, date: str = "2026-12-01", **key: Any) -> TunedEntry:
    made = dataclasses.replace(KEY, **key)
    return entry_of(made, Candidate(TREE if params is None else params), VERDICT, {"date": date})


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    target = tiny_target(engine=ENGINE)
    return target, tiny_head(target, engine=ENGINE)


@pytest.fixture(scope="module")
def here(parts: tuple[Any, Any]) -> DeploymentKey:
    return key_of(LLM.from_parts(*parts, engine=ENGINE), 1, 192)


def engine_of(
    parts: tuple[Any, Any], where: Path | str, spec: SpecConfig | None = None, **changes: Any
) -> tuple[LLM, list[str]]:
    said: list[str] = []
    llm = LLM.from_parts(
        *parts, engine=ENGINE, spec=spec, tuned=where, progress=said.append, **changes
    )
    return llm, said


# ---- documents -----------------------------------------------------------------------------------


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    made = entry()
    path = write(made, tmp_path / "new")
    assert path.name == f"tuned-{made.id}.json" and read(path) == made
    assert list(path.parent.iterdir()) == [path]


def test_installing_replaces_what_was_for_the_same_key(tmp_path: Path) -> None:
    install(entry({"spec.width": 2}), tmp_path)
    other = install(entry(batch=4), tmp_path)
    last = install(entry(), tmp_path)
    assert set(tmp_path.iterdir()) == {other, last}
    assert install(entry(), tmp_path) == last and last.is_file()


def damage(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(version=9), "it is of format 9"),
        (lambda d: d.update(extra=1), "unknown field 'extra'"),
        (lambda d: d.pop("verdict"), "missing field 'verdict'"),
        (lambda d: d["params"].update({"spec.width": 5}), "its content is not what was written"),
        (lambda d: d["key"].pop("dtype"), "its key does not have the fields"),
        (lambda d: d.update(params=[]), "its parts are no JSON objects"),
    ],
)
def test_damaged_documents_are_one_line_and_the_heuristic(
    tmp_path: Path, change: Any, said: str
) -> None:
    path = write(entry(), tmp_path)
    damage(path, change)
    with pytest.raises(ConfigError, match=said) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    lines: list[str] = []
    assert Lookup(tmp_path, lines.append).entries == ()
    assert len(lines) == 1 and said in lines[0] and lines[0].endswith("(not used)")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x01", '{"version": 1}'])
def test_files_that_are_no_documents(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned-0.json"
    path.write_text(text)
    lines: list[str] = []
    assert Lookup(tmp_path, lines.append).entries == () and len(lines) == 1
    with pytest.raises(ConfigError):  # asked for by name, it is an error
        Lookup(path, lines.append)


def test_what_the_gate_did_not_accept_is_no_entry() -> None:
    for change in ({"tokens_identical": False}, {"accepted": False}, {"speed_ratio": None}):
        with pytest.raises(ConfigError, match="not used"):
            entry_of(KEY, Candidate(TREE), VERDICT | change, {"date": "2026-12-01"})
    with pytest.raises(ConfigError, match="is a patch of the source"):
        entry_of(KEY, Candidate(patch="--- a\n"), VERDICT, {"date": "2026-12-01"})


def test_params_of_other_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'spec\.width'"):
        entry({"spec.widht": 3})
    with pytest.raises(ConfigError, match="is not one of 16, 32"):
        entry({"kernel.tree_attention.LEAD": 17})
    with pytest.raises(ConfigError, match="is no whole number"):
        entry({"spec.width": 0})
    old = dataclasses.replace(entry(), versions={"space": SPACE_VERSION + 1})
    with pytest.raises(ConfigError, match="of the parameters, this code has"):
        read(write(old, tmp_path))


# ---- which ---------------------------------------------------------------------------------------


def test_the_same_deployment_goes_before_the_nearest() -> None:
    spec, engine = SpecConfig(), EngineConfig()
    numerics = {"engine.arithmetic": "float", "kernel.tree_attention.LEAD": 128, "spec.width": 5}
    near = entry(numerics, device="Some CPU, 4 cores")
    own = entry(numerics, context=1024, suite="math")
    found = choose([near, own], KEY, spec, engine)
    assert found.entry == own and found.exact and dict(found.params) == numerics
    assert "for this deployment: " in found.reason and "1.07x (1.03 to 1.11)" in found.reason
    # from a neighbour only what cannot change a token
    found = choose([near], KEY, spec, engine)
    assert found.entry == near and not found.exact and dict(found.params) == {"spec.width": 5}
    assert "device Some CPU, 4 cores" in found.reason and "2 not lossless" in found.reason


@pytest.mark.parametrize(
    "key",
    [{"target_digest": "f" * 16}, {"device": "Other, 2 cores"}, {"batch": 8}, {"kernels": "xla"}],
)
def test_what_is_too_far_is_not_taken(key: dict[str, Any]) -> None:
    found = choose([entry(**key)], KEY, SpecConfig(), EngineConfig())
    assert found.entry is None and not found.params and "no tuned entry" in found.reason


def test_explicit_fields_win_one_by_one() -> None:
    given = SpecConfig.from_mapping({"width": 8, "policy": {"decay": 0.9}})
    assert given == SpecConfig() and {"width", "policy"} <= explicit(given)
    found = choose([entry()], KEY, given, EngineConfig())
    assert dict(found.params) == {"spec.head_depth": 2}
    assert set(found.overruled) == {"spec.width", "policy.decay"}
    assert "given explicitly: width, decay" in found.reason
    # a value that is not the default speaks for itself
    found = choose([entry()], KEY, SpecConfig(width=9), EngineConfig())
    assert "spec.width" not in found.params and "spec.head_depth" in found.params
    kernel = {"kernel.tree_attention.LEAD": 128, "kernel.tree_attention.COLUMNS": 2}
    engine = EngineConfig(kernel_params=(("tree_attention.LEAD", 64),))
    found = choose([entry(kernel)], KEY, SpecConfig(), engine)
    assert dict(found.params) == {"kernel.tree_attention.COLUMNS": 2}


@pytest.mark.parametrize("mode", ["tree", "chain", "off"])
def test_other_modes_are_experiments_of_their_own(mode: str) -> None:
    assert choose([entry()], KEY, SpecConfig(mode=mode), EngineConfig()).entry is None


def test_the_users_folder_goes_before_what_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = tmp_path / "mine", tmp_path / "shipped"
    monkeypatch.setattr(lookup, "tuned_home", lambda: homes[0])
    monkeypatch.setattr(lookup, "shipped_home", lambda: homes[1])
    assert Lookup(None, print).entries == ()
    write(entry({"spec.width": 2}, "2026-12-09"), homes[1])
    write(entry({"spec.width": 3}, "2026-12-01"), homes[0])
    write(entry({"spec.width": 4}, "2026-12-02"), homes[0])
    widths = [e.params["spec.width"] for e in Lookup(None, print).entries]
    assert widths == [4, 3, 2]
    assert Lookup("off", print).entries == ()
    with pytest.raises(ConfigError, match="no such file or folder"):
        Lookup(tmp_path / "nowhere", print)


# ---- engines -------------------------------------------------------------------------------------


def test_an_engine_starts_with_its_entry(
    parts: tuple[Any, Any], here: DeploymentKey, tmp_path: Path
) -> None:
    made = dataclasses.replace(entry(), key=here)
    write(made, tmp_path)
    llm, said = engine_of(parts, tmp_path)
    assert llm.spec.width == 3 and llm.spec.head_depth == 2 and llm.spec.policy.decay == 0.8
    assert said.count(llm.tuned.reason) == 1 and llm.tuned.entry == made
    assert llm.plan()["tuned"]["params"] == TREE
    # a call's own settings are filled the same way, and plain decoding is plain
    assert llm.resolve(SpecConfig(budget=5)).width == 3
    assert llm.resolve(SpecConfig(width=5)).width == 5
    assert llm.resolve(SpecConfig(mode="off")).width == 8
    # nothing for batches yet: another regime
    assert llm.resolve(SpecConfig(), 4).width == 8
    off, said = engine_of(parts, "off")
    assert off.spec.width == 8 and not said and off.tuned.reason == "off: heuristic"


def test_tokens_are_those_of_the_heuristic(
    parts: tuple[Any, Any], here: DeploymentKey, tmp_path: Path
) -> None:
    write(dataclasses.replace(entry(), key=here), tmp_path)
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    prompt = [[5, 6, 7, 8, 5, 6]]
    plain, _ = engine_of(parts, "off")
    tuned, _ = engine_of(parts, tmp_path)
    want = plain.generate(prompt, sampling, spec=SpecConfig(mode="off"))[0].token_ids
    assert tuned.generate(prompt, sampling)[0].token_ids == want


def test_batches_have_entries_of_their_own(
    parts: tuple[Any, Any], here: DeploymentKey, tmp_path: Path
) -> None:
    write(dataclasses.replace(entry({"spec.width": 2}), key=here), tmp_path)
    batch = dataclasses.replace(here, batch=4)
    write(dataclasses.replace(entry({"spec.width": 6}), key=batch), tmp_path)
    llm, said = engine_of(parts, tmp_path)
    assert [llm.resolve(SpecConfig(), n).width for n in (1, 3, 4, 8)] == [2, 6, 6, 6]
    assert len(said) == 3 and "nearest deployment (batch 4)" in said[-1]
    assert engine_of(parts, tmp_path, batch=4)[0].spec.width == 6


def test_an_entry_that_contradicts_what_was_given_is_left_out(
    parts: tuple[Any, Any], here: DeploymentKey, tmp_path: Path
) -> None:
    write(dataclasses.replace(entry({"spec.head_depth": 4}), key=here), tmp_path)
    llm, said = engine_of(parts, tmp_path, SpecConfig(depth=2))
    assert llm.spec.depth == llm.spec.head_depth == 2
    assert any(
        "not used beside what was given: head_depth=4 is more than depth=2" in x for x in said
    )
    with pytest.raises(ConfigError, match="depth=99"):  # not the entry's fault
        llm.resolve(SpecConfig(depth=99))


def test_what_an_engine_is_comes_from_its_very_deployment_alone(
    parts: tuple[Any, Any],
    here: DeploymentKey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[EngineConfig] = []
    monkeypatch.setattr(engine_module, "resolve_kernels", built.append)
    params = {
        "engine.max_batch": 8,
        "engine.weights": "float32",
        "engine.prefill_chunk": 16,
        "kernel.tree_attention.LEAD": 128,
    }
    write(dataclasses.replace(entry(params), key=here), tmp_path / "own")
    llm, said = engine_of(parts, tmp_path / "own")
    assert llm.engine.max_batch == 8
    assert llm.engine.weights == "stored"  # parts that are loaded already are what they are
    assert llm.engine.prefill_chunk == 32  # given
    assert llm.plan_for(llm.spec).numerics.kernel_params == (("tree_attention.LEAD", 128),)
    assert built == [dataclasses.replace(llm.engine)] and len(said) == 1

    near = dataclasses.replace(here, device=here.device_kind + ", 64 cores")
    write(dataclasses.replace(entry(params), key=near), tmp_path / "near")
    llm, said = engine_of(parts, tmp_path / "near")
    assert llm.engine == ENGINE and "4 not lossless" in said[0]


def test_kernels_that_cannot_be_built_are_left_out(
    parts: tuple[Any, Any],
    here: DeploymentKey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: EngineConfig) -> str:
        raise KernelError("no compiler")

    monkeypatch.setattr(engine_module, "resolve_kernels", refuse)
    params = {"kernel.tree_attention.LEAD": 128, "spec.width": 3}
    write(dataclasses.replace(entry(params), key=here), tmp_path)
    llm, said = engine_of(parts, tmp_path)
    assert llm.engine.kernel_params == () and llm.spec.width == 3
    assert "kernels of the tuned entry not used: no compiler" in said


def test_one_file_must_be_for_this_deployment(
    parts: tuple[Any, Any], here: DeploymentKey, tmp_path: Path
) -> None:
    path = write(dataclasses.replace(entry(), key=here), tmp_path)
    assert engine_of(parts, path)[0].spec.width == 3
    other = write(
        dataclasses.replace(entry(), key=dataclasses.replace(here, target_family="llama")), tmp_path
    )
    with pytest.raises(ConfigError, match=r"is of another deployment \(target_family llama\)"):
        engine_of(parts, other)
    assert engine_of(parts, other, SpecConfig(mode="off"))[0].spec.width == 8


def test_an_entry_that_changes_what_is_loaded_loads_again(tmp_path: Path) -> None:
    model, head = write_target(tmp_path / "model"), write_head(tmp_path / "head")
    config = dataclasses.replace(ENGINE, draft_weights="q8_0")

    def load(where: Path | str, engine: EngineConfig = config) -> tuple[LLM, list[str]]:
        said: list[str] = []
        llm = LLM(model, head, engine=engine, tuned=where, progress=said.append)
        return llm, said

    base, _ = load("off")
    if base.plan_for(base.spec).numerics.native is False:
        pytest.skip("no native kernels here")
    params = {"engine.draft_weights": "stored", "spec.width": 3}
    write(dataclasses.replace(entry(params), key=key_of(base, 1, 192)), tmp_path / "tuned")
    tuned, said = load(tmp_path / "tuned")
    assert tuned.engine.draft_weights == "stored" and tuned.spec.width == 3
    assert sum(line.startswith("loading draft head") for line in said) == 2
    assert said.count(tuned.tuned.reason) == 1 and tuned.tuned.exact
    # given explicitly, also at its default, it stays, and nothing is loaded twice
    given = EngineConfig.from_mapping(
        {"capacity": 192, "attention_chunk": 64, "prefill_chunk": 32, "draft_weights": "q8_0"}
    )
    kept, said = load(tmp_path / "tuned", given)
    assert kept.engine.draft_weights == "q8_0" and kept.spec.width == 3
    assert sum(line.startswith("loading draft head") for line in said) == 1
