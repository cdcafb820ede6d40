"""The loop: measure, propose, pass the gate, remember; then the next explorer starts from what was
accepted (pilot.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.autotune import explorers
from jetspec_jax.autotune.candidate import Candidate
from jetspec_jax.autotune.explorers import Part
from jetspec_jax.autotune.key import DeploymentKey
from jetspec_jax.autotune.ledger import Ledger
from jetspec_jax.autotune.memory import Memory
from jetspec_jax.autotune.pairs import Asked, Figures, Pairs, centre
from jetspec_jax.autotune.search import Finished, Params, Search
from jetspec_jax.autotune.session import Session
from jetspec_jax.config import SamplingParams
from jetspec_jax.errors import ConfigError, JetSpecError, TokensDiffer

_TRIAL_GROUPS, _CONFIRM_GROUPS = (
    8,
    16,
)  # prompts (or batches) a trial is measured on, and a finalist
_FINALISTS = 2  # of a search that are measured again before the gate sees one
_WORTH = 1.01  # measured ratio from which a finalist is shown to the gate
_LEAST_S, _ENOUGH_S = 20.0, 60.0  # a search with less time is not begun; what one should have

External = Callable[[str, Candidate, float], Any]  # command, incumbent, seconds -> Attempt
Predict = Callable[[Figures, Figures], float | None]
Judge = Callable[[Candidate, Candidate, float], Any]  # incumbent, candidate, seconds -> Verdict


@dataclasses.dataclass(frozen=True)
class Task:
    """What a run is about.

    Attributes:
        key: the deployment.
        space: declared parameters that apply to it.
        compose: a candidate's params from values of the space (`space.params_of`).
        order: ops by gap, largest first.
        prompts: token ids that explorers measure on; the gate has others.
        sampling: of measured answers.
        start: makes a worker for an engine-level candidate.
        judge: the gate.
        out: folder of all files.
        seed: of everything random.
        code: version of the code.
        gate_seconds: what a gate is given, and what searches leave for it.
        predict: the cost model's speed ratio from the rounds and nodes of both sides.
        external: runs an external explorer and judges its patch (`external.explore`).
    """

    key: DeploymentKey
    space: Sequence[Any]
    compose: explorers.Compose
    order: Sequence[str]
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    start: Callable[[Candidate], Asked]
    judge: Judge
    out: Path
    seed: int = 0
    code: str = ""
    gate_seconds: float = 120.0
    external: External | None = None
    predict: Predict = lambda reference, candidate: None


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a caller may show: a search that begins, or one more finished trial, and the best."""

    part: str
    best: Finished | None
    count: int


