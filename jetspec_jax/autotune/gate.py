"""The gate: no candidate is kept that changes a token (pilot.md section 5). There is no flag to skip
any part of it.

The reference is plain decoding (`spec.mode="off"`) by the trusted source tree, with the kernels' own
build parameters and the incumbent's engine settings, that is, its numerics. A candidate is asked
over a pipe (`client.Worker`); what it must produce stays in this process until it has answered:

1. Free running on unseen prompts, incumbent and candidate in turn (A B, B A, ...). Each prompt is
   asked once a side, so an answer that was remembered is no use. The same runs are the speed pairs.
2. The reference's tokens and KV rows for the same prompts, by plain decoding.
3. Token forcing: with the reference's stream as context, the candidate's choice at every position,
   in its own rounds, and a digest of every KV row that it committed.
4. Sampled answers (temperature, top-p, seeds), the other batch regime, and digests of the logits.
5. More prompts by token forcing, until a fault that changes one token in 2,000 would have shown.

A patched tree's own clock is not believed: whole requests are timed here instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.client import Worker
from jetspec_jax.autotune.prompts import Prompt, draw, split
from jetspec_jax.autotune.supervise import Limits
from jetspec_jax.autotune.verdict import FAULT, Verdict, miss_probability, positions_for
from jetspec_jax.autotune.worker import FACTORY
from jetspec_jax.config import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.errors import ConfigError, JetSpecError
from jetspec_jax.intervals import median_ratio

LEVELS = ("bitwise", "certified")
PLAIN = {"spec.mode": "off"}
_OTHER_BATCH = 8  # for token forcing in bulk, where the deployment decodes one sequence


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is compared. The defaults miss a fault that changes one token in 2,000 with
    probability 1%, and refuse to accept where the budget allowed less than 5%.

    Attributes:
        positions: wanted, by token forcing.
        least: with fewer no candidate is accepted.
        pairs: timed pairs (of a whole batch each).
        tokens: of an answer, at most.
        logits: prompts whose logits are compared.
        sampled: prompts answered with a temperature.
    """

    positions: int = positions_for(0.01)
    least: int = positions_for(0.05)
    pairs: int = 24
    tokens: int = 160
    logits: int = 8
    sampled: int = 8


class Refused(Exception):
    """Ends the gate with a reason."""


@dataclasses.dataclass
class _Found:
    """What has been compared so far."""

    positions: int = 0
    free_tokens: int = 0
    sampled_tokens: int = 0
    rows: int = 0
    logits: int = 0
    bits: bool | None = None
    difference: str = ""  # where bits differ first
    mismatches: list[tuple[str, int, float | None]] = dataclasses.field(default_factory=list)
    before: list[float] = dataclasses.field(default_factory=list)
    after: list[float] = dataclasses.field(default_factory=list)
    speed: tuple[float, float, float] | None = None
    noise: float | None = None
    deviation: float | None = None
    compared: bool = False  # everything that has to be


