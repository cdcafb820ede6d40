"""What every command of `serve` shares: flags, configs made of them, exit codes, progress lines.

Nothing here imports jax: a command must be able to say what it is about to load within a fraction
of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import os
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jetspec_jax.config import (
    ARITHMETIC,
    BUILDERS,
    DRAFT_WEIGHTS,
    DRAFTERS,
    DTYPES,
    KERNELS,
    NUMERICS,
    SPEC_MODES,
    WEIGHTS,
    EngineConfig,
    SamplingParams,
    SpecConfig,
)
from jetspec_jax.errors import ConfigError, JetSpecError, ModelFileError

BUNDLED = "SmolLM2-135M-Instruct (bundled)"
INTERRUPTED = 130  # the shell's own code for a process ended by Ctrl-C


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest flag, and without abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            # A negative number or text after `--` is not a flag: name the first word that looks
            # like one.
            word = next((w for w in extra if w.startswith("-") and len(w) > 1), extra[0])
            if not word.startswith("-"):
                self.error(f"unexpected argument {word!r}; put the prompt in one pair of quotes")
            flag = word.split("=", 1)[0]
            near = difflib.get_close_matches(flag, list(self._option_string_actions), 1, 0.6)
            self.error(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        return parsed


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="PATH", help="HF directory or GGUF file (default: bundled SmolLM2-135M)"
    )
    group.add_argument(
        "--draft",
        metavar="PATH",
        help="draft head directory, or none (default: the bundled model's own head)",
    )
    group.add_argument("--dtype", choices=DTYPES, help="weights and activations (default: float32)")
    group.add_argument(
        "--capacity", type=int, metavar="TOKENS", help="prompt and answer together (default: 2048)"
    )
    group.add_argument(
        "--numerics",
        choices=NUMERICS,
        help="bitwise: logits equal to plain decoding bit for bit (default with kernels, "
        "where it is free); fast: the default with XLA",
    )
    group.add_argument("--kernels", choices=KERNELS, help="matmul kernels (default: auto)")
    group.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="projections in memory, same values and tokens: stored, as in the file wherever a "
        "native kernel decodes it (default), or float32; with XLA always --dtype",
    )
    group.add_argument(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        help="the draft head's in memory: q8_0, rounded to 8 bits, which changes no token "
        "(default), or stored, as --weights; with XLA always --dtype",
    )
    group.add_argument(
        "--arithmetic",
        choices=ARITHMETIC,
        help="of Q4_1, Q4_0 and Q8_0 weights with native kernels: float sums, exact integer sums "
        "of blocks, or auto: integer on CPUs with AVX-512 VNNI (default: auto)",
    )


def add_spec_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--spec", choices=SPEC_MODES, help="tree, chain, off, or auto: what pays on this machine"
    )
    group.add_argument(
        "--drafter", choices=DRAFTERS, help="who drafts (default: hybrid, or lookup without a head)"
    )
    group.add_argument("--depth", type=int, metavar="D", help="longest drafted path")
    group.add_argument(
        "--head-depth",
        type=int,
        metavar="D",
        help="depths drafted by the head; lookup may go on to --depth (default: the device's best)",
    )
    group.add_argument("--width", type=int, metavar="W", help="candidates kept per depth")
    group.add_argument(
        "--budget", type=int, metavar="N", help="tree nodes verified per round, root included"
    )
    group.add_argument("--builder", choices=BUILDERS, help="tree builder (default: exact)")
    group.add_argument(
        "--spec-config",
        metavar="FILE_OR_JSON",
        help="all of the above at once: a .toml or .json file or a JSON object; the flags "
        "above win over it",
    )


def add_tuned_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tuned",
        metavar="DIR|FILE|off",
        help="settings that serve.autotune found: those of a folder, of one file, or off: the "
        "heuristic alone (default: what --apply installed, and what is shipped); the flags above "
        "win over them",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int = 256) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)"
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument(
        "--seed", type=int, default=0, help="same seed, same tokens, plain or speculative"
    )
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default: {max_tokens}"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="log-probabilities, and the K best beside each"
    )


def spec_from_args(args: argparse.Namespace) -> SpecConfig:
    """`--spec-config` first, single flags on top. Raises ConfigError naming the key or file."""
    values: dict[str, Any] = {}
    if args.spec_config is not None:
        values |= load_mapping(args.spec_config, "--spec-config")
    for key in ("drafter", "depth", "head_depth", "width", "budget", "builder"):
        if getattr(args, key) is not None:
            values[key] = getattr(args, key)
    if args.spec is not None:
        values["mode"] = args.spec
    return SpecConfig.from_mapping({key: _tuples(value) for key, value in values.items()})


def engine_from_args(args: argparse.Namespace, **extra: Any) -> EngineConfig:
    names = ("dtype", "capacity", "numerics", "kernels", "weights", "draft_weights", "arithmetic")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return EngineConfig.from_mapping(given | extra)


def sampling_from_args(args: argparse.Namespace) -> SamplingParams:
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "ignore_eos",
        "logprobs",
    )
    return SamplingParams(stop=tuple(args.stop), **{name: getattr(args, name) for name in names})


def load_mapping(text: str, flag: str) -> dict[str, Any]:
    """A JSON object given inline, or the path of a .toml / .json file."""
    if text.lstrip().startswith("{"):
        return parse_json_object(text, flag)
    path = Path(text).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(
            f"{flag} {text!r}: {reason}; give a .toml or .json file, or a JSON object"
        ) from error
    if path.suffix == ".toml":
        try:
            return tomllib.loads(content)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{flag} {path}: not valid TOML ({error})") from error
    return parse_json_object(content, f"{flag} {path}")


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f'{where}: a JSON object like {{"key": value}} is needed, not {type(value).__name__}'
        )
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def describe_load(args: argparse.Namespace) -> str:
    """The first line a command prints, made from the flags alone."""
    model = args.model or BUNDLED
    if args.draft == "none" or (args.draft is None and args.model is not None):
        head = "no draft head"
    else:
        head = f"draft head {args.draft}" if args.draft else "its bundled draft head"
    return f"loading {model} with {head}, {args.dtype or EngineConfig().dtype}"


def head_name(args: argparse.Namespace, llm: Any) -> str | None:
    """The loaded draft head for result documents: its path, "bundled", or None."""
    return None if llm.draft_config is None else args.draft or "bundled"


def check_tuned(where: str | None) -> None:
    """Refuses a missing --tuned path before anything heavy is imported."""
    if where is not None and where != "off" and not Path(where).expanduser().exists():
        raise ConfigError(
            f"--tuned {where}: no such file or folder; give one of serve.autotune, or off"
        )


def check_path(path: str | None, flag: str) -> None:
    """Refuses a missing local path before anything heavy is imported. Hub ids (org/name) pass."""
    if path is None or (flag, path) == ("--draft", "none"):
        return
    if not path.strip():
        raise ConfigError(f"{flag} is empty; give a path, or leave the flag out")
    local = (
        path.startswith((".", "/", "~"))
        or path.endswith((".gguf", ".safetensors"))
        or path.count("/") != 1
    )
    if local and not Path(path).expanduser().exists():
        wanted = (
            "a draft head's directory (config.json + safetensors), or none"
            if flag == "--draft"
            else "a Hugging Face directory or a .gguf file"
        )
        raise ModelFileError(f"{flag} {path}: no such file or directory; give {wanted}")


def load_llm(args: argparse.Namespace, spec: SpecConfig, engine: EngineConfig) -> Any:
    """Builds the engine; the heavy imports happen here. Commands without --tuned measure what
    their flags say, and nothing else.
    """
    import jetspec_jax  # seconds of imports, after the first line is out

    batch = getattr(args, "batch", None) or getattr(args, "batch_size", None) or 1
    return jetspec_jax.LLM(
        args.model,
        args.draft,
        spec=spec,
        engine=engine,
        progress=say,
        tuned=getattr(args, "tuned", "off"),
        batch=batch,
    )


def say(message: str) -> None:
    """One line on stderr: everything that is not the answer goes there."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def phase(what: str) -> Iterator[None]:
    """Says what starts, and how long it took when that was noticeable."""
    say(f"{what} ...")
    start = time.perf_counter()
    yield
    took = time.perf_counter() - start
    if took > 0.5:
        say(f"{what}: {took:.1f} s")


def dump_json(document: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON: no NaN or Infinity; dataclasses and arrays become plain values."""
    return json.dumps(plain(document), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Dataclasses, arrays, paths, numpy scalars -> JSON values; non-finite floats -> null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if value - value == 0 else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return plain(tolist())
    return str(value)


def use_colour(stream: Any, forced: bool = False) -> bool:
    """NO_COLOR (any non-empty value) wins; a flag forces colour; otherwise only on a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return forced or (hasattr(stream, "isatty") and stream.isatty())


def run(
    body: Callable[[argparse.Namespace], int], parser: Parser, argv: Sequence[str] | None
) -> int:
    """Parses, runs, and turns every way a command can end into a code and at most one line."""
    args = parser.parse_args(argv)
    try:
        code = body(args)
        sys.stdout.flush()
        return code
    except JetSpecError as error:
        if args.debug:
            traceback.print_exc()
        say("error: " + " ".join(str(error).split()))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain once more when it flushes stdout
        # at exit.
        with contextlib.suppress(Exception):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # A bug or a limit of the machine (memory): still one line, unless asked for more.
        if args.debug:
            raise
        say(
            f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}; --debug "
            "shows the traceback"
        )
        return 1
