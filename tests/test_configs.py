"""Every file in configs/ names its command, its cost and what to expect, and the command is a real
one.
"""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from jetspec_jax.config import SpecConfig
from jetspec_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
COMMAND = re.compile(r"python -m ((?:serve|train)(?:\.\w+)+)(.*)")


def head_comment(text: str) -> str:
    """The comment at the start of a file, without the marks."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return "\n".join(lines)


def problems(path: str, text: str) -> list[str]:
    """What is missing in the head comment of a config file."""
    head = head_comment(text)
    found = []
    command = COMMAND.search(head)
    if command is None:
        found.append("names no command `python -m serve....` or `python -m train....`")
    else:
        module, arguments = command.groups()
        if path not in head:
            found.append(
                f"its command does not use the file itself ({path}); it says {arguments.strip()!r}"
            )
        if importlib.util.find_spec(module) is None:
            found.append(f"its command names {module}, which does not exist")
    if not re.search(r"\bcosts?\b", head, re.IGNORECASE):
        found.append("says nothing about its cost (time, memory, hardware)")
    if not re.search(r"\bexpect", head, re.IGNORECASE):
        found.append("does not say what to expect")
    return found


def test_there_are_configs():
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_config_names_its_command_cost_and_expectation(path):
    text = path.read_text(encoding="utf-8")
    tomllib.loads(text)
    assert not problems(str(path.relative_to(ROOT)), text)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "spec").glob("*.toml")), ids=lambda p: p.name
)
def test_spec_configs_are_valid(path):
    SpecConfig.from_mapping(tomllib.loads(path.read_text(encoding="utf-8")))


def test_the_check_finds_what_is_missing():
    good = (
        "# What it is.\n# python -m serve.bench --spec-config configs/a.toml\n# Cost: 1 minute."
        " Expect 2x.\nx = 1\n"
    )
    assert problems("configs/a.toml", good) == []
    assert len(problems("configs/a.toml", "x = 1\n" + good)) == 3
    assert "does not use the file" in problems("configs/b.toml", good)[0]
    assert (
        "does not exist"
        in problems("configs/a.toml", good.replace("serve.bench", "serve.nothing"))[0]
    )
    assert len(problems("configs/a.toml", good.replace("Cost", "It").replace("Expect", "So"))) == 2


@pytest.mark.parametrize("field", ["budget", "depth", "head_depth", "width", "lookup_ngram"])
@pytest.mark.parametrize("value", [2.5, True, "3", 0])
def test_counts_are_whole_numbers(field, value):
    with pytest.raises(ConfigError, match=f"SpecConfig.{field}=.*give at least 1"):
        SpecConfig(**{field: value})
