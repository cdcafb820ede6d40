"""Built-in explorers: who searches what, in which order, and from where."""

from __future__ import annotations

import pytest

from jetspec_jax.autotune import explorers
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.errors import ConfigError
from tests.autotune.fakes import SPACE, Knob, compose


def test_every_parameter_belongs_to_one_explorer() -> None:
    (tree,) = explorers.parts("tree", SPACE)
    assert [p.name for p in tree.space] == ["spec.width", "spec.builder", "policy.first_credit"]
    kernel = explorers.parts("kernel", SPACE, ["tree_attention", "row_invariant_matmul"])
    assert [p.name for p in kernel] == [
        "kernel.tree_attention",
        "kernel.row_invariant_matmul",
        "kernel.engine",
    ]
    assert explorers.parts("scheduler", SPACE) == []
    chunk = Knob("engine.prefill_chunk", "choice", 64, choices=(32, 64))
    assert [p.name for p in explorers.parts("scheduler", (*SPACE, chunk))] == ["scheduler"]
    assert "engine.prefill_chunk" not in str(explorers.parts("kernel", (*SPACE, chunk)))


def test_the_kernel_with_the_largest_gap_comes_first() -> None:
    names = [p.name for p in explorers.parts("kernel", SPACE, ["row_invariant_matmul"])]
    assert names[0] == "kernel.row_invariant_matmul"
    assert explorers.parts("kernel", SPACE)[0].ahead == 2


def test_names() -> None:
    assert explorers.names("builtin:kernel, builtin:tree,builtin:kernel") == ("kernel", "tree")
    with pytest.raises(ConfigError, match="'builtin:magic' is not known"):
        explorers.names("builtin:magic")


def test_candidates_say_what_is_changed_and_nothing_else() -> None:
    base = Candidate({"spec.width": 4, "spec.budget": 1})
    made = explorers.candidate_of(
        SPACE, base, {"spec.builder": "exact", "policy.first_credit": 0.3}, "o", compose
    )
    assert made.params == {"spec.width": 4, "spec.budget": 1, "policy.first_credit": 0.3}
    back = explorers.candidate_of(
        SPACE, Candidate({"spec.width": 4}), {"spec.width": 8}, "", compose
    )
    assert back.id == Candidate().id
    odd = explorers.candidate_of(SPACE, Candidate({"spec.width": 99}), {}, "", compose)
    assert odd.params == {"spec.width": 99}  # not declared: stays until it is searched
    assert explorers.candidate_of(SPACE, odd, {"spec.width": 3}, "", compose).params == {
        "spec.width": 3
    }


def test_it_begins_with_what_memory_knows_and_single_moves() -> None:
    (tree,) = explorers.parts("tree", SPACE)
    seed = Candidate({"spec.width": 2, "kernel.tree_attention.LEAD": 1})
    first = explorers.first(tree.space, Candidate({"spec.builder": "accum_logp"}), [seed])
    here = {"spec.width": 8, "spec.builder": "accum_logp", "policy.first_credit": 0.15}
    assert first[0] == here | {"spec.width": 2}
    # width has many values: halved and doubled
    assert [f for f in first[1:] if f["spec.width"] != 8] == [
        here | {"spec.width": 4},
        here | {"spec.width": 12},
    ]
    assert here | {"policy.first_credit": 0.3} in first
    ordered = Knob("spec.budget", "choice", 24, choices=(2, 8, 24, 48))
    assert [f["spec.budget"] for f in explorers.first([ordered], Candidate(), [])] == [8, 48]
    edge = Knob("spec.head_depth", "int", 7, low=1, high=7)
    assert [f["spec.head_depth"] for f in explorers.first([edge], Candidate(), [])] == [6]
