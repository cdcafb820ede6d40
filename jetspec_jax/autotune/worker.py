"""One engine in a process of its own, asked by JSON lines: `python -m jetspec_jax.autotune.worker`.

It runs in whatever source tree is the current directory, so a patched copy of the code is measured
and checked by the same requests as the code itself (`client.Worker` is the other end). Requests:

    {"op": "load", "model", "draft", "candidate", "spec", "engine"}      -> facts
    {"op": "encode", "conversations"}                                    -> {"prompts": [...]}
    {"op": "warm", "params", "batch", "sampling"}                        -> {"seconds"}
    {"op": "generate", "prompts", "sampling", "params", "batch"}         -> {"answers": [...]}
    {"op": "force", "prompts", "streams", "sampling", "params", "batch", "logits"}
                                                                         -> {"forced": [...]}
    {"op": "state", as generate}                                         -> {"states": [...]}
    {"op": "close"}

`params` are dotted parameters (`spec.*`, `policy.*`) on top of the candidate's: another tree or
budget needs no new process. `sampling` is a list of SamplingParams fields, one object per prompt.
An answer is {"ok": ...}, or {"error", "kind"} where a request cannot be served. What libraries
print goes to stderr: the channel is a copy of stdout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jetspec_jax.errors import ConfigError, JetSpecError

FACTORY = "jetspec_jax.autotune.engine:load"


class Engine(Protocol):
    """What a worker asks of an engine; `engine.LLMEngine` is the real one.

    `params`, `sampling` and `batch` as in the module's docstring. All results are JSON values.
    """

    def facts(self) -> dict[str, Any]:
        """What was loaded: "arithmetic", "weights", "kernels", "bitwise", ..."""
        ...

    def encode(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """Token ids of conversations through the model's chat template."""
        ...

    def warm(
        self, params: Mapping[str, Any], batch: int, sampling: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Compiles what the other requests need, and measures costs; {"seconds"}."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        batch: int,
    ) -> list[dict[str, Any]]:
        """Per prompt "token_ids", "decode_s", "prefill_s", "rounds", "tau", "nodes"."""
        ...

    def force(
        self,
        prompts: Sequence[Sequence[int]],
        streams: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        batch: int,
        logits: bool,
    ) -> list[dict[str, Any]]:
        """Per prompt the "choices" at every position of its stream, the stream being the context,
        and "rows", a digest of each committed KV row; with `logits` also "best", "margin" and
        "digests" of the logits there.
        """
        ...

    def state(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Mapping[str, Any]],
        params: Mapping[str, Any],
        batch: int,
    ) -> list[dict[str, Any]]:
        """Free running: per prompt "token_ids" and "rows", as in `force`."""
        ...


def load_factory(name: str) -> Callable[..., Engine]:
    """The function "module:name", called with model, draft, candidate, spec, engine."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--factory {name}: {error}; give module:function") from error


class Server:
    """Answers requests; holds the engine between them."""

    def __init__(self, factory: Callable[..., Engine]) -> None:
        self._factory = factory
        self._engine: Engine | None = None

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            JetSpecError: it cannot be served.
        """
        op = job.get("op")
        if op == "load":
            started = time.perf_counter()
            names = ("model", "draft", "candidate", "spec", "engine")
            self._engine = self._factory(**{name: job.get(name) for name in names})
            seconds = time.perf_counter() - started
            return {**self._engine.facts(), "load_s": seconds, "tree": _tree()}
        if self._engine is None:
            raise ConfigError(f"op {op!r} comes before 'load'; load an engine first")
        engine, params, batch = self._engine, job.get("params") or {}, int(job.get("batch") or 1)
        sampling = job.get("sampling") or []
        if op == "encode":
            return {"prompts": engine.encode(job.get("conversations") or [])}
        if op == "warm":
            return engine.warm(params, batch, sampling)
        prompts = job.get("prompts") or []
        if len(sampling) != len(prompts):
            raise ConfigError(
                f"{len(sampling)} sampling settings for {len(prompts)} prompts; give one each"
            )
        if op == "generate":
            return {"answers": engine.generate(prompts, sampling, params, batch)}
        if op == "state":
            return {"states": engine.state(prompts, sampling, params, batch)}
        if op == "force":
            logits = bool(job.get("logits"))
            streams = job.get("streams") or []
            return {"forced": engine.force(prompts, streams, sampling, params, batch, logits)}
        raise ConfigError(
            f"op {op!r} is not known; use load, encode, warm, generate, force, state, close"
        )


def _tree() -> str:
    """The source tree that this process runs: what the client asked for, or it is an error."""
    import jetspec_jax

    return os.path.dirname(os.path.dirname(os.path.abspath(jetspec_jax.__file__)))


def main(argv: Sequence[str] | None = None) -> int:
    """Serves standard input until "close" or its end."""
    parser = argparse.ArgumentParser(prog="python -m jetspec_jax.autotune.worker")
    parser.add_argument("--factory", default=FACTORY, help="module:function that loads an engine")
    args = parser.parse_args(argv)
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        server = Server(load_factory(args.factory))
    except JetSpecError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), file=channel)
        return error.exit_code
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("op") == "close":
            break
        try:
            reply = {"ok": server.answer(job)}
        except JetSpecError as error:
            reply = {"error": " ".join(str(error).split()), "kind": type(error).__name__}
        except Exception as error:  # noqa: BLE001 - the client decides what a fault means
            kind, text = type(error).__name__, " ".join(str(error).split())[:300]
            reply = {"error": f"{kind}: {text}", "kind": "WorkerError"}
        print(json.dumps(reply), file=channel, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
