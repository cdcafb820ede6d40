"""Roofline of a forward on the native CPU kernels: every op's time beside what it must take.

    python -m serve.roofline --rows 1,12

Builds the kernels a second time with a clock between the steps of the decoder stack, runs a forward
of the bundled model (or --model) over a filled cache, and compares every step with the larger of
two times: its bytes at the read bandwidth that numpy threads reach here, and its vector operations
at the multiply-add rate that registers reach here (decoding a packed weight counts, see `DECODE`).
The best of --repeats runs. Last line of stdout: JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax.errors import ConfigError, JetSpecError
from serve import cli

# Vector operations that decode 16 weights, beside one multiply-add a row: shift, table,
# multiply-add; convert, multiply; shift.
DECODE = {"f32": 0, "bf16": 1, "q8_0": 2, "q4_0": 3, "q4_1": 3, "q4_k": 3, "q6_k": 5}
STEPS = (
    *("norm", "qkv", "rotate", "attention", "split", "o"),
    *("norm", "gate_up", "split", "down", "begin", "norm"),
)


@dataclasses.dataclass(frozen=True)
class Work:
    """What an op has to do: bytes to read, vector operations of 16 lanes."""

    bytes: float
    operations: float


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of the table; seconds."""

    op: str
    measured: float
    memory: float
    arithmetic: float

    @property
    def bound(self) -> float:
        """The least time that the hardware allows."""
        return max(self.memory, self.arithmetic)


def matmul_work(weights: Sequence[Any], rows: int) -> Work:
    """Of packed weights times `rows` rows. Integer sums run in tiles and dot products, which this
    model of 16-lane multiply-adds does not describe: they are held against memory only."""
    size = sum(w.nbytes for w in weights)
    floats = [w for w in weights if w.arithmetic == "float"]
    return Work(size, sum(w.n * w.k / 16 * (rows + DECODE[w.format]) for w in floats))


def attention_work(cfg: Any, rows: int, context: int) -> Work:
    """Of `rows` tree rows over `context` cached keys, all layers; the tree's own keys are few."""
    keys = cfg.num_layers * context
    return Work(
        2.0 * keys * cfg.kv_width * 4, 2.0 * keys * cfg.num_heads * cfg.head_dim * rows / 16
    )


def lines(
    measured: dict[str, float], work: dict[str, Work], bandwidth: float, rate: float
) -> list[Line]:
    """Rows of the table: `bandwidth` in bytes and `rate` in 16-lane operations a second."""
    empty = Work(0.0, 0.0)
    return [
        Line(op, t, (w := work.get(op, empty)).bytes / bandwidth, w.operations / rate)
        for op, t in measured.items()
    ]


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m serve.roofline",
        usage="python -m serve.roofline [flags]",
        description="Measured against computed time of every op of a forward (native kernels).",
    )
    cli.add_model_flags(parser)
    parser.add_argument(
        "--rows", default="1,12", metavar="N,...", help="rows of a forward (default: 1,12)"
    )
    parser.add_argument(
        "--context", type=int, default=256, metavar="N", help="cached tokens (default: 256)"
    )
    parser.add_argument(
        "--repeats", type=int, default=40, metavar="N", help="runs, the best counts (default: 40)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    return cli.run(lambda args: _run(args, argv), build_parser(), argv)


def parse_rows(text: str) -> list[int]:
    """ "1,12" -> [1, 12]."""
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1 or max(rows) > 256:
        raise ConfigError(f"--rows {text}: give numbers from 1 to 256, such as 1,12")
    return rows


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    rows = parse_rows(args.rows)
    if args.context < 1 or args.repeats < 1:
        raise ConfigError("--context and --repeats: give at least 1")
    from jetspec_jax.config import SpecConfig
    from pallas_kernels import native
    from serve import facts, peers

    try:
        profiled = native.library(("-DJETSPEC_PROFILE",))
    except native.KernelError as error:
        raise JetSpecError(f"{error}; the roofline is of the native kernels") from error
    plain = native.library
    native.library = lambda extra_flags=(): profiled
    try:
        llm = cli.load_llm(args, SpecConfig(mode="off"), cli.engine_from_args(args))
        if not llm.plan_for(llm.spec).numerics.stack:
            raise ConfigError("the native decoder stack does not take this model or these flags")
        bandwidth, rate = peers.read_bandwidth(), peak_rate(profiled.handle, facts.cores())
        cli.say(f"read {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.1f} G vector operations a second")
        tables = {n: forward(llm, profiled.handle, n, args) for n in rows}
        sums = llm.arithmetic
    finally:
        native.library = plain
    document: dict[str, Any] = {
        "forwards": {},
        "context": args.context,
        "bandwidth_gb_s": bandwidth / 1e9,
        "vector_operations_g_s": rate / 1e9,
        "hardware": facts.hardware(),
        "threads": facts.cores(),
        "weights": args.weights,
        "arithmetic": sums,
        "versions": facts.versions(),
        "commit": facts.git_revision(),
        "command": facts.command("serve.roofline", argv),
    }
    for n, (measured, work) in tables.items():
        found = lines(measured, work, bandwidth, rate)
        _print(n, found, args.context, f"{facts.hardware()} · {sums} sums · batch 1")
        matmuls = sum(x.measured for x in found if x.op in ("qkv", "o", "gate_up", "down", "head"))
        total = sum(x.measured for x in found)
        document["forwards"][n] = {
            "ops": {x.op: dataclasses.asdict(x) | {"bound": x.bound} for x in found},
            "total_s": total,
            "bound_s": sum(x.bound for x in found),
            "matmul_share": matmuls / total,
        }
    print(cli.dump_json(document))
    return 0


def peak_rate(handle: ctypes.CDLL, threads: int) -> float:
    """16-lane multiply-adds a second of all threads together, operands in registers."""
    call = handle.PeakMultiplyAdds
    call.restype = ctypes.c_double
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda _: call(), range(threads))) / 16


