"""pallas_kernels <- jetspec_jax <- {train, serve}: nothing imports backwards (architecture.md
section 1).
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "pallas_kernels": {"pallas_kernels"},
    "jetspec_jax": {"jetspec_jax", "pallas_kernels"},
    "train": {"train", "jetspec_jax", "pallas_kernels"},
    "serve": {"serve", "jetspec_jax", "pallas_kernels"},
}
OURS = set(ALLOWED) | {"tests"}


def imports(source: str, package: str) -> list[tuple[int, str]]:
    """(line, top-level package) of every import statement, inside functions and TYPE_CHECKING,
    too.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(
                (node.lineno, (node.module or "").split(".")[0] if not node.level else package)
            )
    return found


def violations(source: str, package: str) -> list[tuple[int, str]]:
    return [
        (line, name) for line, name in imports(source, package) if name in OURS - ALLOWED[package]
    ]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no Python files in {package}/"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in violations(path.read_text(encoding="utf-8"), package)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "package,line",
    [
        ("pallas_kernels", "import jetspec_jax.config"),
        ("pallas_kernels", "def f():\n    from jetspec_jax import config"),
        ("jetspec_jax", "from train.losses import ce"),
        ("jetspec_jax", "import serve as s"),
        ("train", "from serve import cli"),
        ("serve", "from train import step"),
        ("serve", "import tests.conftest"),
    ],
)
def test_the_rule_finds_a_backward_import(package, line):
    assert violations(line, package)


def test_the_rule_lets_the_allowed_direction_through():
    assert not violations(
        "import jax\nfrom pallas_kernels import dispatch\nfrom .config import X", "jetspec_jax"
    )
