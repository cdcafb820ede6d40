"""Losses of parallel draft heads as pure functions of logits (algorithm.md section 7).

Everything is per slot: logits [..., Vd] over the draft vocabulary in float32, labels [...] int32 in
draft ids with -1 where the target's token is outside the draft vocabulary or past the text. Masked
slots are replaced before any reduction, so that no NaN of an unused slot can reach a sum or a
gradient.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jetspec_jax.errors import ConfigError
from jetspec_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimised, a mean over slots (slot d of a block predicts depth d):

        weight(d) * (ce * CE + kl * KL + tv * TV) - acceptance * reach(d) + nodes * visit(d)

    where reach(d) is the probability the head gives to the whole right path down to depth d. Its
    sum over depths is the expected accepted length of a sampled chain, and visit, the probability
    that a chain which goes on as often as the head trusts itself gets to depth d, sums to the nodes
    the target would have to verify.
    """

    ce: float = 0.3
    kl: float = 0.7
    tv: float = 0.0
    temperature: float = 1.0
    gamma: float = 0.0  # depth weights exp(-d / gamma); 0: uniform
    # Share of a slot's weight that is the probability (by the head) of the right path above it,
    # from 0 (every slot counts) to 1 (a slot counts as often as decoding would get there).
    survival: float = 0.0
    acceptance: float = 0.0  # of the expected accepted length
    nodes: float = 0.0  # of the expected verified nodes
    chunk: int = 32  # blocks whose logits are in memory at once


@flax.struct.dataclass
class LossParts:
    """Sums over the supervised slots of some blocks, per depth. Add parts of chunks, then
    `finish`."""

    loss: Array  # [D] float32, weighted loss summed over slots
    agree: Array  # [D] float32, slots whose best token is the target's
    # [D] float32, supervised slots (label inside the text, in the draft vocabulary or not)
    count: Array
    chain: Array  # scalar, accepted tokens of the greedy chain, summed over whole blocks
    blocks: Array  # scalar, whole blocks (a label at every depth)


def depth_weights(depth: int, gamma: float) -> Array:
    """exp(-d / gamma) for d = 0..depth-1, [D] float32; uniform where gamma is 0 (off)."""
    if gamma <= 0:
        return jnp.ones((depth,), jnp.float32)
    return jnp.exp(-jnp.arange(depth, dtype=jnp.float32) / gamma)


def masked(x: Array, mask: Array) -> Array:
    """x where mask, else 0; x [..., n], mask [...]. A select: NaN in masked rows vanishes, gradient
    included."""
    return jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """-log softmax(logits)[label] per slot, [...] float32; 0 where masked.

    Args:
        logits: [..., Vd] float32.
        labels: [...] int32; any value where masked.
        mask: [...] bool.
    """
    logits = masked(logits, mask)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(mask, jax.nn.logsumexp(logits, -1) - picked, 0.0)


def forward_kl(logits: Array, teacher: Array, mask: Array, temperature: float = 1.0) -> Array:
    """T^2 KL(teacher^(1/T) || student^(1/T)) per slot, [...] float32; 0 where masked.

    Both are normalised over the draft vocabulary ("renormalised", not "other bucket"): the student
    has no output for other tokens, so an 'other' logit would only measure the vocabulary's
    coverage. Slots whose target token lies outside are left to the caller's mask. The teacher
    carries no gradient.

    Args:
        logits, teacher: [..., Vd] float32.
        mask: [...] bool.
        temperature: T of the distillation (Hinton et al., arXiv 1503.02531), above 0.
    """
    teacher = jax.lax.stop_gradient(masked(teacher, mask))
    log_q = jax.nn.log_softmax(masked(logits, mask) / temperature, -1)
    log_p = jax.nn.log_softmax(teacher / temperature, -1)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    return jnp.where(mask, kl * temperature**2, 0.0)


