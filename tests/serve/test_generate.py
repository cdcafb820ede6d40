"""serve.generate: what comes out on which stream, and how it ends."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from serve import cli, generate
from tests.serve.conftest import Run
from tests.serve.fake_llm import PLAIN_S, SPEC_S, FakeLLM

ROOT = Path(__file__).parents[2]
Fake = type[FakeLLM]


def test_text_on_stdout_and_the_rest_on_stderr(fake: Fake, run: Run) -> None:
    got = run(generate.main, "what?")
    assert got.code == 0
    assert got.out == FakeLLM.answer + "\n"
    assert got.err.splitlines()[0].startswith("loading SmolLM2-135M-Instruct (bundled)")
    assert "tau 4.00" in got.err and "20.0 tok/s" in got.err


def test_json_is_one_document_and_nothing_else(fake: Fake, run: Run) -> None:
    got = run(
        generate.main, "what?", "--json", "--compare", "--stats", "--tree", "--max-tokens", "20"
    )
    document = got.json
    assert got.code == 0 and document["version"] == 1 and document["interrupted"] is False
    (result,) = document["results"]
    assert result["text"] == FakeLLM.answer[:20] and result["finish_reason"] == "length"
    assert result["spec"]["tau"] == 4.0 and result["spec"]["accepted_hist"] == [0, 0, 0, 5]
    assert result["compare"]["identical"] is True
    assert result["compare"]["speedup"] == pytest.approx(PLAIN_S / SPEC_S)
    assert result["trace"][0]["path"] == [0, 1, 2, 3]
    assert document["sampling"]["max_tokens"] == 20 and document["hardware"]


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_jsonl_keeps_order_and_count(fake: Fake, run: Run, tmp_path: Path, batch: int) -> None:
    lines = [{"prompt": f"p{i}" * (i + 1), "id": f"id{i}", "max_tokens": i + 1} for i in range(5)]
    file = tmp_path / "many.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    got = run(generate.main, "--prompts", str(file), "--jsonl", "--batch-size", str(batch))
    rows = [json.loads(line) for line in got.out.splitlines()]
    assert got.code == 0
    assert [row["index"] for row in rows] == list(range(5))
    assert [row["id"] for row in rows] == [line["id"] for line in lines]
    assert [len(row["token_ids"]) for row in rows] == [1, 2, 3, 4, 5]
    assert max(fake.made[0].batches) == min(batch, 5)


def test_messages_and_stdin(fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"messages": [{"role": "user", "content": "a\u2028b"}]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(row, ensure_ascii=False) + "\n"))
    got = run(generate.main, "--prompts", "-", "--system", "be brief", "--json")
    assert got.code == 0 and len(got.json["results"]) == 1
    assert bytes(fake.made[0].prompts[0]).decode() == "system: be brief\nuser: a\u2028b\n"


def test_no_chat_sends_the_text_itself(fake: Fake, run: Run) -> None:
    assert run(generate.main, "--no-chat", "--prompt", "def f(").code == 0
    assert bytes(fake.made[0].prompts[0]) == b"def f("


@pytest.mark.parametrize("extra", [[], ["--json"], ["--jsonl"]])
def test_compare_fails_on_a_planted_difference(
    fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    monkeypatch.setattr(FakeLLM, "differ_at", 7)
    got = run(generate.main, "what?", "--compare", *extra)
    assert got.code == 1
    assert "TOKENS DIFFER from plain decoding at token 7" in got.err
    if extra:
        assert json.loads(got.out)  # still valid
    monkeypatch.setattr(FakeLLM, "differ_at", None)
    good = run(generate.main, "what?", "--compare", *extra)
    assert good.code == 0 and "speed-up 2.00x" in good.err


def test_ctrl_c_in_a_stream_prints_partial_statistics(
    fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "interrupt_at", 2)
    got = run(generate.main, "what?")
    assert got.code == 130
    assert got.out == FakeLLM.answer[:8] + "\n"
    assert "interrupted after 8 tokens, 2 rounds" in got.err


def test_ctrl_c_in_many_prompts_keeps_what_is_done(
    fake: Fake, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text('{"prompt": "a"}\n' * 4)
    monkeypatch.setattr(FakeLLM, "interrupt_at", 2)
    got = run(generate.main, "--prompts", str(file), "--json")
    assert got.code == 130
    assert got.json["interrupted"] is True and len(got.json["results"]) == 2


def test_tree_shows_the_accepted_path(fake: Fake, run: Run) -> None:
    got = run(generate.main, "what?", "--tree")
    assert "3 accepted" in got.err and got.err.count("✓ '") == 3 and "· 'z'" in got.err
    assert "the target's own next token: '!'" in got.err
    assert got.out == FakeLLM.answer + "\n"
    late = run(generate.main, "what?", "--tree-round", "99")
    assert late.code == 1 and "only" in late.error


def test_accepted_tokens_in_colour(fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    got = run(generate.main, "what?", "--color-accepted")
    assert got.out.startswith("\x1b[32mdef\x1b[0m ")
    assert got.out.replace("\x1b[32m", "").replace("\x1b[0m", "") == FakeLLM.answer + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(generate.main, "what?", "--color-accepted").out


def test_plan_prints_and_generates_nothing(fake: Fake, run: Run) -> None:
    got = run(generate.main, "--plan", "--json")
    assert got.code == 0 and got.json["memory"] == {"weights_mb": 1.5} and fake.made[0].calls == []
    assert "budget  4" in run(generate.main, "--plan").out


def test_spec_config_from_json_and_file_and_flags_on_top(
    fake: Fake, run: Run, tmp_path: Path
) -> None:
    run(generate.main, "x", "--spec-config", '{"budget": 8, "width": 3}', "--budget", "5")
    assert (fake.made[0].spec.budget, fake.made[0].spec.width) == (5, 3)
    for path in sorted((ROOT / "configs" / "spec").glob("*.toml")):
        got = run(generate.main, "x", "--spec-config", str(path))
        assert got.code == 0, (path, got.err)


BAD_INPUT = [
    ([], 2, "no prompt"),
    ([""], 1, "the prompt is empty"),
    ([" \n"], 1, "the prompt is empty"),
    (["a", "--prompt", "b"], 2, "once"),
    (["a", "b"], 2, "quotes"),
    (["a", "--budget", "1000"], 2, "give at most 256"),
    (["a", "--model", ""], 2, "--model is empty"),
    (["a", "--draft", " "], 2, "--draft is empty"),
    (["a", "--color-accepted", "--json"], 2, "--color-accepted colours text"),
    (["a", "--spec", "off", "--budget", "8"], 2, "--budget cannot apply with --spec off"),
    (["a", "--spec", "off", "--head-depth", "2"], 2, "--head-depth cannot apply with --spec off"),
    (["a", "--drafter", "none", "--budget", "4"], 2, "--budget cannot apply with --drafter none"),
    (["a", "--drafter", "lookup", "--head-depth", "2"], 2, "cannot apply with --drafter lookup"),
    (["a", "--draft", "none", "--draft-weights", "stored"], 2, "cannot apply with --draft none"),
    (["a", "--budgett", "3"], 2, "unknown flag --budgett; did you mean --budget?"),
    (["a", "--max_tokens=3"], 2, "did you mean --max-tokens?"),
    (["a", "--budget", "many"], 2, "invalid int value"),
    (["a", "--spec", "forest"], 2, "invalid choice"),
    (["a", "--max-tokens", "0"], 2, "max_tokens=0"),
    (["a", "--temperature", "-1"], 2, "temperature=-1.0"),
    (["a", "--top-p", "0"], 2, "top_p"),
    (["a", "--stop", ""], 2, "stop"),
    (["a", "--capacity", "0"], 2, "capacity"),
    (["a", "--budget", "0"], 2, "budget"),
    (["a", "--batch-size", "0"], 2, "--batch-size 0"),
    (["a", "--logprobs", "2"], 2, "--json"),
    (["a", "--json", "--jsonl"], 2, "exclude"),
    (["a", "--no-chat", "--system", "s"], 2, "--no-chat"),
    (["a", "--spec", "off", "--compare"], 2, "nothing to compare"),
    (["a", "--drafter", "none", "--tree"], 2, "no tree"),
    (["a", "--spec-config", "{bad"], 2, "--spec-config: not valid JSON"),
    (["a", "--spec-config", '{"bugdet": 3}'], 2, "did you mean 'budget'?"),
    (["a", "--spec-config", "/no/such.toml"], 2, "No such file"),
    (["a", "--chat-template-kwargs", "[1]"], 2, "JSON object"),
    (["a", "--model", "/no/such/model"], 1, "--model /no/such/model: no such file"),
    (["a", "--draft", "./nothing"], 1, "give a draft head's directory"),
    (["--prompts", "/no/such.jsonl"], 1, "/no/such.jsonl: No such file"),
    (["x" * 3000], 1, "the prompt has 3007 tokens, but the context holds 2048"),
]


@pytest.mark.parametrize(
    ("argv", "code", "words"), BAD_INPUT, ids=[str(i) for i in range(len(BAD_INPUT))]
)
def test_bad_input_is_one_line_and_an_exit_code(
    fake: Fake, run: Run, argv: list[str], code: int, words: str
) -> None:
    got = run(generate.main, *argv)
    assert got.code == code
    assert words in got.error
    assert got.out == ""
    assert run(generate.main, "fine").code == 0  # and the next request is served


BAD_LINES = [
    ("{", "line 2: not valid JSON"),
    ("[1]", "line 2: needs exactly one"),
    ('{"text": "a"}', "line 2: needs exactly one"),
    ('{"prompt": "a", "messages": []}', "line 2: needs exactly one"),
    ('{"prompt": 3}', "line 2: the prompt must be text"),
    ('{"prompt": ""}', "line 2: the prompt is empty"),
    ('{"messages": []}', 'line 2: "messages" must be a non-empty list'),
    ('{"messages": [{"role": "user"}]}', "line 2: messages[0] needs"),
    ('{"messages": [{"role": "robot", "content": "a"}]}', "line 2: messages[0] role 'robot'"),
    ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens=0"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_bad_lines_name_file_and_line(
    fake: Fake, run: Run, tmp_path: Path, line: str, words: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "good"}\n' + line + "\n")
    got = run(generate.main, "--prompts", str(file), "--jsonl")
    assert got.code == 1 and got.out == ""
    assert f"{file}, {words}" in got.error
    assert fake.made == []  # found before anything was loaded


def test_an_unexpected_error_is_one_line_without_debug(
    fake: Fake, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(FakeLLM, "warmup", broken)
    got = run(generate.main, "a")
    assert got.code == 1 and got.error.startswith("error: ValueError: first line second line")
    with pytest.raises(ValueError):
        run(generate.main, "a", "--debug")


def test_a_closed_pipe_ends_quietly() -> None:
    code = (
        "import sys, jetspec_jax; from tests.serve.fake_llm import FakeLLM; jetspec_jax.LLM "
        "= FakeLLM\n"
        "FakeLLM.answer = 'x' * 200_000\n"
        "from serve.generate import main; sys.exit(main(['a', '--max-tokens', '200000']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(30) == 0
    assert "Traceback" not in err and "Broken" not in err and "Exception" not in err


def test_the_first_line_comes_before_the_heavy_imports() -> None:
    """jax takes over a second to import: importing the command must not do it."""
    code = (
        "import sys, time, serve.generate, serve.bench, serve.demo\n"
        "print([m for m in ('jax', 'numpy', 'matplotlib') if m in sys.modules])\n"
        "print(time.process_time())"
    )
    got = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    heavy, seconds = got.stdout.splitlines()
    assert heavy == "[]"
    # Processor time, not the clock: a busy machine must not fail this. Imports alone are 0.1 s.
    assert float(seconds) < 0.6


def test_json_has_no_nan() -> None:
    assert (
        cli.dump_json({"a": float("nan"), "b": [float("inf"), 1.5]})
        == '{"a": null, "b": [null, 1.5]}'
    )


def test_tuned_reaches_the_engine_and_a_missing_path_is_refused(
    fake: type[FakeLLM], run: Run
) -> None:
    def asked(*argv: str) -> dict[str, object]:
        assert run(generate.main, "hello", "--json", *argv).code == 0
        return fake.made[-1].asked

    assert asked() == {"tuned": None, "batch": 1}
    assert asked("--tuned", "off", "--batch-size", "4") == {"tuned": "off", "batch": 4}
    outcome = run(generate.main, "hello", "--tuned", "/nowhere/tuned")
    assert outcome.code == 2 and "--tuned /nowhere/tuned: no such file or folder" in outcome.error
    document = run(generate.main, "hello", "--json").json
    assert document["tuned"]["entry"] is None and "heuristic" in document["tuned"]["reason"]
