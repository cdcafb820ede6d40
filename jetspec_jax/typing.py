"""Glossary of dimension letters, and array aliases for annotations.

B batch (sequences), T query rows, N tree nodes (root included), D draft depth (nodes below the root
on the longest path), W candidates per depth, S key positions (cache capacity), H model width, Q
query heads, K KV heads, G = Q / K, h head dim, V vocabulary, L layers, F feed-forward width, E
experts.
"""

from typing import Any

import jax
import numpy as np

Array = jax.Array
ArrayLike = jax.Array | np.ndarray
PyTree = Any
Params = dict[str, Any]
