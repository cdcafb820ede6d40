"""GGUF blocks to float32, bit for bit as `gguf.quants.dequantize` and several times faster.

Faster because the arithmetic runs in place on the destination, in pieces that stay in the caches.
Block layouts: ggml/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jetspec_jax.weights.gguf_file import BLOCKS

_PIECE = 1 << 17  # elements per piece: 512 KiB of float32, about one L2 cache


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """float16 at byte `at` of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(q: np.ndarray, out: np.ndarray) -> None:
    """Low nibbles to the first half of `out` [n, 32], high nibbles to the second."""
    out[:, :16] = q & np.uint8(0x0F)
    out[:, 16:] = q >> np.uint8(4)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    shift = np.concatenate([mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)], axis=1)
    q = blocks[:, 16:].reshape(-1, 4, 32)
    view = out.reshape(-1, 4, 2, 32)
    view[:, :, 0] = q & np.uint8(0x0F)
    view[:, :, 1] = q >> np.uint8(4)
    groups = out.reshape(-1, 8, 32)
    groups *= (_half(blocks, 0) * scale.astype(np.float32))[:, :, None]
    groups -= (_half(blocks, 2) * shift.astype(np.float32))[:, :, None]


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # two halves of 128 elements, each 64 bytes
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    view = out.reshape(-1, 2, 2, 2, 32)  # half, nibble, byte group, element
    for nibble in range(2):
        for group in range(2):
            bits = (high >> np.uint8(4 * nibble + 2 * group)) & np.uint8(3)
            view[:, :, nibble, group] = (
                (low[:, :, group] >> np.uint8(4 * nibble)) & np.uint8(0x0F)
            ) | (bits << np.uint8(4))
    out -= np.float32(32)
    groups = out.reshape(-1, 16, 16)
    groups *= scale[:, :, None]


_DECODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_SIZES = {kind: (per_block, block_bytes) for kind, per_block, block_bytes in BLOCKS.values()}
SUPPORTED = ("F32", "F16", "BF16", *_DECODERS)


def dequantize(blocks: np.ndarray, kind: str, out: np.ndarray | None = None) -> np.ndarray:
    """Float32 values of GGUF blocks.

    Args:
        blocks: uint8 [..., bytes per row], C-contiguous, as `GGUFFile.blocks` gives them.
        kind: type name, one of `SUPPORTED`, or "F64".
        out: C-contiguous float32 destination [..., columns] to fill; a new array when None.

    Returns:
        float32 [..., columns] (`out` when given).
    """
    per_block, block_bytes = _SIZES[kind]
    shape = (*blocks.shape[:-1], blocks.shape[-1] // block_bytes * per_block)
    if out is None:
        out = np.empty(shape, np.float32)
    if kind == "F64":  # safetensors only
        out[...] = blocks.view(np.float64).reshape(shape)
    elif kind == "F32":
        out[...] = blocks.view(np.float32).reshape(shape)
    elif kind == "F16":
        out[...] = blocks.view(np.float16).reshape(shape)
    elif kind == "BF16":
        np.left_shift(
            blocks.view(np.uint16).reshape(shape),
            np.uint32(16),
            out=out.view(np.uint32),
            dtype=np.uint32,
        )
    else:
        decode = _DECODERS[kind]
        source = blocks.reshape(-1, block_bytes)
        target = out.reshape(-1, per_block)
        step = _PIECE // per_block
        for start in range(0, len(source), step):
            decode(source[start : start + step], target[start : start + step])
    return out
