"""Attention of T tree rows over a committed prefix in the cache and over the rows themselves.

The native kernel (`cpu.cc`) reads keys and values once per key head for all its query rows, only
the live part of the cache, and reduces in an order that is a function of a row's ordered list of
visible keys alone: a row of a tree gets the bits that plain decoding of its path would give,
wherever its ancestors lie (algorithm.md section 6).

On NVIDIA GPUs `mosaic_gpu` (Hopper) and `triton` (others) keep the same promise by another order,
chunks of logical positions; the three forms differ from each other in the last bits.
"""

import functools
import importlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, native, triton_call, tuned
from pallas_kernels.tree_attention import reference, specs

_SYMBOL_OF_DTYPE = {"float32": "TreeAttentionF32", "bfloat16": "TreeAttentionBf16"}


def resolve(implementation: dispatch.Implementation = "auto") -> Literal["cpu", "xla"]:
    """What `implementation` means on this machine; builds the kernel if it may be used (once).

    Raises:
      native.KernelError: "cpu" where the kernel cannot be built.
    """
    if jax.default_backend() != "cpu":
        if implementation == "cpu":
            raise native.KernelError(
                f"{specs.OP}: implementation 'cpu' needs JAX's cpu backend, "
                f"not {jax.default_backend()!r}"
            )
        return dispatch.choose(specs.OP, "xla", native.library)
    return dispatch.choose(specs.OP, implementation, native.library)


def tree_attention(
    q: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    lengths: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    pages: jax.Array | None = None,
    implementation: dispatch.Implementation = "auto",
    threads: int = 0,
) -> jax.Array:
    """Softmax attention of row i over the live cache slots and the new rows j with mask[b, i, j].

    Args:
      q: [B, K, G, T, h] queries: G query heads share a key head.
      cache_k: [B, K, S, h] keys, any S; slots >= lengths[b] are not read and may hold anything.
      cache_v: [B, K, S, h] values.
      lengths: [B] int32, live slots per sequence, 0..S (checked when it runs).
      new_k: [B, K, T, h] keys of the rows themselves, not in the cache.
      new_v: [B, K, T, h] their values.
      mask: [B, T, T] bool. For trees: ancestor-or-self, rows in topological order.
      scale: factor of the scores.
      pages: [B, M] int32, or None. Given, the cache is in pages: cache_k and cache_v are
        [P, K, page, h], slot s of sequence b is slot s % page of page pages[b, s // page], and
        S = M * page. The CPU and XLA forms copy the pages together first.
      implementation: "auto" runs on a CPU the native kernel for float32 and bfloat16 where it can
        be built, on a GPU "mosaic_gpu" or "triton" where they take the call, else XLA; a name
        insists.
      threads: most threads that the native kernel uses; 0: all that XLA's pool and the CPU affinity
        allow, but one for a small problem. The bits do not depend on it.

    Returns:
      [B, K, G, T, h] in q.dtype, accumulated in float32. A row that sees nothing is zero. From the
      native kernel the bits of a row depend on its query and on the ordered list of its visible
      keys and values only.

    Under vmap the native call takes the new axis as more batch; operands without it are copied.

    Raises:
      native.KernelError: shapes or dtypes that do not fit, or an implementation not available.
      jax.errors.JaxRuntimeError: when it runs (outside of jit a ValueError),
        a length outside 0..S (native kernel).
    """
    _check(q, cache_k, cache_v, lengths, new_k, new_v, mask, pages)
    if implementation in ("mosaic_gpu", "triton") or dispatch.device().platform == "gpu":
        form, kernel = _gpu_form(implementation, q, cache_k, pages)
        if form != "xla":
            return kernel(q, cache_k, cache_v, lengths, new_k, new_v, mask, pages, scale=scale)
        implementation = "xla"
    if pages is not None:
        cache_k, cache_v = _gathered(cache_k, pages), _gathered(cache_v, pages)
    symbol = _SYMBOL_OF_DTYPE.get(q.dtype.name)
    if symbol is None and implementation == "cpu":
        raise native.KernelError(
            f"{specs.OP}: implementation 'cpu' has no {q.dtype} form: "
            "use float32 or bfloat16, or 'auto'"
        )
    if symbol is None or resolve(implementation) == "xla":
        return reference.tree_attention(
            q, cache_k, cache_v, lengths, new_k, new_v, mask, scale=scale
        )
    call = jax.ffi.ffi_call(
        native.library().target(symbol),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        vmap_method="broadcast_all",
    )
    return call(
        q,
        cache_k,
        cache_v,
        lengths,
        new_k,
        new_v,
        mask,
        scale=np.float32(scale),
        threads=np.int64(threads),
    )


