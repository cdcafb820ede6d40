"""A process of its own with two CPU devices: gradient accumulation and data parallelism."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.models.spec import flatten
from tests.train.test_step import LOSS, ROWS, SMALL, setup
from train.step import data_mesh, gradients


def main() -> None:
    """One after the other, on two devices, and both: the same as in one piece. Sequences differ in
    how many slots they supervise, so a mean of means would be wrong."""
    params, frozen, batch = setup(SMALL, batch=4)
    batch = batch.replace(
        stop=jnp.broadcast_to(jnp.asarray([[ROWS], [9], [ROWS], [14]]), batch.stop.shape),
        valid=batch.valid.at[0, :2].set(False),
    )
    kwargs: dict[str, Any] = {"cfg": SMALL, "loss": LOSS, "dtype": jnp.float32}
    whole, parts = jax.jit(functools.partial(gradients, **kwargs))(params, frozen, batch)
    mesh = data_mesh(2)
    for accumulate, devices in ((4, None), (1, mesh), (2, mesh)):
        fn = jax.jit(functools.partial(gradients, **kwargs, accumulate=accumulate, mesh=devices))
        got, found = fn(params, frozen, batch)
        np.testing.assert_allclose(found.count, parts.count)
        for name, want in flatten(whole).items():
            np.testing.assert_allclose(
                flatten(got)[name], want, rtol=2e-4, atol=2e-6, err_msg=f"{name} {accumulate}"
            )


if __name__ == "__main__":
    main()
