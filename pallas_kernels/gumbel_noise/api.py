"""Standard Gumbel noise of token ids under position keys.

The native kernel (`cpu.cc`) is the serving form of `jetspec_jax.sampling.token_noise` (which is the
XLA form and the reference): a sampled round needs the noise of the whole vocabulary at every depth
of its tree, and two logarithms an id cost XLA more than verification itself.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.gumbel_noise import specs


def gumbel_noise(keys: jax.Array, ids: jax.Array, *, threads: int = 0) -> jax.Array:
    """Noise of every id under every key; native CPU only.

    Args:
      keys: [..., 2] uint32.
      ids: [...] int32.
      threads: most threads; 0: all there are. The bits do not depend on it.

    Returns:
      [..., ids' shape] float32. An id's noise is a function of its key and itself alone.

    Raises:
      native.KernelError: shapes or dtypes that do not fit, or no native kernel here.
    """
    if keys.shape[-1:] != (2,) or keys.dtype != jnp.uint32 or ids.dtype != jnp.int32:
        raise native.KernelError(
            f"{specs.OP}: keys {keys.dtype}{list(keys.shape)} and ids {ids.dtype}{list(ids.shape)}:"
            " need uint32 [..., 2] and int32"
        )
    shape = (*keys.shape[:-1], *ids.shape)
    call = jax.ffi.ffi_call(
        native.library().target("GumbelNoise"),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        vmap_method="sequential",
    )
    return call(keys, ids, threads=np.int64(threads))
