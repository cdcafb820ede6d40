"""Which form of the GPU ops serves a call, and that all forms mean the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import build_tree, dispatch, draft_head_topk, triton_call
from pallas_kernels import row_invariant_matmul as rim
from pallas_kernels.gpu_target import TARGETS, on_abstract
from pallas_kernels.native import KernelError
from pallas_kernels.row_invariant_matmul import arrays
from pallas_kernels.verify_head import verify_head
from pallas_kernels.verify_head.gpu import Sampling
from tests.pallas_kernels.interpreted import interpreted_mosaic
from tests.pallas_kernels.triton_interpreter import interpreted

RNG = np.random.default_rng(0)
# small integers: sums are exact, so all forms agree in every bit
X = jnp.asarray(RNG.integers(-2, 3, (2, 3, 64)), jnp.bfloat16)
W = jnp.asarray(RNG.integers(-2, 3, (64, 64)), jnp.bfloat16)
EXPERTS = jnp.stack([W, -W])
COUNTS = jnp.asarray([3, 1], jnp.int32)
SAMPLING = Sampling(
    jnp.asarray(RNG.integers(0, 2**32, (2, 3, 2)), jnp.uint32),
    jnp.asarray([[0, 1, 2], [0, 0, 1]], jnp.float32),
)


def ids(sampling: Sampling | None, **kwargs: Any) -> jax.Array:
    return verify_head(X, W, COUNTS, sampling=sampling, **kwargs).ids


CALLS = {
    "project": lambda **kw: rim.project(X, W, **kw),
    "project_grouped": lambda **kw: rim.project_grouped(
        X.reshape(6, 64), EXPERTS, jnp.asarray([0, 1, 1, 0, 0, 1], jnp.int32), **kw
    ),
    "greedy": lambda **kw: ids(None, **kw),
    "sampled": lambda **kw: ids(SAMPLING, **kw),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the hash, which is meant to
def test_forms_agree_and_each_gpu_has_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    wanted = np.asarray(call(implementation="xla"))
    np.testing.assert_array_equal(np.asarray(call()), wanted)
    with on_abstract(TARGETS["h100"]), interpreted_mosaic(), dispatch.strict():
        np.testing.assert_array_equal(np.asarray(call()), wanted)
    pytest.importorskip("triton")
    # the interpreter takes arrays, so no vmap may look inside
    monkeypatch.setattr(arrays, "_build_project", lambda multiply: multiply)
    loaded: list[str] = []
    monkeypatch.setattr(triton_call, "load", lambda op: loaded.append(op) or interpreted(op))
    with on_abstract(TARGETS["rtx-pro-6000"]), dispatch.strict():
        np.testing.assert_array_equal(np.asarray(call()), wanted)
    assert len(loaded) == 1


def test_rows_that_are_not_there_are_zero() -> None:
    choice = verify_head(X, W, COUNTS)
    for field in choice:
        assert not np.asarray(field)[1, 1:].any()


def test_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton on every GPU, Hopper too."""
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(1, 4, 3)
    table = -jnp.asarray(RNG.integers(1, 5, (1, 4, 3, 3)), jnp.float32)
    root = jnp.zeros((1,), jnp.int32)
    wanted = build_tree.build_tree(tokens, table, root, 9)
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_call, "load", interpreted)
    with on_abstract(TARGETS["h100"]), dispatch.strict():
        found = build_tree.build_tree(tokens, table, root, 9)
        with pytest.raises(KernelError, match="20000 nodes of width 3"):
            build_tree.build_tree(tokens, table, root, 20000)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    with pytest.raises(KernelError, match="do not fit a tree"):
        build_tree.build_tree(tokens, table[:, :2], root, 9)


def test_what_a_kernel_does_not_take_is_said() -> None:
    with on_abstract(TARGETS["h100"]):
        with dispatch.strict(), pytest.raises(KernelError, match="need bfloat16"):
            rim.project(X.astype(jnp.float32), W)
        with pytest.raises(KernelError, match="width 40"):
            draft_head_topk.candidates(X, W, 40, implementation="mosaic_gpu")
        packed = rim.pack(np.asarray(W), "xla")
        with pytest.raises(KernelError, match="packed head is greedy"):
            verify_head(X.astype(jnp.float32), packed, COUNTS, sampling=SAMPLING)
    with pytest.raises(KernelError, match="needs a Hopper GPU"):
        rim.project(X, W, implementation="mosaic_gpu")
    with pytest.raises(KernelError, match="do not fit a head"):
        verify_head(X, W[:, :32], COUNTS)


def test_packed_weights_as_stored_take_the_kernels() -> None:
    """What `pack` gives where there is no native kernel, with a bias and a residual; and vmap."""
    packed = rim.pack(np.asarray(W), "xla")
    bias, residual = jnp.arange(64.0), jnp.ones((2, 3, 64), jnp.float32)
    plain = rim.project(X, W)
    with on_abstract(TARGETS["h100"]), interpreted_mosaic(), dispatch.strict():
        with dispatch.recorded() as taken:
            y = rim.matmul(X, packed, bias=bias, residual=residual)
            choice = verify_head(X, packed, COUNTS)
        each = jax.vmap(rim.project, (0, None))(X, W)
    assert taken == [("row_invariant_matmul", "mosaic_gpu"), ("verify_head", "mosaic_gpu")]
    np.testing.assert_array_equal(np.asarray(y), np.asarray(plain + bias[None, None] + residual))
    np.testing.assert_array_equal(np.asarray(each), np.asarray(plain))
    np.testing.assert_array_equal(np.asarray(choice.ids), np.asarray(verify_head(X, W, COUNTS).ids))
