"""Search over declared parameters: Optuna's TPE, pruning and SQLite, made so that a kill changes
nothing.

A search is a list of finished trials and a plan. The k-th trial's parameters are the k-th entry of
the plan; where the plan ends, TPE extends it, from nothing but the seed and the trials that are
finished. Both are in the database. So a process that is killed and started again goes on with the
trial it was at, and ends where it would have ended (with measured times: up to their noise).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import sqlite3
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jetspec_jax.errors import ConfigError, JetSpecError

STARTUP_TRIALS = 8  # before TPE models anything; declared first candidates count
_TRIES = 24  # asks for parameters that were not proposed before
_REFUSED = math.log(
    0.5
)  # what TPE is told of a configuration that was refused or gave wrong tokens
_PLAN, _SPACE, _FACTS, _RESULT = "plan", "space", "facts", "result"  # attributes in the database


class Declared(Protocol):
    """What a search needs of a parameter (`autotune.space.Parameter`)."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def choices(self) -> Sequence[Any]: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def log(self) -> bool: ...


Params = Mapping[str, Any]
# Log speed ratios against the reference, one a prompt; closed early when the trial is pruned.
Objective = Callable[[Params], Generator[float]]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A trial that has ended.

    Attributes:
        ordinal: position in the plan.
        params: dotted name -> value.
        steps: log speed ratio against the reference, prompt by prompt.
        pruned: measured on fewer prompts than wanted, since it was clearly behind.
        note: why it has no measurement (one line), or "".
        seconds: spent on it.
    """

    ordinal: int
    params: Params
    steps: tuple[float, ...]
    pruned: bool
    note: str
    seconds: float

    @property
    def ratio(self) -> float | None:
        """Speed against the reference, the geometric mean over prompts; None if not measured."""
        return math.exp(math.fsum(self.steps) / len(self.steps)) if self.steps else None


def behind(
    steps: Sequence[float], best: Sequence[float], *, z: float = 1.0, noise: float = 0.03
) -> bool:
    """Whether a trial is clearly behind the best one, compared prompt by prompt.

    Args:
        steps: log speed ratios of the trial, in the order of the prompts.
        best: those of the best trial.
        z: standard errors by which the mean difference must lie below zero.
        noise: least standard deviation of one difference that is believed: two prompts that agree
            by luck are no proof.
    """
    pairs = [a - b for a, b in zip(steps, best, strict=False)]
    if len(pairs) < 2:
        return False
    mean = math.fsum(pairs) / len(pairs)
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in pairs) / (len(pairs) - 1))
    return mean + z * max(spread, noise) / math.sqrt(len(pairs)) < 0


def distributions(space: Iterable[Declared]) -> dict[str, Any]:
    """Optuna's distributions of declared parameters, by name.

    Raises:
        ConfigError: a declaration that describes no values.
    """
    from optuna import distributions as kinds

    made: dict[str, Any] = {}
    for p in space:
        if p.kind == "choice" and p.choices:
            made[p.name] = kinds.CategoricalDistribution(tuple(p.choices))
        elif p.kind == "int" and p.low is not None and p.high is not None:
            made[p.name] = kinds.IntDistribution(int(p.low), int(p.high), log=p.log)
        elif p.kind == "float" and p.low is not None and p.high is not None:
            made[p.name] = kinds.FloatDistribution(p.low, p.high, log=p.log)
        else:
            raise ConfigError(
                f"parameter {p.name} of kind {p.kind!r} describes no values; declare a choice with "
                "choices, or an int or float with low and high"
            )
    return made


class Search:
    """One study in a SQLite file.

    Args:
        path: the file; made where it is missing.
        name: of the study: deployment key and explorer.
        space: parameters to search.
        seed: of everything that is random.
        defaults: a value for every parameter.
        first: parameter sets to try before anything is sampled, best guess first; what they leave
            out is taken from `defaults`, and one with a value that was not declared is left
            out. Only those given when the study is made count: a restarted search keeps its plan.
        identity: what a parameter set means; two with equal identities are one trial.
        facts: kept with the study (JSON), for reports.

    Raises:
        ConfigError: a file that is no study database, or a study over another space.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        space: Sequence[Declared],
        *,
        seed: int = 0,
        defaults: Params,
        first: Sequence[Params] = (),
        identity: Callable[[Params], str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        optuna = _optuna()
        self._space, self._seed = distributions(space), seed
        self._identity = identity or (lambda p: json.dumps(dict(p), sort_keys=True))
        try:
            self._study = optuna.create_study(
                storage=_storage(path),
                study_name=name,
                direction="maximize",
                sampler=optuna.samplers.RandomSampler(seed),  # never asked: see _measure
                load_if_exists=True,
            )
            known = self._study.user_attrs
        except Exception as error:  # sqlalchemy's and optuna's own, many kinds
            raise ConfigError(
                f"{path} cannot be used as a search database "
                f"({type(error).__name__}: {str(error).splitlines()[0][:120]}); "
                "move it away, or give another --out"
            ) from error
        declared = {n: repr(d) for n, d in sorted(self._space.items())} | {"seed": seed}
        if _PLAN not in known:
            self._study.set_user_attr(_SPACE, declared)
            self._study.set_user_attr(_FACTS, dict(facts or {}))
            whole = [{n: (dict(defaults) | dict(p))[n] for n in self._space} for p in first]
            fit = [p for p in whole if all(_holds(d, p[n]) for n, d in self._space.items())]
            self._plan = _distinct(fit, self._identity)
            self._study.set_user_attr(_PLAN, self._plan)
        else:
            if known.get(_SPACE) != declared:
                raise ConfigError(
                    f"{path} holds a search of the same name over other parameters or with another "
                    "seed; move it away, or give another --out"
                )
            self._plan = list(known[_PLAN])

    @property
    def finished(self) -> list[Finished]:
        """Trials that have ended, in the order of the plan."""
        return _finished(self._study)

    @property
    def best(self) -> Finished | None:
        """The fastest trial that was measured on all its prompts."""
        whole = [t for t in self.finished if t.steps and not t.pruned]
        return max(whole, key=lambda t: t.ratio or 0.0, default=None)

    def plan(self, count: int) -> list[Params]:
        """Up to `count` parameter sets that come next; fewer where nothing new is left to try."""
        done = len(self.finished)
        if len(self._plan) < done + count:
            self._plan += self._sample(done + count - len(self._plan))
            self._study.set_user_attr(_PLAN, self._plan)
        return self._plan[done : done + count]

    def run(
        self,
        objective: Objective,
        *,
        trials: int | None = None,
        deadline: float = math.inf,
        ahead: int = 1,
        prepare: Callable[[Sequence[Params]], None] = lambda batch: None,
        done: Callable[[Finished], None] = lambda trial: None,
    ) -> str:
        """Runs trials until there are `trials` finished ones, or the clock stands at `deadline`.

        Args:
            objective: measures one parameter set, a value a prompt. What it raises as a
                JetSpecError makes the trial a failed one; anything else ends the search.
            trials: number of finished trials to reach, those of earlier runs included.
            deadline: of `time.monotonic`; looked at before every prompt. A trial that it cuts
                is not kept.
            ahead: trials whose parameters are drawn at once, so that they can be prepared
                side by side.
            prepare: gets each such batch before the first of it is measured.
            done: gets every trial as it ends.

        Returns:
            Why it ended, in words.
        """
        while True:
            count = len(self.finished)
            if trials is not None and count >= trials:
                return f"{count} trials are done"
            if time.monotonic() >= deadline:
                return "the time is up"
            # batches begin at multiples of `ahead`, whether or not the process was killed between
            size = ahead - count % ahead
            batch = self.plan(size if trials is None else min(size, trials - count))
            if not batch:
                return "every combination was tried"
            prepare(batch)
            for params in batch:
                trial = self._measure(params, objective, deadline)
                if trial is None:
                    return "the time is up"
                done(trial)

    def _measure(self, params: Params, objective: Objective, deadline: float) -> Finished | None:
        """Measures one parameter set and writes it, whole, in one transaction: a process that is
        killed before leaves nothing behind. None: the clock cut it short.
        """
        ordinal, best, started = len(self.finished), self.best, time.monotonic()
        steps: list[float] = []
        note, pruned = "", False
        values = objective(params)
        try:
            with contextlib.closing(values):
                for value in values:
                    steps.append(value)
                    # the reference's own value is 0 everywhere: no trial gains by being behind it
                    rivals = [[0.0] * len(steps), *([best.steps] if best is not None else [])]
                    pruned = any(behind(steps, rival) for rival in rivals)
                    if pruned:
                        break
                    if time.monotonic() >= deadline:
                        return None
        except JetSpecError as error:
            # A configuration that is refused or crashes is a result: it will not be tried again.
            # What the clock cut short is none.
            if time.monotonic() >= deadline:
                return None
            note, steps = " ".join(str(error).split()), []
        if not steps and not note:
            if time.monotonic() >= deadline:
                return None
            note = "no prompt was measured"
        spent = time.monotonic() - started
        result = Finished(ordinal, dict(params), tuple(steps), pruned, note, spent)
        self._write(result)
        return result

    def _write(self, result: Finished) -> None:
        trial = _optuna().trial
        means = [math.fsum(result.steps[: i + 1]) / (i + 1) for i in range(len(result.steps))]
        self._study.add_trial(
            trial.create_trial(
                state=trial.TrialState.PRUNED if result.pruned else trial.TrialState.COMPLETE,
                value=_REFUSED if result.note else means[-1],
                params=dict(result.params),
                distributions=self._space,
                intermediate_values=dict(enumerate(means, 1)),
                user_attrs={_RESULT: dataclasses.asdict(result)},
            )
        )

    def _sample(self, count: int) -> list[Params]:
        """New parameter sets by TPE: a function of seed and finished trials."""
        optuna = _optuna()
        word = hashlib.sha256(f"{self._seed}|{len(self._plan)}".encode()).digest()
        sampler = optuna.samplers.TPESampler(
            seed=int.from_bytes(word[:4], "little"),
            n_startup_trials=STARTUP_TRIALS,
            multivariate=True,
        )
        scratch = optuna.create_study(direction="maximize", sampler=sampler)
        scratch.add_trials(_ended(self._study))
        seen = {self._identity(p) for p in self._plan}
        found: list[Params] = []
        for _ in range(count * _TRIES):
            params = {n: _rounded(v) for n, v in scratch.ask(self._space).params.items()}
            params = {n: v for n, v in params.items() if _holds(self._space[n], v)}
            if len(params) < len(self._space):
                continue  # rounded out of its range
            identity = self._identity(params)
            if identity not in seen:
                seen.add(identity)
                found.append(params)
                if len(found) == count:
                    break
        return found


def studies(path: Path) -> dict[str, tuple[Mapping[str, Any], list[Finished]]]:
    """Every search of a database for reports: name -> (facts, finished trials)."""
    if not path.is_file():
        return {}
    optuna = _optuna()
    storage = _storage(path)
    found = {}
    for summary in optuna.get_all_study_summaries(storage):
        study = optuna.load_study(study_name=summary.study_name, storage=storage)
        found[summary.study_name] = (study.user_attrs.get(_FACTS, {}), _finished(study))
    return found


def _ended(study: Any) -> list[Any]:
    """Optuna's trials that ended with a result, in the order of the plan."""
    made = [t for t in study.get_trials(deepcopy=False) if t.state.name in ("COMPLETE", "PRUNED")]
    return sorted(made, key=lambda t: t.user_attrs[_RESULT]["ordinal"])


def _finished(study: Any) -> list[Finished]:
    results = [t.user_attrs[_RESULT] for t in _ended(study)]
    return [Finished(**{**r, "steps": tuple(r["steps"])}) for r in results]


def _rounded(value: Any) -> Any:
    """Three digits say all that a measurement can."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _holds(distribution: Any, value: Any) -> bool:
    """Whether a declared parameter can have this value."""
    try:
        inner = distribution.to_internal_repr(value)
    except (TypeError, ValueError):
        return False
    return bool(distribution._contains(inner))


def _distinct(sets: Iterable[Params], identity: Callable[[Params], str]) -> list[Params]:
    kept: dict[str, Params] = {}
    for params in sets:
        kept.setdefault(identity(params), params)
    return list(kept.values())


def _storage(path: Path) -> Any:
    return _optuna().storages.RDBStorage(
        "sqlite://", engine_kwargs={"creator": functools.partial(_connect, path)}
    )


def _connect(path: Path) -> sqlite3.Connection:
    """With a write-ahead log a commit waits for no disk: what a killed process wrote is there, and
    what a machine that loses power wrote last is gone, without harm to the rest.
    """
    connection = sqlite3.connect(path, timeout=30, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def _optuna() -> Any:
    """Optuna, imported late (it takes a second) and without its log lines.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import optuna
    except ImportError as error:
        raise ConfigError(
            "the search needs Optuna, which is not installed; "
            "run: pip install 'jetspec-jax[autotune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
