"""Expected commit length of exact and all-children trees on synthetic candidates.

    python -m jetspec_jax.tree.simulate

Independent depths, D=15, W=7. The best token of a depth has probability Beta(6, 1.5) (mean 0.8),
the rest falls off geometrically by 0.6. algorithm.md section 4 gives, for a simulation of this
kind, all-children -> exact: 16: 3.27 -> 5.17, 32: 4.28 -> 6.05, 64: 5.29 -> 6.92, 128: 6.27 ->
7.78, 256: 7.10 -> 8.60.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import SpecConfig
from jetspec_jax.tree.build import build_tree
from jetspec_jax.tree.topology import Candidates
from jetspec_jax.typing import Array

BUDGETS = (8, 16, 32, 64, 128, 256)
BETA, DECAY = (6.0, 1.5), 0.6


def synthetic_candidates(rounds: int, depth: int, width: int, seed: int) -> Candidates:
    """Candidates of independent rounds, leaves `[rounds, D, ...]`; rows repeat over parents."""
    rng = np.random.default_rng(seed)
    best = rng.beta(*BETA, (rounds, depth, 1))
    rest = DECAY ** np.arange(width - 1)
    probability = np.concatenate([best, (1 - best) * rest / max(rest.sum(), 1e-9)], axis=-1)
    logp = np.log(np.maximum(-np.sort(-probability, axis=-1), 1e-9)).astype(np.float32)
    return Candidates(
        tokens=jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rounds, depth, width)),
        logp=jnp.asarray(np.repeat(logp[:, :, None], width, axis=2)),
    )


def commit_lengths(cands: Candidates, builder: str, budgets: tuple[int, ...]) -> np.ndarray:
    """Mean expected commit length (bonus included) per budget, float64 `[len(budgets)]`.

    One tree of the largest budget serves all: its cuts are the smaller trees.
    """
    depth = cands.tokens.shape[1]

    def scores(one: Candidates) -> Array:
        return build_tree(
            one,
            jnp.int32(0),
            builder=builder,
            budget=max(budgets),
            max_depth=depth,
            spec=SpecConfig(),
        ).score

    worth = np.exp(np.asarray(jax.jit(jax.vmap(scores))(cands), np.float64))
    return np.cumsum(worth.mean(axis=0))[np.asarray(budgets) - 1]


def table(rounds: int = 200, depth: int = 15, width: int = 7, seed: int = 0) -> str:
    """The table as markdown text."""
    cands = synthetic_candidates(rounds, depth, width, seed)
    published = commit_lengths(cands, "accum_logp", BUDGETS)
    exact = commit_lengths(cands, "exact", BUDGETS)
    top = float(np.exp(np.asarray(cands.logp)[:, :, 0, 0]).mean())
    lines = [
        f"Expected commit length, D={depth}, W={width}, mean top-1 {top:.2f}, {rounds} rounds, "
        f"seed {seed}",
        "",
        "| budget | all-children | exact | gain |",
        "|---:|---:|---:|---:|",
    ]
    for budget, old, new in zip(BUDGETS, published, exact, strict=True):
        lines.append(f"| {budget} | {old:.2f} | {new:.2f} | {100 * (new / old - 1):+.0f}% |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Prints the table as markdown."""
    parser = argparse.ArgumentParser(description="Exact against all-children trees.")
    for name, value in (("rounds", 200), ("depth", 15), ("width", 7), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    print(table(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