def total_variation(logits: Array, teacher: Array, mask: Array) -> Array:
    """Half the L1 distance of student and teacher per slot, [...] float32 in 0..1; 0 where masked.

    1 - TV is the probability that speculative sampling accepts a token drawn from the student
    (Leviathan et al., arXiv 2211.17192, theorem 3.5; as a loss: DSpark, arXiv 2607.05147).
    Normalised over the draft vocabulary as in `forward_kl`; no gradient to the teacher.

    Args:
        logits, teacher: [..., Vd] float32.
        mask: [...] bool.
    """
    p = jax.nn.softmax(jax.lax.stop_gradient(masked(teacher, mask)), -1)
    q = jax.nn.softmax(masked(logits, mask), -1)
    return jnp.where(mask, 0.5 * jnp.abs(p - q).sum(-1), 0.0)


def reach(log_q: Array, known: Array) -> Array:
    """Probability of the whole right path down to each depth, [..., D] float32.

    Args:
        log_q: [..., D] log-probability of the right token given the right path above.
        known: [..., D] bool; a token that the head cannot draft ends the path.
    """
    # where before cumsum: masked slots may hold anything
    return jnp.exp(jnp.cumsum(jnp.where(known, log_q, -jnp.inf), -1))


def block_loss(
    logits: Array, labels: Array, inside: Array, loss: LossConfig, teacher: Array | None = None
) -> LossParts:
    """Loss and metrics of blocks.

    Args:
        logits: [N, D, Vd] float32, conditioned on the true parents where there is a path head.
        labels: [N, D] int32 draft ids; -1 outside the draft vocabulary.
        inside: [N, D] bool, the label exists (block is real and the position lies inside the text).
        loss: what is summed.
        teacher: [N, D, Vd] float32 target logits; needed where kl or tv is above 0.

    Raises:
        ConfigError: kl or tv without a teacher.
    """
    if teacher is None and (loss.kl > 0 or loss.tv > 0):
        raise ConfigError(f"loss.kl={loss.kl} and loss.tv={loss.tv} need the target's logits")
    depth = logits.shape[1]
    supervised = inside & (labels >= 0)
    nll = cross_entropy(logits, labels, supervised)
    total = loss.ce * nll
    if loss.kl > 0 and teacher is not None:
        total = total + loss.kl * forward_kl(logits, teacher, supervised, loss.temperature)
    if loss.tv > 0 and teacher is not None:
        total = total + loss.tv * total_variation(logits, teacher, supervised)
    total = total * depth_weights(depth, loss.gamma)[None]
    if loss.survival > 0:
        path = jax.lax.stop_gradient(reach(-nll, supervised))
        above = jnp.concatenate([jnp.ones_like(path[:, :1]), path[:, :-1]], 1)
        total = total * (1.0 - loss.survival + loss.survival * above)
    if loss.acceptance > 0:
        total = total - loss.acceptance * reach(-nll, supervised)
    if loss.nodes > 0:
        # log-probability of the head's own best token
        safe = masked(logits, supervised)
        trust = safe.max(-1) - jax.nn.logsumexp(safe, -1)
        visit = jnp.exp(jnp.cumsum(jnp.where(supervised, trust, 0.0), 1) - trust)
        total = total + jnp.where(supervised, loss.nodes * visit, 0.0)
    best = jnp.argmax(masked(jax.lax.stop_gradient(logits), inside), -1).astype(jnp.int32)
    agree = ((best == labels) & supervised).astype(jnp.float32)
    # Given right parents so far, the greedy chain is exactly the run of agreements.
    run = jnp.cumprod(agree, 1).sum(1)
    whole = inside.sum(1) == depth
    return LossParts(
        loss=total.sum(0),
        agree=agree.sum(0),
        count=inside.astype(jnp.float32).sum(0),
        chain=jnp.where(whole, run, 0.0).sum(),
        blocks=whole.astype(jnp.float32).sum(),
    )


def finish(parts: LossParts) -> dict[str, Array]:
    """Means of summed parts; 0 where nothing was supervised (a batch without labels is harmless).

    Returns:
        loss (scalar), loss_per_depth [D], agreement [D], chain_tau (1 + accepted / blocks), slots.
    """
    count = jnp.maximum(parts.count, 1.0)
    return {
        "loss": parts.loss.sum() / jnp.maximum(parts.count.sum(), 1.0),
        "loss_per_depth": parts.loss / count,
        "agreement": parts.agree / count,
        "chain_tau": 1.0 + parts.chain / jnp.maximum(parts.blocks, 1.0),
        "slots": parts.count.sum(),
    }
