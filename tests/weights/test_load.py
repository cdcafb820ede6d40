"""load_params: the same parameters from every format, and nothing loaded from what does not fit."""

from __future__ import annotations

import dataclasses
import mmap
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jetspec_jax.models.decoder import declare
from jetspec_jax.models.spec import WeightSpec, flatten
from jetspec_jax.weights import load_params, open_source
from pallas_kernels.memory import aligned_empty
from tests.weights.files import FAMILIES, one_line, write_gguf, write_hf

ROWS = (None, None)


def source_of(tmp_path: Path, **tensors: np.ndarray) -> Any:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return open_source(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_directory_give_the_same_model(tmp_path: Path, family: str, tied: bool) -> None:
    tensors = write_hf(tmp_path / "hf", family, tied=tied)
    write_gguf(tmp_path / "m.gguf", family, tied=tied)
    hf, packed = open_source(tmp_path / "hf"), open_source(tmp_path / "m.gguf")
    config = hf.config()
    assert dataclasses.replace(packed.config(), name=config.name) == config
    decl = declare(config)
    one, two = flatten(load_params(hf, decl)), flatten(load_params(packed, decl))
    assert list(one) == list(two)
    for name, value in one.items():
        assert isinstance(value, jax.Array)
        assert (value.shape, value.dtype) == (decl[name].shape, jnp.float32)
        np.testing.assert_array_equal(value, two[name], err_msg=name)
    here = "model.layers.1.self_attn"
    fused = np.concatenate([tensors[f"{here}.{p}_proj.weight"] for p in "qkv"])
    np.testing.assert_array_equal(one["layers.1.qkv"], fused)


def test_fused_stacked_and_plain_sources(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    t = {name: rng.normal(size=(2, 3)).astype(np.float32) for name in "abcdef"}
    decl = {
        "fused": WeightSpec((4, 3), ROWS, ("a", "b")),
        "stacked.0": WeightSpec((2, 4, 3), (None, *ROWS), (("a", "c"), ("d", "e")), stack=True),
        "stacked.1": WeightSpec((2, 2, 3), (None, *ROWS), ("e", "f"), stack=True),
    }
    params = load_params(source_of(tmp_path, **t), decl)
    np.testing.assert_array_equal(params["fused"], np.concatenate([t["a"], t["b"]]))
    pairs = [np.concatenate([t["a"], t["c"]]), np.concatenate([t["d"], t["e"]])]
    np.testing.assert_array_equal(params["stacked"][0], np.stack(pairs))
    np.testing.assert_array_equal(params["stacked"][1], np.stack([t["e"], t["f"]]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtype_of_the_parameters(tmp_path: Path, dtype: Any) -> None:
    value = np.linspace(-3, 3, 12, dtype=np.float32).reshape(4, 3)
    source = source_of(tmp_path, a=value)
    params = load_params(source, {"w": WeightSpec((4, 3), ROWS, ("a",))}, dtype)
    assert params["w"].dtype == dtype
    np.testing.assert_array_equal(params["w"], value.astype(dtype))


def test_pack_replaces_weights_and_progress_counts(tmp_path: Path) -> None:
    a, b = np.ones((4, 3), np.float32), np.full((3,), 2, np.float32)
    decl = {
        "w": WeightSpec((8, 3), ROWS, ("a", "c"), linear=True),
        "table": WeightSpec((4, 3), ROWS, ("d",)),
        "norm": WeightSpec((3,), (None,), ("b",)),
    }
    seen: list[Any] = []

    def pack(name: str, spec: WeightSpec, parts: Any) -> Any:
        assert (name == "w") == spec.linear
        return {"packed": [(p.kind, p.shape) for p in parts]} if spec.linear else None

    params = load_params(
        source_of(tmp_path, a=a, b=b, c=a.astype(np.float16), d=a * 2),
        decl,
        pack=pack,
        progress=lambda *x: seen.append(x),
    )
    assert params["w"]["packed"] == [("F32", (4, 3)), ("F16", (4, 3))]
    np.testing.assert_array_equal(params["table"], a * 2)
    np.testing.assert_array_equal(params["norm"], b)
    assert isinstance(params["norm"], jax.Array)
    assert seen == [("w", 1, 3), ("table", 2, 3), ("norm", 3, 3)]


def test_arrays_are_adopted_without_a_copy_and_one_at_a_time(tmp_path: Path) -> None:
    array = aligned_empty((256, 64), np.float32)
    assert array.ctypes.data % 64 == 0
    assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data
    big = np.ones((1_000, 250), np.float32)
    names = [f"t{i}" for i in range(12)]
    source = source_of(tmp_path, **dict.fromkeys(names, big))
    decl = {name: WeightSpec(big.shape, ROWS, (name,)) for name in names}
    tracemalloc.start()
    try:
        params = load_params(source, decl, jnp.bfloat16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    total = len(names) * big.nbytes // 2
    assert total <= sum(x.nbytes for x in params.values())
    # tracemalloc does not see the arena of huge pages, where the final arrays lie on Linux
    seen = 0 if hasattr(mmap, "MADV_HUGEPAGE") else total
    assert seen <= peak < seen + big.nbytes // 4


def test_what_does_not_fit_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.ones((4, 3), np.float32)
    source = source_of(tmp_path, a=x, b=x[:, :2].copy(), c=np.ones((4, 3), np.int32))
    reads: list[str] = []
    monkeypatch.setattr(type(source), "read", lambda self, name, out=None: reads.append(name))
    good = WeightSpec((4, 3), ROWS, ("a",))
    cases = {
        "'aa' is missing": {"w": good, "v": WeightSpec((4, 3), ROWS, ("aa",))},
        "nearest name there is 'a'": {"v": WeightSpec((4, 3), ROWS, ("aa",))},
        "[4, 2]": {"w": good, "v": WeightSpec((4, 3), ROWS, ("b",))},
        "[8, 3]": {"w": good, "v": WeightSpec((7, 3), ROWS, ("a", "a"))},
        "[2, 4, 3]": {"v": WeightSpec((3, 4, 3), (None, *ROWS), ("a", "a"), stack=True)},
        "int32": {"w": good, "v": WeightSpec((4, 3), ROWS, ("c",))},
        "2 unexpected tensor(s), such as 'b'": {"w": good},
    }
    for fragment, decl in cases.items():
        one_line(tmp_path, lambda decl=decl: load_params(source, decl), fragment)
    assert reads == []


def test_config_of_another_model_is_noticed(tmp_path: Path) -> None:
    write_hf(tmp_path, "qwen3")
    source = open_source(tmp_path)
    for change in ({"ffn_size": 128}, {"num_layers": 3}, {"num_layers": 1}, {"qk_norm": False}):
        decl = declare(dataclasses.replace(source.config(), **change))
        one_line(tmp_path, lambda decl=decl: load_params(source, decl), "config")
