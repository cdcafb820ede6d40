"""A peer engine in a process of its own: another interpreter, a JSON line per request and answer.

The worker gets the prompt's token ids and a number of tokens, and answers with the tokens and the
seconds of decoding. Everyone counts alike: the keys of all prompt ids but the last are computed
before the clock starts, then one forward per token, whatever the token is (the end of text does not
end an answer).
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.errors import ConfigError, ModelFileError

# The channel is a copy of stdout, and stdout becomes stderr: libraries may print what they like.
_PROLOGUE = """
import json, os, sys, time
channel = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def answer(document):
    print(json.dumps(document), file=channel, flush=True)

def serve(load):
    try:
        hello, decode = load(*sys.argv[1:])
    except ImportError as error:
        sys.exit(answer({"missing": str(error)}))
    except Exception as error:
        sys.exit(answer({"error": f"{type(error).__name__}: {error}"}))
    answer(hello)
    for line in sys.stdin:
        job = json.loads(line)
        ids, seconds = decode(job["ids"], job["max_tokens"])
        answer({"ids": ids, "decode_s": seconds})
"""


class Worker:
    """A running peer.

    Args:
        flag: the command-line flag that named the interpreter, for errors.
        python: the interpreter.
        script: Python text that defines `load(*argv)`, which returns (what the peer says of itself,
            decode(ids, max_tokens) -> (new ids, seconds)).
        argv: for `load`, as text.
        packages: what to install where the import fails.

    Attributes:
        facts: what the peer says of itself: versions, threads.

    Raises:
        ConfigError: there is no such interpreter.
        ModelFileError: the interpreter lacks a package, or the peer does not start.
    """

    def __init__(
        self, flag: str, python: str, script: str, argv: Sequence[Any], packages: str
    ) -> None:
        self._name = f"{flag} {python}"
        text = f"{_PROLOGUE}\n{script}\nserve(load)\n"
        try:
            self._process = subprocess.Popen(
                [str(Path(python).expanduser()), "-c", text, *map(str, argv)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ConfigError(
                f"{self._name}: {error.strerror}; give the path of a Python interpreter with "
                f"{packages}"
            ) from error
        try:
            self.facts = self._read()
            if "missing" in self.facts:
                raise ModelFileError(
                    f"{self._name}: {self.facts['missing']}; "
                    f"run: {python} -m pip install {packages}"
                )
            if "error" in self.facts:
                raise ModelFileError(
                    f"{self._name}: the peer does not start ({self.facts['error']}); is "
                    f"{packages} there up to date?"
                )
        except BaseException:
            self.close()
            raise

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]  # PIPE above
        if not line:
            status = self._process.wait()
            how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            raise ModelFileError(
                f"{self._name}: the peer process ended {how}; what it printed stands above, "
                "python -m serve.peers --help tells of known crashes"
            )
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise ModelFileError(
                f"{self._name}: the peer answers {line!r:.80}, which is not JSON; give the path "
                "of a Python interpreter"
            ) from error

    def decode(self, ids: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
        """Greedy decoding, alone. Returns (new token ids, seconds without the prompt)."""
        job = json.dumps({"ids": [int(i) for i in ids], "max_tokens": max_tokens})
        with contextlib.suppress(BrokenPipeError):  # it ended: the read below says so
            print(job, file=self._process.stdin, flush=True)
        got = self._read()
        return tuple(got["ids"]), float(got["decode_s"])

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]  # PIPE above
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
