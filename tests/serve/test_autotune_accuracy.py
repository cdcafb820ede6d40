"""The command that holds the cost model against timed rounds."""

import pytest

from jetspec_jax.errors import ConfigError
from jetspec_jax.testing import tiny_llm
from serve import autotune_accuracy as command


def test_rows_and_numbers():
    row = command.Row("stored", "head", 4, 1, 4.0, predicted=0.011, measured=0.010)
    assert row.error == pytest.approx(0.1)
    assert command.numbers("4,12", "--budgets") == [4, 12]
    for text in ("", "a", "0", "4,65"):
        with pytest.raises(ConfigError, match="--budgets"):
            command.numbers(text, "--budgets")
    assert command.words("head,lookup", command.DRAFTERS, "--drafters") == ["head", "lookup"]
    with pytest.raises(ConfigError, match="--drafters head,x"):
        command.words("head,x", command.DRAFTERS, "--drafters")


def test_a_wrong_flag_is_one_line(capsys):
    assert command.main(["--rounds", "0"]) != 0
    assert "--rounds" in capsys.readouterr().err


def test_rounds_are_counted_and_timed():
    llm = tiny_llm()
    spec = command._spec("lookup", 4)
    spent, nodes = command.time_rounds(llm, spec, [[5, 6, 7, 5, 6, 7, 5, 6]], 3)
    assert 0 < spent < 10
    assert 1 <= nodes <= 4
