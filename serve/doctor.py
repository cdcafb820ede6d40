"""Why is a draft head hardly ever accepted? Checks it, then tries each suspect the other way round.

A head that is loaded with one wrong setting still runs and still gives the right tokens: it only
never pays. So each setting is (1) compared with what the target says and with the published
defaults, and (2) flipped in a copy of the head's config.json while everything else stays, and a
short generation shows which version is accepted more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.config import DraftConfig, EngineConfig, ModelConfig, SamplingParams, SpecConfig
from jetspec_jax.drafter.checkpoint import default_layer_ids
from jetspec_jax.errors import ConfigError, JetSpecError
from jetspec_jax.stats import SpecStats, pooled
from serve import cli
from serve.doctor_checks import (
    BAD,
    OK,
    Finding,
    check_config,
    check_files,
    check_template,
    read_config,
)
from serve.render import number, percent

PROBES = (
    "Write a Python function that returns the sum of a list of numbers.",
    "List the first five months of the year, one per line.",
    "A box holds 3 red and 4 blue balls. How many balls are in it? Explain.",
)
PROBE_TOKENS = 40
NEAR_ZERO = 0.10  # accepted tokens per round below which a head does nothing
CHAIN = SpecConfig(mode="chain", drafter="head", builder="chain")


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A setting, and the change to config.json that turns it round."""

    name: str
    change: Callable[[dict[str, Any]], None]
    remedy: str


def suspects_of(draft: DraftConfig, model: ModelConfig) -> list[Suspect]:
    """Every setting that can be wrong without an error, each with its opposite."""

    def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
        def change(config: dict[str, Any]) -> None:
            config[key] = value
            inner = config.setdefault("dflash_config", {})
            inner[key] = value
            if key == "causal_head":
                config["causal"] = inner["causal"] = value

        return change

    def rope(config: dict[str, Any]) -> None:
        for key in ("rope_scaling", "rope_parameters"):
            config.pop(key, None)
        config["rope_theta"] = model.rope.theta

    ids, layers = draft.target_layer_ids, model.num_layers
    found = [
        Suspect(
            f"causal={not draft.causal}",
            put("causal_head", not draft.causal),
            "set causal_head and causal in config.json",
        ),
        Suspect(
            f"draft_shift={not draft.draft_shift}",
            put("draft_shift", not draft.draft_shift),
            "set draft_shift in config.json",
        ),
    ]
    usual = default_layer_ids(len(ids), layers)
    options = {
        usual: "the default formula",
        tuple(i + 1 for i in ids): "one later",
        tuple(i - 1 for i in ids): "one earlier",
    }
    for other, why in options.items():
        if (
            other != tuple(ids)
            and all(0 <= i < layers for i in other)
            and len(set(other)) == len(other)
        ):
            remedy = "set dflash_config.target_layer_ids in config.json"
            found.append(
                Suspect(
                    f"target_layer_ids={list(other)} ({why})",
                    put("target_layer_ids", list(other)),
                    remedy,
                )
            )
    if draft.rope != model.rope and model.rope.kind == "default":
        found.append(
            Suspect(
                f"rope theta {model.rope.theta:g} (the target's)",
                rope,
                "set rope_theta in config.json",
            )
        )
    return found


@contextlib.contextmanager
def varied_head(folder: Path, change: Callable[[dict[str, Any]], None]) -> Iterator[Path]:
    """A temporary copy of a head's directory with another config.json; the weights are linked, not
    copied."""
    config = read_config(folder)
    change(config)
    with tempfile.TemporaryDirectory(prefix="jetspec-doctor-") as name:
        copy = Path(name)
        for path in folder.iterdir():
            if path.is_file() and path.name != "config.json":
                (copy / path.name).symlink_to(path.resolve())
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield copy


def probe(llm: Any, kwargs: Mapping[str, Any], chat: bool = True) -> SpecStats:
    """Pooled statistics of short greedy answers drafted by the head alone, as a chain."""
    sampling = SamplingParams(max_tokens=PROBE_TOKENS)
    if chat:
        talks = [[{"role": "user", "content": text}] for text in PROBES]
        results = [
            llm.chat([talk], sampling, template_kwargs=dict(kwargs) or None, spec=CHAIN)[0]
            for talk in talks
        ]
    else:
        results = [llm.generate([text], sampling, spec=CHAIN)[0] for text in PROBES]
    return pooled(result.spec for result in results)


def per_round(stats: SpecStats) -> float:
    """Accepted tokens per round: 0 for a head that does nothing."""
    return stats.accepted / stats.rounds if stats.rounds else 0.0


