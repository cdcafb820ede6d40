"""Coding prompts: functions of Python's standard library, and small procedural tasks with computed
examples.

Only signatures and docstrings of the running interpreter's own library are read (with `ast`,
nothing is imported); nothing of them is stored in the repository.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_SKIPPED_DIRS = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "__pycache__",
    "turtledemo",
    "ensurepip",
}

_COMPLETE = (
    "Complete the following Python function:\n\n```python\n{stub}\n```",
    "Complete the following Python function.\n\n{stub}\n",
    "{stub}\n",
    "Please complete this function and return only the code:\n\n```python\n{stub}\n```",
    "Implement this Python function. Follow the docstring.\n\n```python\n{stub}\n```",
    "Here is the signature and docstring of a function. Write its body.\n\n{stub}\n",
    "Finish the implementation below in Python 3 and explain briefly how it works.\n\n```python\n{stub}\n```",
    "Fill in the body of `{name}`:\n\n```python\n{stub}\n```",
)
_WRITE = (
    "Write a Python function that {does}.",
    "Write a Python function `{name}` that {does}.",
    "Write a Python function `{call}` that {does}. Include a docstring.",
    "Can you write a function in Python which {does}? Show an example of how to use it.",
    "I need a Python helper called `{name}` that {does}. Please write it with type hints.",
    "Implement `{call}` in Python. It {does}.",
    "Show me simple Python code that {does}.",
    "Write a short Python function that {does}, and a few unit tests for it.",
)
_READ = (
    "What does this Python code do? Explain it step by step.\n\n```python\n{code}\n```",
    "Add a docstring and comments to this function:\n\n```python\n{code}\n```",
    "Review the following Python function and suggest improvements.\n\n```python\n{code}\n```",
    "Write unit tests for this function:\n\n```python\n{code}\n```",
    "Rewrite this function so that it is easier to read:\n\n```python\n{code}\n```",
)
# Docstrings start with an imperative ("Return the ..."); a sentence needs the third person
# ("returns the ...").
_VERB = re.compile(r"^([A-Z][a-z]+)\b(?!')")
_IRREGULAR = {"Do": "does", "Be": "is", "Have": "has", "Go": "goes"}


class Function(NamedTuple):
    """A library function: where it is, how it is called, what it says it does, and its own text."""

    path: str
    name: str
    call: str
    signature: str
    doc: str
    code: str


def third_person(sentence: str) -> str | None:
    """ "Return the sum." -> "returns the sum"; None when the sentence does not start with an
    imperative.
    """
    match = _VERB.match(sentence)
    if match is None:
        return None
    verb = match.group(1)
    if verb in _IRREGULAR:
        word = _IRREGULAR[verb]
    elif verb.endswith("s") and not verb.endswith(("ss", "us")):
        word = verb.lower()  # already third person
    elif verb.endswith(("sh", "ch", "ss", "x", "z")):
        word = verb.lower() + "es"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        word = verb.lower()[:-1] + "ies"
    else:
        word = verb.lower() + "s"
    rest = sentence[match.end() :].strip().rstrip(".")
    return (
        f"{word} {rest}"
        if rest and verb not in ("The", "This", "A", "An", "If", "For", "See")
        else None
    )


def _functions_of(path: Path, root: Path) -> Iterator[Function]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (
        SyntaxError,
        UnicodeDecodeError,
    ):  # a few library files are broken on purpose (tests of the parser)
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if not doc or not 25 <= len(doc) <= 900:
            continue
        names = [
            a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")
        ]
        args = ast.unparse(node.args)
        args = re.sub(r"^(self|cls)(, )?(/(, )?)?", "", args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        # The segment starts at `def`, not at the line's first column: pad it, so that dedent sees
        # one indentation.
        code = textwrap.dedent(" " * node.col_offset + (ast.get_source_segment(text, node) or ""))
        yield Function(
            str(path.relative_to(root)),
            node.name,
            f"{node.name}({', '.join(names)})",
            f"def {node.name}({args}){returns}:",
            doc,
            code,
        )


@functools.cache
def library_functions() -> tuple[Function, ...]:
    """Documented public functions of the standard library, in file order (deterministic per
    interpreter).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Function] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_DIRS & set(path.relative_to(root).parts):
            continue
        for function in _functions_of(path, root):
            key = f"{function.call} {function.doc}"
            if key not in seen:
                seen.add(key)
                found.append(function)
    return tuple(found)