class Pilot:
    """Runs explorers for a task.

    Args:
        task: what and where.
        session: where it stands; kept up to date.
        say: gets one line per event.
        show: gets every finished trial.
        trials: finished trials after which a search ends; None: only time ends it.
        deadline: of `time.monotonic`.
    """

    def __init__(
        self,
        task: Task,
        session: Session,
        *,
        say: Callable[[str], None] = lambda line: None,
        show: Callable[[Progress], None] = lambda progress: None,
        trials: int | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.task, self.session = task, session
        self._say, self._show, self._trials, self._deadline = say, show, trials, deadline
        self.memory = Memory(task.out / "memory.db")
        self.ledger = Ledger(self.memory, task.key, task.code)
        self._began, self._before = time.monotonic(), session.seconds
        self._predicted: dict[str, float | None] = {}  # by candidate id
        self.finished = 0  # trials, those of an interrupted run included

    def run(self, names: Sequence[str]) -> None:
        """Known patterns first, then every explorer's searches, furthest gap first.

        Ctrl-C, and anything else that is raised, leaves everything finished on disk.
        """
        try:
            self._known()
            for name in names:
                if name.startswith(explorers.COMMAND):
                    going = self._external(name)
                else:
                    rest = names[names.index(name) + 1 :]
                    going = self._builtin(name, [n for n in rest if not n.startswith("cmd:")])
                if not going:
                    self._say("the same command goes on there")
                    return
            self.session.done = True
        finally:
            self._save()

    def _builtin(self, name: str, later: Sequence[str]) -> bool:
        """All searches of an explorer; False: the time did not do for all."""
        todo = self._parts(name)
        if not todo:
            self._say(f"no declared parameter of {name} applies to this deployment")
        todo = [p for p in todo if p.name not in self.session.ended]
        after = [p for n in later for p in self._parts(n) if p.name not in self.session.ended]
        for place, part in enumerate(todo):
            left = self._deadline - time.monotonic() - self.task.gate_seconds
            if left < _LEAST_S:  # a gate may be quicker than is kept for it
                left += self.task.gate_seconds / 2
            if left < _LEAST_S:
                self._say(f"no time is left for {', '.join(p.name for p in todo[place:])}")
                return False
            # as many of the searches as get enough time to find something share it
            coming = [*todo[place:], *after]
            count = len(coming) if math.isinf(left) else max(1, int(left / _ENOUGH_S))
            among = sum(p.weight for p in coming[:count])
            self._explore(part, left * part.weight / among)
        return True

    def _parts(self, name: str) -> list[Part]:
        return explorers.parts(name, self.task.space, self.task.order)

    def _external(self, command: str) -> bool:
        """One external explorer; False: the time did not do for it."""
        if command in self.session.ended:
            return True
        left = self._deadline - time.monotonic()
        if left < self.task.gate_seconds:
            self._say(f"no time is left for {command}")
            return False
        if self.task.external is None:
            raise ConfigError(f"--explorer {command!r}: this task runs no external explorers")
        self._say(f"{command} explores")
        attempt = self.task.external(command, self.session.incumbent, left)
        kept = "accepted" if attempt.accepted else f"refused ({attempt.stage})"
        where = f": {attempt.patch_file}" if attempt.patch_file else ""
        self._say(f"{command}: {kept}, {attempt.reason}{where}")
        self.session.attempts.append(attempt.to_json())
        self.session.ended[command] = attempt.reason
        self._save()
        return True

    # ---- before any search -----------------------------------------------------------------------

    def _known(self) -> None:
        """What memory holds for this deployment and near ones, and the shipped heuristic where the
        run does not begin from it, go first: nothing is cheaper than an answer that is known.
        """
        incumbent, session = self.session.incumbent, self.session
        if "known" in session.ended:
            return
        found = [c for c in self.memory.candidates(self.task.key) if c.patch is None]
        if incumbent.id != Candidate().id:
            found.insert(0, Candidate(origin="heuristic"))
        found = [c for c in found if c.id not in self.ledger.refused() and c.id != incumbent.id][:4]
        measured: list[tuple[float, Candidate]] = []
        every = True  # was measured, as far as it can be
        if found:
            self._say(f"{len(found)} known configurations go first")
            with self._pairs(incumbent) as pairs:
                for candidate in found:
                    if candidate.id in session.known:  # measured before the time was up
                        measured.append((session.known[candidate.id], candidate))
                        continue
                    steps = self._confirm(pairs, candidate, 0, _TRIAL_GROUPS // 2)
                    every = every and steps != []
                    if steps:
                        session.known[candidate.id] = centre(steps)
                        measured.append((centre(steps), candidate))
                        self._say(f"{describe(candidate)}: {math.exp(centre(steps)):.2f}x")
        if self._pass("known", measured) and every:
            session.ended["known"] = f"{len(found)} tried"
        self._save()

    # ---- one search ------------------------------------------------------------------------------

    def _explore(self, part: Part, seconds: float) -> None:
        """Searches, measures the best again, and shows them to the gate."""
        task, incumbent = self.task, self.session.incumbent
        until = time.monotonic() + seconds
        origin = f"builtin:{part.explorer}"

        def make(params: Params) -> Candidate:
            return explorers.candidate_of(task.space, incumbent, params, origin, task.compose)

        search = Search(
            task.out / "search.db",
            self._study(part),
            part.space,
            seed=task.seed,
            defaults=explorers.values(part.space, incumbent),
            first=explorers.first(part.space, incumbent, self.memory.candidates(task.key)),
            identity=lambda params: make(params).id,
            facts={
                "part": part.name,
                "incumbent": incumbent.to_json(),
                "here": explorers.values(part.space, incumbent),
                "key": task.key.to_json(),
            },
        )
        refused = self.ledger.refused()

        def progress() -> None:
            self._show(Progress(part.name, search.best, len(search.finished)))

        def show(_: Finished) -> None:
            self.finished += 1
            progress()
            self._save()

        with self._pairs(incumbent) as pairs:

            def objective(params: Params) -> Generator[float]:
                candidate = make(params)
                if candidate.id == incumbent.id:
                    yield from [0.0] * min(_TRIAL_GROUPS, pairs.groups)
                    return
                if candidate.id in refused:
                    raise TokensDiffer(refused[candidate.id])
                values = pairs.ratios(candidate)
                try:
                    for _ in range(_TRIAL_GROUPS):
                        value = next(values, None)
                        if value is None:
                            return
                        yield value
                except TokensDiffer as error:
                    self._differs(candidate, str(error))
                    raise

            before = len(search.finished)
            self.finished += before
            if before:
                self._say(f"{part.name}: goes on after {before} finished trials")
            progress()
            why = search.run(
                objective,
                trials=self._trials,
                deadline=until,
                ahead=part.ahead,
                prepare=lambda batch: (
                    pairs.prepare([make(p) for p in batch]) if part.ahead > 1 else None
                ),
                done=show,
            )
            self._say(f"{part.name}: {why}; {len(search.finished)} trials{_best(search.best)}")
            finalists = self._finalists(search, pairs, make)
        self._pass(part.name, finalists)
        self.session.ended[part.name] = why
        self._save()

    def _finalists(
        self, search: Search, pairs: Pairs, make: Callable[[Params], Candidate]
    ) -> list[tuple[float, Candidate]]:
        """The best few, measured again on prompts that chose none of them, best first."""
        faster = [t for t in search.finished if (t.ratio or 0) > 1]
        best = sorted(faster, key=lambda t: (t.pruned, -(t.ratio or 0)))[:_FINALISTS]
        found: list[tuple[float, Candidate]] = []
        for trial in best:
            candidate = make(trial.params)
            if candidate.id == self.session.incumbent.id:
                continue
            again = self._confirm(pairs, candidate, _TRIAL_GROUPS, _CONFIRM_GROUPS)
            if again is None:
                continue
            # where the clock left nothing to measure again, the search's own word stands
            value = centre(again or trial.steps)
            found.append((value, candidate))
            self._say(
                f"{describe(candidate)}: {trial.ratio:.3f}x, measured again {math.exp(value):.3f}x"
                if again
                else f"{describe(candidate)}: {trial.ratio:.3f}x, no time to measure it again"
            )
        return found

    def _confirm(
        self, pairs: Pairs, candidate: Candidate, first: int, count: int
    ) -> list[float] | None:
        """Fresh pairs of a candidate; fewer where the clock ends them, None where it fails."""
        steps: list[float] = []
        start = first if first + 2 <= pairs.groups else 0
        until = self._deadline - 0.8 * self.task.gate_seconds
        try:
            if time.monotonic() < until:
                for value in pairs.ratios(candidate, start):
                    steps.append(value)
                    if len(steps) >= count or time.monotonic() >= until:
                        break
        except TokensDiffer as error:
            self._differs(candidate, str(error))
            return None
        except JetSpecError as error:
            self._say(f"{describe(candidate)}: {' '.join(str(error).split())}")
            return None
        both = pairs.figures.get(candidate.id)
        if both is not None:
            predicted = self.task.predict(both["reference"], both["candidate"])
            self._predicted[candidate.id] = predicted
        return steps

    # ---- the gate --------------------------------------------------------------------------------

    def _pass(self, search: str, finalists: Sequence[tuple[float, Candidate]]) -> bool:
        """Shows finalists to the gate, best first, until one is accepted or the time is up; False:
        one that is worth it was not judged for want of time.
        """
        session = self.session
        for measured, candidate in sorted(finalists, key=lambda item: -item[0]):
            incumbent = session.incumbent
            left = self._deadline - time.monotonic()
            if math.exp(measured) < _WORTH or session.judged(candidate, incumbent):
                continue
            if left < self.task.gate_seconds / 2:
                self._say(f"no time is left to judge {describe(candidate)}")
                return False
            self._say(f"the gate judges {describe(candidate)}")
            # a gate looks at the clock between its steps, and a step takes some seconds
            seconds = 0.95 * left
            verdict = self.task.judge(incumbent, candidate, seconds)
            self._say(f"{'accepted' if verdict.accepted else 'refused'}: {verdict.reason}")
            session.verdicts.append(
                {
                    "candidate": candidate.to_json(),
                    "incumbent": incumbent.to_json(),
                    "search": search,
                    "measured": math.exp(measured),
                    "in_time": verdict.accepted or verdict.seconds < 0.9 * seconds,
                    "verdict": verdict.to_json(),
                }
            )
            if verdict.accepted:
                session.incumbent = candidate
            self._save()
            self.ledger.judged(incumbent, candidate, verdict, self._predicted.get(candidate.id))
            if verdict.accepted:
                return True
        return True

    # ---- small things ----------------------------------------------------------------------------

    def _differs(self, candidate: Candidate, text: str) -> None:
        self._say(f"{describe(candidate)}: {text}")
        self.ledger.differed(candidate, text)

    def _pairs(self, reference: Candidate) -> Pairs:
        return Pairs(
            self.task.start,
            reference,
            self.task.prompts,
            sampling=self.task.sampling,
            batch=self.task.key.batch,
            deadline=self._deadline,
        )

    def _study(self, part: Part) -> str:
        """One study a deployment, search, incumbent, space and seed."""
        facts = [
            self.task.key.to_json(),
            self.session.incumbent.id,
            # not repr(p): a declaration may hold functions, whose addresses change
            [
                [p.name, p.kind, list(p.choices), p.low, p.high, p.log, p.default]
                for p in part.space
            ],
            self.task.seed,
            self.task.code,
        ]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        return f"{part.name}/{digest}"

    def _save(self) -> None:
        self.session.seconds = self._before + time.monotonic() - self._began
        self.session.save()


def describe(candidate: Candidate) -> str:
    """A candidate in a few words."""
    words = [
        f"{name.partition('.')[2]}={value}" for name, value in sorted(candidate.params.items())
    ]
    if candidate.patch:
        words.append("a patch")
    return ", ".join(words) or "the shipped heuristic"


def _best(best: Finished | None) -> str:
    if best is None or best.ratio is None:
        return ""
    return f", the best {best.ratio:.3f}x on the search's prompts"
