"""Stop ids, length and stop strings (cases.md 1, as far as these modules reach)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax import stop
from jetspec_jax.errors import ConfigError

EOS = 9
truncate = jax.jit(stop.truncate_at_stop)


def cut(tokens, count, stop_ids, limit):
    out = truncate(
        jnp.array([tokens]), jnp.array([count]), jnp.array([stop_ids]), jnp.array([limit])
    )
    return tuple(np.asarray(x)[0].item() for x in out)


@pytest.mark.parametrize(
    "limit,want",
    [
        (1, (1, True, stop.REASON_LENGTH)),
        (2, (2, True, stop.REASON_LENGTH)),
        (3, (3, True, stop.REASON_STOP)),  # EOS is also the last token allowed: a stop
        (4, (3, True, stop.REASON_STOP)),
        (100, (3, True, stop.REASON_STOP)),
    ],
)
def test_end_inside_an_accepted_block(limit, want):
    assert cut([1, 2, EOS, 4, 5, 6], 6, [EOS, -1], limit) == want


def test_eos_beyond_the_accepted_tokens_does_not_stop():
    assert cut([1, 2, EOS, 4, 5, 6], 2, [EOS, -1], 100) == (2, False, stop.REASON_NONE)


def test_padding_is_no_stop_id_and_an_empty_round_is_harmless():
    assert cut([-1, -1, -1, -1, -1, -1], 0, [-1, -1], 5) == (0, False, stop.REASON_NONE)
    assert cut([-1, 1, 2, 3, 4, 5], 6, [-1, -1], 100) == (6, False, stop.REASON_NONE)


def test_no_room_ends_with_length():
    assert cut([1, 2, 3, 4, 5, 6], 3, [EOS, -1], 0) == (0, True, stop.REASON_LENGTH)
    assert cut([1, 2, 3, 4, 5, 6], 3, [EOS, -1], 3) == (3, True, stop.REASON_LENGTH)


def test_rows_are_independent():
    tokens = jnp.array([[1, EOS, 3], [1, 2, 3], [7, 2, 3]])
    kept, finished, reason = truncate(
        tokens,
        jnp.array([3, 3, 2]),
        jnp.array([[EOS, -1], [EOS, -1], [8, 7]]),
        jnp.array([9, 3, 9]),
    )
    assert kept.tolist() == [2, 3, 1]
    assert finished.tolist() == [True, True, True]
    assert reason.tolist() == [stop.REASON_STOP, stop.REASON_LENGTH, stop.REASON_STOP]


def run(stops, pieces):
    detector = stop.StopDetector(stops)
    out = [detector.feed(p) for p in pieces]
    return detector, "".join(out) + detector.flush(), out


def test_holds_back_only_what_may_begin_a_stop():
    detector, text, out = run(("END", "##"), ["a E", "N", "x#", "!", " #", "# rest"])
    assert out == ["a ", "", "ENx", "#!", " ", ""]
    assert text == "a ENx#! "
    assert detector.match == stop.StopMatch("##", 8, 10)
    assert detector.feed("more") == ""


def test_the_first_to_be_complete_wins_then_the_longest():
    assert run(("abcde", "c"), ["abcde"])[0].match == stop.StopMatch("c", 2, 3)
    assert run(("b", "ab"), ["xab"])[0].match == stop.StopMatch("ab", 1, 3)


def test_no_stops_passes_text_through():
    assert run((), ["a", "", "b"])[2] == ["a", "", "b"]


@pytest.mark.parametrize("stops", [("",), ("a", ""), (3,), "text"])
def test_bad_stops_are_refused(stops):
    with pytest.raises(ConfigError):
        stop.StopDetector(stops)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=14),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 14), max_size=5),
)
def test_any_cutting_of_the_text_gives_the_brute_force_answer(text, stops, cuts):
    found = [(i + len(s), i, s) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    edges = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    detector, out, _ = run(tuple(stops), pieces)
    if found:
        end, start, s = min(found)
        assert detector.match == stop.StopMatch(s, start, end)
        assert out == text[:start]
    else:
        assert detector.match is None and out == text
