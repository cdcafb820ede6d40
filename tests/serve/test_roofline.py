"""The roofline's arithmetic and its flags; the command itself on the bundled model."""

import json
from typing import Any

import numpy as np
import pytest

from jetspec_jax.errors import ConfigError
from pallas_kernels import native
from pallas_kernels import row_invariant_matmul as rim
from serve import roofline


def test_rows():
    assert roofline.parse_rows("1,12") == [1, 12]
    for text in ("", "0", "1,,2", "x", "257"):
        with pytest.raises(ConfigError, match="--rows"):
            roofline.parse_rows(text)


def test_work_of_a_matmul():
    w = rim.pack(np.ones((64, 32), np.float32))
    work = roofline.matmul_work([w, w], rows=5)
    assert work.bytes == 2 * 64 * 32 * 4
    assert work.operations == 2 * 64 * 32 / 16 * 5


def test_the_larger_time_bounds():
    work = {"a": roofline.Work(100.0, 5.0), "b": roofline.Work(10.0, 50.0)}
    a, b, c = roofline.lines({"a": 2.0, "b": 9.0, "c": 1.0}, work, bandwidth=100.0, rate=10.0)
    assert (a.memory, a.arithmetic, a.bound) == (1.0, 0.5, 1.0)
    assert (b.memory, b.arithmetic, b.bound) == (0.1, 5.0, 5.0)
    assert c.bound == 0.0


@pytest.mark.slow
def _command(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    before = native.library
    flags = ["--rows", "1,3", "--repeats", "3", "--context", "40", *words]
    assert roofline.main(flags) == 0
    assert native.library is before
    return json.loads(capsys.readouterr().out.splitlines()[-1])


OPS = ("qkv", "o", "gate_up", "down", "head", "attention")


def test_the_command(capsys: pytest.CaptureFixture[str]):
    out = _command(capsys, "--arithmetic", "float")
    one, three = out["forwards"]["1"], out["forwards"]["3"]
    assert out["arithmetic"] == "float" and set(one["ops"]) == set(three["ops"])
    # nothing is faster than the hardware (a busy machine can hide some of the bandwidth); of all
    # ops, since a thread that is put aside sees another's step pass in no time
    ops = [one["ops"][op] for op in OPS]
    assert sum(o["measured"] for o in ops) > 0.5 * sum(o["bound"] for o in ops) > 0
    assert three["bound_s"] >= one["bound_s"]
    assert three["ops"]["gate_up"]["arithmetic"] > one["ops"]["gate_up"]["arithmetic"]
    assert 0.3 < one["matmul_share"] < 1.0


def test_integer_sums_are_held_against_memory_only(capsys: pytest.CaptureFixture[str]):
    out = _command(capsys, "--arithmetic", "integer")
    assert out["arithmetic"] == "integer"
    ops = [out["forwards"]["3"]["ops"][op] for op in OPS[:-1]]
    assert all(o["arithmetic"] == 0 for o in ops)
    assert sum(o["measured"] for o in ops) > 0.5 * sum(o["memory"] for o in ops) > 0
