"""Answers from the command line: `python -m serve.generate "Write a Python function that reverses a string"`.

Streams the answer on stdout; what is being loaded, progress and statistics go to stderr. Exit code 0: done;
1: a run-time error, or `--compare` found different tokens; 2: usage; 130: Ctrl-C (partial statistics are printed).

`--json` prints one document and nothing else on stdout (schema version 1):

    {"version": 1, "model": str, "draft": str | null, "hardware": str, "dtype": str, "versions": {...},
     "spec": {SpecConfig fields}, "sampling": {SamplingParams fields}, "load_s": float, "compile_s": float,
     "interrupted": bool, "results": [RESULT, ...]}

`--jsonl` prints one RESULT per line, in the order of the prompts, as batches finish. RESULT:

    {"version": 1, "index": int, "id": any (when the prompt had one), "text": str, "token_ids": [int],
     "prompt_tokens": int, "finish_reason": "stop" | "length", "stop": what stopped it | null,
     "logprobs": [...] | null, "timings": {"compile_s", "prefill_s", "decode_s", "ttft_s", "tok_s"},
     "spec": {"tau", "rounds", "accepted", "drafted", "nodes", "delivered", "accepted_hist",
              "acceptance_per_depth", "acceptance_rate_per_position", "node_efficiency"},
     "trace": [...] (with --tree),
     "compare": {"identical": bool, "first_difference": int | null, "speedup", "plain_tok_s", "spec_tok_s"}
                (with --compare)}

Times are seconds, compilation apart; "first_difference" counts tokens of the answer from 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax.config import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.errors import ConfigError, InputError
from serve import cli
from serve.prompts import Request, check_text, read_prompts
from serve.render import AcceptedPainter, key_values, number, percent, tree_lines, view_of

VERSION = 1
OFF = SpecConfig(mode="off")


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.generate",
        description="Generate text with speculative decoding: the same tokens as plain decoding, faster.",
        epilog='example: python -m serve.generate "Write a haiku about trees" --max-tokens 60 --compare',
    )
    parser.add_argument("prompt", nargs="?", help="what to ask (or --prompt, or --prompts for many)")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", dest="prompt_flag", metavar="TEXT", help="the prompt, as a flag")
    prompts.add_argument("--prompts", metavar="FILE", help='JSON lines of {"prompt"} or {"messages"}; - is stdin')
    prompts.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts decoded together (default: 1)")
    prompts.add_argument("--system", metavar="TEXT", help="system message")
    prompts.add_argument("--no-chat", action="store_true", help="send the text as it is, without the chat template")
    prompts.add_argument("--chat-template-kwargs", metavar="JSON", help='e.g. {"enable_thinking": false}')
    cli.add_model_flags(parser)
    cli.add_spec_flags(parser)
    cli.add_sampling_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")
    output.add_argument("--jsonl", action="store_true", help="one JSON result per line on stdout")
    output.add_argument("--compare", action="store_true", help="decode plainly too; exit 1 if the tokens differ")
    output.add_argument("--stats", action="store_true", help="full statistics at the end")
    output.add_argument("--tree", action="store_true", help="draw the round that accepted most, with its accepted path")
    output.add_argument("--tree-round", type=int, metavar="N", help="draw round N (from 1) instead")
    output.add_argument("--color-accepted", action="store_true", help="accepted draft tokens in green (NO_COLOR wins)")
    tools = parser.add_argument_group("diagnosis")
    tools.add_argument("--plan", action="store_true", help="print the resolved configuration and memory, then exit")
    tools.add_argument("--doctor", action="store_true", help="find out why a draft head is hardly ever accepted")
    tools.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(_run, build_parser(), argv)


def _run(args: argparse.Namespace) -> int:
    _check_combinations(args)
    spec, sampling = cli.spec_from_args(args), cli.sampling_from_args(args)
    engine = cli.engine_from_args(args, **({"max_batch": args.batch_size} if args.batch_size > 32 else {}))
    kwargs = cli.parse_json_object(args.chat_template_kwargs or "{}", "--chat-template-kwargs")
    if args.compare and not spec.enabled:
        raise ConfigError("--compare has nothing to compare with --spec off or --drafter none; drop one of them")
    if args.tree and not spec.enabled:
        raise ConfigError("--tree has no tree to draw with --spec off or --drafter none; drop one of them")
    cli.check_path(args.model, "--model")
    cli.check_path(args.draft, "--draft")
    requests = [] if args.plan or args.doctor else _requests(args)
    samplings = [request.sampling_params(sampling) for request in requests]
    cli.say(cli.describe_load(args))
    if args.doctor:
        from serve import doctor  # only here

        return doctor.run(args, engine, kwargs)
    start = time.perf_counter()
    llm = cli.load_llm(args, spec, engine)
    job = _Job(args, llm, spec, engine, sampling, time.perf_counter() - start)
    if args.plan:
        return job.plan()
    prompts = [_encode(llm, request, args, kwargs) for request in requests]
    _check_lengths(llm, engine, requests, prompts)
    job.warm_up(min(args.batch_size, len(prompts)))
    if len(requests) == 1 and not (args.json or args.jsonl):
        return job.stream(prompts[0], samplings[0])
    return job.many(requests, prompts, samplings)


def _check_combinations(args: argparse.Namespace) -> None:
    if args.json and args.jsonl:
        raise ConfigError("--json and --jsonl exclude each other; choose one")
    if args.no_chat and (args.system or args.chat_template_kwargs):
        raise ConfigError("--no-chat uses no template, so --system and --chat-template-kwargs cannot apply; drop one side")
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size {args.batch_size}: give at least 1")
    if args.logprobs is not None and not (args.json or args.jsonl):
        raise ConfigError("--logprobs are part of the JSON output; add --json or --jsonl")
    if args.tree_round is not None:
        args.tree = True
        if args.tree_round < 1:
            raise ConfigError(f"--tree-round {args.tree_round}: rounds count from 1")
    if args.plan and args.doctor:
        raise ConfigError("--plan and --doctor exclude each other; choose one")


def _requests(args: argparse.Namespace) -> list[Request]:
    given = [name for name in ("prompt", "prompt_flag", "prompts") if getattr(args, name) is not None]
    if len(given) > 1:
        raise ConfigError("give the prompt once: as an argument, with --prompt, or with --prompts")
    if not given:
        raise ConfigError('no prompt; for example: python -m serve.generate "Write a haiku about trees"')
    if args.prompts is not None:
        if args.prompts == "-":
            cli.say("reading prompts from stdin")
        requests = read_prompts(args.prompts)
    else:
        text = args.prompt if args.prompt is not None else args.prompt_flag
        requests = [Request("prompt", prompt=check_text(text, "prompt"))]
    chatty = next((r for r in requests if r.messages is not None), None)
    if args.no_chat and chatty is not None:
        raise InputError(f'{chatty.where}: "messages" need the chat template; drop --no-chat or give "prompt"')
    return requests


def _encode(llm: Any, request: Request, args: argparse.Namespace, kwargs: dict[str, Any]) -> list[int]:
    if args.no_chat:
        return llm.tokenizer.encode(request.prompt, add_special=True)
    return llm.tokenizer.chat(request.as_messages(), system=args.system, add_generation_prompt=True, **kwargs)


def _check_lengths(llm: Any, engine: EngineConfig, requests: Sequence[Request], prompts: Sequence[list[int]]) -> None:
    """All prompts are checked before the first answer is paid for."""
    room = min(engine.capacity, llm.model_config.max_context)
    for request, ids in zip(requests, prompts, strict=True):
        if len(ids) >= room:
            raise InputError(
                f"{request.where}: the prompt has {len(ids)} tokens, but only {room} fit with at least one token "
                f"of answer; shorten it or raise --capacity (the model's limit is {llm.model_config.max_context})"
            )


class _Job:
    """One invocation after loading: the engine, and how the user wants to see its answers."""

    def __init__(
        self, args: argparse.Namespace, llm: Any, spec: SpecConfig, engine: EngineConfig, sampling: SamplingParams,
        load_s: float,
    ) -> None:  # fmt: skip
        self.args, self.llm, self.spec, self.engine, self.sampling = args, llm, spec, engine, sampling
        self.load_s, self.compile_s = load_s, 0.0
        self.colour_err = cli.use_colour(sys.stderr)

    def plan(self) -> int:
        plan = self.llm.plan()
        lines = [cli.dump_json(plan, indent=2)] if self.args.json else key_values(cli.plain(plan), 0)
        print("\n".join(lines))
        return 0

    def warm_up(self, batch: int) -> None:
        with cli.phase("compiling"):
            self.compile_s = float(self.llm.warmup(batch=batch, spec=self.spec))
            if self.args.compare:
                self.compile_s += float(self.llm.warmup(batch=batch, spec=OFF))

    def stream(self, prompt: list[int], sampling: SamplingParams) -> int:
        """Prints the answer as it is made. Returns the exit code."""
        out, colour = sys.stdout, cli.use_colour(sys.stdout, forced=True) and self.args.color_accepted
        painter = AcceptedPainter(self.llm.tokenizer.incremental().push if colour else lambda token: "", colour)
        tokens, rounds, result, start = 0, 0, None, time.perf_counter()
        try:
            for chunk in self.llm.stream(prompt, sampling, spec=self.spec, trace=self.args.tree):
                painter.feed(chunk.token_ids, chunk.accepted)
                out.write(painter.paint(chunk.text))
                out.flush()
                tokens += len(chunk.token_ids)
                rounds = chunk.rounds
                result = chunk.result or result
        except KeyboardInterrupt:
            took = time.perf_counter() - start
            out.write("\n")
            cli.say(f"interrupted after {tokens} tokens, {rounds} rounds, {took:.1f} s ({tokens / took:.1f} tok/s)")
            return cli.INTERRUPTED
        out.write("\n")
        out.flush()
        cli.say(self._summary(result))
        self._details(result)
        if not self.args.compare:
            return 0
        other = self.llm.generate([prompt], sampling, spec=OFF)[0]
        return 0 if self._report_compare(compare(result, other), "") else 1

    def many(self, requests: Sequence[Request], prompts: list[list[int]], samplings: list[SamplingParams]) -> int:
        """Batches of prompts in order. Returns the exit code."""
        documents: list[dict[str, Any]] = []
        same, interrupted, size = True, False, self.args.batch_size
        start = time.perf_counter()
        try:
            for first in range(0, len(prompts), size):
                part = slice(first, first + size)
                results = self.llm.generate(prompts[part], samplings[part], spec=self.spec, trace=self.args.tree)
                others = self.llm.generate(prompts[part], samplings[part], spec=OFF) if self.args.compare else None
                for offset, result in enumerate(results):
                    index = first + offset
                    compared = compare(result, others[offset]) if others else None
                    document = result_document(index, requests[index].id, result, compared, self.args.tree)
                    documents.append(document)
                    same &= compared is None or compared["identical"]
                    self._emit(index, len(prompts), document, result, compared)
        except KeyboardInterrupt:
            interrupted = True
            took = time.perf_counter() - start
            cli.say(f"interrupted: {len(documents)} of {len(prompts)} prompts done in {took:.1f} s")
        if self.args.json:
            print(cli.dump_json(self._document(documents, interrupted), indent=2))
        return cli.INTERRUPTED if interrupted else 0 if same else 1

    def _emit(self, index: int, total: int, document: dict[str, Any], result: Any, compared: Any) -> None:
        if self.args.jsonl:
            print(cli.dump_json(document), flush=True)
        elif not self.args.json:
            cli.say(f"--- prompt {index + 1} of {total}")
            print(result.text, flush=True)
        if total > 1 or not self.args.json:
            cli.say(f"{index + 1}/{total}: {self._summary(result)}")
        self._details(result)
        if compared is not None:
            self._report_compare(compared, f"{index + 1}/{total}: ")

    def _document(self, documents: list[dict[str, Any]], interrupted: bool) -> dict[str, Any]:
        from serve import facts  # starts jax, which runs by now

        return {
            "version": VERSION,
            "model": self.args.model or cli.BUNDLED,
            "draft": self.args.draft or (None if self.llm.draft_config is None else "bundled"),
            "hardware": facts.hardware(),
            "dtype": self.engine.dtype,
            "versions": facts.versions(),
            "spec": self.llm.spec,
            "sampling": self.sampling,
            "load_s": self.load_s,
            "compile_s": self.compile_s,
            "interrupted": interrupted,
            "results": documents,
        }

    def _summary(self, result: Any) -> str:
        times = result.timings
        text = f"{len(result.token_ids)} tokens ({result.finish_reason}), tau {number(result.spec.tau)}, "
        text += f"{number(times.tok_s, 1)} tok/s, first token {number(times.ttft_s)} s"
        compiled = self.compile_s + times.compile_s
        return text + (f", compiling {compiled:.1f} s apart" if compiled >= 0.1 else "")

    def _details(self, result: Any) -> None:
        if self.args.stats:
            for line in stats_lines(result):
                cli.say(line)
        if self.args.tree:
            self._draw(result)

    def _draw(self, result: Any) -> None:
        rounds = [view_of(trace) for trace in result.trace or ()]
        if not rounds:
            return cli.say("no tree: the answer ended with the token that prefill gave")
        wanted = self.args.tree_round
        if wanted is not None and wanted > len(rounds):
            raise InputError(f"--tree-round {wanted}: this answer took only {len(rounds)} rounds")
        index = wanted - 1 if wanted is not None else max(range(len(rounds)), key=lambda i: len(rounds[i].path))
        view = rounds[index]
        nodes = sum(view.valid)
        cli.say(f"round {index + 1} of {len(rounds)}: {nodes} nodes, {len(view.path) - 1} accepted (✓)")
        for line in tree_lines(view, lambda token: self.llm.tokenizer.decode([token], skip_special=False), self.colour_err):
            cli.say(line)
        return None

    def _report_compare(self, compared: dict[str, Any], prefix: str) -> bool:
        speeds = f"plain {number(compared['plain_tok_s'], 1)} tok/s, speculative {number(compared['spec_tok_s'], 1)} tok/s"
        if compared["identical"]:
            cli.say(f"{prefix}tokens identical to plain decoding; speed-up {number(compared['speedup'])}x ({speeds})")
        else:
            at, pair = compared["first_difference"], compared["tokens_there"]
            cli.say(
                f"{prefix}TOKENS DIFFER from plain decoding at token {at}: plain {pair[0]}, speculative {pair[1]} ({speeds})"
            )
        return compared["identical"]


def compare(spec: Any, plain: Any) -> dict[str, Any]:
    """How a speculative GenerationResult stands against the plain one of the same prompt."""
    from serve.measure import first_difference, ratio  # numpy

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


def result_document(index: int, request_id: Any, result: Any, compared: Any, trace: bool) -> dict[str, Any]:
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
    depths = " ".join(f"{k}:{percent(a)}" for k, a in enumerate(stats.acceptance_per_depth or (), 1) if a is not None)
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


if __name__ == "__main__":
    sys.exit(main())
