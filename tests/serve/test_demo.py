"""serve.demo: the line that `make demo` promises."""

from __future__ import annotations

import pytest

from serve import demo
from tests.serve.conftest import Run
from tests.serve.fake_llm import FakeLLM

Fake = type[FakeLLM]


def test_demo(fake: Fake, run: Run) -> None:
    got = run(demo.main, "--max-tokens", "17")
    assert got.code == 0
    assert got.err.startswith("loading SmolLM2-135M-Instruct (bundled)")
    assert got.out.startswith(FakeLLM.answer[:17] + "\n")
    last = got.last
    for key in (
        "model",
        "prompts",
        "tokens_identical",
        "speedup",
        "tau",
        "plain_tok_s",
        "spec_tok_s",
        "hardware",
        "dtype",
    ):
        assert key in last
    assert last["tokens_identical"] is True and last["prompts"] == 6 and last["tau"] == 4.0
    assert last["speedup"] == pytest.approx(2.0) and last["plain_tok_s"] == pytest.approx(10.0)
    assert "\x1b" not in got.out  # no terminal, no colour


def test_demo_fails_when_tokens_differ(
    fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "differ_at", 4)
    got = run(demo.main, "--max-tokens", "17", "--limit", "2")
    assert got.code == 1 and got.last["tokens_identical"] is False
    assert "TOKENS DIFFER" in got.err


@pytest.mark.parametrize(
    "argv", [["--limit", "0"], ["--spec", "off"], ["--max-tokens", "0"], ["--modle", "x"]]
)
def test_bad_input(fake: Fake, run: Run, argv: list[str]) -> None:
    got = run(demo.main, *argv)
    assert got.code == 2 and got.error and got.out == ""
