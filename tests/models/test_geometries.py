"""The two tables of model sizes say the same: kernels have their own, since they import nothing of
the decoder."""

import pytest

from jetspec_jax.drafter.checkpoint import read_draft_config
from jetspec_jax.loading import bundled_head_path
from jetspec_jax.models.geometries import GEOMETRIES, geometry
from jetspec_jax.weights import bundled_model_path, open_source
from pallas_kernels.geometries import GEOMETRIES as OF_KERNELS


@pytest.mark.parametrize("name", [*sorted(GEOMETRIES), "smollm2-135m"])
def test_sizes_of_kernels_are_those_of_the_model(name: str) -> None:
    here = OF_KERNELS[name]
    model = geometry(name) if name in GEOMETRIES else open_source(bundled_model_path()).config()
    assert (here.layers, here.hidden, here.heads, here.kv_heads, here.head_dim, here.vocab) == (
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.vocab_size,
    )
    assert here.ffn == (model.moe_ffn_size if here.experts else model.ffn_size)
    if here.experts:
        assert (here.experts, here.active) == (model.num_experts, model.experts_per_token)


def test_the_head_of_the_small_model_is_the_one_that_ships() -> None:
    head, here = read_draft_config(bundled_head_path()), OF_KERNELS["smollm2-135m"].draft
    assert (here.layers, here.taps, here.ffn, here.block, here.vocab) == (
        head.num_layers,
        len(head.target_layer_ids),
        head.ffn_size,
        head.block_size,
        head.draft_vocab_size,
    )
