"""Kernel parameters: what is declared is what the sources have, and no build parameter changes a
bit of any op.
"""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native, parameters, tuned
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.parameters import Facts, ParameterError, using
from tests.pallas_kernels import test_decoder_stack as stack
from tests.pallas_kernels import test_row_invariant_matmul as matmul
from tests.pallas_kernels import test_tree_attention as attention
from tests.pallas_kernels import test_verify_head as head
from tests.pallas_kernels.test_integer_sums import packed_as, rows_of

BUILD = {
    name.removeprefix("kernel."): p
    for name, p in parameters.declared().items()
    if parameters.is_build(name)
}
# Every parameter at another value than the source's own: the smallest, and the largest.
SMALL = parameters.check(
    {n: next(c for c in p.choices if c != p.default) for n, p in BUILD.items()}
)
LARGE = parameters.check(
    {n: next(c for c in reversed(p.choices) if c != p.default) for n, p in BUILD.items()}
)


def macros() -> dict[str, str]:
    """Build parameters of the sources: macro -> the definition of its default."""
    ops = "|".join({n.partition(".")[0].upper() for n in BUILD})
    text = "\n".join(p.read_text() for p in (*native.SOURCES, *native.HEADERS))
    found = re.findall(rf"#ifndef (JETSPEC_(?:{ops})_\w+)\n(?:#if .*\n)?#define \1 (.+)\n", text)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_declared_parameters_are_those_of_the_sources() -> None:
    found = macros()
    wanted = {f"JETSPEC_{n.replace('.', '_').upper()}": p.default for n, p in BUILD.items()}
    assert found.keys() == wanted.keys()
    for name, text in found.items():
        # the declared default is that of the widest vector form, where forms differ
        widest = re.sub(r"\(JETSPEC_FORM == 3 \? (\d+) : \d+\)", r"\1", text)
        assert int(widest) == wanted[name], name


def test_defaults_are_among_the_values_and_say_why() -> None:
    for p in parameters.declared().values():
        assert p.takes(p.default) and p.why and p.setup_s >= 0, p.name
    assert all(p.setup == "build" and not p.changes_bits for p in BUILD.values())


def test_no_value_is_a_build_of_its_own() -> None:
    assert parameters.build_flags(()) == ()
    assert parameters.build_flags(
        (("tree_attention.LEAD", 128), ("tree_attention.segment", 512))
    ) == ("-DJETSPEC_TREE_ATTENTION_LEAD=128",)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tree_attention.LEED": 64}, "did you mean 'tree_attention.LEAD'"),
        ({"tree_attention.LEAD": 65}, "use one of 16, 32, 64, 128, 256"),
        ({"tree_attention.LEAD": True}, "not one of its values"),
        ({"tree_attention.LEAD": "64"}, "not one of its values"),
    ],
)
def test_what_nobody_declared_is_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(said)) as caught:
        parameters.check(values)
    assert "\n" not in str(caught.value)


def test_values_that_the_sources_refuse_are_one_line() -> None:
    values = {"tree_attention.FEW_ROWS_BLOCK": 64, "tree_attention.VALUE_BLOCK": 32}
    one = next(s for s in native.SOURCES if s.parent.name == "tree_attention")
    flags = parameters.build_flags(parameters.check(values))
    with pytest.raises(native.KernelError, match="FEW_ROWS_BLOCK is a multiple of 16 and at most"):
        native.load((one,), flags)


def test_only_what_can_matter_applies() -> None:
    def names(**changes: Any) -> set[str]:
        facts = Facts(**{"kernels": "cpu", "cores": 2, "form": 3, **changes})
        return {
            n.removeprefix("kernel.") for n, p in parameters.declared().items() if p.applies(facts)
        }

    floats, sums = names(floating=("f32",)), names(integer=("q4_1",), vnni=True, tiles=True)
    assert "row_invariant_matmul.TILE_ROWS" in floats - sums
    assert "row_invariant_matmul.FUSED_ROWS" not in floats  # float32 is never decoded
    assert "row_invariant_matmul.TILES_FROM" in sums - names(integer=("q4_1",), vnni=True)
    assert "threads.SPINS" in sums - names(integer=("q4_1",), cores=1)
    assert not any(map(parameters.is_build, names(kernels="gpu", gpu_form="triton")))
    assert names(kernels="gpu", gpu_form="mosaic_gpu") == {"tree_attention.segment"}
    assert names(kernels="xla") == set()


def test_defaults_of_a_gpu_are_those_of_its_table() -> None:
    facts = Facts("gpu", gpu_form="triton", device="NVIDIA A100", head_dim=64)
    found = parameters.declared()["kernel.tree_attention.num_warps"].narrowed(facts)
    assert found.default == 4 and found.here is None
    own = {"segment": 1024, "num_warps": 4, "num_stages": 2}
    with using((("tree_attention.LEAD", 16), ("tree_attention.num_warps", 8))):
        assert tuned.lookup("tree_attention", "triton", "NVIDIA A100", own, dim=64) == own | {
            "num_warps": 8
        }
        with pytest.raises(native.KernelError, match="num_warps"):
            tuned.lookup("tree_attention", "mosaic_gpu", "NVIDIA A100", {"segment": 1024})


def everything() -> list[np.ndarray]:
    """Results of every op that has build parameters, over forms, numbers of rows and trees."""
    found: list[np.ndarray] = []
    rng = np.random.default_rng(0)
    for form in ("f32", "bf16", "Q8_0", "Q4_1", "Q4_K", "Q6_K"):
        packed, _ = matmul.packed_as(form, 3, 100, 512)
        for m in (1, 2, 3, 7, 12, 13, 17, 40, 130):
            x = rng.standard_normal((m, 512), dtype=np.float32)
            found.append(matmul.bits(rim.matmul(jnp.asarray(x), packed, implementation="cpu")))
    for kind in ("Q8_0", "Q4_1"):
        packed, _ = packed_as(kind, 3, 100, 608)
        for m in (1, 2, 3, 4, 5, 8, 9, 15, 17, 130):
            found.append(
                matmul.bits(
                    rim.matmul(jnp.asarray(rows_of(m, m, 608)), packed, implementation="cpu")
                )
            )
    shapes = (
        (2, 2, 3, 7, 20, 45),
        (1, 3, 3, 12, 64, 300),
        (1, 3, 3, 1, 64, 300),
        (2, 2, 1, 40, 128, 90),
    )
    for seed, shape in enumerate(shapes):
        case = attention.make(seed, *shape)
        found += [np.asarray(attention.run(case, threads=n)) for n in (0, 1, 2)]
    for form in ("f32", "Q8_0i", "Q4_1i"):
        out = stack.run(stack.make(2, stack.LLAMA, form=form))
        found += [np.asarray(x) for x in (out.hidden, out.new_k, out.new_v)]
    hidden = rng.standard_normal((2, 9, 64), dtype=np.float32)
    for form in ("f32", "Q8_0"):
        chosen = head.run(hidden, head.head_of(rng, form, head.TASK + 17, 64), [9, 4])
        found += [np.asarray(chosen.ids), np.asarray(chosen.margin)]
    return found


@pytest.mark.parametrize("values", [SMALL, LARGE], ids=["small", "large"])
def test_no_build_parameter_changes_a_bit(values: parameters.Values) -> None:
    expected = everything()
    own = native.library()
    with using(values):
        assert native.library().target("Matmul") != own.target("Matmul")
        got = everything()
    assert native.library() is own
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=str(i))
