"""Quantisation at load, for weights whose values decide speed and never a token: the draft head."""

from __future__ import annotations

import numpy as np

BLOCK = 32


def q8_0(rows: np.ndarray) -> np.ndarray:
    """Rows [n, k] float32, k a multiple of 32 -> GGUF Q8_0 blocks, uint8 [n, k / 32 * 34].

    A block of 32 is a float16 scale, its largest magnitude over 127, and 32 int8 (ggml's
    quantize_row_q8_0).
    """
    n, k = rows.shape
    blocks = rows.reshape(n, k // BLOCK, BLOCK)
    scale = np.abs(blocks).max(-1) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    out = np.empty((n, k // BLOCK, 2 + BLOCK), np.uint8)
    out[..., :2] = scale.astype(np.float16)[..., None].view(np.uint8)
    quants = np.rint(blocks * inverse[..., None]).astype(np.int8)
    out[..., 2:] = quants.view(np.uint8)
    return out.reshape(n, -1)