def forward(
    llm: Any, handle: ctypes.CDLL, rows: int, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Work]]:
    """Seconds by op of the best of `repeats` forwards of a chain of `rows` rows, and their work."""
    import jax
    import jax.numpy as jnp

    from jetspec_jax.cache import alloc
    from jetspec_jax.models.decoder import forward_block, lm_head_weight
    from pallas_kernels.verify_head import verify_head

    cfg, plan = llm.model_config, llm.plan_for(llm.spec)
    params = llm.params_for(plan).target
    size = args.context + rows
    cache = alloc(cfg.num_layers, 1, cfg.num_kv_heads, size, cfg.head_dim, jnp.float32)
    length, counts = (jnp.asarray([n], jnp.int32) for n in (args.context, rows))
    positions = args.context + jnp.arange(rows, dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((1, rows, rows), bool))

    @jax.jit
    def hidden(params: Any, cache: Any) -> Any:
        return forward_block(
            params,
            cfg,
            jnp.zeros((1, rows), jnp.int32),
            positions,
            cache.k,
            cache.v,
            length,
            mask,
            counts=counts,
            numerics=plan.numerics,
        ).hidden

    @jax.jit
    def choose(params: Any, hidden: Any) -> Any:
        return verify_head(hidden, lm_head_weight(params), counts).ids

    def timed(call: Any, *operands: Any) -> tuple[float, Any]:
        started = time.perf_counter()
        out = jax.block_until_ready(call(*operands))
        return time.perf_counter() - started, out

    profile = (ctypes.c_double * len(STEPS))()
    best: tuple[float, list[float], float] | None = None
    for turn in range(1 + args.repeats):
        handle.DecoderStackProfile(profile)
        whole, x = timed(hidden, params, cache)
        handle.DecoderStackProfile(profile)
        head = timed(choose, params, x)[0]
        if turn > 0 and (best is None or whole + head < best[0] + best[2]):
            best = (whole, list(profile), head)
    if best is None:
        raise JetSpecError("nothing was measured")
    measured: dict[str, float] = {}
    for op in ("qkv", "o", "gate_up", "down", "head", "attention", "norm", *STEPS):
        measured[op] = 0.0
    for step, seconds in zip(STEPS, best[1], strict=True):
        measured[step] += seconds
    measured["head"] = best[2]
    measured["rest (embedding, call)"] = best[0] - sum(best[1])
    layers = params["layers"]
    work = {
        name: matmul_work([p[name] for p in layers], rows)
        for name in ("qkv", "o", "gate_up", "down")
    }
    work["head"] = matmul_work([lm_head_weight(params)], rows)
    work["attention"] = attention_work(cfg, rows, args.context)
    return measured, work


def _print(rows: int, found: Sequence[Line], context: int, facts_line: str) -> None:
    from rich.console import Console
    from rich.table import Table

    total, bound = sum(x.measured for x in found), sum(x.bound for x in found)
    table = Table(
        title=f"forward of {rows} row{'s' if rows > 1 else ''} at {context} cached tokens, ms",
        caption=facts_line,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("op", "measured", "memory", "arithmetic", "bound / measured", "share"):
        table.add_column(name, justify="left" if name == "op" else "right")

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.2f}" if seconds else ""

    for x in found:
        ratio = f"{x.bound / x.measured:.0%}" if x.bound and x.measured else ""
        share = f"{x.measured / total:.0%}"
        table.add_row(x.op, ms(x.measured), ms(x.memory), ms(x.arithmetic), ratio, share)
    table.add_row("all", ms(total), "", ms(bound), f"{bound / total:.0%}", "100%", style="bold")
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
