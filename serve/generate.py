"""Answers from the command line: `python -m serve.generate "Write a Python function that reverses a
string"`.

Streams the answer on stdout; what is being loaded, progress and statistics go to stderr. Exit code
0: done; 1: a run-time error, or `--compare` found different tokens; 2: usage; 130: Ctrl-C (partial
statistics are printed).

`--json` prints one document and nothing else on stdout (schema version 1):

    {"version": 1, "model": str, "draft": str | null, "hardware": str, "dtype": str, "versions":
    {...},
     "spec": {SpecConfig fields}, "tuned": {"entry": str | null, "date", "exact": bool, "params":
     {...}, "overruled": [...], "reason": str}, "sampling": {SamplingParams fields}, "load_s":
     float, "compile_s": float, "interrupted": bool, "results": [RESULT, ...]}

`--jsonl` prints one RESULT per line, in the order of the prompts, as batches finish. RESULT:

    {"version": 1, "index": int, "id": any (when the prompt had one), "text": str, "token_ids":
    [int],
     "prompt_tokens": int, "finish_reason": "stop" | "length", "stop": what stopped it | null,
     "logprobs": [...] | null, "timings": {"compile_s", "prefill_s", "decode_s", "ttft_s", "tok_s"},
     "spec": {"tau", "rounds", "accepted", "drafted", "nodes", "delivered", "accepted_hist",
              "acceptance_per_depth", "acceptance_rate_per_position", "node_efficiency"},
     "trace": [...] (with --tree), "compare": {"identical": bool, "first_difference": int | null,
     "speedup", "plain_tok_s", "spec_tok_s"}
                (with --compare)}

Times are seconds, compilation apart; "first_difference" counts tokens of the answer from 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax.config import SpecConfig
from jetspec_jax.errors import ConfigError, InputError
from serve import cli
from serve.prompts import Request, check_text, read_prompts

OFF = SpecConfig(mode="off")


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.generate",
        usage="python -m serve.generate [flags] PROMPT",
        description="Generate text with speculative decoding: the same tokens as plain "
        "decoding, faster.",
        epilog='example: python -m serve.generate "Write a haiku about trees" --compare',
    )
    parser.add_argument(
        "prompt", nargs="?", help="what to ask (or --prompt, or --prompts for many)"
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt", dest="prompt_flag", metavar="TEXT", help="the prompt, as a flag"
    )
    prompts.add_argument(
        "--prompts", metavar="FILE", help='JSON lines of {"prompt"} or {"messages"}; - is stdin'
    )
    prompts.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="prompts decoded together (default: 1)",
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message")
    prompts.add_argument(
        "--no-chat", action="store_true", help="send the text as it is, without the chat template"
    )
    prompts.add_argument(
        "--chat-template-kwargs", metavar="JSON", help='e.g. {"enable_thinking": false}'
    )
    cli.add_model_flags(parser)
    cli.add_spec_flags(parser)
    cli.add_tuned_flag(parser)
    cli.add_sampling_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="one JSON document on stdout and nothing else"
    )
    output.add_argument("--jsonl", action="store_true", help="one JSON result per line on stdout")
    output.add_argument(
        "--compare", action="store_true", help="decode plainly too; exit 1 if the tokens differ"
    )
    output.add_argument("--stats", action="store_true", help="full statistics at the end")
    output.add_argument(
        "--tree",
        action="store_true",
        help="draw the round that accepted most, with its accepted path",
    )
    output.add_argument("--tree-round", type=int, metavar="N", help="draw round N (from 1) instead")
    output.add_argument(
        "--color-accepted",
        action="store_true",
        help="accepted draft tokens in green (NO_COLOR wins)",
    )
    tools = parser.add_argument_group("diagnosis")
    tools.add_argument(
        "--plan", action="store_true", help="print the resolved configuration and memory, then exit"
    )
    tools.add_argument(
        "--doctor", action="store_true", help="find out why a draft head is hardly ever accepted"
    )
    tools.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(_run, build_parser(), argv)


def _run(args: argparse.Namespace) -> int:
    _check_combinations(args)
    spec, sampling = cli.spec_from_args(args), cli.sampling_from_args(args)
    engine = cli.engine_from_args(
        args, **({"max_batch": args.batch_size} if args.batch_size > 32 else {})
    )
    kwargs = cli.parse_json_object(args.chat_template_kwargs or "{}", "--chat-template-kwargs")
    if args.compare and not spec.enabled:
        raise ConfigError(
            "--compare has nothing to compare with --spec off or --drafter none; drop one of them"
        )
    if args.tree and not spec.enabled:
        raise ConfigError(
            "--tree has no tree to draw with --spec off or --drafter none; drop one of them"
        )
    cli.check_path(args.model, "--model")
    cli.check_path(args.draft, "--draft")
    cli.check_tuned(args.tuned)
    requests = [] if args.plan or args.doctor else _requests(args)
    samplings = [request.sampling_params(sampling) for request in requests]
    cli.say(cli.describe_load(args))
    if args.doctor:
        from serve import doctor  # only here

        return doctor.run(args, engine, kwargs)
    start = time.perf_counter()
    llm = cli.load_llm(args, spec, engine)
    from serve.job import Job  # numpy

    job = Job(args, llm, spec, engine, sampling, time.perf_counter() - start)
    if args.plan:
        return job.plan()
    prompts = [_encode(llm, request, args, kwargs) for request in requests]
    _check_lengths(llm, requests, prompts)
    job.warm_up(min(args.batch_size, len(prompts)), samplings)
    if len(requests) == 1 and not (args.json or args.jsonl):
        return job.stream(prompts[0], samplings[0])
    return job.many(requests, prompts, samplings)


def _check_combinations(args: argparse.Namespace) -> None:
    if args.json and args.jsonl:
        raise ConfigError("--json and --jsonl exclude each other; choose one")
    if args.no_chat and (args.system or args.chat_template_kwargs):
        raise ConfigError(
            "--no-chat uses no template, so --system and --chat-template-kwargs cannot "
            "apply; drop one side"
        )
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size}: give at least 1")
    if args.logprobs is not None and not (args.json or args.jsonl):
        raise ConfigError("--logprobs are part of the JSON output; add --json or --jsonl")
    if args.color_accepted and (args.json or args.jsonl):
        raise ConfigError("--color-accepted colours text; drop it or --json/--jsonl")
    nothing = "--spec off" if args.spec == "off" else None
    nothing = nothing or ("--drafter none" if args.drafter == "none" else None)
    if nothing is not None:
        for name in ("drafter", "depth", "head_depth", "width", "budget", "builder"):
            if getattr(args, name) not in (None, "none"):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} cannot apply with {nothing}; drop one of them")
    if args.head_depth is not None and args.drafter == "lookup":
        raise ConfigError("--head-depth cannot apply with --drafter lookup; drop one of them")
    if args.draft_weights is not None and args.draft == "none":
        raise ConfigError("--draft-weights cannot apply with --draft none; drop one of them")
    if args.tree_round is not None:
        args.tree = True
        if args.tree_round < 1:
            raise ConfigError(f"--tree-round {args.tree_round}: rounds count from 1")
    if args.plan and args.doctor:
        raise ConfigError("--plan and --doctor exclude each other; choose one")


def _requests(args: argparse.Namespace) -> list[Request]:
    given = [
        name for name in ("prompt", "prompt_flag", "prompts") if getattr(args, name) is not None
    ]
    if len(given) > 1:
        raise ConfigError("give the prompt once: as an argument, with --prompt, or with --prompts")
    if not given:
        raise ConfigError(
            'no prompt; for example: python -m serve.generate "Write a haiku about trees"'
        )
    if args.prompts is not None:
        if args.prompts == "-":
            cli.say("reading prompts from stdin")
        requests = read_prompts(args.prompts)
    else:
        text = args.prompt if args.prompt is not None else args.prompt_flag
        requests = [Request("prompt", prompt=check_text(text, "prompt"))]
    chatty = next((r for r in requests if r.messages is not None), None)
    if args.no_chat and chatty is not None:
        raise InputError(
            f'{chatty.where}: "messages" need the chat template; drop --no-chat or give "prompt"'
        )
    return requests


def _encode(
    llm: Any, request: Request, args: argparse.Namespace, kwargs: dict[str, Any]
) -> list[int]:
    if args.no_chat:
        return llm.tokenizer.encode(request.prompt, add_special=True)
    return llm.tokenizer.chat(
        request.as_messages(), system=args.system, add_generation_prompt=True, **kwargs
    )


def _check_lengths(llm: Any, requests: Sequence[Request], prompts: Sequence[list[int]]) -> None:
    """All prompts are checked before the first answer is paid for."""
    room = llm.capacity
    for request, ids in zip(requests, prompts, strict=True):
        if len(ids) >= room:
            raise InputError(
                f"{request.where}: the prompt has {len(ids)} tokens, but the context holds {room} "
                "with the answer; shorten it or raise --capacity (the model's limit is "
                f"{llm.model_config.max_context})"
            )


if __name__ == "__main__":
    sys.exit(main())
