"""Arithmetic word problems, made up procedurally (our own text; no evaluation suite is read
here).
"""

from __future__ import annotations

import random
from collections.abc import Callable

_NAMES = (
    "Amara Bruno Chen Dalia Emeka Farah Goran Hana Ivo Jamila Kofi Lena Marco Nadia Omar Petra Quinn Rosa Samir Tara "
    "Umar Vera Wes Ximena Yusuf Zoe Anton Bea Caleb Dora Elias Freya Gus Helga Igor Juno Karim Lotte Mina Nico"
).split()
_THINGS = (
    "apples marbles stickers books pencils cookies postcards shells coins balloons candles tomatoes buttons stamps "
    "muffins bracelets photos cards oranges eggs beads tickets flowers bottles keyrings plants magnets puzzles"
).split()
_PLACES = (
    "market school farm library bakery museum station office garden workshop harbour stadium hotel"
).split()
_JOBS = (
    "gardener baker tailor painter courier potter carpenter tutor plumber farmer jeweller cook"
).split()
_ASKS = (
    "",
    "",
    "",
    " Show your working.",
    " Explain each step.",
    " Think step by step.",
    " Give the final number.",
)


def _n(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    return rng.randrange(low, high + 1, step)


def _give_away(r: random.Random) -> str:
    a, b = r.sample(_NAMES, 2)
    x, thing = _n(r, 20, 90), r.choice(_THINGS)
    y, z = _n(r, 2, 9), _n(r, 3, 15)
    return r.choice((
        f"{a} owns {x} {thing}. {b} gets {y} of them, and then {a} buys {z} more. How many {thing} does {a} own now?",
        f"{a} collected {x} {thing} on Monday and {z} on Tuesday, but lost {y}. {b} has twice what {a} has left. "
        f"How many {thing} does {b} have?",
        f"There are {x} {thing} in a crate. {a} takes out {y}, {b} takes out {z}. What fraction of the crate is left?",
    ))  # fmt: skip


def _prices(r: random.Random) -> str:
    a, thing, other = r.choice(_NAMES), *r.sample(_THINGS, 2)
    p, q, x, y = _n(r, 2, 15), _n(r, 2, 9), _n(r, 2, 12), _n(r, 2, 12)
    note = r.choice((50, 100, 200, 500))
    return r.choice((
        f"At the {r.choice(_PLACES)} shop, {thing} cost ${p} each and {other} cost ${q} each. {a} buys {x} {thing} and "
        f"{y} {other}. What is the bill?",
        f"{a} pays for {x} {thing} at ${p} each with ${note}. How much change should {a} get, or how much is missing?",
        f"A box with {x} {thing} sells for ${p * x}. {a} needs {y} boxes and has a coupon for {_n(r, 5, 40, 5)}% off. "
        f"How much does {a} pay?",
        f"{a} bought {x} {thing} for ${p} each and sold all of them for ${p + q} each. How much profit was made?",
    ))  # fmt: skip


def _wages(r: random.Random) -> str:
    a, job = r.choice(_NAMES), r.choice(_JOBS)
    rate, hours, days = _n(r, 9, 40), _n(r, 3, 9), _n(r, 2, 6)
    return r.choice((
        f"{a} works as a {job} and earns ${rate} per hour. {a} works {hours} hours on each of {days} days. After paying "
        f"{_n(r, 10, 30, 5)}% tax, what is left?",
        f"A {job} charges a fixed ${_n(r, 20, 80, 5)} per visit plus ${rate} for every hour. {a} got a visit of {hours} "
        f"hours. How much is owed?",
        f"{a} the {job} is paid ${rate} an hour for the first {hours} hours of a day and 50% more after that. How much "
        f"does {a} earn on a day of {hours + days} hours?",
    ))  # fmt: skip


def _travel(r: random.Random) -> str:
    a, b = r.sample(_NAMES, 2)
    v, t, w = _n(r, 20, 110, 5), _n(r, 2, 7), _n(r, 10, 60, 5)
    return r.choice((
        f"{a} drives at {v} km per hour for {t} hours, then at {w} km per hour for one more hour. How far is the trip?",
        f"A train covers {v * t} km in {t} hours. At that speed, how long would {v * (t + 2)} km take?",
        f"{a} and {b} start from the same {r.choice(_PLACES)} in opposite directions at {v} and {w} km per hour. How far "
        f"apart are they after {t} hours?",
        f"{a} cycles {w} km to the {r.choice(_PLACES)} and walks back {w // 5} km less. How long is the whole way?",
    ))  # fmt: skip


def _sharing(r: random.Random) -> str:
    a, b, c = r.sample(_NAMES, 3)
    k, x, thing = _n(r, 2, 5), _n(r, 4, 30), r.choice(_THINGS)
    return r.choice((
        f"{a} has {k} times as many {thing} as {b}, and {c} has {x} fewer than {a}. If {b} has {x + k}, how many do the "
        f"three have together?",
        f"{a}, {b} and {c} share {x * 3 * k} {thing} in the ratio 1:{k}:{2 * k}. How many does each of them get?",
        f"{x} {thing} fit on one shelf and the {r.choice(_PLACES)} has {k} cupboards with {k + 2} shelves. How many "
        f"{thing} can be stored?",
        f"If {a} gives {x} {thing} to {b}, both have the same number. Together they own {6 * x}. How many did {a} have?",
    ))  # fmt: skip


def _rates(r: random.Random) -> str:
    a, thing = r.choice(_NAMES), r.choice(_THINGS)
    x, y, k = _n(r, 3, 20), _n(r, 2, 8), _n(r, 2, 6)
    return r.choice((
        f"{k} machines make {k * x} {thing} in {y} minutes. How many {thing} do {k + 2} machines make in an hour?",
        f"A tank holds {x * 60} litres. One pipe fills {x} litres a minute, a leak loses {min(y, x - 1)} litres a minute. "
        f"How long until the tank is full?",
        f"{a} packs {x} {thing} every {y} minutes and takes a break of {k * 5} minutes each hour. How many {thing} are "
        f"packed in a shift of {k} hours?",
        f"A recipe for {k} people uses {x * 10} grams of flour. How much is needed for {k * y} people?",
    ))  # fmt: skip


def _percent(r: random.Random) -> str:
    a, thing = r.choice(_NAMES), r.choice(_THINGS)
    x, p = _n(r, 40, 400, 20), _n(r, 5, 60, 5)
    return r.choice((
        f"Of {x} visitors of the {r.choice(_PLACES)}, {p}% bought {thing}. How many did not?",
        f"The price of a coat was ${x}. It rose by {p}% and later fell by {p}%. What is the price now?",
        f"{a} saves {p}% of a monthly income of ${x * 10}. How much has {a} saved after a year?",
        f"A class of {x // 10} children voted: {p}% chose the {r.choice(_PLACES)} for the trip. How many children is that?",
    ))  # fmt: skip


def _equations(r: random.Random) -> str:
    a, b, c = _n(r, 2, 12), _n(r, 1, 40), _n(r, 2, 20)
    return r.choice((
        f"Solve for x: {a}x + {b} = {a * c + b}.",
        f"What is the value of {a}(x - {b}) + {c} when x = {b + c}?",
        f"Find two numbers whose sum is {a + b} and whose product is {a * b}.",
        f"A rectangle is {a} cm longer than it is wide. Its perimeter is {2 * (2 * c + a)} cm. Find its area.",
        f"Simplify {a}x + {b} - {c}x + {a * b}.",
        f"Compute {a * 13} * {c} - {b} and explain how you got the result.",
        f"The mean of five numbers is {b}. Four of them are {b - a}, {b + a}, {b + 1} and {b - 2}. What is the fifth?",
        f"What is the probability of drawing a red ball from a bag with {a} red and {b} blue balls? And two in a row?",
        f"Find the derivative of f(x) = {a}x^3 - {b}x + {c} and its value at x = {_n(r, 1, 4)}.",
        f"How many whole numbers between {b} and {b + a * c} can be divided by {a}?",
    ))  # fmt: skip


def _ages(r: random.Random) -> str:
    a, b = r.sample(_NAMES, 2)
    x, k, y = _n(r, 5, 20), _n(r, 2, 4), _n(r, 2, 10)
    return r.choice((
        f"{a} is {k} times as old as {b}, who is {x}. How old will {a} be when {b} is {x + y}?",
        f"In {y} years {a} will be {x + 2 * y}. {b} is {k} years younger than {a}. How old is {b} today?",
        f"The ages of {a} and {b} add up to {x * k + x}. {a} is {k} times as old as {b}. How old are they?",
    ))  # fmt: skip


_KINDS: tuple[Callable[[random.Random], str], ...] = (
    _give_away, _prices, _prices, _wages, _travel, _sharing, _rates, _percent, _equations, _ages,
)  # fmt: skip


def maths_prompt(rng: random.Random) -> str:
    """One word problem or short exercise."""
    text = rng.choice(_KINDS)(rng) + rng.choice(_ASKS)
    if rng.random() < 0.08:
        return "Solve this problem.\n\n" + text
    return text
