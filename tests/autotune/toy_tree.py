"""A small checkout that explorers may work on: the worker's modules, `pallas_kernels/toy.py` as the
code to make faster, and the fake engine.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tests.conftest import ROOT

TOY = '''"""The toy's kernel: what it costs, and what it says."""

PAUSE_S = 0.004


def token(context, right):
    return right
'''
TEST = """from pallas_kernels import toy


def test_the_kernel_says_what_is_right():
    assert toy.token([1, 2], 5) == 5
"""


def make(folder: Path) -> Path:
    """A committed checkout in `folder`, with a change that is not committed and a file of the
    user's own.
    """
    tree = folder / "checkout"
    for pattern in ("jetspec_jax/*.py", "jetspec_jax/autotune/*.py", "pallas_kernels/*.py"):
        for source in ROOT.glob(pattern):
            to = tree / source.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to)
    (tree / "tests" / "autotune").mkdir(parents=True)
    for name in (
        "tests/__init__.py",
        "tests/autotune/__init__.py",
        "tests/autotune/fake_engine.py",
    ):
        shutil.copyfile(ROOT / name, tree / name)
    (tree / "pallas_kernels" / "toy.py").write_text(TOY)
    (tree / "tests" / "test_toy.py").write_text(TEST)
    (tree / ".gitignore").write_text("__pycache__/\n.cache/\n")
    (tree / "README.md").write_text("committed\n")
    for words in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=u", "-c", "user.email=u@localhost", "commit", "-qm", "toy"),
    ):
        subprocess.run(["git", "-C", str(tree), *words], check=True)
    (tree / "README.md").write_text("committed, and changed\n")
    (tree / "notes.txt").write_text("the user's own\n")
    return tree


def fingerprint(tree: Path) -> str:
    """Everything below `tree`: names, modes, contents, and what git says."""
    whole = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        if ".git" in path.relative_to(tree).parts:
            continue
        whole.update(f"{path.relative_to(tree)} {path.lstat().st_mode}\n".encode())
        if path.is_file():
            whole.update(path.read_bytes())
    for words in (
        ("status", "--porcelain=v2", "--branch"),
        ("rev-parse", "HEAD"),
        ("stash", "list"),
    ):
        whole.update(subprocess.check_output(["git", "-C", str(tree), *words]))
    return whole.hexdigest()
