"""What a user asks next: follow-up requests for each source of prompts, from our own templates. They
suit any answer of their source, because the answer is not written yet when they are drawn.
"""

from __future__ import annotations

import random

from train.prompts_chat import AUDIENCE, PEOPLE

_LANGUAGES = "JavaScript|Java|C++|Go|Rust|TypeScript|Ruby|Kotlin|Swift|C".split("|")
_INPUTS = (
    "an empty input|None|a very long input|negative values|repeated values|a single element|text with accents|"
    "floating-point numbers|an input of the wrong type|nested lists|values that are all the same"
).split("|")  # fmt: skip
_TONES = "formal|relaxed|cheerful|sober|polite|humorous|dramatic|plain|warm|sceptical".split("|")
_TONGUES = "Spanish|French|German|Italian|Portuguese|Dutch|Swedish".split("|")
_WORDS = "two|three|four|five".split("|")

_CODE = (
    "Add type hints.", "Add comments to the important lines.", "Explain the code line by line.", "Make it shorter.",
    "Now write unit tests for it with pytest.", "Write three assert statements that check it.", "How does it handle {input}?",
    "Change it so that it raises a ValueError for {input}.", "What does it return for {input}? Fix it if that is wrong.",
    "How long does it take for large inputs, and how much memory does it need?", "Can you make it faster?",
    "Show an example call and the output.", "Translate it to {language}.", "How would the same look in {language}?",
    "Add a docstring in NumPy style.", "Which mistakes could a reviewer find in this code?", "Rewrite it with a loop only.",
    "Rewrite it as a generator.", "Use clearer names for the variables.", "Split it into {word} smaller functions.",
    "Turn it into a small class with a method for each step.", "Add a command line interface with argparse.",
    "Why did you do it this way, and not with a function of the standard library?", "Log what happens in each step.",
    "Write a paragraph for the README about it.", "Give me only the final code, without explanations.",
    "Describe how it works to {audience}.", "I get a TypeError when I call it with {input}. Why?",
)  # fmt: skip
_MATHS = (
    "Check the result in another way.", "Are you sure? Go through it once more.", "Explain the {step} step again.",
    "What changes if all the numbers are doubled?", "Write the whole solution as one equation.", "Now only the final number.",
    "Make up a similar problem with larger numbers and solve it.", "Which of the numbers given were not needed?",
    "How would you explain this to {audience}?", "Write a Python function that solves this for any numbers.",
    "What would the result be with {n} more at the start?", "And if there were {n} fewer in the end?",
    "Round the result to the nearest ten and say how large the error is.", "Give the result as a percentage.",
    "Show the calculation in a table with a row for each step.", "What is a common mistake in problems of this kind?",
    "Suppose the first number is unknown and your result is given. How do you find it?", "Draw a sketch with characters.",
    "Solve it again with a variable x.", "Ask me {word} questions of this kind, without the solutions.",
)  # fmt: skip
_CHAT = (
    "Make it half as long.", "Say that again in {word} sentences.", "Tell me more about the {step} point.", "Why?",
    "Put the main ideas into a bulleted list.", "Put it into a table with {word} rows.", "Can you give an example?",
    "Now explain it to {audience}.", "Write it in a more {tone} tone.", "How would {person} put it?", "Continue.",
    "What speaks against this?", "What did you leave out?", "Which part is the most important, and why?",
    "Suggest a title and a subtitle.", "Translate the first two sentences into {tongue}.", "What should I ask next?",
    "Write {word} questions for a quiz about it, with answers.", "Turn it into a short dialogue between two people.",
    "Add a closing paragraph.", "Write a shorter version for a text message.", "Give me {word} other ideas like this.",
    "How sure are you of this, and how could I check it?", "Which words in it are hard? Define them.", "Thank you! And in practice?",
    "Compare this with how it was {n} years ago.", "Use simpler words.", "Start again, with another point of view.",
)  # fmt: skip
_ASKS = {"python-library": _CODE, "python-task": _CODE, "maths": _MATHS}


def follow_up(source: str, rng: random.Random) -> str:
    """One request that can follow an answer to a prompt of `source`."""
    return rng.choice(_ASKS.get(source, _CHAT)).format(
        input=rng.choice(_INPUTS),
        language=rng.choice(_LANGUAGES),
        audience=rng.choice(AUDIENCE),
        person=rng.choice(PEOPLE),
        tone=rng.choice(_TONES),
        tongue=rng.choice(_TONGUES),
        step=rng.choice(("first", "second", "last")),
        word=rng.choice(_WORDS),
        n=rng.randint(2, 40),
    )
