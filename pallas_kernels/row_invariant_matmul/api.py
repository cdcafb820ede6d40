"""Projection whose row bits do not depend on the number of rows.

On CPU, XLA's matmul changes a row's bits with the number of rows M, and its cost doubles from M = 1
to M = 8. The native kernel (`cpu.cc`) reads the weights once for all rows at memory speed and sums
every output from k = 0 upwards with fused multiply-adds, or in exact integer sums of blocks where
the weight was packed so, so verifying a tree gives exactly the
logits of plain decoding.

Not differentiable: it serves decoding. Training multiplies plain arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, native
from pallas_kernels.row_invariant_matmul import arrays, packing, reference, specs
from pallas_kernels.row_invariant_matmul.packing import PackedWeight


def matmul(
    x: jax.Array,
    packed: PackedWeight,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    implementation: dispatch.Implementation = "auto",
    threads: int = 0,
) -> jax.Array:
    """x @ w.T (+ bias) (+ residual), float32 sums.

    Args:
      x: [..., k]; computed in float32. A bfloat16 x and a bfloat16 weight that is not in panels
        are multiplied as they are, by the GPU kernels where there are any (`project`).
      packed: weight [n, k] from `pack` or `pack_gguf`.
      bias: [n], added to the finished sum.
      residual: [..., n], added last; both additions are rounded like separate ones.
      implementation: "auto" runs the native kernel if the weight is in panels and the kernel can be
        built, else XLA; "cpu" and "xla" insist.
      threads: upper limit for the native kernel (0: all that XLA's pool and the CPU affinity
        allow). The bits do not depend on it.

    Returns:
      [..., n] float32. From the native kernel each row's bits depend on that row and the weight
      only.

    Raises:
      native.KernelError: shapes that do not fit, or an implementation that is not available.
    """
    rows = _rows(x, packed)
    lead = x.shape[:-1]
    _check_bias(bias, packed)
    if residual is not None and residual.shape != (*lead, packed.n):
        raise native.KernelError(
            f"{specs.OP}: residual of shape {residual.shape} is not {(*lead, packed.n)}"
        )
    if _plain(x, packed):
        y = arrays.project(rows, packed.data, implementation=implementation)
    elif _choose(packed, implementation) == "cpu":
        extras: dict[str, jax.Array] = {}
        if bias is not None:
            extras["bias"] = bias.astype(jnp.float32)
        if residual is not None:
            extras["residual"] = residual.reshape(-1, packed.n).astype(jnp.float32)
        y = _call(packed, threads, False)(rows, packed.data, extras)
        return y.reshape(*lead, packed.n)
    else:
        y = _xla(rows, packed)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    y = y.reshape(*lead, packed.n)
    return y if residual is None else y + residual.astype(jnp.float32)


def gated_matmul(
    x: jax.Array,
    packed: PackedWeight,
    *,
    bias: jax.Array | None = None,
    implementation: dispatch.Implementation = "auto",
    threads: int = 0,
) -> jax.Array:
    """silu(x @ gate.T) * (x @ up.T) for one weight that holds gate above up.

    Args:
      x: [..., k]; computed in float32.
      packed: weight [2 f, k], gate rows first.
      bias: [2 f], added to the finished sums before the gate.
      implementation: as in `matmul`.
      threads: as in `matmul`.

    Returns:
      [..., f] float32. The native kernel fuses the gate where f is a multiple of 32 (else XLA
      applies it to the native product). Its silu is within 4 ulp of the exact one and its bits
      depend on the row and the weight only.

    Raises:
      native.KernelError: shapes that do not fit, an odd number of outputs, or an implementation not
      available.
    """
    rows = _rows(x, packed)
    half, odd = divmod(packed.n, 2)
    if odd:
        raise native.KernelError(f"{specs.OP}: a gated weight needs 2 f outputs, not {packed.n}")
    _check_bias(bias, packed)
    native_kernel = not _plain(x, packed) and _choose(packed, implementation) == "cpu"
    if native_kernel and half % specs.PANEL == 0:
        extras = {} if bias is None else {"bias": bias.astype(jnp.float32)}
        y = _call(packed, threads, True)(rows, packed.data, extras)
    else:
        both = matmul(rows, packed, bias=bias, implementation=implementation, threads=threads)
        y = jax.nn.silu(both[:, :half]) * both[:, half:]
    return y.reshape(*x.shape[:-1], half)


def take_rows(
    packed: PackedWeight, ids: jax.Array, *, implementation: dispatch.Implementation = "auto"
) -> jax.Array:
    """Rows of the weight, e.g. token embeddings of a tied LM head, read from the packed form.

    Args:
      packed: weight [n, k].
      ids: [...] int in [0, n).
      implementation: as in `matmul`; the bits are the same for all.

    Returns:
      [..., k] in the weight's float dtype (float32 for the quantised formats).

    Raises:
      native.KernelError: an implementation that is not available.
    """
    if _choose(packed, implementation) == "xla":
        return packing.take_rows_xla(packed, ids)
    target = native.library().target("Matmul")
    rows = _build_take(target, packed.n, packed.k, packed.panel_layout)(
        ids.reshape(-1).astype(jnp.int32), packed.data
    )
    rows = rows.reshape(*ids.shape, packed.k)
    return rows.astype(jnp.bfloat16) if packed.format == "bf16" else rows


def _rows(x: jax.Array, packed: PackedWeight) -> jax.Array:
    if x.ndim == 0 or x.shape[-1] != packed.k:
        raise native.KernelError(
            f"{specs.OP}: x of shape {x.shape} does not fit a weight [{packed.n}, {packed.k}]"
        )
    rows = x.reshape(int(np.prod(x.shape[:-1])), packed.k)
    return rows if _plain(x, packed) else rows.astype(jnp.float32)


def _plain(x: jax.Array, packed: PackedWeight) -> bool:
    """Whether both are bfloat16 and the weight is as stored: what GPU kernels take."""
    return packed.layout == "rows" and packed.format == "bf16" and x.dtype == jnp.bfloat16


def _check_bias(bias: jax.Array | None, packed: PackedWeight) -> None:
    if bias is not None and bias.shape != (packed.n,):
        raise native.KernelError(
            f"{specs.OP}: bias of shape {bias.shape} does not fit {packed.n} outputs"
        )


def _choose(packed: PackedWeight, implementation: dispatch.Implementation) -> str:
    if packed.layout == "rows":
        if implementation == "cpu":
            raise native.KernelError(
                f"{specs.OP}: implementation 'cpu' needs a weight in panels: use pack(w, 'cpu')"
            )
        return "xla"
    return packing.resolve(implementation)


def _xla(rows: jax.Array, packed: PackedWeight) -> jax.Array:
    if packed.layout == "rows":
        return reference.matmul_rows(rows, packed.data)
    if packed.format in ("f32", "bf16"):
        return reference.matmul_panels(rows, packed.data, packed.n)
    return reference.matmul_rows(rows, packing.unpack(packed))


def _call(packed: PackedWeight, threads: int, gated: bool):
    target = native.library().target("Matmul")
    return _build_call(target, packed.n, packed.panel_layout, threads, gated)


@functools.cache
def _build_call(target: str, n: int, form: str, threads: int, gated: bool):
    """The FFI call for one weight shape: f(x [M, k], data, extras) -> [M, n or n / 2]."""
    width = n // 2 if gated else n

    @jax.custom_batching.custom_vmap
    def call(x: jax.Array, data: jax.Array, extras: dict[str, jax.Array]) -> jax.Array:
        args = [extras[name] for name in ("bias", "residual") if name in extras]
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32))(
            x,
            data,
            *args,
            format=np.int64(specs.LAYOUT_ID[form]),
            outputs=np.int64(n),
            has_bias="bias" in extras,
            has_residual="residual" in extras,
            gated=gated,
            threads=np.int64(threads),
        )

    @call.def_vmap
    def _batched(size, batched, x, data, extras):
        x_batched, data_batched, extras_batched = batched
        if data_batched or extras_batched.get(
            "bias", False
        ):  # one weight per entry: nothing to share
            spread = jax.tree.map(
                lambda leaf, is_batched: (
                    leaf if is_batched else jnp.broadcast_to(leaf, (size, *leaf.shape))
                ),
                (x, data, extras),
                (x_batched, data_batched, extras_batched),
            )
            return jax.lax.map(lambda args: call(*args), spread), True
        # More rows of the same weight: one call, and the same bits for every row.
        if not x_batched:
            x = jnp.broadcast_to(x, (size, *x.shape))
        extras = dict(extras)
        if "residual" in extras:
            residual = extras["residual"]
            if not extras_batched["residual"]:
                residual = jnp.broadcast_to(residual, (size, *residual.shape))
            extras["residual"] = residual.reshape(size * x.shape[1], n)
        y = call(x.reshape(size * x.shape[1], x.shape[2]), data, extras)
        return y.reshape(size, x.shape[1], width), True

    return call


@functools.cache
def _build_take(target: str, n: int, k: int, form: str):
    """The FFI call for one weight shape: f(ids [T], data) -> [T, k].

    `target` is that of the matmul, which takes rows where x is integers.
    """

    @jax.custom_batching.custom_vmap
    def call(ids: jax.Array, data: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((ids.size, k), jnp.float32))(
            ids,
            data,
            format=np.int64(specs.LAYOUT_ID[form]),
            outputs=np.int64(n),
            has_bias=False,
            has_residual=False,
            gated=False,
            threads=np.int64(0),
        )

    @call.def_vmap
    def _batched(size, batched, ids, data):
        if batched[1]:
            ids = ids if batched[0] else jnp.broadcast_to(ids, (size, *ids.shape))
            return jax.lax.map(lambda args: call(*args), (ids, data)), True
        return call(ids.reshape(-1), data).reshape(*ids.shape, k), True

    return call
