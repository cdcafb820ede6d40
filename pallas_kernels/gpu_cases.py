"""Every GPU kernel at the named shapes of its `specs`: what `gpu_compile` builds.

A new op adds a generator here; its shapes stay beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import triton_call

HOPPER = "h100"
OTHER = "rtx-pro-6000"
# Triton's other GPUs: sm_80 and sm_89. The same source, so some shapes of each op tell.
OLDER = ("a100", "l40s")
_OLDER_SHAPES = {
    "tree_attention": ("qwen3-8b batch 1 rows 64", "smollm2-135m batch 1 rows 64"),
    "row_invariant_matmul": ("qwen3-8b qkv rows 64", "smollm2-135m down rows 64", "down tokens 64"),
    "verify_head": ("qwen3-8b rows 64",),
    "build_tree": ("batch 1 nodes 64", "nodes 256"),
}
_HOPPER_CODE = ("HGMMA", "UTMALDG")


@dataclasses.dataclass(frozen=True)
class GpuCase:
    """A kernel at a shape.

    Attributes:
        op, form, shape: names; together with `target` they name the case.
        target: key of `gpu_target.TARGETS`.
        build: gives the function and its abstract arguments; imports the kernel.
        quick: part of the subset that CI compiles.
        needs: instructions that the machine code must contain.
        same_bits: cases of one name here promise equal bits a row, so their arithmetic must be
            equal; empty: none.
    """

    op: str
    form: str
    shape: str
    target: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    quick: bool = False
    needs: tuple[str, ...] = ()
    same_bits: str = ""

    @property
    def name(self) -> str:
        """The case in the committed table and on the command line."""
        return f"{self.op}/{self.form}/{self.target}/{self.shape}"


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _module(op: str, form: str) -> Any:
    if form == "triton":
        return triton_call.load(op)
    return importlib.import_module(f"pallas_kernels.{op}.{form}")


def _tree_attention() -> Iterator[GpuCase]:
    from pallas_kernels.tree_attention import specs

    quick = {(1, 1), (1, 64), (8, 32)}
    for shape in specs.GPU_SHAPES:
        for form, target in (("mosaic_gpu", HOPPER), ("triton", OTHER)):

            def build(shape: Any = shape, form: str = form) -> Any:
                module = _module(specs.OP, form)
                values = {"segment": specs.SEGMENT}
                if form == "triton":
                    values = module.heuristics(shape.dim)
                heads, dim = shape.heads, shape.dim
                blocks, slots, extra = shape.batch, shape.capacity, ()
                if shape.page:
                    count = shape.capacity // shape.page
                    blocks, slots = shape.batch * count, shape.page
                    extra = (array(shape.batch, count, dtype=jnp.int32),)
                cache = array(blocks, heads, slots, dim)
                new = array(shape.batch, heads, shape.rows, dim)
                fn = functools.partial(module.tree_attention, scale=1 / math.sqrt(dim), **values)
                return fn, (
                    array(shape.batch, heads, shape.group, shape.rows, dim),
                    cache,
                    cache,
                    array(shape.batch, dtype=jnp.int32),
                    new,
                    new,
                    array(shape.batch, shape.rows, shape.rows, dtype=jnp.bool_),
                    *extra,
                )

            mosaic = form == "mosaic_gpu"
            once = shape.page in (0, 16) and shape.name.startswith(("qwen3-8b", "smollm2"))
            yield GpuCase(
                specs.OP,
                form,
                shape.name,
                target,
                build,
                quick=once and shape.capacity == 4096 and (shape.batch, shape.rows) in quick,
                needs=_HOPPER_CODE if mosaic else ("HMMA",),
                same_bits=f"{specs.OP} {form} dim {shape.dim}" if mosaic and not shape.page else "",
            )


def _row_invariant_matmul() -> Iterator[GpuCase]:
    from pallas_kernels.row_invariant_matmul import specs

    for form, target in (("mosaic_gpu", HOPPER), ("triton", OTHER)):
        for shape in specs.GPU_SHAPES:
            for rows in (1, 64, 256) if shape.name == "qwen3-8b qkv" else (64,):

                def build(shape: Any = shape, rows: int = rows, form: str = form) -> Any:
                    fn = _module(specs.OP, form).matmul
                    return fn, (array(rows, shape.k), array(shape.n, shape.k))

                yield GpuCase(
                    specs.OP,
                    form,
                    f"{shape.name} rows {rows}",
                    target,
                    build,
                    quick=shape.name in ("qwen3-8b qkv", "smollm2-135m down") and rows == 64,
                    needs=_HOPPER_CODE if form == "mosaic_gpu" else ("HMMA",),
                )
        for grouped in specs.GROUPED_SHAPES:

            def build_grouped(shape: Any = grouped, form: str = form) -> Any:
                chosen = 64 * shape.active
                return _module(specs.OP, form).grouped_matmul, (
                    array(chosen, shape.k),
                    array(shape.experts, shape.n, shape.k),
                    array(chosen, dtype=jnp.int32),
                )

            yield GpuCase(
                specs.OP,
                form,
                f"{grouped.name} tokens 64",
                target,
                build_grouped,
                quick=grouped.name.endswith("down"),
                needs=_HOPPER_CODE if form == "mosaic_gpu" else ("HMMA",),
            )


def _verify_head() -> Iterator[GpuCase]:
    from pallas_kernels.verify_head import specs
    from pallas_kernels.verify_head.gpu import Sampling

    for form, target in (("mosaic_gpu", HOPPER), ("triton", OTHER)):
        for shape in specs.GPU_SHAPES:
            for rows in specs.GPU_ROWS if shape.name == "qwen3-8b" else (64,):
                for sampled in (False, True) if rows == 64 else (False,):

                    def build(
                        shape: Any = shape, rows: int = rows, form: str = form, warm: bool = sampled
                    ) -> Any:
                        kernel = _module(specs.OP, form).verify_head
                        args: tuple[Any, ...] = (
                            array(rows, shape.hidden),
                            array(shape.vocab, shape.hidden),
                        )
                        if not warm:
                            return kernel, args
                        sampling = Sampling(
                            array(rows, 2, dtype=jnp.uint32), array(rows, dtype=jnp.float32)
                        )
                        return (lambda x, w, s: kernel(x, w, sampling=s)), (*args, sampling)

                    yield GpuCase(
                        specs.OP,
                        form,
                        f"{shape.name} rows {rows}{' sampled' if sampled else ''}",
                        target,
                        build,
                        quick=shape.name == "qwen3-8b" and rows == 64,
                        needs=_HOPPER_CODE if form == "mosaic_gpu" else ("HMMA",),
                    )


def _draft_head_topk() -> Iterator[GpuCase]:
    from pallas_kernels.draft_head_topk import specs

    for shape in specs.GPU_SHAPES:

        def build(shape: Any = shape) -> Any:
            kernel = _module(specs.OP, "mosaic_gpu").topk
            return (lambda x, w: kernel(x, w, shape.width)), (
                array(shape.depth, shape.hidden),
                array(shape.vocab, shape.hidden),
            )

        yield GpuCase(
            specs.OP,
            "mosaic_gpu",
            shape.name,
            HOPPER,
            build,
            quick=shape.name == "qwen3-8b",
            needs=_HOPPER_CODE,
        )


def _build_tree() -> Iterator[GpuCase]:
    from pallas_kernels.build_tree import specs

    for shape in specs.GPU_SHAPES:
        for target in (HOPPER, OTHER):

            def build(shape: Any = shape) -> Any:
                kernel = _module(specs.OP, "triton").build_tree
                return (lambda tokens, table, root: kernel(tokens, table, root, shape.nodes)), (
                    array(shape.batch, shape.depth, shape.width, dtype=jnp.int32),
                    array(shape.batch, shape.depth, shape.width, shape.width, dtype=jnp.float32),
                    array(shape.batch, dtype=jnp.int32),
                )

            quick = shape.batch == 1 and shape.nodes == 64 and target == HOPPER
            yield GpuCase(specs.OP, "triton", shape.name, target, build, quick=quick)


def _accept_commit() -> Iterator[GpuCase]:
    from pallas_kernels.accept_commit import specs
    from pallas_kernels.accept_commit.api import accept_commit

    for shape in specs.GPU_SHAPES:

        def build(shape: Any = shape) -> Any:
            caches = [array(shape.batch, shape.heads, shape.capacity, shape.dim)] * shape.layers
            rows = array(shape.layers, shape.batch, shape.heads, shape.rows, shape.dim)
            path = array(shape.batch, shape.path, dtype=jnp.int32)
            count = array(shape.batch, dtype=jnp.int32)
            fn = jax.jit(accept_commit, donate_argnums=(0, 1))
            return fn, (caches, caches, rows, rows, path, count, count)

        yield GpuCase(specs.OP, "xla", shape.name, HOPPER, build, quick=shape.batch == 1)


def all_cases() -> tuple[GpuCase, ...]:
    """Every kernel at every named shape.

    Raises:
      ValueError: two cases of one name.
    """
    generators = (
        _tree_attention,
        _row_invariant_matmul,
        _verify_head,
        _draft_head_topk,
        _build_tree,
        _accept_commit,
    )
    cases = tuple(case for generate in generators for case in generate())
    cases += tuple(
        dataclasses.replace(case, target=target, quick=False)
        for case in cases
        for target in OLDER
        if case.form == "triton"
        and case.target == OTHER
        and any(shape in case.shape for shape in _OLDER_SHAPES[case.op])
    )
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two cases are named {twice[0]!r}")
    return cases
