"""A training sequence as the loss sees it: prompts, answers, anchors, tokens outside the draft
vocabulary."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
from rich.console import Console
from rich.text import Text

from jetspec_jax.errors import ConfigError
from jetspec_jax.loading import tokenizer_of
from jetspec_jax.text import Tokenizer
from jetspec_jax.weights import bundled_model_path, open_source
from train.config import TrainConfig
from train.data import Dataset, draw_anchors

STYLES = {"prompt": "dim", "answer": "green", "anchor": "reverse green", "unknown": "red"}


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a sequence: its text, its part in the loss, and what it is to the head."""

    id: int
    text: str
    answer: bool  # a label of the loss; prompt tokens are context only
    anchor: bool  # a block starts behind it in the step that is shown
    known: bool  # in the draft vocabulary, so that the head can propose it


def tokens_of(
    data: Dataset,
    index: int,
    anchors: int,
    seed: int,
    id_map: np.ndarray | None,
    tokenizer: Tokenizer,
) -> list[Token]:
    """Training sequence `index`, with `anchors` anchors as a step would draw them.

    Raises:
        ConfigError: there is no such sequence.
    """
    if not 0 <= index < len(data.train):
        raise ConfigError(
            f"--show-sample {index}: the training part has sequences 0 to {len(data.train) - 1}"
        )
    sample = data.train[index]
    drawn, valid = draw_anchors(sample, anchors, np.random.default_rng([seed, index]))
    starts = set(drawn[valid].tolist())
    known = None if id_map is None else set(id_map.tolist())
    return [
        Token(
            int(token),
            tokenizer.decode([int(token)], skip_special=False),
            bool(sample.span_stop[at]),
            at in starts,
            known is None or int(token) in known,
        )
        for at, token in enumerate(sample.tokens)
    ]


def render(tokens: list[Token]) -> Text:
    """The text in colours: prompt dim, answer green, anchors reversed, answer tokens that the head
    cannot propose red."""
    text = Text()
    for token in tokens:
        style = STYLES["answer" if token.answer else "prompt"]
        if token.answer and not token.known:
            style = STYLES["unknown"]
        text.append(token.text, f"reverse {style}" if token.anchor else style)
    return text


def table(tokens: list[Token]) -> str:
    """The same a line a token, for files and pipes: place, id, part, marks, text."""
    lines = []
    for at, token in enumerate(tokens):
        marks = [
            "answer" if token.answer else "prompt",
            *(["anchor"] if token.anchor else []),
            *(["outside-vocabulary"] if token.answer and not token.known else []),
        ]
        lines.append(f"{at:5d} {token.id:6d} {token.text!r} {' '.join(marks)}")
    return "\n".join(lines)


def show_sample(cfg: TrainConfig, data: Dataset, id_map: np.ndarray | None, index: int) -> None:
    """Prints training sequence `index` on stderr, in colours on a terminal.

    Raises:
        ConfigError: there is no such sequence.
        ModelFileError: the target has no usable tokenizer.
    """
    tokenizer = tokenizer_of(open_source(cfg.data.target or bundled_model_path()))
    tokens = tokens_of(data, index, cfg.data.anchors, cfg.data.seed, id_map, tokenizer)
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        print(table(tokens), file=sys.stderr)
        return
    console.print(render(tokens))
    legend = Text("prompt", STYLES["prompt"])
    for name, style in (
        ("answer (labels)", STYLES["answer"]),
        ("anchor", STYLES["anchor"]),
        ("outside the draft vocabulary", STYLES["unknown"]),
    ):
        legend.append(" · ", "dim").append(name, style)
    console.print(legend)
