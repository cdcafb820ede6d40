"""One training step: block forward of the draft head, LM-head loss in chunks, gradients, optimiser.

The forward is the serving forward (`jetspec_jax.drafter`), with weights wrapped so that every
projection runs in the compute dtype, forward and backward (bfloat16 uses AMX or tensor cores; the
master weights stay float32).
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jetspec_jax.config import DraftConfig
from jetspec_jax.drafter import (
    block_inputs,
    context_kv,
    declare,
    draft_block,
    fuse,
    parent_features,
    path_gate,
)
from jetspec_jax.models.spec import flatten, nest
from jetspec_jax.numerics import ComputeWeight, dot, trainable_dot
from jetspec_jax.typing import Array, Params, PyTree
from train.losses import LossConfig, LossParts, block_loss, finish


@flax.struct.dataclass
class Batch:
    """B sequences with A anchors each."""

    tokens: Array  # [B, T] int32, right padded
    taps: Array  # [B, T, n, Ht] target features, row t of token t
    final: Array  # [B, T, Ht] target hidden states after the final norm
    anchors: Array  # [B, A] int32 positions; the block supervises anchor+1 .. anchor+D
    stop: Array  # [B, A] int32, end of the answer the block is in: nothing from there on is a label
    valid: Array  # [B, A] bool, False for padding anchors


@flax.struct.dataclass
class Frozen:
    """The target's part: nothing of it is trained."""

    embed: Array  # [V, H]
    head: Array  # [Vd, H], LM head rows of the draft vocabulary
    draft_of: Array  # [V] int32, draft id of each target id, -1 outside


@flax.struct.dataclass
class TrainState:
    """Everything a checkpoint holds besides the data cursor, which is `step` itself."""

    params: Params
    opt: PyTree
    ema: Params | None
    step: Array  # int32


def compute_params(cfg: DraftConfig, params: Params, dtype: Any) -> Params:
    """Parameters with every projection wrapped for products in `dtype`."""
    flat, decl = flatten(params), declare(cfg)
    return nest(
        {name: ComputeWeight(w, dtype) if decl[name].linear else w for name, w in flat.items()}
    )


def block_hidden(
    params: Params,
    cfg: DraftConfig,
    frozen: Frozen,
    batch: Batch,
    dtype: Any,
    *,
    remat: bool = False,
) -> Array:
    """Hidden states of all blocks, [B, A, D, H], by the functions that serve."""
    wrapped = compute_params(cfg, params, dtype)
    ctx = fuse(wrapped, cfg, batch.taps.astype(dtype))
    rows = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
    kv = context_kv(wrapped, cfg, ctx, jnp.broadcast_to(rows[None], batch.tokens.shape))
    anchor = jnp.take_along_axis(batch.tokens, batch.anchors, 1)
    block = block_inputs(cfg, anchor, batch.anchors)
    embeds = frozen.embed[block.tokens].astype(dtype)
    # `anchors` itself is the number of context rows strictly before the anchor; made 3-D so that
    # one anchor per sequence takes the training form as well (the streaming form has no gradient).
    visible = rows[None, None] < batch.anchors[..., None]
    return draft_block(
        wrapped,
        cfg,
        embeds,
        block.positions,
        tuple(k for k, _ in kv),
        tuple(v for _, v in kv),
        visible,
        remat=remat,
    )


def slot_targets(
    cfg: DraftConfig, frozen: Frozen, batch: Batch
) -> tuple[Array, Array, Array, Array]:
    """What supervises each slot, all [B, A, D]: label (draft id), inside (bool), parent (target
    id), teacher row.

    Depth d of anchor a: the label is token a+1+d, its parent token a+d, and the target's hidden
    state at a+d holds its distribution.
    """
    offsets = batch.anchors[..., None] + jnp.arange(cfg.depth, dtype=jnp.int32)[None, None]
    last = batch.tokens.shape[1] - 1
    inside = (offsets + 1 < batch.stop[..., None]) & batch.valid[..., None]

    def at(index: Array) -> Array:
        flat = jnp.clip(index, 0, last).reshape(index.shape[0], -1)
        return jnp.take_along_axis(batch.tokens, flat, 1).reshape(index.shape)

    label = jnp.where(inside, frozen.draft_of[at(offsets + 1)], -1)
    return label, inside, at(offsets), jnp.clip(offsets, 0, last)


