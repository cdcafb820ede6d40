"""What the op means: the XLA form, and a numpy oracle that is exact to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.row_invariant_matmul import specs


def pack_array(w: np.ndarray) -> np.ndarray:
    """[N, K] -> [ceil(N / 32), K, 32], zero padded: the weights in the order in which the kernel reads them."""
    n, k = w.shape
    padded = np.zeros((specs.panels(n) * specs.PANEL, k), w.dtype)
    padded[:n] = w
    return np.ascontiguousarray(padded.reshape(-1, specs.PANEL, k).transpose(0, 2, 1))


def unpack_array(data: jax.Array, n: int) -> jax.Array:
    """[P, K, 32] -> [n, K]; inverse of `pack_array`, bit for bit."""
    count, k, lanes = data.shape
    return data.transpose(0, 2, 1).reshape(count * lanes, k)[:n]


def matmul_panels(x: jax.Array, data: jax.Array, n: int) -> jax.Array:
    """XLA form on packed weights: x [M, K] float32, data [P, K, 32] -> [M, n] float32.

    The same sums in an order of XLA's choosing: equal to the kernel within rounding, and without its promise that a
    row's bits do not depend on the other rows.
    """
    y = jnp.einsum(
        "mk,pkn->mpn",
        x,
        data.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(x.shape[0], -1)[:, :n]


def matmul_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """XLA form on weights as stored: x [M, K] float32, w [N, K] -> [M, N] float32."""
    return jax.lax.dot_general(
        x,
        w.astype(jnp.float32),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c rounded once, as the hardware instruction does.

    The product is exact in float64. The sum is rounded to odd there (its last bit is set when anything was lost), which
    makes the second rounding, to float32, correct (Boldo & Melquiond 2008, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd").
    """
    with np.errstate(all="ignore"):
        p = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        q = np.asarray(c, np.float64)
        p, q = np.broadcast_arrays(p, q)
        s = p + q
        v = s - p
        lost = (p - (s - v)) + (q - v)  # two-sum: s + lost is the exact sum
        bits = s.view(np.int64)
        inexact = np.isfinite(s) & (lost != 0) & ((bits & 1) == 0)
        # Towards the exact value: one step away from zero if the loss has the sign of s, one step to zero if not.
        step = np.where((lost > 0) == (s > 0), 1, -1)
        return np.where(inexact, bits + step, bits).view(np.float64).astype(np.float32)


def matmul_sequential(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The kernel's exact result: one accumulator per output from k = 0 upwards. x [M, K], w [N, K] -> [M, N]."""
    acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
    for k in range(x.shape[1]):
        acc = fma(x[:, k, None], w[None, :, k], acc)
    return acc
