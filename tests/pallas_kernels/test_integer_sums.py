"""Integer block sums: the definition bit for bit, every instruction that computes it, its error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul import reference, specs
from tests.pallas_kernels.test_row_invariant_matmul import (
    SOURCE,
    bits,
    call_plain,
    gguf_blocks,
    normal,
)

KINDS = ("Q8_0", "Q4_1", "Q4_0")
# Portable, AVX2, AVX-512 without tiles, and with tiles for every number of rows.
FORMS = (
    "-DJETSPEC_FORM=0",
    "-DJETSPEC_FORM=2",
    "-DJETSPEC_ROW_INVARIANT_MATMUL_TILES_FROM=99",
    "-DJETSPEC_ROW_INVARIANT_MATMUL_TILES_FROM=1",
)


def packed_as(kind: str, seed: int, n: int, k: int) -> tuple[rim.PackedWeight, np.ndarray]:
    """A random weight multiplied in integers, and its rows of the file."""
    blocks, _ = gguf_blocks(seed, n, k, kind)
    return rim.pack_gguf(blocks, kind, "cpu", arithmetic="integer"), blocks


def rows_of(seed: int, m: int, k: int, powers: int = 30) -> np.ndarray:
    """Rows with blocks of very different size, some zero."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-powers, powers + 1, (m, k // 32))) * (
        rng.random((m, k // 32)) > 0.1
    )
    x = rng.standard_normal((m, k)) * np.repeat(scale, 32, axis=1)
    return x.astype(np.float32)


@settings(max_examples=25)
@given(
    m=st.integers(0, 40),
    n=st.integers(1, 100),
    blocks=st.integers(1, 12),
    kind=st.sampled_from(KINDS),
    threads=st.integers(0, 3),
)
def test_any_shape_is_the_definition(m: int, n: int, blocks: int, kind: str, threads: int) -> None:
    packed, rows = packed_as(kind, m, n, 32 * blocks)
    x = rows_of(n, m, 32 * blocks)
    got = rim.matmul(jnp.asarray(x), packed, implementation="cpu", threads=threads)
    np.testing.assert_array_equal(bits(got), bits(reference.matmul_integer(x, rows, kind)))


@pytest.mark.parametrize("flag", FORMS)
def test_vector_forms_are_the_definition(flag: str) -> None:
    if flag.endswith("FORM=2") and "avx2" not in native.cpu_identity():
        pytest.skip("no AVX2")
    narrow = native.load((SOURCE,), (flag, "-O1")).handle
    for kind in KINDS:
        packed, rows = packed_as(kind, 7, 70, 416)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 33):
            x = rows_of(m, m, 416)
            x[0, 100] = np.nan if m == 6 else x[0, 100]
            number = specs.LAYOUT_ID[packed.panel_layout]
            got = call_plain(narrow, x, np.asarray(packed.data), 70, number)
            expected = reference.matmul_integer(x, rows, kind)
            np.testing.assert_array_equal(got, expected, err_msg=f"{kind} M={m}")


