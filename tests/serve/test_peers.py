"""serve.peers: the peers' protocol, the float32 twin of a GGUF, turns, ratios, the last line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

import jetspec_jax.weights
from jetspec_jax.config import WEIGHTS
from jetspec_jax.errors import ConfigError, ModelFileError
from jetspec_jax.stats import SpecStats
from jetspec_jax.weights import open_source
from jetspec_jax.weights.gguf_file import GGUFFile
from serve import peer_figures, peer_llama, peer_torch, peers
from serve.peer_figures import Run
from serve.peer_worker import Worker
from tests.serve.conftest import Run as RunCommand
from tests.serve.fake_llm import FakeLLM
from tests.weights.files import write_gguf

Fake = type[FakeLLM]
ARGS = ("--limit", "3", "--max-tokens", "20", "--turns", "2")

# What peer_llama's script uses of llama-cpp-python. It writes ANSWER, whatever it is asked.
FAKE_LLAMA = """
import ctypes, os
import numpy
__version__ = "0.0-fake"

class Llama:
    def __init__(self, path, n_ctx, n_threads, n_threads_batch, verbose):
        print("a library that prints", path)
        if open(path, "rb").read(4) != b"GGUF":
            raise ValueError("not a GGUF: " + path)
        self.ctx = self

    def n_vocab(self):
        return 258

    def reset(self):
        self.evals = []

    def eval(self, tokens):
        if os.environ.get("CRASH"):
            os.abort()
        self.evals.append(list(tokens))

def llama_get_logits_ith(model, row):
    answer = os.environ["ANSWER"].encode()
    assert row == -1 and len(model.evals[-1]) == 1  # after the prompt, one token each
    model.logits = numpy.zeros(258, numpy.float32)
    model.logits[answer[(len(model.evals) - 2) % len(answer)]] = 1
    return model.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

def llama_print_system_info():
    return b"FAKE = 1 | "
"""
FAKE_TORCH = """
def load(folder, threads):
    assert os.path.exists(folder + "/model.safetensors") and os.path.exists(folder + "/config.json")
    answer = list(os.environ["ANSWER"].encode())
    return {"torch": "0.0-fake", "threads": int(threads)}, lambda ids, n: (answer[:n], n * 0.2)
"""


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An interpreter with a llama_cpp that is not one."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "llama_cpp.py").write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("ANSWER", FakeLLM.answer)
    return sys.executable


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tiny GGUF in place of the bundled one."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind="Q4_1")
    monkeypatch.setattr(jetspec_jax.weights, "bundled_model_path", lambda: path)
    return path


@pytest.fixture
def ready(fake: Fake, model: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Everything but the arithmetic: a fake engine, a tiny file, a known bandwidth, no load."""
    plan = {"memory": {"target_bytes": 50_000_000}}
    monkeypatch.setattr(FakeLLM, "plan", lambda self: plan)
    monkeypatch.setattr(peers, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(peers, "PAUSE_S", 0.0)
    monkeypatch.setattr(peer_torch, "_SCRIPT", FAKE_TORCH)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    return fake


def metadata(writer: gguf.GGUFWriter, arch: str) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_name("")
    writer.add_string("general.license", "apache-2.0")
    writer.add_add_bos_token(False)
    writer.add_token_list(["a", "", "é"])
    writer.add_token_types([1, 3, 1])
    writer.add_token_scores([0.5, -1.0, 2.0])


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_float32_twin_of_a_gguf(tmp_path: Path, kind: str) -> None:
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(source, kind=kind, metadata=metadata)
    assert peer_llama.write_f32_gguf(source, target) == target
    ours, theirs = open_source(source), open_source(target)
    assert theirs.names() == ours.names()
    for name in ours.names():
        assert np.array_equal(ours.read(name), theirs.read(name)), name
    before, after = GGUFFile(source), GGUFFile(target)
    assert list(after.tensors) == list(before.tensors)
    assert {t.type_name for t in after.tensors.values()} == {"F32"}
    assert [t.shape for t in after.tensors.values()] == [t.shape for t in before.tensors.values()]
    # metadata, types included, as another reader sees them
    old, new = (gguf.GGUFReader(path).fields for path in (source, target))
    assert new.keys() - {"general.file_type"} == old.keys() - {"general.file_type"}
    assert new["general.file_type"].contents() == gguf.LlamaFileType.ALL_F32
    for key in old.keys() - {"general.file_type", "GGUF.tensor_count", "GGUF.kv_count"}:
        assert new[key].types == old[key].types and new[key].contents() == old[key].contents(), key


def test_llama_protocol(python: str, model: Path) -> None:
    with peer_llama.start(python, model, 2_048, 2) as worker:
        assert worker.facts == {
            "llama-cpp-python": "0.0-fake",
            "threads": 2,
            "system": "FAKE = 1 |",
        }
        for count in (3, 9):  # reset between
            ids, seconds = worker.decode([5, 6, 7], count)
            assert bytes(ids).decode() == FakeLLM.answer[:count] and seconds > 0


def test_a_peer_that_dies_is_named(
    python: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH", "1")
    with (
        peer_llama.start(python, model, 2_048, 2) as worker,
        pytest.raises(ModelFileError, match=r"--llama-python .* ended by SIGABRT"),
    ):
        worker.decode([5, 6], 3)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("def load(): import no_such_thing", r"No module named 'no_such_thing'; run: .*install x"),
        ("def load(): raise OSError('odd file')", r"does not start \(OSError: odd file\)"),
        ("sys.exit(3)", "ended with status 3"),
        ("print('hello', file=channel, flush=True)", r"answers 'hello\\n', which is not JSON"),
    ],
)
def test_a_peer_that_does_not_start(script: str, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        Worker("--x-python", sys.executable, script, (), "x")
    assert "\n" not in str(caught.value)


def test_no_such_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"--x-python /no/such: No such file"):
        Worker("--x-python", "/no/such", "", (), "x")