def _chunk_parts(
    cfg: DraftConfig,
    loss: LossConfig,
    dtype: Any,
    head: Array,
    trained: tuple[Array, Array | None, Array | None],
    fixed: tuple[Array, Array, Array],
) -> tuple[Array, LossParts]:
    """Summed loss of some blocks. trained: hidden [C, D, H], w1 rows [C, D, r], w2; fixed: final,
    label, inside."""
    hidden, features, w2 = trained
    final, label, inside = fixed
    logits = trainable_dot(hidden, head, dtype).astype(jnp.float32)
    if features is not None and w2 is not None:
        logits = logits + trainable_dot(features, w2, dtype).astype(jnp.float32)
    teacher = None
    if loss.kl > 0 or loss.tv > 0:
        teacher = dot(final, head, dtype).astype(jnp.float32)
    parts = block_loss(logits, label, inside, loss, teacher)
    return parts.loss.sum(), parts


def chunked_loss(
    cfg: DraftConfig,
    loss: LossConfig,
    dtype: Any,
    hidden: Array,
    features: Array | None,
    w2: Array | None,
    head: Array,
    fixed: tuple[Array, Array, Array],
) -> LossParts:
    """Loss parts of N blocks, `loss.chunk` at a time.

    The gradient of each chunk is taken while its logits are there (the head is frozen, so only [N,
    D, H] of gradient has to be kept): no recomputation, and never more than one chunk of logits in
    memory.

    Args:
        hidden: [N, D, H]; features: [N, D, r] rows of w1 at the parents, or None; w2: [Vd, r] or
            None.
        head: [Vd, H] in the compute dtype.
        fixed: final [N, D, H], label [N, D], inside [N, D].
    """
    return _chunked_loss(cfg, loss, dtype, hidden, features, w2, head, fixed)


def _scan_chunks(
    cfg: DraftConfig,
    loss: LossConfig,
    dtype: Any,
    hidden: Array,
    features: Array | None,
    w2: Array | None,
    head: Array,
    fixed: tuple[Array, Array, Array],
) -> tuple[LossParts, tuple[Array, Array | None, Array | None]]:
    blocks = hidden.shape[0]
    chunk = min(loss.chunk, blocks)
    pad = -blocks % chunk

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1)))  # padding blocks have inside = False
        return x.reshape(-1, chunk, *x.shape[1:])

    grad = jax.value_and_grad(functools.partial(_chunk_parts, cfg, loss, dtype, head), has_aux=True)

    def step(carry: tuple[LossParts, Array | None], xs: Any) -> tuple[Any, Any]:
        parts, dw2 = carry
        h, f, kept = xs
        (_, new), (dh, df, dw) = grad((h, f, w2), kept)
        parts = jax.tree.map(jnp.add, parts, new)
        return (parts, None if dw2 is None else dw2 + dw.astype(jnp.float32)), (dh, df)

    zero = jnp.zeros((cfg.depth,), jnp.float32)
    none = LossParts(zero, zero, zero, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    start = (none, None if w2 is None else jnp.zeros(w2.shape, jnp.float32))
    xs = jax.tree.map(split, (hidden, features, fixed))
    (parts, dw2), (dh, df) = lax.scan(step, start, xs)
    dh, df = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:blocks], (dh, df))
    return parts, (dh, df, None if w2 is None or dw2 is None else dw2.astype(w2.dtype))


def _chunked_fwd(
    cfg: DraftConfig,
    loss: LossConfig,
    dtype: Any,
    hidden: Array,
    features: Array | None,
    w2: Array | None,
    head: Array,
    fixed: tuple[Array, Array, Array],
) -> tuple[LossParts, Any]:
    parts, grads = _scan_chunks(cfg, loss, dtype, hidden, features, w2, head, fixed)
    return parts, (grads, head, fixed)


def _chunked_bwd(
    cfg: DraftConfig, loss: LossConfig, dtype: Any, kept: Any, g: LossParts
) -> tuple[Any, ...]:
    (dh, df, dw2), head, fixed = kept
    # Only the total loss has a gradient; it is the same cotangent for every depth (`objective` sums
    # them).
    scale = g.loss[0]

    def scaled(x: Array | None) -> Array | None:
        return None if x is None else (x.astype(jnp.float32) * scale).astype(x.dtype)

    def no_gradient(x: Array) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros_like(x)
        return jnp.zeros(x.shape, jax.dtypes.float0)

    return scaled(dh), scaled(df), scaled(dw2), no_gradient(head), jax.tree.map(no_gradient, fixed)


def _chunked_plain(cfg: DraftConfig, loss: LossConfig, dtype: Any, *arrays: Any) -> LossParts:
    return _scan_chunks(cfg, loss, dtype, *arrays)[0]


_chunked_loss: Any = jax.custom_vjp(_chunked_plain, nondiff_argnums=(0, 1, 2))
_chunked_loss.defvjp(_chunked_fwd, _chunked_bwd)


