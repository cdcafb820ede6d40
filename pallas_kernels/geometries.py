"""Geometries of the models that the kernels' named shapes, compile check and bench are about.

Sizes are those of the models' published config.json. Draft heads of Qwen3-8B and Qwen3-30B-A3B are
the published ones (algorithm.md section 2), SmolLM2's is the one that ships here; the others have
no public head and are given one of the published kind (5 layers, 5 taps, block 16).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DraftHead:
    """Sizes of a draft head; heads, head size and width are the target's.

    Attributes:
        layers: decoder layers.
        taps: target layers whose outputs are fused.
        ffn: width of the SwiGLU.
        block: slots of a drafted block, the anchor included; depth D = block - 1.
        vocab: rows of the LM head that the draft reads.
    """

    layers: int
    taps: int
    ffn: int
    block: int
    vocab: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Sizes of a target model.

    Attributes:
        name: as on the command line.
        layers, hidden: L, H.
        heads, kv_heads, head_dim: Q, K, h.
        ffn: F of a dense layer, or of one expert.
        vocab: V.
        draft: its draft head.
        experts, active: E and experts a token, 0 for dense layers.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    draft: DraftHead
    experts: int = 0
    active: int = 0

    @property
    def q_width(self) -> int:
        """Q h."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """K h."""
        return self.kv_heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Outputs of the fused query, key and value projection."""
        return self.q_width + 2 * self.kv_width


GEOMETRIES = {
    g.name: g
    for g in (
        Geometry(
            *("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
            draft=DraftHead(layers=5, taps=5, ffn=12288, block=16, vocab=151936),
        ),
        Geometry(
            *("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936),
            draft=DraftHead(layers=8, taps=5, ffn=6144, block=16, vocab=151936),
            experts=128,
            active=8,
        ),
        Geometry(
            *("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936),
            draft=DraftHead(layers=5, taps=5, ffn=3072, block=16, vocab=151936),
        ),
        Geometry(
            *("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
            draft=DraftHead(layers=5, taps=5, ffn=14336, block=16, vocab=128256),
        ),
        Geometry(
            *("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152),
            draft=DraftHead(layers=2, taps=5, ffn=1536, block=8, vocab=12288),
        ),
    )
}
