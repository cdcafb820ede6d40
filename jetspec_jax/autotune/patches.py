"""Patches that an external explorer gives back: made, checked and applied, never trusted.

All of it is done by git in a repository of our own beside the copies, so neither the user's
repository nor anything that an explorer wrote into its copy (hooks, configuration, filters) has a
say. What a patch touches is read from git's index after it was applied, not from its text: renames,
copies and mode changes cannot hide there.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from jetspec_jax.errors import ConfigError, InputError

# Where a patch may change something, and what of that it may not.
ALLOWED = ("pallas_kernels/", "jetspec_jax/")
PROTECTED = (
    "jetspec_jax/autotune/",  # gate, worker, sandbox, memory
    "jetspec_jax/testing.py",  # the tests' engines
    "jetspec_jax/intervals.py",
    "jetspec_jax/stats.py",  # the definitions of every figure
    "jetspec_jax/errors.py",
    "jetspec_jax/__init__.py",  # runs before the worker does
    "pallas_kernels/__init__.py",
    "pallas_kernels/bench.py",
    "pallas_kernels/bench_gpu.py",
    "pallas_kernels/bench_round.py",
)
PROTECTED_NAMES = (
    "reference.py",  # what kernels are tested against
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
)
SUFFIXES = (".py", ".cc", ".h")  # of files that may be changed or added
_PLAIN_FILE = "100644"
_NO_FILE = "000000"
_LARGEST = 1 << 20  # bytes of a patch
_GIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Change:
    """One file that a patch touches; modes as git writes them, status A, M, D or T."""

    path: str
    old_mode: str
    new_mode: str
    status: str


def refusal(change: Change) -> str | None:
    """Why a change is not allowed, None if it is."""
    path = PurePosixPath(change.path)
    if not change.path.startswith(ALLOWED):
        return f"{path} is not among {' and '.join(ALLOWED)}, where explorers may work"
    if change.path.startswith(PROTECTED) or path.name in PROTECTED_NAMES:
        return f"{path} is read-only: it belongs to the gate, the tests or the benchmark"
    if path.suffix not in SUFFIXES or any(part.startswith(".") for part in path.parts):
        return f"{path} is no source file; explorers change {', '.join(SUFFIXES)}"
    modes = {change.old_mode, change.new_mode}
    if not modes <= {_PLAIN_FILE, _NO_FILE}:
        return f"{path} would have mode {change.new_mode}; only plain files may change"
    return None


def shadows(change: Change, tree: Path) -> str | None:
    """Why a new file would take another module's place on import, None if it would not."""
    if change.status != "A":
        return None
    path = tree / change.path
    for parent in [path.with_suffix(""), *path.parents]:
        if parent == tree:
            break
        if parent != path.with_suffix("") and parent.with_suffix(".py").is_file():
            return f"{change.path} would shadow the module {parent.with_suffix('.py').name}"
    if path.suffix == ".py" and path.with_suffix("").is_dir():
        return f"{change.path} has the name of a package"
    return None


def git(folder: Path, work: Path, *arguments: str, text: str | None = None) -> str:
    """Runs git on our own repository `folder` over the files in `work`.

    Raises:
        InputError: git failed; its first line.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    settings = ("core.autocrlf=false", "core.hooksPath=/dev/null", "core.fsmonitor=false")
    settings += ("user.name=gate", "user.email=gate@localhost", "core.quotePath=false")
    command = ["git", f"--git-dir={folder}", f"--work-tree={work}"]
    for setting in settings:
        command += ["-c", setting]
    try:
        done = subprocess.run(
            [*command, *arguments],
            input=text,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            cwd=work,
            env=environment,
            timeout=_GIT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError("git is not on PATH; external explorers need it") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(f"git {arguments[0]} took more than {_GIT_S:g} s on {work}") from error
    if done.returncode:
        first = (done.stderr.strip() or "no message").splitlines()[0]
        raise InputError(f"git {arguments[0]}: {first}; give a patch against the working copy")
    return done.stdout


def tracked_files(tree: Path) -> list[str]:
    """Files under version control in the user's tree (with the changes that are not committed).

    Raises:
        ConfigError: it is no checkout.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), "ls-files", "-z", "--cached"],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{tree} is no git checkout; external explorers work on a copy of its tracked files"
        ) from error
    return sorted({name for name in done.stdout.split("\0") if name})


