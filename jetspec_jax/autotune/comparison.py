"""What the gate compares, in order: one `Comparison` is one pass (`gate.py` says why)."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.client import Worker
from jetspec_jax.autotune.prompts import Prompt
from jetspec_jax.autotune.tally import Effort, Found, Refused, differences, first, largest
from jetspec_jax.config import EngineConfig, SamplingParams
from jetspec_jax.errors import JetSpecError
from jetspec_jax.intervals import median_ratio

PLAIN = {"spec.mode": "off"}
_LOGITS_BUDGET = 8  # nodes of trees where logits are computed: samples, and bits of logits
_OTHER_BATCH = 8  # for token forcing in bulk, where the deployment decodes one sequence


@dataclasses.dataclass
class Comparison:
    """One pass through the gate. `start(candidate, engine, tree, trusted)` starts a worker."""

    incumbent: Candidate
    candidate: Candidate
    mode: str  # of the base speculation settings
    engine: EngineConfig
    tree: Path | None
    batch: int
    level: str
    effort: Effort
    until: float  # time.monotonic() at which the budget ends
    drawn: list[Prompt]
    start: Callable[[Candidate, EngineConfig, Path | None, bool], Worker]
    say: Callable[[str], None]
    found: Found
    used: list[str]

    # ---- workers ---------------------------------------------------------------------------------

    def _fixed(self, change: Candidate) -> dict[str, Any]:
        """What a process is loaded with; the rest of a candidate is overrides."""
        parts = ("engine", "kernel")
        return {k: v for k, v in change.params.items() if k.partition(".")[0] in parts}

    def _open(self) -> None:
        """Starts the processes: those that would be loaded alike are one."""
        numerics = {
            k: v
            for k, v in self._fixed(self.incumbent).items()
            if k.startswith("engine.") and k != "engine.kernel_params"
        }
        plain = dataclasses.replace(self.engine, kernel_params=())
        self.reference = self.start(Candidate(numerics), plain, None, True)
        loaded: list[tuple[dict[str, Any], Worker]] = []
        if plain == self.engine:
            loaded.append((numerics, self.reference))

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
        self.old, self.new = (
            {k: v for k, v in c.params.items() if k not in self._fixed(c)}
            for c in (self.incumbent, self.candidate)
        )

    def _theirs(self, ask: Callable[[], Any], *names: str, count: int = 0) -> Any:
        """A request to the candidate: whatever goes wrong there refuses it.

        Args:
            ask: the request.
            names: lists that each of `count` answers must hold; nobody trusts the other end.
        """
        if time.monotonic() > self.until:
            raise Refused(
                f"the budget ended after {self.found.positions} positions; give more seconds"
            )
        try:
            made = ask()
        except JetSpecError as error:
            raise Refused(f"the candidate failed: {error}") from error
        if names and not (
            isinstance(made, list)
            and len(made) == count
            and all(isinstance(a, dict) and isinstance(a.get(n), list) for a in made for n in names)
        ):
            raise Refused(f"the candidate failed: its answers are not {count} times {names}")
        return made

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
        # Free running in the deployment's own batch has answered them already, choice by choice;
        # this compares rows, and the same choices in the batch in which the rest is forced.
        bulk = self._bulk
        self._force(mine, bulk)
        if self.found.speed is not None and self.found.speed[2] < 1.0:
            ratio, _, high = self.found.speed
            raise Refused(f"slower: ratio {ratio:.3f}, upper bound {high:.3f} is below 1")
        self.say("gate: logits, sampled answers, the other batch")
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
        self.known: dict[str, dict[str, Any]] = {}
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
        made = self._theirs(ask, "token_ids", count=len(prompts)) if side == "after" else ask()
        whole = time.perf_counter() - started
        # an answer of one token has no time of its own: the request's is as good as any
        decode = max(a["decode_s"] for a in made) if self.tree is None else 0.0
        return (decode if decode > 0 else whole), made

    @property
    def _bulk(self) -> int:
        """Sequences at once where speed is all that counts."""
        return self.batch if self.batch > 1 else _OTHER_BATCH

    def _truth(self, group: list[tuple[str, list[int]]]) -> list[dict[str, Any]]:
        """The reference's answers and KV rows, computed once a prompt. Where its rows do not depend
        on their company, many at once.
        """
        new = [(name, ids) for name, ids in group if name not in self.known]
        if not new:
            return [self.known[name] for name, _ in group]
        batch = self._bulk if self.reference.facts["bitwise"] else self.batch
        made = self.reference.state(
            [ids for _, ids in new], sampling=self._greedy(), overrides=PLAIN, batch=batch
        )
        self.known |= {name: answer for (name, _), answer in zip(new, made, strict=True)}
        return [self.known[name] for name, _ in group]

    def _force(self, group: list[tuple[str, list[int]]], batch: int) -> None:
        """The reference's streams and rows, the candidate's free answers against them where it gave
        any, and its choices and rows with the streams as context.
        """
        if not group:
            return
        prompts, truth = [ids for _, ids in group], self._truth(group)
        streams = [t["token_ids"] for t in truth]
        free = [
            (name, self.answers.get(name), stream)
            for (name, _), stream in zip(group, streams, strict=True)
        ]
        forced = self._theirs(
            lambda: self.after.force(
                prompts, streams, overrides=self.new, batch=batch, timeout=self._left
            ),
            "choices",
            "rows",
            count=len(prompts),
        )
        wrong: list[tuple[int, int]] = []
        for i, ((name, _), answer, right) in enumerate(zip(group, forced, truth, strict=True)):
            stream, choices = right["token_ids"], answer["choices"]
            self.found.positions += len(stream)
            wrong += [(i, at) for at in differences(choices, stream)]
            self._rows(name, answer["rows"], right["rows"])
        for i, (_, answer, stream) in enumerate(free):
            if answer is not None:
                self.found.free_tokens += len(stream)
                if answer != stream:
                    wrong.append((i, differences(answer, stream)[0]))
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
        self._bits(list(theirs) == list(ours), lambda: f"{name}, KV row {first(theirs, ours)}")

    def _bits(self, same: bool, where: Callable[[], str]) -> None:
        if not same and self.found.bits is not False:
            self.found.difference = where()
        self.found.bits = same and self.found.bits is not False

    @property
    def _one_size(self) -> dict[str, Any]:
        """The candidate's parameters with trees of one size. A program that computes logits has a
        branch for every budget of its plan and takes most of a minute to compile; what the plan
        chooses was free running and forced already.
        """
        if self.new.get("spec.mode", self.mode) != "auto":
            return self.new
        return {**self.new, "spec.mode": "tree", "spec.budget": _LOGITS_BUDGET}

    def _logits(self, group: list[tuple[str, list[int]]], batch: int) -> None:
        """Bits of the logits at every position of some prompts; numbers for the certified level."""
        new = self._one_size
        prompts = [ids for _, ids in group]
        streams = [t["token_ids"] for t in self._truth(group)]
        ours = self.reference.force(prompts, streams, overrides=PLAIN, batch=batch, logits=True)
        theirs = self._theirs(
            lambda: self.after.force(
                prompts, streams, overrides=new, batch=batch, logits=True, timeout=self._left
            ),
            "digests",
            "best",
            "margin",
            count=len(prompts),
        )
        for (name, _), a, b in zip(group, ours, theirs, strict=True):
            self.found.logits += len(a["digests"])
            same = a["digests"] == b["digests"]
            self._bits(
                same, lambda n=name, a=a, b=b: f"{n}, logits {first(a['digests'], b['digests'])}"
            )
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
        self.found.noise = largest(ours, noise)
        self.found.deviation = largest(ours, theirs)
        if not self.found.deviation <= self.found.noise:  # NaN is no agreement
            raise Refused(
                f"numbers differ by {self.found.deviation:.3g}, more than the reference's own "
                f"noise of {self.found.noise:.3g}"
            )

    def _sampled(self) -> None:
        """Answers with temperature: sampling is a function of seed and position, so they are equal
        token for token, too.
        """
        group = self._take(min(self.effort.sampled, len(self.queue)))
        kinds = [(0.7, 1.0), (1.0, 0.9), (1.3, 1.0)]  # temperature, top-p
        tokens = max(self.effort.tokens // 2, 1)
        each = [
            SamplingParams(temperature=t, top_p=p, seed=seed, max_tokens=tokens)
            for seed, (t, p) in zip(range(len(group)), itertools.cycle(kinds), strict=False)
        ]
        self._states(group, each, self.batch, sampled=True)

    def _free_state(self, group: list[tuple[str, list[int]]]) -> None:
        """KV rows after free running, in the deployment's batch and in the other regime."""
        each = [self._greedy()] * len(group)
        for batch in (self.batch, _OTHER_BATCH if self.batch == 1 else 1):
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
        new = self._one_size if sampled else self.new
        theirs = self._theirs(
            lambda: self.after.state(
                prompts, sampling=each, overrides=new, batch=batch, timeout=self._left
            ),
            "token_ids",
            "rows",
            count=len(prompts),
        )
        ours = (
            self.reference.state(prompts, sampling=each, overrides=PLAIN, batch=batch)
            if sampled
            else self._truth(group)
        )
        wrong = []
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            count = len(a["token_ids"])
            if sampled:
                self.found.sampled_tokens += count
            else:
                self.found.free_tokens += count
            wrong += [(i, at) for at in differences(b["token_ids"], a["token_ids"])[:1]]
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