def objective(
    params: Params,
    cfg: DraftConfig,
    loss: LossConfig,
    frozen: Frozen,
    batch: Batch,
    dtype: Any,
    *,
    remat: bool = False,
) -> tuple[Array, LossParts]:
    """Mean loss over supervised slots, and the summed parts."""
    hidden = block_hidden(params, cfg, frozen, batch, dtype, remat=remat)
    label, inside, parent, row = slot_targets(cfg, frozen, batch)
    blocks = hidden.shape[0] * hidden.shape[1]
    flat_rows = row.reshape(row.shape[0], -1)
    if loss.kl > 0 or loss.tv > 0:
        final = jnp.take_along_axis(batch.final, flat_rows[..., None], 1)
    else:
        final = jnp.zeros((*flat_rows.shape, 1), dtype)
    final = final.reshape(blocks, cfg.depth, -1)
    features = w2 = None
    if cfg.path_head != "none":
        wrapped = compute_params(cfg, params, dtype)
        features = parent_features(params, cfg, parent, path_gate(wrapped, cfg, hidden))
        features = features.astype(dtype).reshape(blocks, cfg.depth, -1)
        w2 = params["path"]["w2"]
    fixed = (final, label.reshape(blocks, -1), inside.reshape(blocks, -1))
    hidden = hidden.reshape(blocks, cfg.depth, -1)
    parts = chunked_loss(cfg, loss, dtype, hidden, features, w2, frozen.head.astype(dtype), fixed)
    return parts.loss.sum() / jnp.maximum(lax.stop_gradient(parts.count.sum()), 1.0), parts


def data_mesh(devices: int) -> Mesh:
    """Axis "data" over the first `devices` devices."""
    return jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )


def gradients(
    params: Params,
    frozen: Frozen,
    batch: Batch,
    *,
    cfg: DraftConfig,
    loss: LossConfig,
    dtype: Any,
    remat: bool = False,
    accumulate: int = 1,
    mesh: Mesh | None = None,
) -> tuple[Params, LossParts]:
    """Gradient of the mean loss over the whole batch, and the summed parts.

    Args:
        remat: recompute the layers in the backward pass.
        accumulate: parts the sequences of a device are cut into, one after the other, so that only
            one part's activations are in memory. B must be a multiple of accumulate times devices.
        mesh: devices that share the batch along axis "data" (parameters on each); None: one device.

    Every slot weighs the same wherever it is computed: parts are summed, and divided by the count
    of all of them.
    """
    scalar = functools.partial(objective, cfg=cfg, loss=loss, dtype=dtype, remat=remat)
    grad = jax.grad(scalar, has_aux=True)

    def summed(params: Params, frozen: Frozen, batch: Batch) -> tuple[Params, LossParts]:
        grads, parts = grad(params, frozen=frozen, batch=batch)
        return jax.tree.map(lambda g: g * parts.count.sum(), grads), parts

    def local(params: Params, frozen: Frozen, batch: Batch) -> tuple[Params, LossParts]:
        if accumulate == 1:
            total = summed(params, frozen, batch)
        else:
            pieces = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
            first = summed(params, frozen, jax.tree.map(lambda x: x[0], pieces))
            rest = jax.tree.map(lambda x: x[1:], pieces)

            def add(total: Any, piece: Batch) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, summed(params, frozen, piece)), None

            total, _ = lax.scan(add, first, rest)
        return total if mesh is None else lax.psum(total, "data")

    run = local
    if mesh is not None:
        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
            check_vma=False,  # the gradient rules of `halves` and others are written by hand
        )
    grads, parts = run(params, frozen, batch)
    count = jnp.maximum(parts.count.sum(), 1.0)
    return jax.tree.map(lambda g: g / count, grads), parts


def train_step(
    state: TrainState,
    batch: Batch,
    frozen: Frozen,
    *,
    cfg: DraftConfig,
    loss: LossConfig,
    optimiser: optax.GradientTransformation,
    ema_decay: float,
    dtype: Any,
    remat: bool = False,
    accumulate: int = 1,
    mesh: Mesh | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One update; returns the new state and the step's metrics (`losses.finish` plus grad_norm)."""
    grads, parts = gradients(
        state.params,
        frozen,
        batch,
        cfg=cfg,
        loss=loss,
        dtype=dtype,
        remat=remat,
        accumulate=accumulate,
        mesh=mesh,
    )
    # Optax mixes integer counters with floats and scalars with arrays; our own code is tested under
    # strict rules.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, opt = optimiser.update(grads, state.opt, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        norm = optax.tree.norm(grads)
    ema = state.ema
    if ema is not None:
        # Early steps would otherwise average in the random start.
        step = state.step.astype(jnp.float32)
        decay = jnp.minimum(ema_decay, (1.0 + step) / (10.0 + step))
        ema = jax.tree.map(lambda e, p: e + (1.0 - decay) * (p - e), ema, params)
    metrics = finish(parts) | {"grad_norm": norm}
    return TrainState(params, opt, ema, state.step + 1), metrics