def test_everyone_starts_in_turn() -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str) -> peers.Decode:
        def decode(ids: Sequence[int], max_tokens: int) -> Run:
            order.append((name, ids[0]))
            return Run((1,) * max_tokens, 1.0)

        return decode

    prompts = [("p", [7]), ("q", [8])]
    runs = peers.take_turns({n: contender(n) for n in "abc"}, prompts, 4, 2)
    assert "".join(name for name, _ in order) == "abcbcacababc"
    assert [prompt for _, prompt in order] == [7] * 6 + [8] * 6
    assert all([len(turns) for turns in runs[n]] == [2, 2] for n in "abc")


def made(seconds: Sequence[Sequence[float]], tokens: Sequence[int] = (1, 2, 3, 4)) -> list:
    stats = SpecStats(2, (0, 2), (2,), 4, 4)  # tau 2
    return [[Run(tuple(tokens), s, stats) for s in turns] for turns in seconds]


def test_ratios() -> None:
    runs = {
        "llama_cpp_q4_1": made([[1.0], [3.0]], (1, 2, 9, 4)),
        "stored_plain": made([[0.5, 0.4, 9.0], [1.5, 1.5, 1.5]]),  # 9.0 is no median
        "stored_speculative": made([[0.25], [0.75]]),
        "float32_plain": made([[2.0], [6.0]]),
    }
    got = peer_figures.summarise(runs, ["p", "q"])
    assert got["tokens_identical"] is True and got["first_different"] is None
    assert got["tok_s"]["llama_cpp_q4_1"] == 2.0 and got["tok_s"]["stored_plain"] == 4.0
    assert got["vs_llama_cpp_q4_1"] == {"plain": 2.0, "speculative": 4.0}
    assert got["vs_own_plain"] == {"stored": 2.0, "float32": None}
    # not run: null, never left out
    assert got["tok_s"]["transformers"] is None and got["tok_s"]["float32_speculative"] is None
    assert got["vs_llama_cpp_f32"] == {"plain": None, "speculative": None}
    assert got["vs_transformers"] == {"plain": None, "speculative": None}
    assert got["tau"] == {"stored": 2.0, "float32": None}
    assert got["agreement"]["llama_cpp_q4_1"] == {"leading_share": 0.5, "prompts_equal": 0}
    assert got["agreement"]["transformers"] is None
    assert got["per_prompt"][1]["tok_s"]["stored_plain"] == 2.67
    limit = peer_figures.bandwidth_figures(
        runs, {"stored": 100_000_000, "float32": 500_000_000}, 2e9
    )
    assert limit["plain_of_bandwidth_limit"] == {"stored": 0.2, "float32": 0.25}
    assert limit["bandwidth_gb_s"] == 2.0


def test_any_difference_among_ours_counts() -> None:
    runs = {
        "stored_plain": made([[1.0, 1.0], [1.0, 1.0]]),
        "float32_plain": made([[1.0], [1.0]]),
    }
    runs["float32_plain"][1] = made([[1.0]], (1, 2, 3, 5))[0]
    got = peer_figures.summarise(runs, ["p", "q"])
    assert got["tokens_identical"] is False
    assert got["first_different"] == {"id": "q", "contender": "float32_plain", "token": 3}
    runs["float32_plain"][1] = runs["stored_plain"][1]
    runs["stored_plain"][0][1] = Run((1, 2, 3), 1.0)  # plain itself, in its second turn
    got = peer_figures.first_different(runs, ["p", "q"])
    assert got == {"id": "p", "contender": "stored_plain", "token": 3}