def clearly_better(other: SpecStats, base: SpecStats) -> bool:
    """Half as much again and at least 0.15 tokens a round more: above what another 120 tokens would
    show by chance."""
    return per_round(other) > 1.5 * per_round(base) and per_round(other) > per_round(base) + 0.15


def diagnose(
    open_llm: Callable[[Path], Any],
    folder: Path,
    kwargs: Mapping[str, Any],
    tell: Callable[[Finding], None],
) -> list[Finding]:
    """All findings, told one by one as they are made.

    Args:
        open_llm: draft head directory -> engine with that head.
        folder: the head in question.
        kwargs: chat template variables.
        tell: called with each finding.
    """
    findings: list[Finding] = []

    def add(finding: Finding) -> None:
        findings.append(finding)
        tell(finding)

    for finding in check_files(folder):
        add(finding)
    try:
        llm = open_llm(folder)
    except JetSpecError as error:
        add(Finding("loading", BAD, str(error)))
        return findings
    draft, model = llm.draft_config, llm.model_config
    for finding in check_config(draft, model):
        add(finding)
    template = check_template(llm.tokenizer, kwargs)
    add(template)
    base = probe(llm, kwargs, chat=template.verdict == OK)
    dead = per_round(base) < NEAR_ZERO
    depths = " ".join(percent(a) for a in base.acceptance_per_depth or ())
    add(Finding("acceptance", BAD if dead else OK, f"tau {number(base.tau)}, by depth {depths}"))
    blamed = False
    if template.verdict == OK:
        raw = probe(llm, kwargs, chat=False)
        if clearly_better(raw, base):
            blamed = True
            add(
                Finding(
                    "template off",
                    BAD,
                    f"tau {number(raw.tau)} on raw text: the head was not trained with this "
                    "template",
                )
            )
    del llm  # its caches, before the next engine allocates its own
    for suspect in suspects_of(draft, model):
        try:
            with varied_head(folder, suspect.change) as copy:
                other = probe(open_llm(copy), kwargs, chat=template.verdict == OK)
        except JetSpecError as error:
            add(Finding(suspect.name, OK, f"cannot be: {error}"))
            continue
        if clearly_better(other, base):
            blamed = True
            add(
                Finding(
                    suspect.name,
                    BAD,
                    f"tau {number(other.tau)} instead of {number(base.tau)}: {suspect.remedy}",
                )
            )
        else:
            add(
                Finding(
                    suspect.name,
                    OK,
                    f"tau {number(other.tau)}: the setting as it is fits better or as well",
                )
            )
    if dead and not blamed:
        add(
            Finding(
                "weights",
                BAD,
                "no single setting explains it; the head belongs to other target weights or "
                "is untrained",
            )
        )
    return findings


def run(args: argparse.Namespace, engine: EngineConfig, kwargs: Mapping[str, Any]) -> int:
    """`--doctor`: prints the diagnosis; exit code 1 when something is wrong."""
    folder = head_folder(args)

    def tell(finding: Finding) -> None:
        if not args.json:
            print(f"{finding.verdict:>7}  {finding.check}: {finding.detail}", flush=True)

    findings = diagnose(opener(args, engine), folder, kwargs, tell)
    wrong = [f for f in findings if f.verdict == BAD]
    if args.json:
        print(cli.dump_json({"version": 1, "healthy": not wrong, "findings": findings}, indent=2))
    elif wrong:
        print(f"wrong: {'; '.join(f.check for f in wrong)}")
    else:
        print("nothing wrong found")
    return 1 if wrong else 0


def opener(args: argparse.Namespace, engine: EngineConfig) -> Callable[[Path], Any]:
    """Head directory -> engine. The target is read once and shared by all of them."""
    from jetspec_jax import LLM, loading

    target = loading.load_target(args.model, engine, cli.say)

    def open_llm(head: Path) -> LLM:
        loaded = loading.load_head(head, target, engine, lambda line: None)
        return LLM.from_parts(target, loaded, spec=CHAIN, engine=engine)

    return open_llm


def head_folder(args: argparse.Namespace) -> Path:
    """The head's directory: `--draft`, or the bundled one of the bundled model."""
    if args.draft is not None and args.draft != "none":
        folder = Path(args.draft).expanduser()
    elif args.model is not None or args.draft == "none":
        raise ConfigError("--doctor has no draft head to look at; give --draft DIR")
    else:
        from jetspec_jax.loading import bundled_head_path

        found = bundled_head_path()
        if found is None:
            raise ConfigError("--doctor: no draft head comes with this version; give --draft DIR")
        folder = Path(found)
    if not folder.is_dir():
        raise ConfigError(
            f"--doctor: {folder} is not a directory; give the draft head's directory with --draft"
        )
    return folder
