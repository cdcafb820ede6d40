"""`make demo`: the bundled model and head, plain against speculative, in minutes on 2 cores.

Streams one answer with the accepted draft tokens in green (on a terminal), then decodes six prompts
both ways and prints a table. The last line of stdout is JSON: {"model", "draft", "prompts",
"tokens_identical", "speedup", "tau", "plain_tok_s", "spec_tok_s", "hardware", "dtype", "batch",
"temperature", "max_tokens", "per_prompt", ...}. Exit code 1 when any token differs from plain
decoding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax.config import SamplingParams, SpecConfig
from jetspec_jax.errors import ConfigError
from serve import cli

OFF = SpecConfig(mode="off")
VARIANT = "spec"
# Diverse on purpose: code, maths, extraction, rewriting, explanation, a story. None is from an
# evaluation suite.
PROMPTS = (
    (
        "code",
        "Write a Python function that returns the n-th Fibonacci number, with a docstring "
        "and an example.",
    ),
    (
        "maths",
        "A train travels 60 km in 45 minutes. What is its average speed in km/h? Explain "
        "step by step.",
    ),
    (
        "extraction",
        "List every name and city in this text as 'name: city', one per line.\n\nMaria "
        "Keller moved from Hamburg to "
        "Lyon in 2019. Her brother Tom Keller still lives in Hamburg, while their friend "
        "Aiko Tanaka works in Osaka.",
    ),
    (
        "rewriting",
        "Correct the spelling and return the whole text:\n\nThe libary will be closd on "
        "Monday becuase of repairs. "
        "Please retrun your books befor Friday and use the side entrence until the repairs "
        "are finshed.",
    ),
    ("explanation", "Explain how photosynthesis works to a ten-year-old."),
    ("story", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
)


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.demo",
        usage="python -m serve.demo [flags]",
        description="Plain against speculative decoding in a few prompts.",
    )
    cli.add_model_flags(parser)
    cli.add_spec_flags(parser)
    cli.add_tuned_flag(parser)
    demo = parser.add_argument_group("demo")
    demo.add_argument(
        "--max-tokens", type=int, default=112, metavar="N", help="tokens per answer (default: 112)"
    )
    demo.add_argument(
        "--limit", type=int, default=len(PROMPTS), metavar="N", help="use the first N prompts"
    )
    demo.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    return cli.run(_run, build_parser(), argv)


def _run(args: argparse.Namespace) -> int:
    spec, engine = cli.spec_from_args(args), cli.engine_from_args(args)
    if not spec.enabled:
        raise ConfigError(
            "the demo compares speculative with plain decoding; drop --spec off or --drafter none"
        )
    if not 1 <= args.limit <= len(PROMPTS):
        raise ConfigError(f"--limit {args.limit}: give 1 to {len(PROMPTS)}")
    sampling = SamplingParams(max_tokens=args.max_tokens)
    cli.check_path(args.model, "--model")
    cli.check_path(args.draft, "--draft")
    cli.check_tuned(args.tuned)
    start = time.perf_counter()
    cli.say(cli.describe_load(args))
    llm = cli.load_llm(args, spec, engine)
    with cli.phase("compiling (kept on disk: the next start is faster)"):
        compile_s = float(llm.warmup(batch=1, spec=spec)) + float(llm.warmup(batch=1, spec=OFF))

    from serve import facts, measure, report
    from serve.suites import SuitePrompt

    chosen = PROMPTS[: args.limit]
    streamed = _stream(llm, chosen[0][1], sampling, spec)
    prompts = [SuitePrompt(name, ({"role": "user", "content": text},)) for name, text in chosen]
    rows: list[measure.Row] = []
    cli.say(f"decoding {len(prompts)} prompts both ways, {args.max_tokens} tokens each")
    for number_, prompt in enumerate(prompts):
        rows += measure.measure(
            llm, "demo", [prompt], {VARIANT: spec}, sampling, first_group=number_
        )
        cli.say(f"  {number_ + 1}/{len(prompts)} {prompt.id}: {_up(rows[-1].speedup(VARIANT))}")
    summary = measure.summarise(rows, VARIANT)
    identical = summary["identical"] and tuple(streamed) == rows[0].plain.token_ids
    header = {
        "hardware": facts.hardware(),
        "dtype": engine.dtype,
        "batch": 1,
        "temperature": 0.0,
        "budget": llm.spec.budget or "auto",
        "max_tokens": args.max_tokens,
        "tuned": llm.tuned.to_json(),
    }
    _table(rows, summary, report, report.facts_line(header))
    total = time.perf_counter() - start
    document = {
        "model": args.model or cli.BUNDLED,
        "draft": cli.head_name(args, llm),
        "prompts": len(rows),
        "tokens_identical": identical,
        "speedup": summary["speedup"],
        "speedup_interval": summary["speedup_interval"],
        "tau": summary["tau"],
        "plain_tok_s": summary["plain_tok_s"],
        "spec_tok_s": summary["spec_tok_s"],
        **header,
        "tokens": summary["tokens"],
        "per_prompt": {
            row.id: {
                "speedup": row.speedup(VARIANT),
                "tau": row.variants[VARIANT].stats.tau,
                "identical": row.identical(VARIANT),
            }
            for row in rows
        },
        "spec": {k: v for k, v in cli.plain(llm.spec).items() if v is not None},
        "versions": facts.versions(),
        "compile_s": compile_s,
        "total_s": total,
    }
    if not identical:
        odd = summary["first_different"] or {"id": f"{rows[0].id} (streamed)", "token": "?"}
        cli.say(f"TOKENS DIFFER from plain decoding: prompt {odd['id']}, token {odd['token']}")
    print(cli.dump_json(document))
    return 0 if identical else 1


def _stream(llm: Any, prompt: str, sampling: SamplingParams, spec: SpecConfig) -> list[int]:
    """Shows one answer as it is made; returns its token ids."""
    from serve.render import AcceptedPainter, number

    colour = cli.use_colour(sys.stdout)
    painter = AcceptedPainter(
        llm.tokenizer.incremental().push if colour else lambda token: "", colour
    )
    cli.say(f"\n> {prompt}" + ("  (green: drafted and accepted)" if colour else ""))
    ids: list[int] = []
    result = None
    for chunk in llm.stream([{"role": "user", "content": prompt}], sampling, spec=spec):
        painter.feed(chunk.token_ids, chunk.accepted)
        sys.stdout.write(painter.paint(chunk.text))
        sys.stdout.flush()
        ids += [int(t) for t in chunk.token_ids]
        result = chunk.result or result
    sys.stdout.write("\n\n")
    sys.stdout.flush()
    if result is not None:
        cli.say(
            f"tau {number(result.spec.tau)}, {number(result.timings.tok_s, 1)} tok/s, "
            f"first token {number(result.timings.ttft_s)} s\n"
        )
    return ids


def _up(speedup: float | None) -> str:
    return "n/a" if speedup is None else f"{speedup:.2f}x"


def _table(rows: Sequence[Any], summary: dict[str, Any], report: Any, line: str) -> None:
    from serve.render import number

    cells = [
        [
            row.id,
            str(len(row.plain.token_ids)),
            number(row.plain.tok_s, 1),
            number(row.variants[VARIANT].tok_s, 1),
            _up(row.speedup(VARIANT)),
            number(row.variants[VARIANT].stats.tau),
            "yes" if row.identical(VARIANT) else "NO",
        ]
        for row in rows
    ]
    cells.append(
        [
            "all",
            str(summary["tokens"]),
            number(summary["plain_tok_s"], 1),
            number(summary["spec_tok_s"], 1),
            _up(summary["speedup"]),
            number(summary["tau"]),
            "yes" if summary["identical"] else "NO",
        ]
    )
    columns = ("prompt", "tokens", "plain tok/s", "spec tok/s", "speed-up", "τ", "identical")
    report.print_table("plain against speculative decoding", cells, columns, line)


if __name__ == "__main__":
    sys.exit(main())
