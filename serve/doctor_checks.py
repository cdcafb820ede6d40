"""What can be said about a draft head from its files and configuration, before running it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.config import DraftConfig, ModelConfig
from jetspec_jax.drafter.checkpoint import default_layer_ids
from jetspec_jax.errors import ConfigError, JetSpecError
from serve import cli

NEEDED = ("fc.weight", "hidden_norm.weight", "norm.weight")
OK, WARN, BAD = "ok", "warning", "WRONG"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    check: str
    verdict: str  # OK | WARN | BAD
    detail: str


def check_config(draft: DraftConfig, model: ModelConfig) -> list[Finding]:
    """Compares a head's configuration with the target's and with the published defaults."""
    ids, layers = draft.target_layer_ids, model.num_layers
    findings = []

    def add(check: str, fine: bool, good: str, bad: str, verdict: str = BAD) -> None:
        findings.append(Finding(check, OK if fine else verdict, good if fine else bad))

    outside = [i for i in ids if not 0 <= i < layers]
    add(
        "layer ids in range",
        not outside,
        f"{list(ids)} of {layers} layers",
        f"{outside} outside 0..{layers - 1}",
    )
    usual = default_layer_ids(len(ids), layers)
    add(
        "layer ids usual",
        tuple(ids) == usual,
        f"{list(ids)}",
        f"{list(ids)}; the default formula gives {list(usual)}",
        WARN,
    )
    add(
        "target depth",
        draft.num_target_layers == layers,
        f"{layers} layers",
        f"the head was made for {draft.num_target_layers} target layers, the target has {layers}",
    )
    add(
        "target width",
        draft.target_hidden_size == model.hidden_size,
        f"{model.hidden_size}",
        f"the head reads width {draft.target_hidden_size}, the target has {model.hidden_size}",
    )
    add(
        "vocabulary",
        draft.vocab_size == model.vocab_size,
        f"{model.vocab_size} tokens",
        f"the head was made for {draft.vocab_size} tokens, the target has {model.vocab_size}",
    )
    mask = draft.mask_token_id
    alias = (
        "the end-of-text token"
        if mask in model.eos_ids
        else "the padding token"
        if mask == model.pad_id
        else None
    )
    inside = 0 <= mask < model.vocab_size
    add(
        "mask token",
        inside and alias is None,
        f"id {mask}",
        f"id {mask} is {alias}"
        if inside
        else f"id {mask} is outside the vocabulary of {model.vocab_size}",
    )
    add(
        "rope",
        draft.rope == model.rope,
        f"{model.rope.kind}, theta {model.rope.theta:g}, as the target",
        f"the head has {draft.rope}, the target {model.rope}",
        WARN,
    )
    return findings


def check_files(folder: Path) -> list[Finding]:
    """Looks at the head's own files: flags, and the norms that are easily lost in conversion."""
    config = read_config(folder)
    inner = config.get("dflash_config") or {}
    flags = {
        name: where[name]
        for where in (inner, config)
        for name in ("causal_head", "causal")
        if name in where
    }
    findings = []
    if not flags:
        findings.append(
            Finding(
                "causal flag",
                WARN,
                "neither causal_head nor causal is in config.json; a guess is used",
            )
        )
    elif len({bool(v) for v in flags.values()}) > 1:
        findings.append(Finding("causal flag", BAD, f"two names contradict each other: {flags}"))
    else:
        findings.append(Finding("causal flag", OK, f"{flags}"))
    names = tensor_names(folder)
    missing = [name for name in NEEDED if name not in names]
    verdict = Finding("fuse and final norms", OK, ", ".join(NEEDED))
    if missing:
        verdict = Finding(
            "fuse and final norms", BAD, f"{', '.join(missing)} missing from the checkpoint"
        )
    return [*findings, verdict]


def check_template(tokenizer: Any, kwargs: Mapping[str, Any]) -> Finding:
    """A head learned answers in the target's chat format; without a template it sees other text."""
    try:
        ids = tokenizer.chat(
            [{"role": "user", "content": "Hello"}], add_generation_prompt=True, **kwargs
        )
    except JetSpecError as error:
        return Finding("chat template", BAD, str(error))
    return Finding("chat template", OK, f"known, {len(ids)} tokens for a one-word message")


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return cli.parse_json_object(
            (folder / "config.json").read_text(encoding="utf-8"), str(folder / "config.json")
        )
    except OSError as error:
        raise ConfigError(
            f"{folder / 'config.json'}: {error.strerror}; --doctor needs a draft head directory"
        ) from error


def tensor_names(folder: Path) -> set[str]:
    """Names in the safetensors headers (the first 8 bytes give the length of a JSON header)."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        names |= header.keys() - {"__metadata__"}
    return names