@pytest.mark.parametrize("kind", KINDS)
def test_row_bits_depend_on_the_row_alone(kind: str) -> None:
    packed, _ = packed_as(kind, 3, 200, 608)
    x = rows_of(4, 300, 608)
    whole = bits(rim.matmul(jnp.asarray(x), packed, implementation="cpu"))
    for m in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 64, 127, 128, 129):
        first = 300 - m  # other rows around it, another place
        part = rim.matmul(jnp.asarray(x[first:]), packed, implementation="cpu", threads=1 + m % 2)
        np.testing.assert_array_equal(bits(part), whole[first:], err_msg=f"M={m}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 4, 20, 60])
def test_misaligned_buffers(kind: str, offset: int) -> None:
    packed, rows = packed_as(kind, 8, 77, 160)
    number = specs.LAYOUT_ID[packed.panel_layout]
    for m in (1, 4, 19):
        x = normal(9, m, 160)
        got = call_plain(native.library().handle, x, np.asarray(packed.data), 77, number, offset)
        np.testing.assert_array_equal(got, reference.matmul_integer(x, rows, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_not_finite_stay_in_their_row(kind: str) -> None:
    packed, _ = packed_as(kind, 10, 50, 128)
    x = normal(11, 20, 128)
    clean = np.asarray(rim.matmul(jnp.asarray(x), packed))
    bad = {3: np.nan, 7: np.inf, 9: -np.inf}
    for row, value in bad.items():
        x[row, 13 * row] = value
    for m in (20, 8, 4):  # and rows by themselves
        got = np.asarray(rim.matmul(jnp.asarray(x[:m]), packed))
        there = [r for r in bad if r < m]
        assert np.isnan(got[there]).all()
        others = [r for r in range(m) if r not in bad]
        np.testing.assert_array_equal(bits(got[others]), bits(clean[others]))
    alone = np.asarray(rim.matmul(jnp.asarray(x[7:8]), packed))
    assert np.isnan(alone).all()


@pytest.mark.parametrize("kind", KINDS)
def test_smallest_and_largest_inputs(kind: str) -> None:
    """Subnormal blocks, values beside far larger ones, mantissas where the scale changes."""
    packed, rows = packed_as(kind, 12, 40, 96)
    edge = np.float32(2 - 2.0**-6)
    near = np.nextafter(edge, np.asarray([0, 4], np.float32), dtype=np.float32)
    for top in (1e-45, 1e-40, 2.0**-126, 2.0**-103, 1.0, *near, edge, 1e30, 2.0**112):
        x = normal(13, 6, 96)
        x = (x / np.abs(x).max(axis=1, keepdims=True) * np.float32(top)).astype(np.float32)
        x[1] = 0
        x[2, 1:] = np.float32(top) * np.float32(2.0**-21)
        got = np.asarray(rim.matmul(jnp.asarray(x), packed))
        np.testing.assert_array_equal(bits(got), bits(reference.matmul_integer(x, rows, kind)))
        assert np.isfinite(got).all() and not got[1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [128, 576, 1536])
def test_error_is_not_above_that_of_float_sums(kind: str, k: int) -> None:
    blocks, w = gguf_blocks(14, 96, k, kind)
    x = normal(15, 24, k)
    exact = x.astype(np.float64) @ w.astype(np.float64).T

    def error(packed: rim.PackedWeight) -> float:
        got = np.asarray(rim.matmul(jnp.asarray(x), packed), np.float64)
        return float(np.sqrt(np.mean((got - exact) ** 2)))

    packed = [rim.pack_gguf(blocks, kind, "cpu", arithmetic=a) for a in ("integer", "float")]
    assert error(packed[0]) <= error(packed[1])


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_file(kind: str) -> None:
    packed, rows = packed_as(kind, 16, 70, 256)
    _, w = gguf_blocks(16, 70, 256, kind)
    layout = reference.pack_gguf_array(rows, kind, "integer")
    np.testing.assert_array_equal(np.asarray(packed.data), layout)
    assert packed.nbytes == rim.pack_gguf(rows, kind, "cpu").nbytes
    np.testing.assert_array_equal(np.asarray(rim.unpack(packed)), w)
    ids = np.random.default_rng(0).integers(0, 70, (3, 11))
    for implementation in ("cpu", "xla"):
        take = jax.jit(functools.partial(rim.take_rows, implementation=implementation))
        np.testing.assert_array_equal(np.asarray(take(packed, jnp.asarray(ids))), w[ids])
    fewer = rim.gather(packed, ids[0])
    assert fewer.arithmetic == "integer"
    np.testing.assert_array_equal(np.asarray(rim.unpack(fewer)), w[ids[0]])


@pytest.mark.parametrize("kind", KINDS)
def test_epilogues_and_batching(kind: str) -> None:
    packed, rows = packed_as(kind, 17, 128, 96)
    x, b, r = normal(18, 2, 9, 96), normal(19, 128), normal(20, 2, 9, 128)
    product = reference.matmul_integer(x.reshape(18, 96), rows, kind).reshape(2, 9, 128)
    jx, jb, jr = map(jnp.asarray, (x, b, r))
    both = jax.jit(rim.matmul)(jx, packed, bias=jb, residual=jr)
    np.testing.assert_array_equal(np.asarray(both), (product + b) + r)
    each = jax.vmap(lambda a, c: rim.matmul(a, packed, bias=jb, residual=c))(jx, jr)
    np.testing.assert_array_equal(np.asarray(each), np.asarray(both))
    xla = rim.matmul(jx, packed, implementation="xla")
    np.testing.assert_allclose(np.asarray(xla), product, rtol=1e-4, atol=1e-2)
    gated = np.asarray(jax.jit(rim.gated_matmul)(jx, packed))
    gate, up = np.split(product.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-30)


def test_what_has_no_integer_arithmetic_is_refused() -> None:
    blocks, _ = gguf_blocks(0, 32, 256, "Q4_K")
    with pytest.raises(native.KernelError, match="no integer arithmetic for Q4_K"):
        rim.pack_gguf(blocks, "Q4_K", "cpu", arithmetic="integer")
    blocks, _ = gguf_blocks(0, 32, 256, "Q8_0")
    with pytest.raises(native.KernelError, match="of implementation 'xla'"):
        rim.pack_gguf(blocks, "Q8_0", "xla", arithmetic="integer")