def judge(
    incumbent: Candidate,
    candidate: Candidate,
    *,
    suite: Sequence[Prompt],
    model: str | Path | None = None,
    draft: str | Path | None = None,
    spec: SpecConfig | None = None,
    engine: EngineConfig | None = None,
    tree: Path | None = None,
    batch: int = 1,
    level: str = "bitwise",
    seed: int | None = None,
    budget_seconds: float = 600.0,
    effort: Effort | None = None,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    factory: str = FACTORY,
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Decides whether a candidate replaces the incumbent.

    Args:
        incumbent: what runs now; without patch.
        candidate: what should; if it has a patch, `tree` is the patched tree.
        suite: all prompts there are; the gate takes from its own half (`prompts.split`).
        model, draft, spec, engine: what both are applied to.
        tree: source tree of the candidate; None: this one.
        batch: sequences decoded together in the deployment.
        level: "bitwise": tokens, KV rows and logits equal the reference's in every bit.
            "certified": tokens equal everywhere, and numbers differ by no more than two
            implementations of the reference do.
        seed: fixes the draw of prompts, for tests; None: a nonce made now.
        budget_seconds: for everything. Where it ends before enough is compared, the candidate is
            refused.
        effort: see `Effort`.
        limits, env: of the candidate's process, where it runs code that nobody trusts.
        factory: see `client.Worker`.
        say: gets one line per phase.

    Returns:
        The verdict. A candidate whose process fails is refused; a reference that fails raises.

    Raises:
        ConfigError: unknown level, batch below 1, or a patch without its tree.
    """
    started = time.monotonic()
    if level not in LEVELS:
        raise ConfigError(f"level={level!r} is not known; choose one of {', '.join(LEVELS)}")
    if batch < 1:
        raise ConfigError(f"batch={batch} is no number of sequences; give at least 1")
    if incumbent.patch is not None or (candidate.patch is not None and tree is None):
        raise ConfigError("a patch is judged in its patched tree; give tree, and no patch before")
    nonce = secrets.token_hex(8) if seed is None else str(seed)
    drawn = draw(split(suite)[1], candidate.id, nonce)
    found, asked = _Found(), effort or Effort()
    used: list[str] = []
    with contextlib.ExitStack() as stack:

        def start(
            change: Candidate, base: EngineConfig, where: Path | None, trusted: bool
        ) -> Worker:
            worker = Worker(
                model=model,
                draft=draft,
                candidate=change,
                spec=spec,
                engine=base,
                tree=where,
                limits=None if trusted else limits,
                env=None if trusted else env,
                factory=factory,
            )
            return stack.enter_context(worker)

        run = _Run(
            incumbent,
            candidate,
            engine or EngineConfig(),
            tree,
            batch,
            level,
            asked,
            started + budget_seconds,
            drawn,
            start,
            say,
            found,
            used,
        )
        try:
            run.everything()
            reason, accepted = run.decide(), True
        except Refused as refused:
            reason, accepted = str(refused), False
    identical = not found.mismatches and found.positions + found.free_tokens > 0
    reached = "none"
    if identical and found.compared:
        reached = (
            "bitwise" if found.bits else "certified" if found.deviation is not None else "none"
        )
    speed = found.speed or (None, None, None)
    return Verdict(
        accepted=accepted,
        reason=reason,
        candidate=candidate.id,
        incumbent=incumbent.id,
        tokens_identical=identical,
        bits_identical=found.bits,
        level=reached,
        asked=level,
        positions=found.positions,
        free_tokens=found.free_tokens,
        sampled_tokens=found.sampled_tokens,
        rows=found.rows,
        logits=found.logits,
        mismatches=tuple(found.mismatches),
        noise=found.noise,
        deviation=found.deviation,
        speed_ratio=speed[0],
        speed_ratio_low=speed[1],
        speed_ratio_high=speed[2],
        pairs=len(found.before),
        clock="engine" if tree is None else "judge",
        prompts=tuple(used),
        nonce=nonce,
        batch=batch,
        seconds=time.monotonic() - started,
    )


@dataclasses.dataclass
class _Run:
    """One pass through the gate. `start(candidate, engine, tree, trusted)` starts a worker."""

    incumbent: Candidate
    candidate: Candidate
    engine: EngineConfig
    tree: Path | None
    batch: int
    level: str
    effort: Effort
    until: float  # time.monotonic() at which the budget ends
    drawn: list[Prompt]
    start: Callable[[Candidate, EngineConfig, Path | None, bool], Worker]
    say: Callable[[str], None]
    found: _Found
    used: list[str]

    # ---- workers ---------------------------------------------------------------------------------

    def _fixed(self, change: Candidate) -> dict[str, Any]:
        """What a process is loaded with; the rest of a candidate is overrides."""
        parts = ("engine", "kernel")
        return {k: v for k, v in change.params.items() if k.partition(".")[0] in parts}

    def _open(self) -> None:
        """Starts the processes: those that would be loaded alike are one."""
        numerics = {k: v for k, v in self._fixed(self.incumbent).items() if k.startswith("engine.")}
        self.reference = self.start(Candidate(numerics), self.engine, None, True)
        loaded: list[tuple[dict[str, Any], Worker]] = [(numerics, self.reference)]

        def worker_for(change: Candidate, tree: Path | None) -> Worker:
            wanted = self._fixed(change)
            for params, worker in loaded:
                if tree is None and params == wanted:
                    return worker
            trusted = tree is None
            made = self.start(Candidate(wanted), self.engine, tree, trusted)
            if trusted:
                loaded.append((wanted, made))
            return made

        self.before = worker_for(self.incumbent, None)
        self.after = self._theirs(lambda: worker_for(self.candidate, self.tree))
        self.old = {k: v for k, v in self.incumbent.params.items() if k not in numerics}
        self.old = {k: v for k, v in self.old.items() if not k.startswith("kernel.")}
        fixed = self._fixed(self.candidate)
        self.new = {k: v for k, v in self.candidate.params.items() if k not in fixed}

    def _theirs(self, ask: Callable[[], Any]) -> Any:
        """A request to the candidate: whatever goes wrong there refuses it."""
        self._time("the candidate answered")
        try:
            return ask()
        except JetSpecError as error:
            raise Refused(f"the candidate failed: {error}") from error

    def _time(self, what: str) -> None:
        if time.monotonic() > self.until:
            raise Refused(
                f"the budget ended before {what}; {self.found.positions} positions were compared"
            )

    @property
    def _left(self) -> float:
        """Seconds for a request of the candidate."""
        return max(self.until - time.monotonic(), 1.0)

    # ---- phases ----------------------------------------------------------------------------------

    def everything(self) -> None:
        self.say("gate: starting engines")
        self._open()
        ids = self.reference.encode([p.messages for p in self.drawn])
        room = int(self.reference.facts.get("capacity", 1 << 30)) - self.effort.tokens
        self.queue = [(p.id, i) for p, i in zip(self.drawn, ids, strict=True) if len(i) <= room]
        if len(self.queue) < 2:
            raise Refused(
                f"{len(self.queue)} unseen prompts fit beside {self.effort.tokens} tokens; give a "
                "suite with more prompts, or a larger capacity"
            )
        self._warm()
        self.say("gate: free running, in pairs")
        mine = self._pairs()
        self.say("gate: token forcing on the same prompts")
        self._force(mine, self.batch)
        self.say("gate: logits, sampled answers, the other batch")
        bulk = self.batch if self.batch > 1 else _OTHER_BATCH
        self._logits(mine[: self.effort.logits], bulk)
        self._sampled()
        self._free_state(mine[:4])
        while self.found.positions < self.effort.positions and self.queue:
            if time.monotonic() > self.until:
                break
            self.say(f"gate: {self.found.positions} of {self.effort.positions} positions")
            self._force(self._take(2 * bulk), bulk)
        self.found.compared = True

    def decide(self) -> str:
        """The reason to accept.

        Raises:
            Refused: there is one against it.
        """
        found = self.found
        if found.positions < self.effort.least:
            raise Refused(
                f"only {found.positions} positions were compared, {self.effort.least} are needed; "
                "give more seconds or more prompts"
            )
        if not found.bits and self.level == "bitwise":
            raise Refused(f"bits differ from the reference's: {found.difference}")
        if not found.bits:
            self._certify()
        if found.speed is None:
            raise Refused("fewer than two timed pairs; give a suite with more prompts")
        # A bound of exactly 1 means "not slower"; float times make equality an accident, so this is
        # pilot.md's "> 1" in practice and the "at least 1.00" to the letter.
        ratio, low, _ = found.speed
        if low < 1.0:
            raise Refused(f"not surely faster: ratio {ratio:.3f}, lower bound {low:.3f} is below 1")
        level = "bitwise" if found.bits else "certified"
        return (
            f"tokens identical at {found.positions} positions ({level}), "
            f"{ratio:.3f} times as fast, at least {low:.3f}"
        )

    def _take(self, count: int) -> list[tuple[str, list[int]]]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        self.used += [name for name, _ in taken]
        return taken

    def _greedy(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.effort.tokens)

    def _warm(self) -> None:
        """Compiles what is timed, and lets both sides run a prompt that is not compared."""
        (_, ids), greedy = self._take(1)[0], self._greedy()
        for worker, params in ((self.before, self.old), (self.after, self.new)):

            def warm(worker: Worker = worker, params: Mapping[str, Any] = params) -> None:
                worker.warm(self.batch, params, timeout=self._left)
                prompts = [ids] * self.batch
                worker.generate(
                    prompts,
                    sampling=greedy,
                    overrides=params,
                    batch=self.batch,
                    timeout=self._left,
                )

            self._theirs(warm) if worker is self.after else warm()

    def _pairs(self) -> list[tuple[str, list[int]]]:
        """Timed free running; the prompts that were asked. Takes at most a third of the budget."""
        stop = time.monotonic() + (self.until - time.monotonic()) / 3
        asked: list[tuple[str, list[int]]] = []
        self.answers: dict[str, list[int]] = {}
        pairs = min(self.effort.pairs, len(self.queue) // self.batch)
        for turn in range(pairs):
            if turn >= 4 and time.monotonic() > stop:
                break
            group = self._take(self.batch)
            prompts, times = [ids for _, ids in group], {}
            for side in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                times[side], made = self._timed(side, prompts)
                if side == "after":
                    self.answers |= {
                        name: a["token_ids"] for (name, _), a in zip(group, made, strict=True)
                    }
            self.found.before.append(times["before"])
            self.found.after.append(times["after"])
            asked += group
        self.found.speed = median_ratio(self.found.before, self.found.after)
        return asked

    def _timed(self, side: str, prompts: list[list[int]]) -> tuple[float, list[dict[str, Any]]]:
        worker, params = (self.before, self.old) if side == "before" else (self.after, self.new)
        timeout = self._left if side == "after" else 600.0

        def ask() -> list[dict[str, Any]]:
            return worker.generate(
                prompts,
                sampling=self._greedy(),
                overrides=params,
                batch=self.batch,
                timeout=timeout,
            )

        started = time.perf_counter()
        made = self._theirs(ask) if side == "after" else ask()
        whole = time.perf_counter() - started
        # an answer of one token has no time of its own: the request's is as good as any
        decode = max(a["decode_s"] for a in made) if self.tree is None else 0.0
        return (decode if decode > 0 else whole), made

    def _force(self, group: list[tuple[str, list[int]]], batch: int) -> None:
        """The reference's streams and rows, the candidate's free answers against them where it gave
        any, and its choices and rows with the streams as context.
        """
        if not group:
            return
        prompts = [ids for _, ids in group]
        truth = self.reference.state(prompts, sampling=self._greedy(), overrides=PLAIN, batch=batch)
        streams = [t["token_ids"] for t in truth]
        free = [
            (name, self.answers.get(name), stream)
            for (name, _), stream in zip(group, streams, strict=True)
        ]
        forced = self._theirs(
            lambda: self.after.force(
                prompts, streams, overrides=self.new, batch=batch, timeout=self._left
            )
        )
        wrong: list[tuple[int, int]] = []
        for i, ((name, _), answer, right) in enumerate(zip(group, forced, truth, strict=True)):
            stream, choices = right["token_ids"], answer["choices"]
            self.found.positions += len(stream)
            wrong += [(i, at) for at in _differences(choices, stream)]
            self._rows(name, answer["rows"], right["rows"])
        for i, (_, answer, stream) in enumerate(free):
            if answer is not None:
                self.found.free_tokens += len(stream)
                if answer != stream:
                    wrong.append((i, _differences(answer, stream)[0]))
        if wrong:
            self._refuse_tokens(sorted(set(wrong)), group, streams)

    def _refuse_tokens(
        self,
        wrong: list[tuple[int, int]],
        group: list[tuple[str, list[int]]],
        streams: list[list[int]],
    ) -> None:
        """Names the places with the reference's own margins, and ends the gate."""
        for i in sorted({i for i, _ in wrong}):
            (told,) = self.reference.force(
                [group[i][1]], [streams[i]], overrides=PLAIN, logits=True
            )
            for _, at in [w for w in wrong if w[0] == i]:
                margin = told["margin"][at] if at < len(told["margin"]) else None
                self.found.mismatches.append((group[i][0], at, margin))
        name, at, margin = self.found.mismatches[0]
        where = "" if margin is None else f", where the top-2 margin is {margin:.6g}"
        raise Refused(f"another token on prompt {name} at position {at}{where}")

    def _rows(self, name: str, theirs: Sequence[str], ours: Sequence[str]) -> None:
        self.found.rows += len(ours)
        self._bits(list(theirs) == list(ours), lambda: f"{name}, KV row {_first(theirs, ours)}")

    def _bits(self, same: bool, where: Callable[[], str]) -> None:
        if not same and self.found.bits is not False:
            self.found.difference = where()
        self.found.bits = same and self.found.bits is not False

    def _logits(self, group: list[tuple[str, list[int]]], batch: int) -> None:
        """Bits of the logits at every position of some prompts; numbers for the certified level."""
        prompts = [ids for _, ids in group]
        truth = self.reference.state(prompts, sampling=self._greedy(), overrides=PLAIN, batch=batch)
        streams = [t["token_ids"] for t in truth]
        ours = self.reference.force(prompts, streams, overrides=PLAIN, batch=batch, logits=True)
        theirs = self._theirs(
            lambda: self.after.force(
                prompts, streams, overrides=self.new, batch=batch, logits=True, timeout=self._left
            )
        )
        for (name, _), a, b in zip(group, ours, theirs, strict=True):
            self.found.logits += len(a["digests"])
            same = a["digests"] == b["digests"]
            self._bits(same, lambda n=name, a=a, b=b: f"{n}, logits {_first(*_pair(a, b))}")
        self._numbers = (prompts, streams, ours, theirs, batch)

    def _certify(self) -> None:
        """Level certified: the candidate is as near to the reference as another implementation of
        the same sums is.

        Raises:
            Refused: it is not.
        """
        prompts, streams, ours, theirs, batch = self._numbers
        native = self.engine.kernels in ("auto", "cpu") and self.engine.dtype == "float32"
        other = (
            {"kernels": "xla", "arithmetic": "auto", "numerics": None}
            if native
            else {"numerics": "fast" if self.reference.facts["bitwise"] else "bitwise"}
        )
        plain = dataclasses.replace(self.engine, **other)
        self.say("gate: noise of the reference")
        worker = self.start(Candidate(), plain, None, True)
        noise = worker.force(prompts, streams, overrides=PLAIN, batch=batch, logits=True)
        worker.close()
        self.found.noise = _largest(ours, noise)
        self.found.deviation = _largest(ours, theirs)
        if self.found.deviation > self.found.noise:
            raise Refused(
                f"numbers differ by {self.found.deviation:.3g}, more than the reference's own "
                f"noise of {self.found.noise:.3g}"
            )

    def _sampled(self) -> None:
        """Answers with temperature: sampling is a function of seed and position, so they are equal
        token for token, too.
        """
        group = self._take(min(self.effort.sampled, len(self.queue)))
        kinds = [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.3}]
        each = [
            SamplingParams(max_tokens=self.effort.tokens // 2, seed=i + 1, **kinds[i % len(kinds)])
            for i in range(len(group))
        ]
        self._states(group, each, self.batch, sampled=True)

    def _free_state(self, group: list[tuple[str, list[int]]]) -> None:
        """KV rows after free running, in the deployment's batch and in the other regime."""
        each = [self._greedy()] * len(group)
        for batch in (self.batch, 4 if self.batch == 1 else 1):
            self._states(group, each, batch, sampled=False)

    def _states(
        self,
        group: list[tuple[str, list[int]]],
        each: list[SamplingParams],
        batch: int,
        *,
        sampled: bool,
    ) -> None:
        if not group:
            return
        prompts = [ids for _, ids in group]
        theirs = self._theirs(
            lambda: self.after.state(
                prompts, sampling=each, overrides=self.new, batch=batch, timeout=self._left
            )
        )
        ours = self.reference.state(prompts, sampling=each, overrides=PLAIN, batch=batch)
        wrong = []
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            count = len(a["token_ids"])
            if sampled:
                self.found.sampled_tokens += count
            else:
                self.found.free_tokens += count
            wrong += [(i, at) for at in _differences(b["token_ids"], a["token_ids"])[:1]]
            self._rows(group[i][0], b["rows"], a["rows"])
        if wrong and sampled:
            self.found.mismatches += [(group[i][0], at, None) for i, at in wrong]
            i, at = wrong[0]
            raise Refused(
                f"another token on prompt {group[i][0]} at position {at} of a sampled answer "
                f"(temperature {each[i].temperature}, seed {each[i].seed})"
            )
        if wrong:
            self._refuse_tokens(wrong, group, [a["token_ids"] for a in ours])


def _pair(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    return a["digests"], b["digests"]


def _differences(a: Sequence[Any], b: Sequence[Any]) -> list[int]:
    """Indices at which two sequences differ; what one of them lacks differs at its end."""
    found = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    return found if len(a) == len(b) else [*found, min(len(a), len(b))]


def _first(a: Sequence[Any], b: Sequence[Any]) -> int:
    return _differences(a, b)[0]


def _largest(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> float:
    """Largest difference of a best logit or of a margin, over all positions."""
    return max(
        abs(x - y)
        for one, other in zip(a, b, strict=True)
        for name in ("best", "margin")
        for x, y in zip(one[name], other[name], strict=True)
    )


__all__ = ["FAULT", "LEVELS", "Effort", "judge", "miss_probability"]