def _gpu_form(
    implementation: dispatch.Implementation,
    q: jax.Array,
    cache_k: jax.Array,
    pages: jax.Array | None,
) -> tuple[str, Any]:
    """The form that serves this call and its function."""
    kind, dim = dispatch.device().kind, q.shape[4]
    found: dict[str, Any] = {}

    def mosaic_gpu() -> None:
        module = importlib.import_module("pallas_kernels.tree_attention.mosaic_gpu")
        values = tuned.lookup(specs.OP, "mosaic_gpu", kind, {"segment": specs.SEGMENT}, dim=dim)
        reason = module.unsupported(q, cache_k, pages, **values)
        if reason:
            raise native.KernelError(reason)
        found["mosaic_gpu"] = functools.partial(module.tree_attention, **values)

    def triton() -> None:
        module = triton_call.load(specs.OP)
        values = tuned.lookup(specs.OP, "triton", kind, module.heuristics(dim), dim=dim)
        reason = module.unsupported(q, segment=values["segment"])
        if reason:
            raise native.KernelError(reason)
        found["triton"] = functools.partial(module.tree_attention, **values)

    forms = {"mosaic_gpu": mosaic_gpu, "triton": triton, "cpu": native.library}
    form = dispatch.select(specs.OP, implementation, forms)
    return form, found.get(form)


def _gathered(cache: jax.Array, pages: jax.Array) -> jax.Array:
    """[P, K, page, h] pages as [B, K, M * page, h]."""
    _, heads, page, dim = cache.shape
    batch, count = pages.shape
    return cache[pages].swapaxes(1, 2).reshape(batch, heads, count * page, dim)


def _check(
    q: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    lengths: jax.Array,
    new_k: jax.Array,
    new_v: jax.Array,
    mask: jax.Array,
    pages: jax.Array | None,
) -> None:
    if q.ndim != 5:
        raise native.KernelError(f"{specs.OP}: q of shape {q.shape}: need [B, K, G, T, h]")
    batch, heads, _, rows, dim = q.shape
    capacity = cache_k.shape[2] if cache_k.ndim == 4 else 0
    blocks = batch if pages is None else cache_k.shape[0]
    cached, new = (blocks, heads, capacity, dim), (batch, heads, rows, dim)
    if pages is not None and (pages.ndim != 2 or pages.shape[0] != batch):
        raise native.KernelError(
            f"{specs.OP}: pages of shape {pages.shape}: need [{batch}, pages of a sequence]"
        )
    for name, x, shape, dtype in (
        ("cache_k", cache_k, cached, q.dtype),
        ("cache_v", cache_v, cached, q.dtype),
        ("lengths", lengths, (batch,), jnp.dtype(jnp.int32)),
        ("new_k", new_k, new, q.dtype),
        ("new_v", new_v, new, q.dtype),
        ("mask", mask, (batch, rows, rows), jnp.dtype(jnp.bool_)),
    ):
        if x.shape != shape or x.dtype != dtype:
            raise native.KernelError(
                f"{specs.OP}: {name} is {x.dtype}{list(x.shape)}, but q {q.dtype}{list(q.shape)} "
                f"needs {dtype}{list(shape)}"
            )
    if pages is not None and pages.dtype != jnp.int32:
        raise native.KernelError(f"{specs.OP}: pages are {pages.dtype}: need int32")
