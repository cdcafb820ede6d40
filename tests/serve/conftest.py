"""The fake engine in place of the real one, and a way to run a command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

import jetspec_jax
from tests.autotune.conftest import workers  # noqa: F401  # serve.autotune runs over them, too
from tests.serve.fake_llm import FakeLLM


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(jetspec_jax, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "differ_at", None)
    monkeypatch.setattr(FakeLLM, "interrupt_at", None)
    return FakeLLM


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def last(self) -> Any:
        return json.loads(self.out.rstrip("\n").split("\n")[-1])

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(main, *argv) -> Outcome; argparse's own exits included."""

    def call(main: Callable[[list[str]], int], *argv: str) -> Outcome:
        capsys.readouterr()
        try:
            code = main(list(argv))
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return call
