"""Least time of every op and of a whole round on a GPU: computed, not measured.

An op takes at least its bytes over the memory bandwidth and its operations over the tensor cores'
rate, whichever is longer; a round takes at least the sum of its ops, for each needs the one before.
Bytes are what must cross the memory bus once: weights, caches, operands and results in bfloat16.
Norms, RoPE, residual additions and SwiGLU are taken as fused into their neighbours, launches as
free, caches of the GPU as empty. So a measured time is never below these, and a speed-up computed
from them is a ceiling only in this sense: it is what the same ideal machine would reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallas_kernels.geometries import Geometry
from pallas_kernels.gpu_target import GpuTarget

HALF, WORD = 2, 4  # bytes of bfloat16; of float32 and int32
PHASES = ("verify", "commit", "draft", "tree")


@dataclasses.dataclass(frozen=True)
class Work:
    """What `count` calls of an op have to do, all together.

    Attributes:
        op: name of the op and of what it is applied to.
        phase: part of the round, one of PHASES.
        count: calls in a round.
        bytes: over the memory bus.
        flops: operations (a multiply-add is two) on the tensor cores.
    """

    op: str
    phase: str
    count: int
    bytes: float
    flops: float

    def seconds(self, target: GpuTarget) -> float:
        """Least time on this GPU."""
        return max(self.bytes / target.bandwidth, self.flops / target.bf16_flops)

    def bound(self, target: GpuTarget) -> str:
        """Which of the two limits holds: "memory" or "compute"."""
        slow = self.bytes / target.bandwidth >= self.flops / target.bf16_flops
        return "memory" if slow else "compute"


def projection(op: str, phase: str, rows: int, n: int, k: int, count: int = 1) -> Work:
    """x [rows, k] times a weight [n, k], `count` different weights."""
    size = HALF * (n * k + rows * (n + k))
    return Work(op, phase, count, count * size, count * 2.0 * rows * n * k)


def grouped_projection(
    op: str, phase: str, rows: int, n: int, k: int, experts: int, active: int, count: int = 1
) -> Work:
    """The same through `active` of `experts` weights a row; a weight is read once if any row wants
    it. Rows choose independently and evenly: E (1 - (1 - a / E)^rows) experts on average."""
    touched = experts * (1.0 - (1.0 - active / experts) ** rows)
    size = HALF * (touched * n * k + rows * active * (n + k))
    return Work(op, phase, count, count * size, count * 2.0 * rows * active * n * k)


def attention(
    op: str, phase: str, rows: int, context: int, g: Geometry, batch: int, count: int
) -> Work:
    """`rows` rows of each of `batch` sequences over `context` cached keys and over themselves: keys
    and values once, queries in, results out, and a bit a row and node. Masked keys are computed."""
    keys = context + rows
    size = HALF * (2 * keys * g.kv_width + 2 * rows * g.q_width) + WORD * rows * -(-rows // 32)
    return Work(
        op, phase, count, count * batch * size, count * batch * 4.0 * rows * keys * g.q_width
    )


def head(op: str, phase: str, rows: int, vocab: int, hidden: int, out: int) -> Work:
    """LM head over `rows` rows whose logits stay on the chip; `out` words a row come back."""
    size = HALF * (vocab * hidden + rows * hidden) + WORD * rows * out
    return Work(op, phase, 1, size, 2.0 * rows * vocab * hidden)


def forward_work(g: Geometry, rows: int, context: int, batch: int = 1) -> list[Work]:
    """One target forward with greedy choice: `rows` rows a sequence over `context` cached keys."""
    m, phase = rows * batch, "verify"
    work = [
        projection("qkv", phase, m, g.qkv, g.hidden, g.layers),
        attention("tree_attention", phase, rows, context, g, batch, g.layers),
        projection("o", phase, m, g.hidden, g.q_width, g.layers),
    ]
    if g.experts:
        work += [
            projection("router", phase, m, g.experts, g.hidden, g.layers),
            grouped_projection(
                "experts gate_up", phase, m, 2 * g.ffn, g.hidden, g.experts, g.active, g.layers
            ),
            grouped_projection(
                "experts down", phase, m, g.hidden, g.ffn, g.experts, g.active, g.layers
            ),
        ]
    else:
        work += [
            projection("gate_up", phase, m, 2 * g.ffn, g.hidden, g.layers),
            projection("down", phase, m, g.hidden, g.ffn, g.layers),
        ]
    return [*work, head("verify_head", phase, m, g.vocab, g.hidden, 3)]


def draft_work(
    g: Geometry, context: int, committed: float, nodes: int, width: int = 8, batch: int = 1
) -> list[Work]:
    """Commit of the last round's rows, the drafter's pass and the tree.

    Args:
        g: geometry.
        context: cached keys.
        committed: rows that a round commits (tau); rounded up to whole rows.
        nodes: slots of the tree.
        width: candidates a depth.
        batch: sequences.
    """
    d, kept = g.draft, math.ceil(committed) * batch
    rows, depth = d.block * batch, d.block - 1
    moved = 2.0 * HALF * g.layers * 2 * g.kv_width * kept
    table = WORD * batch * depth * width * (1 + width)
    return [
        Work("accept_commit", "commit", 1, moved, 0.0),
        projection("draft_context fc", "commit", kept, g.hidden, d.taps * g.hidden),
        projection("draft_context kv", "commit", kept, 2 * g.kv_width, g.hidden, d.layers),
        projection("draft qkv", "draft", rows, g.qkv, g.hidden, d.layers),
        attention("draft attention", "draft", d.block, context, g, batch, d.layers),
        projection("draft o", "draft", rows, g.hidden, g.q_width, d.layers),
        projection("draft gate_up", "draft", rows, 2 * d.ffn, g.hidden, d.layers),
        projection("draft down", "draft", rows, g.hidden, d.ffn, d.layers),
        head("draft_head_topk", "draft", depth * batch, d.vocab, g.hidden, width * (1 + width)),
        Work("build_tree", "tree", 1, table + WORD * 7 * nodes * batch, 0.0),
    ]


def round_work(
    g: Geometry, nodes: int, context: int, committed: float, width: int = 8, batch: int = 1
) -> list[Work]:
    """All of one speculative round. Arguments as `draft_work`."""
    return [
        *forward_work(g, nodes, context, batch),
        *draft_work(g, context, committed, nodes, width, batch),
    ]


def seconds(work: Sequence[Work], target: GpuTarget) -> float:
    """Least time of ops that follow each other."""
    return sum(w.seconds(target) for w in work)


def ceiling(
    g: Geometry,
    target: GpuTarget,
    nodes: int,
    context: int,
    tau: float,
    width: int = 8,
    batch: int = 1,
) -> float:
    """Ideal speed-up over ideal plain decoding: tau times a plain step over a round."""
    plain = seconds(forward_work(g, 1, context, batch), target)
    return tau * plain / seconds(round_work(g, nodes, context, tau, width, batch), target)


def draft_parameters(g: Geometry) -> int:
    """Parameters of the draft head's checkpoint (norms included, embedding and LM head not)."""
    d = g.draft
    layer = g.hidden * (g.qkv + g.q_width + 3 * d.ffn) + 2 * g.hidden + 2 * g.head_dim
    return d.layers * layer + d.taps * g.hidden**2 + 2 * g.hidden
