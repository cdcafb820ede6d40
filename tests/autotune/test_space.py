"""The search space: complete, true to the code's own defaults, and strict about names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jetspec_jax.autotune.candidate import Candidate, apply
from jetspec_jax.autotune.space import (
    EngineFacts,
    declared,
    facts_of,
    find,
    params_of,
    search_space,
)
from jetspec_jax.config import EngineConfig, PolicyConfig, SpecConfig
from jetspec_jax.engine import LLM
from jetspec_jax.errors import ConfigError
from jetspec_jax.testing import tiny_head, tiny_llm, tiny_target

# never changed by a search, and why
_SPEC_LEFT = {
    "policy": "its fields are",
    "histogram": "recorded data",
    "histogram_threshold": "of the histogram builder, which needs recorded data",
}
_POLICY_LEFT = dict.fromkeys(
    ("first_loss", "loss_share", "most_loss", "memory", "least_loss"), "a promise, not a choice"
)
_ENGINE_LEFT = {
    "capacity": "what the user needs",
    "dtype": "what the user needs",
    "numerics": "what the user needs",
    "kernels": "auto takes the best there is",
    "kernel_params": "each is a parameter of its own",
}
_XLA = EngineConfig(kernels="xla", capacity=192, attention_chunk=64, prefill_chunk=32)


@pytest.fixture(scope="module")
def llm() -> LLM:
    engine = EngineConfig(capacity=192, attention_chunk=64, prefill_chunk=32)
    target = tiny_target(engine=engine)
    head = tiny_head(target, engine=engine, path_head="markov", path_rank=8)
    return LLM.from_parts(target, head, engine=engine)


@pytest.fixture(scope="module")
def plain_llm() -> LLM:
    return tiny_llm(head=False, engine=_XLA)


def test_every_field_is_declared_or_left_out_on_purpose() -> None:
    names = {"spec": SpecConfig, "policy": PolicyConfig, "engine": EngineConfig}
    left = {"spec": _SPEC_LEFT, "policy": _POLICY_LEFT, "engine": _ENGINE_LEFT}
    for section, config in names.items():
        fields = {f.name for f in dataclasses.fields(config)}
        mine = {n.partition(".")[2] for n in declared() if n.startswith(section + ".")}
        assert mine | left[section].keys() == fields and not mine & left[section].keys(), section


def test_every_declared_default_is_the_codes_own() -> None:
    """Of the configs themselves; those left open there are checked on engines below."""
    sections = {"spec": SpecConfig(), "policy": PolicyConfig(), "engine": EngineConfig()}
    for name, p in declared().items():
        section, _, field = name.partition(".")
        own = getattr(sections[section], field) if section in sections else None
        if own not in (None, "auto") or name == "spec.mode":
            assert p.default == own, name


def values_of(p: Any) -> list[Any]:
    return list(p.choices) if p.kind == "choice" else [p.low, p.high]


def test_apply_takes_every_value_of_every_parameter(llm: LLM) -> None:
    for p in declared().values():
        for value in values_of(p.narrowed(facts_of(llm)) if p.applies(facts_of(llm)) else p):
            spec, engine = apply(Candidate({p.name: value}), SpecConfig(), EngineConfig())
            section, _, field = p.name.partition(".")
            holder = {"spec": spec, "policy": spec.policy, "engine": engine}.get(section)
            found = dict(engine.kernel_params)[field] if holder is None else getattr(holder, field)
            assert found == value, p.name


@pytest.mark.parametrize("which", ["llm", "plain_llm"])
def test_defaults_say_what_happens_anyway(which: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(which)
    space = search_space(facts_of(engine))
    own = engine.plan_for(engine.spec)
    all_said = {p.name: p.default for p in space if p.name.startswith(("spec.", "policy."))}
    spec, _ = apply(Candidate(all_said), SpecConfig(), EngineConfig())
    said = engine.plan_for(engine.resolve(spec))
    assert said.budgets == own.budgets and said.depth == own.depth and said.head == own.head
    # budget and head depth are left open where nothing is said
    fill = {"budget": own.budgets[-1], "head_depth": own.spec.head_depth or said.spec.head_depth}
    assert said.spec == dataclasses.replace(own.spec, **fill)
    assert params_of(space, all_said) == {}


def test_the_space_is_that_of_the_engine(llm: LLM, plain_llm: LLM) -> None:
    with_head = {p.name for p in search_space(facts_of(llm))}
    without = {p.name for p in search_space(facts_of(plain_llm, batch=4))}
    assert {"spec.head_depth", "spec.width", "spec.path_head", "policy.decay"} <= with_head
    assert not {"spec.head_depth", "spec.width", "spec.drafter", "engine.draft_weights"} & without
    assert {
        "spec.depth",
        "spec.lookup_ngram",
        "engine.attention_chunk",
        "engine.max_batch",
    } <= without
    assert "engine.max_batch" not in with_head and "engine.attention_chunk" not in with_head
    assert not any(n.startswith("kernel.") for n in without)
    if llm.plan_for(llm.spec).numerics.native:
        assert "kernel.tree_attention.LEAD" in with_head
        assert "kernel.row_invariant_matmul.TILES_FROM" not in with_head  # no integer weights


def test_ranges_follow_the_head(llm: LLM, plain_llm: LLM) -> None:
    assert llm.draft_config is not None
    depth = find("spec.depth", search_space(facts_of(llm)))
    assert depth.high == llm.draft_config.depth == depth.default
    assert find("spec.depth", search_space(facts_of(plain_llm))).high == 24


def test_a_poor_base_is_the_default_that_is_left_out(llm: LLM) -> None:
    poor = LLM.from_parts(
        llm._target,
        llm._head,
        engine=llm.engine,
        spec=SpecConfig(budget=1, builder="accum_logp", width=40),
    )
    space = search_space(facts_of(poor))
    budget, width = find("spec.budget", space), find("spec.width", space)
    assert budget.default == 1 and budget.takes(1)  # the search itself does not go so low
    assert width.default == 40 and width.takes(40) and not width.takes(41)
    assert params_of(space, {"spec.builder": "accum_logp"}) == {}
    assert params_of(space, {"spec.builder": "exact"}) == {"spec.builder": "exact"}


def test_what_leaving_out_means_is_said_where_it_changes(llm: LLM) -> None:
    space = search_space(facts_of(llm))
    head_depth = find("spec.head_depth", space).default
    found = params_of(space, {"spec.depth": 4})
    assert (
        found["spec.head_depth"] == head_depth and found["spec.budget"] == llm.budgets(llm.spec)[-1]
    )
    resolved = llm.resolve(apply(Candidate(found), SpecConfig(), llm.engine)[0])
    assert resolved.head_depth == head_depth and resolved.depth == 4
    # and what means nothing is not said
    found = params_of(space, {"spec.drafter": "lookup", "spec.width": 3, "spec.head_depth": 2})
    assert "spec.width" not in found and "spec.head_depth" not in found
    assert "policy.decay" not in params_of(space, {"spec.mode": "tree", "policy.decay": 0.7})


def test_unknown_names_and_values_are_one_line(llm: LLM) -> None:
    space = search_space(facts_of(llm))
    with pytest.raises(ConfigError, match=r"not declared; did you mean 'spec\.width'"):
        params_of(space, {"spec.widht": 3})
    with pytest.raises(ConfigError, match="cannot matter here"):
        params_of(space, {"engine.attention_chunk": 64})
    with pytest.raises(ConfigError, match=r"spec\.width=0 is outside of the space; give 1 to"):
        params_of(space, {"spec.width": 0})
    with pytest.raises(ConfigError, match=r"did you mean 'tree_attention\.LEAD'"):
        apply(Candidate({"kernel.tree_attention.LEED": 64}), SpecConfig(), EngineConfig())


def test_numerics_are_marked() -> None:
    base = SpecConfig(mode="off")
    facts = EngineFacts(
        "cpu", integer=("q4_1",), arithmetic="integer", form=3, vnni=True, spec=base
    )
    marked = {p.name for p in search_space(facts) if p.changes_bits}
    assert marked == {"engine.arithmetic", "engine.weights"}
    costly = {p.name for p in search_space(facts) if p.setup_s > 10}
    assert costly and all(n.startswith("kernel.") for n in costly)


def test_a_path_head_that_is_off_is_not_used(llm: LLM) -> None:
    off = llm.plan_for(llm.resolve(SpecConfig(path_head=False)))
    assert off.head is not None and off.head.path_head == "none"
    on = llm.plan_for(llm.resolve(SpecConfig()))
    assert on.head is not None and on.head.path_head == "markov"
    with pytest.raises(ConfigError, match=r"path_head=1 is no truth value; give true or false"):
        SpecConfig(path_head=1)  # pyright: ignore[reportArgumentType]