def library_prompt(rng: random.Random) -> str | None:
    """One prompt about a random library function, or None when the drawn phrasing does not fit
    it.
    """
    function = rng.choice(library_functions())
    kind = rng.random()
    if kind < 0.5:
        doc = function.doc
        quoted = (
            f'    """{doc}\n    """'
            if "\n" not in doc
            else textwrap.indent(f'"""{doc}\n"""', "    ")
        )
        return rng.choice(_COMPLETE).format(
            stub=f"{function.signature}\n{quoted}", name=function.name
        )
    if kind < 0.85:
        first = re.split(r"(?<=[.!?])\s|\n\s*\n", function.doc.strip(), maxsplit=1)[0]
        does = third_person(" ".join(first.split()))
        if does is None or not 15 <= len(does) <= 200:
            return None
        return rng.choice(_WRITE).format(does=does, name=function.name, call=function.call)
    if not 3 <= function.code.count("\n") <= 25:
        return None
    return rng.choice(_READ).format(code=function.code)


# ---- procedural tasks: condition x change x summary over small inputs, with examples computed by r

_KEEP: tuple[tuple[str, str, Callable[[int], bool]], ...] = (
    ("even", "even numbers", lambda x: x % 2 == 0),
    ("odd", "odd numbers", lambda x: x % 2 == 1),
    ("positive", "positive numbers", lambda x: x > 0),
    ("negative", "negative numbers", lambda x: x < 0),
    ("multiple_of_three", "multiples of three", lambda x: x % 3 == 0),
    ("multiple_of_five", "multiples of five", lambda x: x % 5 == 0),
    ("small", "numbers whose absolute value is below ten", lambda x: abs(x) < 10),
    ("large", "numbers greater than ten", lambda x: x > 10),
    ("square", "perfect squares", lambda x: x >= 0 and int(x**0.5) ** 2 == x),
    ("prime", "prime numbers", lambda x: x > 1 and all(x % d for d in range(2, int(x**0.5) + 1))),
)
_CHANGE: tuple[tuple[str, str, Callable[[int], int]], ...] = (
    ("", "", lambda x: x),
    ("squared", "the squares of ", lambda x: x * x),
    ("doubled", "twice each of ", lambda x: 2 * x),
    ("absolute", "the absolute values of ", abs),
    ("digit_sum", "the digit sums of ", lambda x: sum(int(c) for c in str(abs(x)))),
    ("negated", "the negated values of ", lambda x: -x),
    ("cubed", "the cubes of ", lambda x: x**3),
)
_SUMMARY: tuple[tuple[str, str, str, Callable[[list[int]], Any]], ...] = (
    ("sum", "the sum of ", "int", sum),
    ("count_distinct", "how many different values there are among ", "int", lambda v: len(set(v))),
    ("list", "a list of ", "List[int]", list),
    ("sorted", "a list, in ascending order, of ", "List[int]", sorted),
    ("descending", "a list, from largest to smallest, of ", "List[int]", lambda v: sorted(v, reverse=True)),
    ("unique", "a list without repetitions, first occurrence first, of ", "List[int]", lambda v: list(dict.fromkeys(v))),
    ("range", "the difference between the largest and the smallest (0 if there are none) of ", "int",
     lambda v: max(v) - min(v) if v else 0),
    ("last", "the last (None if there is none) of ", "Optional[int]", lambda v: v[-1] if v else None),
    ("running", "the running totals of ", "List[int]", lambda v: [sum(v[: i + 1]) for i in range(len(v))]),
)  # fmt: skip
_TEXT: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (
    ("reverse_words", "Return the text with the order of its words reversed.", "str",
     lambda s: " ".join(s.split()[::-1])),
    ("reverse_each_word", "Return the text with every word spelled backwards but left in place.", "str",
     lambda s: " ".join(w[::-1] for w in s.split())),
    ("longest_word", "Return the longest word of the text; the first one if several are equally long.", "str",
     lambda s: max(s.split(), key=len)),
    ("shortest_words", "Return all words that have the smallest length, in order.", "List[str]",
     lambda s: [w for w in s.split() if len(w) == min(map(len, s.split()))]),
    ("word_lengths", "Return a dictionary that maps each word to its length.", "Dict[str, int]",
     lambda s: {w: len(w) for w in s.split()}),
    ("letter_counts", "Count how often every letter occurs, ignoring spaces.", "Dict[str, int]",
     lambda s: {c: s.count(c) for c in dict.fromkeys(s.replace(" ", ""))}),
    ("initials", "Return the first letters of all words as one upper-case string.", "str",
     lambda s: "".join(w[0] for w in s.split()).upper()),
    ("capitalize_alternate", "Return the words joined by spaces with every second word in upper case.", "str",
     lambda s: " ".join(w.upper() if i % 2 else w for i, w in enumerate(s.split()))),
    ("remove_repeats", "Remove words that have already occurred earlier in the text.", "str",
     lambda s: " ".join(dict.fromkeys(s.split()))),
    ("count_vowels_per_word", "Return the number of vowels in each word.", "List[int]",
     lambda s: [sum(c in "aeiou" for c in w) for w in s.split()]),
    ("camel_case", "Join the words in camelCase.", "str",
     lambda s: s.split()[0] + "".join(w.title() for w in s.split()[1:])),
    ("snake_case", "Join the words with underscores, in lower case.", "str", lambda s: "_".join(s.lower().split())),
    ("sort_by_length", "Return the words sorted by length; words of equal length keep their order.", "List[str]",
     lambda s: sorted(s.split(), key=len)),
    ("drop_short_words", "Remove all words that have fewer than four letters.", "str",
     lambda s: " ".join(w for w in s.split() if len(w) >= 4)),
    ("first_unique_letter", "Return the first letter that occurs exactly once, or an empty string.", "str",
     lambda s: next((c for c in s if c != " " and s.count(c) == 1), "")),
    ("compress", "Write runs of the same character as the character followed by the length of the run.", "str",
     lambda s: "".join(f"{m.group(0)[0]}{len(m.group(0))}" for m in re.finditer(r"(.)\1*", s))),
    ("swap_first_last", "Swap the first and the last letter of every word.", "str",
     lambda s: " ".join(w[-1] + w[1:-1] + w[0] if len(w) > 1 else w for w in s.split())),
    ("caesar_three", "Shift every letter by three places in the alphabet (z becomes c), leave spaces alone.", "str",
     lambda s: "".join(c if c == " " else chr((ord(c) - 94) % 26 + 97) for c in s)),
)  # fmt: skip
_WORDS = (
    "apple river stone cloud green paper light music winter garden silver orange window travel candle bridge mirror "
    "forest pencil summer planet rocket castle dragon butter coffee island market number bottle ladder tunnel the a to "
    "red sun sky cat dog owl tea ice map key sea box egg hat"
).split()
_CLASSES = (
    "a bank account with deposits, withdrawals and a transaction history", "a stack with push, pop and peek",
    "a queue built from two stacks", "a singly linked list with insert, delete and search", "a binary search tree",
    "a shopping cart that computes totals and discounts", "a to-do list that can be saved to a JSON file",
    "a least-recently-used cache", "a matrix with addition and multiplication", "a fraction with arithmetic operators",
    "a simple inventory of products", "a deck of playing cards", "a library that lends books", "a temperature converter",
    "a priority queue based on a heap", "a graph with breadth-first search", "a timer used as a context manager",
    "an event scheduler", "a student record with an average grade", "a text-based tic-tac-toe game", "a polynomial",
    "a vending machine", "a parking lot", "a circular buffer", "an undirected weighted graph", "a password generator",
    "a tokenizer for arithmetic expressions", "a trie for prefix search", "a bag that counts its elements",
)  # fmt: skip
_ALGORITHMS = (
    "bubble sort", "insertion sort", "merge sort", "quicksort", "selection sort", "heap sort", "binary search",
    "depth-first search of a graph", "breadth-first search of a graph", "Dijkstra's shortest path algorithm",
    "the sieve of Eratosthenes", "Euclid's algorithm for the greatest common divisor", "fast exponentiation",
    "the Fibonacci sequence with memoization", "topological sorting", "matrix multiplication", "matrix transposition",
    "reading a CSV file and summing a column", "counting the words of a text file", "parsing a date in ISO format",
    "converting Roman numerals to integers", "converting an integer to binary", "checking for balanced brackets",
    "finding all permutations of a list", "finding all subsets of a set", "merging overlapping intervals",
    "rotating a list by k places", "flattening a nested list", "grouping anagrams", "two-sum with a dictionary",
    "the longest common prefix of several strings", "the longest increasing subsequence", "edit distance",
    "the knapsack problem with dynamic programming", "checking whether a linked list has a cycle", "a moving average",
    "validating an e-mail address with a regular expression", "removing duplicates from a sorted list",
    "generating Pascal's triangle", "computing prime factors", "run-length encoding", "a simple linear regression",
)  # fmt: skip
_ALGORITHM_ASKS = (
    "Write {x} in Python.", "Implement {x} in Python and explain its time complexity.",
    "Show me how to code {x} in Python with comments.", "Explain {x} and give a short Python example.",
    "Write a Python program for {x} and test it on a small example.", "Write {x} in JavaScript.",
    "Write a C++ function for {x}.", "What are the edge cases of {x}? Give Python code that handles them.",
    "Compare two ways of coding {x} in Python.", "Write {x} in Java with a main method.",
)  # fmt: skip
_CLASS_ASKS = (
    "Write a Python class for {x}.", "Design {x} as a Python class and show how to use it.",
    "Implement {x} in Python with type hints and docstrings.", "Write {x} in Python, then add unit tests for it.",
    "Create a Python class that models {x}. Keep it short.", "Explain how you would implement {x}, then write the code.",
)  # fmt: skip


