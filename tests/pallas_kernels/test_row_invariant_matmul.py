"""The projection kernel: exact bits, row invariance, formats, epilogues, batching, fallback."""

import ctypes
import functools
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch, native
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.row_invariant_matmul import reference, specs

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "pallas_kernels" / specs.OP / "cpu.cc"
GGUF_KINDS = tuple(specs.GGUF_KINDS)
FORMATS = ("f32", "bf16", "Q8_0", "Q4_1", "Q4_K", "Q6_K")  # by their number in cpu.cc


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def bits(a: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(a).view(np.int32)


def gguf_blocks(seed: int, n: int, k: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks [n, bytes] and their values [n, k] by the `gguf` package."""
    form, size, _ = specs.GGUF_KINDS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, k // specs.DEPTH[form], size), dtype=np.uint8)
    halves = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}[kind]
    for at in halves:
        scale = rng.standard_normal(blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    blocks = blocks.reshape(n, blocks.shape[1] * size)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return blocks, values.reshape(n, k)


def packed_as(
    form: str, seed: int, n: int, k: int, implementation: dispatch.Implementation = "cpu"
) -> tuple[rim.PackedWeight, np.ndarray]:
    """A random weight in one storage form, and its float32 values."""
    if form in specs.GGUF_KINDS:
        blocks, values = gguf_blocks(seed, n, k, form)
        return rim.pack_gguf(blocks, form, implementation), values
    w = normal(seed, n, k)
    if form == "bf16":
        narrow = w.astype(ml_dtypes.bfloat16)
        return rim.pack(narrow, implementation), narrow.astype(np.float32)
    return rim.pack(w, implementation), w


def test_oracle_fma_is_correctly_rounded() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 300)).astype(np.float32)
    c = (-a.astype(np.float64) * b * (1 + rng.choice([0.0, 2.0**-30, 2.0**-24, 0.5], 300))).astype(
        np.float32
    )
    # Halfway cases, where rounding twice goes wrong: 1 + 2^-24 + tiny.
    a[:2], b[:2], c[:2] = 2.0**-12, 2.0**-12, 1.0
    b[1] = np.float32(2.0**-12 * (1 + 2.0**-23))
    got = reference.fma(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [np.nextafter(r, np.float32(s), dtype=np.float32) for s in (-np.inf, np.inf)]
        error = abs(Fraction(float(r)) - exact)
        others = [abs(Fraction(float(o)) - exact) for o in near]
        assert error <= min(others)
        if error == min(others):  # a tie goes to the even neighbour
            assert int(r.view(np.int32)) % 2 == 0


@settings(max_examples=25)
@given(
    m=st.integers(0, 70) | st.integers(71, 300),
    n=st.integers(1, 100),
    k=st.integers(0, 200),
    form=st.sampled_from(("f32", "bf16")),
    threads=st.integers(0, 3),
)
def test_equals_the_sequential_sum(m: int, n: int, k: int, form: str, threads: int) -> None:
    packed, w = packed_as(form, 1, n, k)
    x = normal(2, m, k)
    got = rim.matmul(jnp.asarray(x), packed, implementation="cpu", threads=threads)
    assert got.shape == (m, n)
    np.testing.assert_array_equal(bits(got), bits(reference.matmul_sequential(x, w)))


@settings(max_examples=6)
@given(
    m=st.integers(0, 40),
    n=st.integers(1, 70),
    blocks=st.integers(1, 9),
    kind=st.sampled_from(GGUF_KINDS),
)
def test_gguf_formats_equal_their_dequantised_values(
    m: int, n: int, blocks: int, kind: str
) -> None:
    depth = specs.DEPTH[specs.GGUF_KINDS[kind].format]
    k = blocks * depth if depth == 32 else -(-blocks // 3) * depth
    packed, w = packed_as(kind, m, n, k)
    x = normal(2, m, k)
    ids = np.random.default_rng(m).integers(0, n, (2, 3))

    @jax.jit
    def run(x: jax.Array, ids: jax.Array, packed: rim.PackedWeight) -> tuple[jax.Array, ...]:
        return rim.matmul(x, packed), rim.unpack(packed), rim.take_rows(packed, ids)

    product, whole, rows = run(jnp.asarray(x), jnp.asarray(ids), packed)
    np.testing.assert_array_equal(np.asarray(whole), w)
    np.testing.assert_array_equal(np.asarray(rows), w[ids])
    np.testing.assert_array_equal(np.asarray(product), reference.matmul_sequential(x, w))


@pytest.mark.parametrize("form", ["f32", "bf16", *GGUF_KINDS])
def test_row_bits_depend_on_the_row_alone(form: str) -> None:
    n, k = 200, 608  # a partial panel; several chunks and a partial one
    if form in ("Q4_K", "Q6_K"):
        k = 512
    packed, _ = packed_as(form, 3, n, k)
    x = normal(4, 300, k)
    whole = bits(rim.matmul(jnp.asarray(x), packed, implementation="cpu"))
    for m in (1, 2, 3, 8, 9, 13, 14, 15, 16, 28, 29, 64, 127, 128, 129):
        first = 300 - m  # other rows around it, another place
        part = rim.matmul(jnp.asarray(x[first:]), packed, implementation="cpu", threads=1 + m % 2)
        np.testing.assert_array_equal(bits(part), whole[first:], err_msg=f"M={m}")


@pytest.mark.parametrize("form", [0, 2])
def test_narrower_vectors_give_the_same_bits(form: int) -> None:
    """The portable and the AVX2 form against the form this machine selects."""
    if form == 2 and "avx2" not in native.cpu_identity():
        form = 0
    narrow = native.load((SOURCE,), (f"-DJETSPEC_FORM={form}", "-O1")).handle
    for number, name in enumerate(FORMATS):
        n, k = 70, 512 if name in ("Q4_K", "Q6_K") else 416
        packed, _ = packed_as(name, 7, n, k)
        for m in (1, 5, 33):
            x = normal(6, m, k)
            expected = rim.matmul(jnp.asarray(x), packed, implementation="cpu")
            got = call_plain(narrow, x, np.asarray(packed.data), n, number)
            np.testing.assert_array_equal(bits(got), bits(expected), err_msg=f"{name} M={m}")


def call_plain(
    library: ctypes.CDLL, x: np.ndarray, data: np.ndarray, n: int, number: int, offset: int = 0
) -> np.ndarray:
    """The kernel on buffers that start `offset` bytes past an aligned address."""

    def moved(a: np.ndarray) -> tuple[np.ndarray, int]:
        buffer = np.zeros(a.nbytes + 128, np.uint8)
        start = -buffer.ctypes.data % 64 + offset
        buffer[start : start + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        return buffer, start

    out = np.full((x.shape[0], n), np.nan, np.float32)
    buffers = [moved(a) for a in (x, data, out)]
    addresses = [ctypes.c_void_p(b.ctypes.data + start) for b, start in buffers]
    library.matmul_plain(*addresses, x.shape[0], x.shape[1], n, number)
    buffer, start = buffers[2]
    assert not buffer[:start].any() and not buffer[start + out.nbytes :].any(), "wrote outside y"
    return buffer[start : start + out.nbytes].view(np.float32).reshape(out.shape)


@pytest.mark.parametrize("offset", [0, 4, 20, 60])
@pytest.mark.parametrize(("number", "name"), list(enumerate(FORMATS)))
def test_misaligned_buffers(offset: int, number: int, name: str) -> None:
    k = 256 if name in ("Q4_K", "Q6_K") else 160
    packed, w = packed_as(name, 8, 77, k)
    for m in (1, 4, 19):
        x = normal(9, m, k)
        got = call_plain(native.library().handle, x, np.asarray(packed.data), 77, number, offset)
        np.testing.assert_array_equal(got, reference.matmul_sequential(x, w))


@pytest.mark.parametrize("kind", ["F32", "BF16", *GGUF_KINDS])
@pytest.mark.parametrize("n", [0, 5, 101])
def test_native_packing_is_the_layout_of_the_reference(kind: str, n: int) -> None:
    if kind in GGUF_KINDS:
        size = specs.GGUF_KINDS[kind].size
        rows = np.zeros((0, size), np.uint8) if n == 0 else gguf_blocks(n, n, 512, kind)[0]
        rows[: n // 2, :2] = np.float16(1e-6).view(np.uint16).reshape(1).view(np.uint8)  # subnormal
        expected = reference.pack_gguf_array(rows, kind)
    else:
        rows = normal(n, n, 130).astype(np.float32 if kind == "F32" else ml_dtypes.bfloat16)
        expected = reference.pack_array(rows)
    got = rim.pack_panels(rows, kind)
    assert got.dtype == expected.dtype and (n == 0 or got.ctypes.data % 64 == 0)
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
    apart = np.concatenate([rows, rows], axis=1)[:, : rows.shape[1]]  # rows of a larger array
    np.testing.assert_array_equal(rim.pack_panels(apart, kind), got)
    every_other = np.repeat(rows, 2, axis=1)[:, ::2]
    into = np.ones((len(got) + 1, *got.shape[1:]), got.dtype)
    rim.pack_panels(every_other, kind, into[1:])
    np.testing.assert_array_equal(into[1:], got)
    assert (into[0] == 1).all()
    with pytest.raises(native.KernelError, match="cannot pack into"):
        rim.pack_panels(rows, kind, into)


def test_packing_of_large_weights_is_shared_and_adopted() -> None:
    w = normal(0, 2077, 1031)
    packed = rim.pack(w, "cpu")
    np.testing.assert_array_equal(np.asarray(packed.data), reference.pack_array(w))
    panels = rim.pack_panels(w, "F32")
    assert jax.device_put(panels).unsafe_buffer_pointer() == panels.ctypes.data


def test_q4_0_scales_without_an_exact_offset_are_refused() -> None:
    blocks, _ = gguf_blocks(0, 40, 64, "Q4_0")
    for scale in (8192.0, np.inf, np.nan):
        blocks[39, 18:20] = np.float16(scale).view(np.uint16).reshape(1).view(np.uint8)
        with pytest.raises(native.KernelError, match="above 8188"):
            rim.pack_gguf(blocks, "Q4_0", "cpu")
    blocks[39, 18:20] = np.float16(-8188.0).view(np.uint16).reshape(1).view(np.uint8)
    assert rim.pack_gguf(blocks, "Q4_0", "cpu").shape == (40, 64)


@pytest.mark.parametrize("form", ["f32", "bf16", *GGUF_KINDS])
@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_take_rows(form: str, implementation: dispatch.Implementation) -> None:
    packed, w = packed_as(form, 27, 70, 256)
    take = functools.partial(rim.take_rows, implementation=implementation)
    ids = np.random.default_rng(0).integers(0, 70, (3, 4, 11))
    got = jax.jit(take)(packed, jnp.asarray(ids))
    assert got.dtype == (jnp.bfloat16 if form == "bf16" else jnp.float32)
    np.testing.assert_array_equal(np.asarray(got), w[ids])
    each = jax.vmap(take, in_axes=(None, 0))(packed, jnp.asarray(ids))
    np.testing.assert_array_equal(np.asarray(each), w[ids])
    weights = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), packed)
    both = jax.vmap(take)(weights, jnp.asarray(ids[:2, 0]))
    np.testing.assert_array_equal(np.asarray(both[0]), w[ids[0, 0]])
    mirrored = packed.replace(data=packed.data[::-1])
    np.testing.assert_array_equal(np.asarray(both[1]), np.asarray(take(mirrored, ids[1, 0])))
    assert take(packed, jnp.zeros((0,), int)).shape == (0, 256)
    assert take(packed, jnp.int32(69)).shape == (256,)


def test_nan_inf_and_subnormals_stay_in_their_row_and_column() -> None:
    x, w = normal(10, 20, 64), normal(11, 50, 64)
    packed = rim.pack(w, "cpu")
    clean = np.asarray(rim.matmul(jnp.asarray(x), packed))
    x[3, 5], x[7, 0], x[9, 63] = np.nan, np.inf, -np.inf
    x[11] *= np.float32(1e-42)
    w[13, 2] = np.inf
    got = np.asarray(rim.matmul(jnp.asarray(x), rim.pack(w, "cpu")))
    np.testing.assert_array_equal(got, reference.matmul_sequential(x, w))
    assert np.isnan(got[3]).all() and not np.isfinite(got[[7, 9]]).any()
    assert np.abs(got[11, 0]) < 1e-38 and got[11, 0] != 0  # subnormals are not flushed
    untouched = np.ix_([r for r in range(20) if r not in (3, 7, 9, 11)], np.arange(50) != 13)
    np.testing.assert_array_equal(got[untouched], clean[untouched])


def test_bias_and_residual_are_separate_additions() -> None:
    packed, w = packed_as("f32", 12, 75, 90)
    x, b, r = normal(13, 2, 9, 90), normal(14, 75), normal(15, 2, 9, 75)
    product = reference.matmul_sequential(x.reshape(18, 90), w).reshape(2, 9, 75)
    run = jax.jit(rim.matmul)
    jx, jb, jr = map(jnp.asarray, (x, b, r))
    np.testing.assert_array_equal(np.asarray(run(jx, packed, bias=jb)), product + b)
    np.testing.assert_array_equal(np.asarray(run(jx, packed, residual=jr)), product + r)
    both = run(jx, packed, bias=jb, residual=jr)
    np.testing.assert_array_equal(np.asarray(both), (product + b) + r)
    each = jax.vmap(lambda a, c: rim.matmul(a, packed, bias=jb, residual=c))(jx, jr)
    np.testing.assert_array_equal(np.asarray(each), np.asarray(both))
    xla = rim.matmul(jx, packed, bias=jb, residual=jr, implementation="xla")
    np.testing.assert_allclose(np.asarray(xla), np.asarray(both), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("half", [32, 96, 48])
def test_gate(half: int) -> None:
    packed, w = packed_as("f32", 16, 2 * half, 64)
    x = normal(17, 150, 64) * np.float32(3)
    got = np.asarray(jax.jit(rim.gated_matmul)(jnp.asarray(x), packed))
    both = reference.matmul_sequential(x, w).astype(np.float64)
    gate, up = both[:, :half], both[:, half:]
    exact = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-33)
    if half % 32 == 0:  # fused: row invariant
        one = rim.gated_matmul(jnp.asarray(x[7]), packed, implementation="cpu", threads=1)
        np.testing.assert_array_equal(bits(one), bits(got[7]))
    bias = normal(18, 2 * half)
    for way, rtol in (("cpu", 1e-6), ("xla", 1e-4)):
        plain = rim.gated_matmul(jnp.asarray(x), packed, implementation=way)
        np.testing.assert_allclose(np.asarray(plain), exact, rtol=rtol, atol=1e-3)
        moved = rim.gated_matmul(jnp.asarray(x), packed, bias=jnp.asarray(bias), implementation=way)
        sums = (both.astype(np.float32) + bias).astype(np.float64)
        g, v = sums[:, :half], sums[:, half:]
        np.testing.assert_allclose(np.asarray(moved), g / (1 + np.exp(-g)) * v, rtol, atol=1e-3)


def test_gate_of_special_values() -> None:
    values = np.array([0.0, -0.0, 1e-30, 20, 88, 200, 3e38, -20, -88, -200, -3e38], np.float32)
    gates = np.concatenate([values, [np.inf, -np.inf, np.nan]]).astype(np.float32)
    w = np.zeros((64, 1), np.float32)
    w[:32, 0], w[32:, 0] = 1.0, 1.0
    packed = rim.pack(w, "cpu")
    got = np.asarray(rim.gated_matmul(jnp.asarray(gates[:, None]), packed))[:, 0]
    with np.errstate(all="ignore"):
        wide = gates.astype(np.float64)
        exact = (wide / (1 + np.exp(-wide)) * wide).astype(np.float32)
    finite = np.isfinite(exact)
    np.testing.assert_allclose(got[finite], exact[finite], rtol=1e-6, atol=1e-30)
    assert got[11] == np.inf and np.isnan(got[12:]).all()


def test_inside_loops_and_transforms() -> None:
    packed, _ = packed_as("f32", 18, 96, 96)
    x = jnp.asarray(normal(19, 5, 96)) / 16

    @jax.jit
    def loop(x: jax.Array, weight: rim.PackedWeight) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state[0] + 1, jnp.tanh(rim.matmul(state[1], weight, implementation="cpu"))

        return jax.lax.while_loop(lambda s: s[0] < 4, body, (jnp.int32(0), x))[1]

    whole = loop(x, packed)
    np.testing.assert_array_equal(bits(loop(x[2:3], packed)), bits(whole[2:3]))
    nested = jax.vmap(jax.vmap(lambda a: rim.matmul(a, packed)))(x.reshape(1, 5, 1, 96))
    np.testing.assert_array_equal(bits(nested[0, :, 0]), bits(rim.matmul(x, packed)))
    weights = jax.tree.map(lambda a, b: jnp.stack([a, b]), packed, packed)
    each = jax.vmap(rim.matmul)(jnp.stack([x, x + 1]), weights)
    np.testing.assert_array_equal(bits(each[1]), bits(rim.matmul(x + 1, packed)))


def test_many_calls_at_once_do_not_wait_for_each_other_forever() -> None:
    """Independent products in one program run on the pool's own threads, which also help."""
    packed, w = packed_as("f32", 20, 256, 64)
    x = normal(21, 40, 8, 64)
    run = jax.jit(lambda xs: [rim.matmul(xs[i], packed) for i in range(40)])
    for _ in range(20):
        ys = run(jnp.asarray(x))
    expected = reference.matmul_sequential(x.reshape(320, 64), w).reshape(40, 8, 256)
    np.testing.assert_array_equal(np.stack([np.asarray(y) for y in ys]), expected)


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_pack_round_trip(implementation: str, dtype: type) -> None:
    w = normal(22, 70, 33).astype(dtype)
    packed = rim.pack(w, implementation)
    assert packed.shape == (70, 33) and packed.data.dtype == dtype
    assert packed.layout == ("panels" if implementation == "cpu" else "rows")
    np.testing.assert_array_equal(np.asarray(rim.unpack(packed)), w)
    ids = np.array([[0, 31, 32], [69, 5, 5]])
    np.testing.assert_array_equal(np.asarray(rim.take_rows(packed, jnp.asarray(ids))), w[ids])
    x = normal(23, 4, 33)
    expected = x @ w.astype(np.float32).T
    for way in {"auto", "xla", implementation}:
        got = rim.matmul(jnp.asarray(x), packed, implementation=way)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["f32", "bf16", *GGUF_KINDS])
@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_gather_takes_rows_as_they_are(form: str, implementation: str) -> None:
    packed, _ = packed_as(form, 25, 70, 256, implementation)
    values = np.asarray(rim.unpack(packed))
    rng = np.random.default_rng(0)
    for ids in ([3], [], range(70), rng.integers(0, 70, 45), rng.permutation(70)[:64]):
        chosen = np.asarray(ids, np.int32)
        got = rim.gather(packed, chosen)
        assert got.shape == (chosen.size, 256)
        assert (got.format, got.layout) == (packed.format, packed.layout)
        np.testing.assert_array_equal(np.asarray(rim.unpack(got)), values[chosen])
    assert got.nbytes == (packed.nbytes * 2 // 3 if implementation == "cpu" else values[:64].nbytes)
    if implementation == "cpu":
        x = jnp.asarray(normal(26, 3, 256))
        product = np.asarray(rim.matmul(x, packed))[:, chosen]
        np.testing.assert_array_equal(np.asarray(rim.matmul(x, got)), product)


def test_errors_are_one_line() -> None:
    packed = rim.pack(normal(24, 32, 8), "cpu")
    rows = rim.pack(normal(24, 32, 8), "xla")
    x = jnp.zeros((2, 8))
    cases = [
        (lambda: rim.matmul(jnp.zeros((2, 9)), packed), "does not fit a weight"),
        (lambda: rim.matmul(x, packed, bias=jnp.zeros(31)), "bias of shape"),
        (lambda: rim.matmul(x, packed, residual=jnp.zeros((1, 32))), "residual of shape"),
        (lambda: rim.matmul(x, rows, implementation="cpu"), "in panels"),
        (lambda: rim.matmul(x, packed, implementation="fast"), "unknown kernel implementation"),
        (lambda: rim.pack(np.zeros((4, 4))), "float32 or bfloat16"),
        (lambda: rim.pack(np.zeros(4, np.float32)), "float32 or bfloat16"),
        (lambda: rim.pack_gguf(np.zeros((4, 20), np.uint8), "Q5_K"), "use one of"),
        (lambda: rim.pack_gguf(np.zeros((4, 19), np.uint8), "Q4_1"), "multiple of 20"),
        (lambda: rim.gated_matmul(x, packed, bias=jnp.zeros(31)), "bias of shape"),
        (lambda: rim.gather(packed, np.zeros((1, 2), int)), "need .count. int"),
        (lambda: rim.gather(packed, np.zeros(2)), "need .count. int"),
        (lambda: rim.gather(packed, np.array([3, 32])), "rows 3 to 32 of a weight with 32"),
        (lambda: rim.gated_matmul(x, rim.pack(normal(1, 33, 8))), "2 f outputs"),
    ]
    for call, message in cases:
        with pytest.raises(native.KernelError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_without_a_compiler_xla_runs_and_says_so(tmp_path: Path) -> None:
    script = """
import logging, numpy as np, jax.numpy as jnp
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
from pallas_kernels import native, row_invariant_matmul as rim
w = np.arange(40 * 32, dtype=np.float32).reshape(40, 32) / 1000
packed = rim.pack(w)
assert packed.layout == "rows"
x = np.ones((3, 32), np.float32)
np.testing.assert_allclose(np.asarray(rim.matmul(jnp.asarray(x), packed)), x @ w.T, rtol=1e-5)
blocks = np.zeros((40, 20), np.uint8); blocks[:, 4:] = 0x21; blocks[:, 1] = 0x3C
q = rim.pack_gguf(blocks, "Q4_1")
assert np.asarray(rim.matmul(jnp.asarray(x), q))[0, 0] == 48.0
try:
    rim.pack(w, "cpu")
except native.KernelError as error:
    print("refused:", error)
"""
    env = dict(os.environ, PATH="", XDG_CACHE_HOME=str(tmp_path), JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("pallas_kernels ")]
    assert len(said) == 1 and "xla" in said[0] and "no C++ compiler on PATH" in said[0]
    assert done.stdout.startswith("refused: row_invariant_matmul: implementation 'cpu'")
