"""Running what `serve.generate` was asked for: one streamed answer, or many prompts in batches."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax.config import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.errors import InputError
from serve import cli, outputs
from serve.prompts import Request
from serve.render import AcceptedPainter, key_values, number, tree_lines, view_of

OFF = SpecConfig(mode="off")


class Job:
    """One invocation after loading: the engine, and how the user wants to see its answers."""

    def __init__(
        self,
        args: argparse.Namespace,
        llm: Any,
        spec: SpecConfig,
        engine: EngineConfig,
        sampling: SamplingParams,
        load_s: float,
    ) -> None:
        self.args, self.llm, self.spec, self.engine, self.sampling = (
            args,
            llm,
            spec,
            engine,
            sampling,
        )
        self.load_s, self.compile_s = load_s, 0.0
        self.colour_err = cli.use_colour(sys.stderr)

    def plan(self) -> int:
        plan = self.llm.plan()
        lines = (
            [cli.dump_json(plan, indent=2)] if self.args.json else key_values(cli.plain(plan), 0)
        )
        print("\n".join(lines))
        return 0

    def warm_up(self, batch: int, samplings: Sequence[SamplingParams]) -> None:
        with cli.phase("compiling"):
            warm = self.llm.warmup
            self.compile_s = float(warm(batch, self.spec, samplings, trace=self.args.tree))
            if self.args.compare:
                self.compile_s += float(warm(batch, OFF, samplings))

    def stream(self, prompt: list[int], sampling: SamplingParams) -> int:
        """Prints the answer as it is made. Returns the exit code."""
        out, colour = (
            sys.stdout,
            cli.use_colour(sys.stdout, forced=True) and self.args.color_accepted,
        )
        painter = AcceptedPainter(
            self.llm.tokenizer.incremental().push if colour else lambda token: "", colour
        )
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
            cli.say(
                f"interrupted after {tokens} tokens, {rounds} rounds, {took:.1f} s "
                f"({tokens / took:.1f} tok/s)"
            )
            return cli.INTERRUPTED
        out.write("\n")
        out.flush()
        cli.say(self._summary(result))
        self._details(result)
        if not self.args.compare:
            return 0
        other = self.llm.generate([prompt], sampling, spec=OFF)[0]
        return 0 if self._report_compare(outputs.compare(result, other), "") else 1

    def many(
        self, requests: Sequence[Request], prompts: list[list[int]], samplings: list[SamplingParams]
    ) -> int:
        """Batches of prompts in order. Returns the exit code."""
        documents: list[dict[str, Any]] = []
        same, interrupted, size = True, False, min(self.args.batch_size, len(prompts))
        start = time.perf_counter()
        try:
            for first in range(0, len(prompts), size):
                part = slice(first, first + size)
                results = self.llm.generate(
                    prompts[part],
                    samplings[part],
                    spec=self.spec,
                    trace=self.args.tree,
                    group=size,
                )
                others = (
                    self.llm.generate(prompts[part], samplings[part], spec=OFF, group=size)
                    if self.args.compare
                    else None
                )
                for offset, result in enumerate(results):
                    index = first + offset
                    compared = outputs.compare(result, others[offset]) if others else None
                    document = outputs.result_document(
                        index, requests[index].id, result, compared, self.args.tree
                    )
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

    def _emit(
        self, index: int, total: int, document: dict[str, Any], result: Any, compared: Any
    ) -> None:
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
            "version": outputs.VERSION,
            "model": self.args.model or cli.BUNDLED,
            "draft": cli.head_name(self.args, self.llm),
            "hardware": facts.hardware(),
            "dtype": self.engine.dtype,
            "versions": facts.versions(),
            "spec": self.llm.spec,
            "tuned": self.llm.tuned.to_json(),
            "sampling": self.sampling,
            "load_s": self.load_s,
            "compile_s": self.compile_s,
            "interrupted": interrupted,
            "results": documents,
        }

    def _summary(self, result: Any) -> str:
        times = result.timings
        text = (
            f"{len(result.token_ids)} tokens ({result.finish_reason}), tau "
            f"{number(result.spec.tau)}, "
        )
        text += f"{number(times.tok_s, 1)} tok/s, first token {number(times.ttft_s)} s"
        compiled = self.compile_s + times.compile_s
        return text + (f", compiling {compiled:.1f} s apart" if compiled >= 0.1 else "")

    def _details(self, result: Any) -> None:
        if self.args.stats:
            for line in outputs.stats_lines(result):
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
        index = (
            wanted - 1
            if wanted is not None
            else max(range(len(rounds)), key=lambda i: len(rounds[i].path))
        )
        view = rounds[index]
        nodes = len(view.token)
        cli.say(
            f"round {index + 1} of {len(rounds)}: {nodes} nodes, {len(view.path) - 1} accepted (✓)"
        )
        for line in tree_lines(
            view,
            lambda token: self.llm.tokenizer.decode([token], skip_special=False),
            self.colour_err,
        ):
            cli.say(line)
        return None

    def _report_compare(self, compared: dict[str, Any], prefix: str) -> bool:
        speeds = (
            f"plain {number(compared['plain_tok_s'], 1)} tok/s, speculative "
            f"{number(compared['spec_tok_s'], 1)} tok/s"
        )
        if compared["identical"]:
            cli.say(
                f"{prefix}tokens identical to plain decoding; speed-up "
                f"{number(compared['speedup'])}x ({speeds})"
            )
        else:
            at, pair = compared["first_difference"], compared["tokens_there"]
            cli.say(
                f"{prefix}TOKENS DIFFER from plain decoding at token {at}: plain {pair[0]}, "
                f"speculative {pair[1]} ({speeds})"
            )
        return compared["identical"]
