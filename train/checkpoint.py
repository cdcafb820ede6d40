"""Resumable checkpoints: one safetensors file and a JSON file in a folder that appears complete or
not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from jetspec_jax.errors import ConfigError, ModelFileError
from train.config import changed_keys
from train.step import TrainState

_NAME = re.compile(r"step-(\d{7})")


def _leaves(state: TrainState) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files to a hidden sibling, flush them, and rename it: a kill leaves the old state
    or the new one."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, content in files.items():
        with open(temporary / name, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(temporary, folder)


def save(out: Path, state: TrainState, meta: dict[str, Any], keep: int) -> Path:
    """Write checkpoint `step-NNNNNNN` under `out`, then drop all but the `keep` newest.

    Args:
        out: run folder.
        state: parameters, optimiser, average and step.
        meta: JSON values: config, data digest, best result, elapsed seconds.
        keep: at least 1.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in _leaves(state).items()}
    folder = out / f"step-{int(state.step):07d}"
    files = {
        "state.safetensors": safetensors.numpy.save(arrays),
        "meta.json": json.dumps(meta, indent=1).encode(),
    }
    write_folder(folder, files)
    for old in complete(out)[:-keep]:
        shutil.rmtree(old)
    return folder


def complete(out: Path) -> list[Path]:
    """Complete checkpoints under `out`, oldest first (a folder under its final name is
    complete)."""
    return sorted(p for p in out.glob("step-*") if _NAME.fullmatch(p.name)) if out.is_dir() else []


def read_meta(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    try:
        return json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as err:
        raise ModelFileError(
            f"{folder / 'meta.json'}: cannot be read ({err}); delete this checkpoint to use "
            "the one before"
        ) from err


def load(folder: Path, like: TrainState) -> TrainState:
    """State of a checkpoint, in the structure of `like`.

    Raises:
        ModelFileError: damaged file, or arrays that do not fit `like`.
    """
    path = folder / "state.safetensors"
    try:
        arrays = safetensors.numpy.load_file(path)
    except Exception as err:
        raise ModelFileError(
            f"{path}: cannot be read ({err}); delete this checkpoint to use the one before"
        ) from err
    wanted = _leaves(like)
    wrong = [
        k
        for k in {**wanted, **arrays}
        if k not in arrays or k not in wanted or arrays[k].shape != wanted[k].shape
    ]
    if wrong:
        raise ModelFileError(
            f"{path}: array {wrong[0]!r} does not fit this run; resume with the code and "
            "config that wrote it"
        )
    _, structure = jax.tree_util.tree_flatten(like)
    leaves = [jax.numpy.asarray(arrays[name], leaf.dtype) for name, leaf in wanted.items()]
    return jax.tree_util.tree_unflatten(structure, leaves)


def check_same(folder: Path, meta: dict[str, Any], config: dict[str, Any], digest: str) -> None:
    """Refuse to resume with another configuration or other data; the [run] section is free.

    Raises:
        ConfigError: names the changed keys.
    """
    changed = changed_keys(meta["config"], config)
    if meta["digest"] != digest:
        changed.append("data (content)")
    if changed:
        raise ConfigError(
            f"{folder}: was written with other values of {', '.join(changed)}; restore them, "
            "or start anew with another "
            "run.out (run.warm_start takes the weights over)"
        )
