"""A GenerationResult as JSON, as statistics lines, and compared with plain decoding."""

from __future__ import annotations

from typing import Any

from serve.measure import first_difference, ratio
from serve.render import key_values, number, percent, view_of

VERSION = 1  # of the JSON output; the schema is in serve.generate's docstring


def compare(spec: Any, plain: Any) -> dict[str, Any]:
    """How a speculative GenerationResult stands against the plain one of the same prompt."""
    at = first_difference(plain.token_ids, spec.token_ids)
    return {
        "identical": at is None,
        "first_difference": at,
        "tokens_there": None if at is None else [_token_at(plain, at), _token_at(spec, at)],
        "speedup": ratio(plain.timings.decode_s, spec.timings.decode_s),
        "plain_tok_s": plain.timings.tok_s,
        "spec_tok_s": spec.timings.tok_s,
    }


def _token_at(result: Any, index: int) -> int | None:
    return int(result.token_ids[index]) if index < len(result.token_ids) else None


def result_document(
    index: int, request_id: Any, result: Any, compared: Any, trace: bool
) -> dict[str, Any]:
    """One RESULT of the schema in the module's docstring."""
    times = ("compile_s", "prefill_s", "decode_s", "ttft_s", "tok_s")
    document = {
        "version": VERSION,
        "index": index,
        **({} if request_id is None else {"id": request_id}),
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_tokens": len(result.prompt_token_ids),
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "logprobs": result.logprobs,
        "timings": {name: getattr(result.timings, name) for name in times},
        "spec": result.spec.to_dict(),
    }
    if trace:
        document["trace"] = [view_of(entry) for entry in result.trace or ()]
    if compared is not None:
        document["compare"] = compared
    return document


def stats_lines(result: Any) -> list[str]:
    """The --stats block: aligned, plain text."""
    stats, times = result.spec, result.timings
    hist = " ".join(f"{j}:{n}" for j, n in enumerate(stats.accepted_hist) if n) or "n/a"
    depths = " ".join(
        f"{k}:{percent(a)}"
        for k, a in enumerate(stats.acceptance_per_depth or (), 1)
        if a is not None
    )
    rows = {
        "prompt tokens": len(result.prompt_token_ids),
        "answer tokens": len(result.token_ids),
        "verify rounds": stats.rounds,
        "tau (tokens per round)": number(stats.tau),
        "rounds by accepted tokens": hist,
        "acceptance by depth": depths or "n/a",
        "nodes per round": number(stats.nodes / stats.rounds if stats.rounds else None, 1),
        "node efficiency": percent(stats.node_efficiency),
        "prefill": f"{number(times.prefill_s, 3)} s",
        "decode": f"{number(times.decode_s, 3)} s",
        "tokens per second": number(times.tok_s, 1),
    }
    return key_values(rows)