def _number_task(rng: random.Random) -> tuple[str, str, str, list[tuple[str, Any]]]:
    keep, kept, test = rng.choice(_KEEP)
    change, changed, apply = rng.choice(_CHANGE)
    summary, summarised, kind, reduce = rng.choice(_SUMMARY)
    name = "_".join(part for part in (summary, keep, change) if part)
    doc = f"Given a list of integers, return {summarised}{changed}the {kept} in it."
    samples = [[rng.randint(-12, 30) for _ in range(rng.randint(3, 6))] for _ in range(2)]
    shown = [(repr(s), reduce([apply(x) for x in s if test(x)])) for s in samples]
    return f"def {name}(numbers: List[int]) -> {kind}:", name, doc, shown


def _text_task(rng: random.Random) -> tuple[str, str, str, list[tuple[str, Any]]]:
    name, doc, kind, run = rng.choice(_TEXT)
    samples = [" ".join(rng.sample(_WORDS, rng.randint(2, 5))) for _ in range(2)]
    argument = rng.choice(("text", "sentence", "s", "words"))
    return (
        f"def {name}({argument}: str) -> {kind}:",
        name,
        doc,
        [(repr(s), run(s)) for s in samples],
    )


def procedural_prompt(rng: random.Random) -> str:
    """A small coding task: a stub with a docstring and computed examples, a sentence, a class or an
    algorithm.
    """
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(_CLASS_ASKS).format(x=rng.choice(_CLASSES))
    if kind < 0.25:
        return rng.choice(_ALGORITHM_ASKS).format(x=rng.choice(_ALGORITHMS))
    signature, name, doc, shown = (_number_task if rng.random() < 0.65 else _text_task)(rng)
    if kind < 0.45:
        does = doc[0].lower() + doc[1:].rstrip(".")
        does = does.removeprefix("given a list of integers, return ")
        ask = rng.choice(
            (
                "Write a Python function for this task: {}.",
                "Please write Python code for this: {}.",
                "How can I compute the following in Python? {}.",
                "Python: {}.",
            )
        )
        text = ask.format(
            ("from a list of integers, compute " if "numbers:" in signature else "") + does
        )
        arg, value = shown[0]
        return f"{text} For example, {arg} gives {value!r}." if rng.random() < 0.5 else text
    examples = "\n".join(
        f"    >>> {name}({arg})\n    {value!r}" for arg, value in shown[: rng.randint(1, 2)]
    )
    needs = sorted(set(re.findall(r"List|Dict|Optional", signature)))
    header = f"from typing import {', '.join(needs)}\n\n\n" if needs and rng.random() < 0.6 else ""
    stub = f'{header}{signature}\n    """{doc}\n{examples}\n    """'
    return rng.choice(_COMPLETE).format(stub=stub, name=name)
