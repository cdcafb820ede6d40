"""Write a head as a Hugging Face directory with provenance: `python -m train.export --run runs/x
--out DIR`.

Weights are stored as bfloat16: half the size, and the rounding is far below what moves an
acceptance.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jetspec_jax.config import DraftConfig, ModelConfig
from jetspec_jax.drafter import load_draft
from jetspec_jax.drafter.checkpoint import config_json, published_tensors
from jetspec_jax.errors import JetSpecError, ModelFileError
from jetspec_jax.typing import Params
from train.checkpoint import write_folder

MAX_BYTES = 40_000_000  # of a head that ships inside the repository
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax")


def git_sha() -> str:
    """Commit of the working tree, with '-dirty' where files differ; 'unknown' outside a
    repository."""
    try:
        root = Path(__file__).parent
        run = [
            ["git", "rev-parse", "HEAD"],
            ["git", "status", "--porcelain", "--untracked-files=no"],
        ]
        sha, dirty = (
            subprocess.run(c, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for c in run
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return sha + ("-dirty" if dirty else "")


def export_head(
    folder: Path,
    cfg: DraftConfig,
    params: Params,
    id_map: np.ndarray | None,
    *,
    target: ModelConfig | None,
    provenance: dict[str, Any],
    dtype: Any = ml_dtypes.bfloat16,
) -> Path:
    """model.safetensors, config.json, provenance.json and README.md (the model card) in one atomic
    folder. Returns it."""
    import safetensors.numpy

    weights = safetensors.numpy.save(
        published_tensors(cfg, params, id_map, dtype), {"format": "pt"}
    )
    record = {
        **provenance,
        "git": git_sha(),
        "versions": {
            "python": platform.python_version(),
            **{p: importlib.metadata.version(p) for p in _PACKAGES},
        },
        "dtype": np.dtype(dtype).name,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }
    config = config_json(cfg, target, np.dtype(dtype).name)
    write_folder(
        folder,
        {
            "model.safetensors": weights,
            "config.json": (json.dumps(config, indent=2) + "\n").encode(),
            "provenance.json": (json.dumps(record, indent=2) + "\n").encode(),
            "README.md": model_card(cfg, record).encode(),
        },
    )
    return folder


def model_card(cfg: DraftConfig, record: dict[str, Any]) -> str:
    """The card of a head: what it is, what it was trained on, and what was measured."""
    path = "none" if cfg.path_head == "none" else f"{cfg.path_head}, rank {cfg.path_rank}"
    rows = {
        "layers": cfg.num_layers,
        "block": f"{cfg.block_size} ({'causal' if cfg.causal else 'bidirectional'})",
        "taps of the target": ", ".join(map(str, cfg.target_layer_ids)),
        "draft vocabulary": cfg.head_vocab_size,
        "path head": path,
    }
    data = record.get("data", {})
    rows |= {
        "training sequences": data.get("sequences", "unknown"),
        "answer tokens": data.get("answer_tokens", "unknown"),
        "vocabulary coverage": data.get("vocabulary_coverage", "unknown"),
    }
    held = record.get("metrics", {}).get("held_out", {})
    name = record.get("target") or "the target"
    lines = [
        "---",
        "library_name: jetspec-jax",
        "tags: [speculative-decoding, draft-head]",
        "---",
        f"# Draft head for {name}",
        "",
        "A draft head for tree speculative decoding (JetSpec, arXiv 2606.18394) with jetspec-jax. "
        "It changes no token of its target; it only makes it faster.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows.items()),
        "",
        "Trained by `"
        + (record.get("command") or "unknown")
        + "` on answers the target wrote itself.",
        "",
    ]
    if held.get("blocks"):
        taus = held["tree_tau"]
        lines += [
            f"Held out, greedy, simulated at {held['blocks']} anchors (step {held.get('step')}): "
            f"chain tau {held['chain_tau']}; expected calibration error of path probabilities "
            f"{held['ece']}.",
            "",
            "| budget | " + " | ".join(taus) + " |",
            "|---|" + "---|" * len(taus),
            "| tree tau | " + " | ".join(str(v) for v in taus.values()) + " |",
            "",
            "| depth | " + " | ".join(str(d + 1) for d in range(len(held["acceptance"]))) + " |",
            "|---|" + "---|" * len(held["acceptance"]),
            "| accepted, largest budget | " + " | ".join(str(v) for v in held["acceptance"]) + " |",
            "| best token right, given the path | "
            + " | ".join(str(v) for v in held["agreement"])
            + " |",
            "",
        ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Copy a run's best (or last) head to its place, checked: loads, and fits the size limit."""
    parser = argparse.ArgumentParser(prog="python -m train.export", description=__doc__)
    parser.add_argument("--run", required=True, help="run folder of train.train_draft")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--which", choices=("best", "last"), default="best")
    parser.add_argument(
        "--max-bytes", type=int, default=MAX_BYTES, help="largest model.safetensors"
    )
    args = parser.parse_args(argv)
    try:
        source = Path(args.run) / args.which
        if not (source / "model.safetensors").is_file():
            what = "holds no exported head" if Path(args.run).is_dir() else "no such run folder"
            raise ModelFileError(f"{source}: {what}; train first, or give --which last")
        files = {
            name: (source / name).read_bytes()
            for name in ("model.safetensors", "config.json", "provenance.json")
        }
        size = len(files["model.safetensors"])
        if size > args.max_bytes:
            raise ModelFileError(
                f"{source}: {size} bytes of weights exceed {args.max_bytes}; train a smaller "
                "head or raise --max-bytes"
            )
        record = json.loads(files["provenance.json"])
        if record["weights_sha256"] != hashlib.sha256(files["model.safetensors"]).hexdigest():
            raise ModelFileError(
                f"{source}: weights are not those of provenance.json; export them again"
            )
        files["README.md"] = model_card(load_draft(source).config, record).encode()
        write_folder(Path(args.out), files)
        print(json.dumps({"head": args.out, "bytes": size, **record["metrics"]}))
    except JetSpecError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
