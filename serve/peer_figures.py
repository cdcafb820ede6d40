"""What serve.peers makes of its runs: rates, ratios, identity and agreement, and the table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jetspec_jax.config import WEIGHTS, SpecConfig
from jetspec_jax.stats import SpecStats, pooled
from serve.measure import first_difference
from serve.render import number
from serve.report import print_table

MODES = {"plain": SpecConfig(mode="off"), "speculative": None}
OURS = tuple(f"{weights}_{mode}" for weights in WEIGHTS for mode in MODES)
Q4_1, F32, TORCH = "llama_cpp_q4_1", "llama_cpp_f32", "transformers"
PEERS = {Q4_1: "stored", F32: "float32", TORCH: "float32"}  # which of ours each is held against
METHOD = (
    "per prompt the median seconds over interleaved turns; tok/s = tokens / sum of those seconds; "
    "a ratio divides two tok/s of this run"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One answer. `decode_s` without the prompt; `stats` of our own runs only."""

    token_ids: tuple[int, ...]
    decode_s: float
    stats: SpecStats | None = None


Runs = Mapping[str, Sequence[Sequence[Run]]]  # contender -> prompt -> turn


def summarise(runs: Runs, ids: Sequence[str]) -> dict[str, Any]:
    """Identity, agreement, rates and ratios. `ids` names the prompts."""
    rates = {name: rate(prompts) for name, prompts in runs.items()}

    def over(weights: str, peer: str) -> dict[str, float | None]:
        return {mode: _ratio(rates.get(f"{weights}_{mode}"), rates.get(peer)) for mode in MODES}

    odd = first_different(runs, ids)
    return {
        "tokens_identical": odd is None,
        "first_different": odd,
        "agreement": {peer: agreement(runs, peer) for peer in PEERS},
        "tok_s": {name: _rounded(rates.get(name), 2) for name in (*PEERS, *OURS)},
        "tau": {w: _tau(runs.get(f"{w}_speculative", ())) for w in WEIGHTS},
        **{f"vs_{peer}": over(weights, peer) for peer, weights in PEERS.items()},
        "vs_own_plain": {w: over(w, f"{w}_plain")["speculative"] for w in WEIGHTS},
        "per_prompt": [
            {"id": name, "tok_s": {n: round(rate([p[index]]), 2) for n, p in runs.items()}}
            for index, name in enumerate(ids)
        ],
    }


def first_different(runs: Runs, ids: Sequence[str]) -> dict[str, Any] | None:
    """The first of our runs that is not what the first of ours, a plain one, wrote."""
    mine = [name for name in OURS if name in runs]
    for index, prompt in enumerate(ids):
        reference = runs[mine[0]][index][0].token_ids
        for name in mine:
            for run in runs[name][index]:
                at = first_difference(reference, run.token_ids)
                if at is not None:
                    return {"id": prompt, "contender": name, "token": at}
    return None


def agreement(runs: Runs, peer: str) -> dict[str, Any] | None:
    """How far a peer writes our tokens: the share of equal leading tokens (mean over prompts), and
    the number of prompts that are equal to the end. None where the peer did not run.
    """
    if peer not in runs:
        return None
    mine = runs[next(name for name in OURS if name in runs)]
    shares = []
    for own, theirs in zip(mine, runs[peer], strict=True):
        tokens = own[0].token_ids
        at = first_difference(tokens, theirs[0].token_ids)
        shares.append(1.0 if at is None else at / max(len(tokens), 1))
    return {
        "leading_share": round(statistics.fmean(shares), 4),
        "prompts_equal": sum(share == 1.0 for share in shares),
    }


def bandwidth_figures(
    runs: Runs, target_bytes: Mapping[str, int], bandwidth: float
) -> dict[str, Any]:
    """What the memory gives, and how much of it plain decoding uses: a token reads every weight."""
    used = {
        weights: _rounded(rate(runs[f"{weights}_plain"]) * size / bandwidth, 3)
        for weights, size in target_bytes.items()
    }
    return {
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "target_mb": {w: round(size / 1e6, 1) for w, size in target_bytes.items()},
        "plain_of_bandwidth_limit": used,
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else round(above / below, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _tau(prompts: Sequence[Sequence[Run]]) -> float | None:
    stats = (run.stats for turns in prompts for run in turns[:1] if run.stats is not None)
    return _rounded(pooled(stats).tau, 3)


def rate(prompts: Sequence[Sequence[Run]]) -> float:
    """Tokens per second over prompts, each with the median of its turns."""
    tokens = sum(len(turns[0].token_ids) for turns in prompts)
    return tokens / sum(statistics.median(run.decode_s for run in turns) for turns in prompts)


def print_rates(document: Mapping[str, Any]) -> None:
    """The table for people, on stderr."""
    labels = {
        Q4_1: "llama.cpp, Q4_1 file",
        F32: "llama.cpp, float32",
        TORCH: "transformers, float32",
        **{f"stored_{mode}": f"ours, weights as stored, {mode}" for mode in MODES},
        **{f"float32_{mode}": f"ours, weights as float32, {mode}" for mode in MODES},
    }
    rates, alike = document["tok_s"], document["agreement"]
    rows = []
    for name, label in labels.items():
        speed, near = rates[name], alike.get(name)
        rows.append(
            [
                label,
                number(speed, 1),
                *(number(_ratio(speed, rates[peer]), 2, "x") for peer in PEERS),
                "" if near is None else f"{near['prompts_equal']}/{document['prompts']}",
            ]
        )
    footer = (
        f"{document['hardware']}, {document['threads']} threads · batch 1 · greedy · "
        f"{document['prompts']} prompts of {document['suite']}, {document['max_tokens']} tokens, "
        f"{document['turns']} turns · ours identical: "
        f"{'yes' if document['tokens_identical'] else 'NO'} · memory reads "
        f"{document['bandwidth_gb_s']} GB/s"
    )
    columns = (
        "",
        "tok/s",
        "to llama.cpp Q4_1",
        "to llama.cpp F32",
        "to transformers",
        "our tokens",
    )
    print_table("side by side", rows, columns, footer)
