"""What `--show-sample` says of a sequence: labels, anchors, tokens the head cannot propose."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from jetspec_jax.errors import ConfigError
from train.config import DataConfig
from train.data import load_dataset
from train.show import STYLES, render, table, tokens_of
from train.train_draft import main

from .conftest import Tiny


@dataclasses.dataclass
class Letters:
    """A tokenizer as far as `tokens_of` needs one."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(f"<{i}>" for i in ids)


def test_marks_are_those_of_the_loss(tiny: Tiny) -> None:
    data = load_dataset(DataConfig(path=str(tiny.data), held_out=0.0))
    sample = data.train[1]
    known = np.asarray(sorted({int(t) for t in sample.tokens[:-1]}), np.int32)
    tokens = tokens_of(data, 1, 5, 0, known, Letters())  # type: ignore[arg-type]
    assert [t.id for t in tokens] == sample.tokens.tolist()
    assert [t.answer for t in tokens] == [i >= sample.spans[0][0] for i in range(sample.length)]
    starts = [i for i, t in enumerate(tokens) if t.anchor]
    assert len(starts) == 5
    # a block needs a token behind its anchor, and begins in the answer
    assert starts[0] >= sample.spans[0][0] - 1 and starts[-1] < sample.length - 1
    assert tokens[-1].known == (sample.tokens[-1] in known)

    text = render(tokens)
    assert text.plain == "".join(t.text for t in tokens)
    styles = {str(span.style) for span in text.spans}
    assert STYLES["prompt"] in styles and STYLES["answer"] in styles
    assert any(style.startswith("reverse") for style in styles)
    lines = table(tokens).splitlines()
    assert len(lines) == sample.length
    assert [i for i, line in enumerate(lines) if "anchor" in line] == starts


def test_a_sequence_that_is_not_there(tiny: Tiny) -> None:
    data = load_dataset(DataConfig(path=str(tiny.data), held_out=0.0))
    with pytest.raises(ConfigError, match=r"--show-sample 99: .* sequences 0 to 22"):
        tokens_of(data, 99, 5, 0, None, Letters())  # type: ignore[arg-type]


def test_a_target_without_tokenizer_is_one_line(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--show-sample", "0", *overrides]) != 0
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ") and "tokenizer" in err