def copy_tree(tree: Path, target: Path, files: Sequence[str]) -> None:
    """Copies files and symbolic links; what is listed and not there (deleted) is left out."""
    for name in files:
        source, to = tree / name, target / name
        if not source.is_symlink() and not source.is_file():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to, follow_symlinks=False)


def start_repository(folder: Path, base: Path) -> None:
    """Our own repository, with everything in `base` as its one commit."""
    folder.mkdir(parents=True)
    git(folder, base, "init", "--quiet")
    info = folder / "info"
    info.mkdir(exist_ok=True)
    # what running code leaves behind is no change
    (info / "exclude").write_text("__pycache__/\n*.pyc\n.cache/\n.pytest_cache/\n")
    git(folder, base, "add", "--all", "--force")
    git(folder, base, "commit", "--quiet", "--no-verify", "--allow-empty", "-m", "base")


def diff(folder: Path, work: Path) -> str:
    """The patch from the base to the files in `work`.

    Raises:
        InputError: it is larger than a patch may be.
    """
    git(folder, work, "add", "--all")
    made = git(
        folder, work, "diff", "--cached", "--binary", "--no-renames", "--no-ext-diff",
        "--no-textconv", "--no-color", "HEAD",
    )  # fmt: skip
    return _sized(made)


def _sized(patch: str) -> str:
    size = len(patch.encode("utf-8", "surrogateescape"))
    if size > _LARGEST:
        raise InputError(f"the patch has {size} bytes; give at most {_LARGEST}")
    return patch


def read_patch(path: Path) -> str:
    """A patch file.

    Raises:
        InputError: it cannot be read, or is too large.
    """
    try:
        if path.is_symlink() or not path.is_file():
            raise InputError(f"{path.name} is no plain file; write the patch there")
        if path.stat().st_size > _LARGEST:
            raise InputError(f"the patch has {path.stat().st_size} bytes; give at most {_LARGEST}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the patch cannot be read ({error}); write UTF-8 text") from error


def apply_checked(folder: Path, tree: Path, patch: str) -> list[Change]:
    """Applies a patch to `tree`, a copy of the base, and checks everything that it touched.

    Raises:
        InputError: it does not apply, touches nothing, or touches what it may not.
    """
    git(folder, tree, "reset", "--quiet", "HEAD")
    git(folder, tree, "apply", "--index", "--whitespace=nowarn", "-", text=patch)
    raw = git(folder, tree, "diff", "--cached", "--raw", "-z", "--no-renames", "HEAD").split("\0")
    changes = []
    for head, path in zip(raw[::2], raw[1::2], strict=False):
        old_mode, new_mode, _, _, status = head.lstrip(":").split()
        changes.append(Change(path, old_mode, new_mode, status))
    if not changes:
        raise InputError("the patch changes nothing; give one that does")
    for change in changes:
        reason = refusal(change) or shadows(change, tree)
        if reason is not None:
            raise InputError(reason)
    return changes


def apply_to(tree: Path, patch: str, scratch: Path) -> list[Change]:
    """`--apply`: puts an accepted patch into the user's tree, after the same checks on a copy.

    Args:
        tree: the user's checkout.
        patch: the text of the accepted patch.
        scratch: an empty folder for the copy.

    Raises:
        InputError: it does not apply there any more, or is not allowed; the tree is as it was.
    """
    base = scratch / "base"
    copy_tree(tree, base, tracked_files(tree))
    start_repository(scratch / "git", base)
    changes = apply_checked(scratch / "git", base, patch)
    for change in changes:
        to = tree / change.path
        if change.status == "D":
            to.unlink()
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / change.path, to)
    return changes
