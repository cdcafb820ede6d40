"""Mixture of experts (cases.md 20): a row's routing and result do not depend on its company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.models.layers import moe

EXPERTS, WIDTH, FFN, TOP = 4, 16, 8, 2


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, WIDTH), (EXPERTS, 2 * FFN, WIDTH), (EXPERTS, WIDTH, FFN))
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def rows(count):
    return jnp.asarray(np.random.default_rng(1).normal(size=(count, WIDTH)), jnp.float32)


@pytest.mark.parametrize("normalise", [True, False])
def test_against_the_definition(weights, normalise):
    router, gate_up, down = (np.asarray(w, np.float64) for w in weights)
    x = rows(7)
    got = moe(x, *weights, top_k=TOP, normalise=normalise)
    for row, out in zip(np.asarray(x, np.float64), np.asarray(got), strict=True):
        p = np.exp(router @ row)
        p /= p.sum()
        best = np.argsort(-p)[:TOP]
        share = p[best] / (p[best].sum() if normalise else 1.0)
        expected = np.zeros(WIDTH)
        for expert, s in zip(best, share, strict=True):
            gate, up = np.split(gate_up[expert] @ row, 2)
            expected += s * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        np.testing.assert_allclose(out, expected, atol=1e-4)


def test_company_does_not_matter(weights):
    run = jax.jit(lambda x: moe(x, *weights, top_k=TOP, normalise=True))
    x = rows(6)
    alone = np.stack([np.asarray(run(x[i : i + 1]))[0] for i in range(6)])
    near = {"rtol": 5e-6, "atol": 1e-6}  # XLA tiles by the number of rows: rounding, not routing
    np.testing.assert_allclose(run(x), alone, **near)
    # the order of the rows, and what the other rows hold, are nothing to a row
    np.testing.assert_allclose(np.asarray(run(x[::-1]))[::-1], alone, **near)
    for bad in (np.nan, np.inf, 1e30):
        poisoned = np.asarray(run(x.at[1].set(bad).at[4].set(-bad)))
        for i in (0, 2, 3, 5):
            np.testing.assert_allclose(poisoned[i], alone[i], **near)
