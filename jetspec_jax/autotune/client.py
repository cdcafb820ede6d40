"""`Worker`: an engine in a fresh process, from any source tree, under limits (`worker.py` is the
other end).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax import errors
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.supervise import Ending, Limits, Supervised
from jetspec_jax.autotune.worker import FACTORY
from jetspec_jax.config import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.errors import ConfigError, WorkerError

TREE = Path(__file__).resolve().parents[2]  # the source tree that this process runs
_TIMEOUT_S = 600.0  # of one request, compilation included
_CLOSED_S = 5.0  # between the end of the channel and that of the process
_LOG_TAIL = 2_000  # bytes of the worker's stderr that are looked at for a cause


class Worker:
    """A running engine. A context manager: leaving it ends the process and all that it started.

    Args:
        model, draft: as for `LLM`.
        candidate: what to change against `spec` and `engine`. A patch is not applied here: give
            the patched tree.
        spec, engine: the base configurations.
        tree: source tree to run in; None: this process's own.
        time_limit: seconds for the whole life of the process; None: no limit.
        memory_limit: bytes, address space and resident memory alike; None: no limit.
        limits: all limits at once, instead of the two before.
        env: whole environment; None: this process's.
        factory: "module:name" in the tree that makes the engine (tests have their own).
        timeout: seconds for loading.

    Attributes:
        facts: what the engine says of itself: arithmetic, weights, kernels, bitwise, capacity.
        load_s: seconds of loading, imports included.

    Raises:
        WorkerError: the process ended, passed a limit or ran in another tree.
        JetSpecError: what loading raised there.
    """

    def __init__(
        self,
        *,
        model: str | Path | None = None,
        draft: str | Path | None = None,
        candidate: Candidate | None = None,
        spec: SpecConfig | None = None,
        engine: EngineConfig | None = None,
        tree: Path | None = None,
        time_limit: float | None = None,
        memory_limit: int | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        factory: str = FACTORY,
        timeout: float = _TIMEOUT_S,
    ) -> None:
        started = time.perf_counter()
        self._tree = (tree or TREE).resolve()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._buffer, self._said, self._supervised = b"", "", None
        limits = limits or Limits(seconds=time_limit, memory_bytes=memory_limit, processes=None)
        command = [sys.executable, "-B", "-m", "jetspec_jax.autotune.worker", "--factory", factory]
        # The directory of a patched tree must come first, whatever this process was started with.
        environment = dict(os.environ if env is None else env)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(self._tree), *filter(None, [environment.get("PYTHONPATH")])]
        )
        try:
            self._supervised = Supervised(
                command,
                self._tree,
                limits,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
            )
            self.facts = self.request(
                {
                    "op": "load",
                    "model": None if model is None else _absolute(model),
                    "draft": None if draft is None else _absolute(draft),
                    "candidate": (candidate or Candidate()).to_json(),
                    "spec": _fields(spec or SpecConfig()),
                    "engine": _fields(engine or EngineConfig()),
                },
                timeout,
            )
            ran = Path(self.facts["tree"]).resolve()
            if ran != self._tree:
                raise WorkerError(
                    f"the worker ran the code in {ran}, not in {self._tree}; remove PYTHONPATH and "
                    "installed copies of jetspec-jax from that interpreter"
                )
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    # ---- requests --------------------------------------------------------------------------------

    def request(self, job: Mapping[str, Any], timeout: float = _TIMEOUT_S) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            WorkerError: the process ended or did not answer in time; it is gone then.
            JetSpecError: what the engine raised, with its own type.
        """
        pipe = self._running().process.stdin
        if pipe is None:  # PIPE at the start
            raise WorkerError("this worker has no channel; start another one")
        with contextlib.suppress(BrokenPipeError):  # it ended: the read below says so
            pipe.write(json.dumps(job).encode() + b"\n")
            pipe.flush()
        line = self._read_line(time.monotonic() + timeout, timeout, str(job["op"]))
        try:
            reply = json.loads(line)
            if "ok" in reply:
                return reply["ok"]
            kind, text = reply["kind"], reply["error"]
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise WorkerError(
                f"the worker answered {line!r:.80}, which is no answer; see its source tree "
                f"{self._tree}"
            ) from error
        known = getattr(errors, kind, WorkerError)
        raise known(text)

    def _running(self) -> Supervised:
        if self._supervised is None or self._supervised.ending is not None:
            raise WorkerError("this worker has ended; start another one")
        return self._supervised

    def _read_line(self, until: float, timeout: float, what: str) -> bytes:
        pipe = self._running().process.stdout
        if pipe is None:  # PIPE above
            raise WorkerError("this worker has no channel; start another one")
        while b"\n" not in self._buffer:
            ready = select.select([pipe], [], [], max(until - time.monotonic(), 0.0))[0]
            if not ready:
                self.close()
                raise WorkerError(
                    f"the worker did not answer {what!r} within {timeout:g} s and was ended; allow "
                    "more time, or change the candidate"
                )
            piece = os.read(pipe.fileno(), 1 << 20)
            if not piece:
                raise WorkerError(self._cause(what))
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _cause(self, what: str) -> str:
        """One line: how the process ended, and the last that it said."""
        with contextlib.suppress(WorkerError):  # still there, its channel closed: ended here
            self._running().wait(_CLOSED_S)
        ending = self.close()
        last = self.stderr().strip().splitlines()[-1:] or ["it said nothing"]
        how = ending.line("the worker") if ending is not None else "the worker ended"
        return f"{how} during {what!r}: {' '.join(last[0].split())[:300]}"

    def encode(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """Token ids of chat conversations."""
        asked = {"op": "encode", "conversations": [list(map(dict, c)) for c in conversations]}
        return self.request(asked)["prompts"]

    def warm(
        self,
        batch: int = 1,
        overrides: Mapping[str, Any] | None = None,
        sampling: Sequence[SamplingParams] = (),
        timeout: float = _TIMEOUT_S,
    ) -> float:
        """Compiles and measures costs; seconds of compilation."""
        asked = {
            "op": "warm",
            "params": dict(overrides or {}),
            "batch": batch,
            "sampling": [_fields(s) for s in sampling],
        }
        return self.request(asked, timeout)["seconds"]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 256,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        overrides: Mapping[str, Any] | None = None,
        batch: int = 1,
        timeout: float = _TIMEOUT_S,
    ) -> list[dict[str, Any]]:
        """Free running: per prompt token_ids, decode_s, prefill_s, rounds, tau, nodes.

        Args:
            prompts: token ids.
            max_tokens: where `sampling` is None: greedy, up to this many.
            sampling: for all, or one per prompt.
            overrides: `spec.*` and `policy.*` parameters on top of the candidate's.
            batch: sequences decoded together.
            timeout: seconds.
        """
        asked = self._asked("generate", prompts, sampling, max_tokens, overrides, batch)
        return self.request(asked, timeout)["answers"]

    def state(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 256,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        overrides: Mapping[str, Any] | None = None,
        batch: int = 1,
        timeout: float = _TIMEOUT_S,
    ) -> list[dict[str, Any]]:
        """As `generate`, but per prompt token_ids and rows: a digest of every committed KV row."""
        asked = self._asked("state", prompts, sampling, max_tokens, overrides, batch)
        return self.request(asked, timeout)["states"]

    def force(
        self,
        prompts: Sequence[Sequence[int]],
        streams: Sequence[Sequence[int]],
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        overrides: Mapping[str, Any] | None = None,
        batch: int = 1,
        logits: bool = False,
        timeout: float = _TIMEOUT_S,
    ) -> list[dict[str, Any]]:
        """Token forcing: per prompt the choices at every position of its stream, and rows; with
        `logits` (another program: it writes them) also best, margin and digests.
        """
        asked = self._asked("force", prompts, sampling, 256, overrides, batch)
        asked |= {"streams": [list(map(int, s)) for s in streams], "logits": logits}
        return self.request(asked, timeout)["forced"]

    @staticmethod
    def _asked(
        op: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        max_tokens: int,
        overrides: Mapping[str, Any] | None,
        batch: int,
    ) -> dict[str, Any]:
        one = sampling or SamplingParams(max_tokens=max_tokens)
        each = [one] * len(prompts) if isinstance(one, SamplingParams) else list(one)
        if len(each) != len(prompts):
            raise ConfigError(
                f"{len(each)} sampling settings for {len(prompts)} prompts; give one, or one each"
            )
        return {
            "op": op,
            "prompts": [list(map(int, p)) for p in prompts],
            "sampling": [_fields(s) for s in each],
            "params": dict(overrides or {}),
            "batch": batch,
        }

    # ---- the end ---------------------------------------------------------------------------------

    def stderr(self) -> str:
        """The end of what the worker has printed so far."""
        if self._log.closed:
            return self._said
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _LOG_TAIL, max(size - _LOG_TAIL, 0)).decode(
            "utf-8", "replace"
        )

    def close(self) -> Ending | None:
        """Ends the process and everything it started; how it ended, None if it never began."""
        supervised = self._supervised
        if self._log.closed:
            return None if supervised is None else supervised.ending
        ending = None
        if supervised is not None:
            for stream in (supervised.process.stdin, supervised.process.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()
            ending = supervised.stop()
        self._said = self.stderr()
        self._log.close()
        return ending

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _absolute(path: str | Path) -> str:
    """The worker may run in another folder: local paths become absolute, hub ids stay."""
    there = Path(path).expanduser()
    return str(there.resolve()) if there.exists() else str(path)


def _fields(value: Any) -> dict[str, Any]:
    """A configuration as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(value)))