def test_last_line(ready: Fake, python: str, run: RunCommand) -> None:
    got = run(peers.main, *ARGS, "--llama-python", python, "--torch-python", python)
    assert got.code == 0, got.err
    assert got.out.count("\n") == 1  # what libraries print is not on stdout
    last = got.last
    assert last["prompts"] == 3 and last["tokens_identical"] is True
    for peer in peer_figures.PEERS:
        assert last["agreement"][peer] == {"leading_share": 1.0, "prompts_equal": 3}
        assert last["tok_s"][peer] > 0
    assert last["tok_s"]["float32_plain"] == 10.0 and last["tok_s"]["float32_speculative"] == 20.0
    assert last["vs_transformers"] == {"plain": 2.0, "speculative": 4.0}
    assert last["vs_llama_cpp_f32"]["speculative"] == pytest.approx(
        2 * last["vs_llama_cpp_f32"]["plain"], abs=0.01
    )
    assert last["vs_own_plain"] == {"stored": 2.0, "float32": 2.0}
    assert last["tau"] == {"stored": 4.0, "float32": 4.0}
    assert last["plain_of_bandwidth_limit"]["float32"] == 0.5 and last["bandwidth_gb_s"] == 1.0
    for key in ("hardware", "threads", "versions", "dtype", "batch", "method", "command", "suite"):
        assert last[key] not in (None, ""), key
    assert last["peers"]["llama_cpp_f32"]["llama-cpp-python"] == "0.0-fake"
    assert "side by side" in got.err and "llama.cpp, Q4_1 file" in got.err
    assert "skipped" not in got.err
    # every engine: a warm-up, then a plain and a speculative run per turn
    assert [llm.engine.weights for llm in ready.made] == list(WEIGHTS)
    for llm in ready.made:
        assert sorted(llm.calls) == ["plain"] * 7 + ["spec"] * 7


def test_peers_without_an_interpreter_are_skipped(ready: Fake, run: RunCommand) -> None:
    got = run(peers.main, *ARGS)
    assert got.code == 0
    said = [line for line in got.err.splitlines() if "skipped" in line]
    assert [line.split(" given")[0] for line in said] == [
        "llama.cpp: skipped, no --llama-python",
        "transformers: skipped, no --torch-python",
    ]
    assert got.last["vs_llama_cpp_q4_1"] == {"plain": None, "speculative": None}
    assert got.last["peers"] == {} and got.last["tok_s"]["float32_plain"] == 10.0


def test_a_peer_with_other_tokens_is_no_failure(
    ready: Fake, python: str, run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSWER", FakeLLM.answer[:5] + "something else, and more of it")
    got = run(peers.main, *ARGS, "--llama-python", python)
    assert got.code == 0 and got.last["tokens_identical"] is True
    assert got.last["agreement"]["llama_cpp_q4_1"] == {"leading_share": 0.25, "prompts_equal": 0}


def test_our_own_difference_is_exit_code_1(
    ready: Fake, run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "differ_at", 4)
    got = run(peers.main, *ARGS)
    assert got.code == 1 and got.last["tokens_identical"] is False
    assert got.last["first_different"]["token"] == 4
    assert "TOKENS DIFFER from plain decoding" in got.err


def test_a_busy_machine_is_named(
    ready: Fake, run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 3.0, 3.0))
    got = run(peers.main, *ARGS)
    assert "the load average is 3.0" in got.err and got.last["load_average_before"] == 3.0


def test_bandwidth_is_that_of_a_memory() -> None:
    assert 1e7 < peers.read_bandwidth(8 << 20) < 1e13


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--suite", "nope"], 2, "neither a known suite"),
        (["--limit", "0"], 2, "--limit 0"),
        (["--max-tokens", "0"], 2, "--max-tokens 0: give at least 1"),
        (["--turns", "0"], 2, "--turns 0: give at least 1"),
        (["--llama-python", "/no/such"], 2, "--llama-python /no/such: No such file"),
        (["--torch-python", "/no/such"], 2, "--torch-python /no/such: No such file"),
        (["--max-tokens", "2000"], 1, "lower --max-tokens"),
        (["--lama-python", "x"], 2, "did you mean --llama-python?"),
    ],
)
def test_bad_input_is_one_line(
    ready: Fake, run: RunCommand, argv: list[str], code: int, words: str
) -> None:
    got = run(peers.main, *argv)
    assert got.code == code and words in got.error and got.out == ""
