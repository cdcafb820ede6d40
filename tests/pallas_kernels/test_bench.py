"""The bench where there is no GPU: computed limits against values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pallas_kernels import bench, roofline
from pallas_kernels.geometries import GEOMETRIES
from pallas_kernels.gpu_target import TARGETS, GpuTarget

QWEN = GEOMETRIES["qwen3-8b"]
# 1 byte and 4 operations a second: seconds are then bytes, or a fourth of the operations
UNIT = GpuTarget("unit", 1, 1, 1.0, 4.0)


@pytest.mark.parametrize(
    "name,count", [("qwen3-8b", 1_048_626_432), ("qwen3-30b-a3b", 473_995_264)]
)
def test_draft_heads_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert roofline.draft_parameters(GEOMETRIES[name]) == count


def test_a_projection_by_hand() -> None:
    work = roofline.projection("p", "verify", rows=2, n=3, k=5, count=7)
    assert work.bytes == 7 * 2 * (15 + 2 * 5 + 2 * 3) and work.flops == 7 * 2 * 2 * 3 * 5
    assert work.seconds(UNIT) == 434.0 and work.bound(UNIT) == "memory"
    wide = roofline.projection("p", "verify", rows=64, n=64, k=64)
    assert wide.bytes == 24_576 and wide.flops == 524_288
    assert wide.seconds(UNIT) == 131_072.0 and wide.bound(UNIT) == "compute"


def test_experts_read_only_what_some_row_wants() -> None:
    one = roofline.grouped_projection("e", "verify", rows=1, n=4, k=6, experts=8, active=2)
    assert one.bytes == pytest.approx(2 * (2 * 24 + 2 * 10)) and one.flops == 2 * 2 * 24
    # two rows: 8 (1 - (3/4)^2) = 3.5 experts
    two = roofline.grouped_projection("e", "verify", rows=2, n=4, k=6, experts=8, active=2)
    assert two.bytes == pytest.approx(2 * (3.5 * 24 + 4 * 10)) and two.flops == 2 * 4 * 24
    many = roofline.grouped_projection("e", "verify", rows=256, n=4, k=6, experts=8, active=2)
    assert many.bytes == pytest.approx(2 * (8 * 24 + 512 * 10))


def test_attention_by_hand() -> None:
    """SmolLM2's 9 heads over 3 of 64: two rows over 10 cached keys."""
    work = roofline.attention("a", "verify", 2, 10, GEOMETRIES["smollm2-135m"], batch=3, count=1)
    keys_values, rows, mask = 2 * 2 * 12 * 192, 2 * 2 * 2 * 576, 4 * 2
    assert work.bytes == 3 * (keys_values + rows + mask)
    assert work.flops == 3 * 4 * 2 * 12 * 576  # a multiply-add for scores, one for values


def test_a_plain_step_of_qwen3_8b_reads_its_weights_and_cache() -> None:
    work = roofline.forward_work(QWEN, 1, 4096)
    weights = 2 * (36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288) + 151936 * 4096)
    cache = 36 * 2 * 2 * 4097 * 1024
    rest = sum(w.bytes for w in work) - weights - cache
    assert weights == 15_136_194_560
    assert 0 < rest < 6e6  # a row's operands
    # 15.74 GB over 3.352 TB/s
    assert roofline.seconds(work, TARGETS["h100"]) == pytest.approx(4.697e-3, rel=1e-3)


def test_ceiling_of_the_speed_up_at_64_nodes() -> None:
    """For every tau: tau x 4.697 / 5.849 ms; the rows that commit moves change the third digit."""
    document = bench.roofline_document(QWEN, 64, 4096, bench.TAUS, 8, 1)
    h100 = document["devices"]["h100"]
    assert set(h100["ceiling"]) == {"4", "6", "8", "10.76"}
    for tau, gain in h100["ceiling"].items():
        assert gain == pytest.approx(float(tau) * 4.697 / 5.849, rel=1e-3)
    assert h100["round_s"] == pytest.approx(5.849e-3, rel=1e-3)
    assert h100["round_s"] == pytest.approx(sum(h100["op_s"].values()))
    assert h100["bound"]["gate_up"] == "memory"
    many = bench.roofline_document(QWEN, 256, 4096, bench.TAUS, 8, 32)["devices"]["h100"]
    assert many["bound"]["gate_up"] == "compute" and many["round_s"] > h100["round_s"]


@pytest.mark.parametrize("model", sorted(GEOMETRIES))
def test_every_model_has_limits_on_every_gpu(model: str) -> None:
    document = bench.roofline_document(GEOMETRIES[model], 16, 512, (2.0,), 4, 2)
    assert set(document["devices"]) == {"h100", "h200", "rtx-pro-6000"}
    for device in document["devices"].values():
        assert 0 < device["plain_s"] < device["round_s"]
        assert 0 < device["ceiling"]["2"] < 2
        assert all(t > 0 for t in device["op_s"].values())


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "limits.svg"
    words = ["--roofline", "--json", "--svg", str(svg), "--nodes", "8", "--context", "128"]
    assert bench.main(words) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["nodes"] == 8
    assert "ceiling of the speed-up" in out and "tree_attention" in out
    assert svg.read_text().startswith("<?xml") and "rtx-pro-6000" in svg.read_text()


@pytest.mark.parametrize(
    "words,message",
    [
        ([], "nothing to time"),
        (["--roofline", "--nodes", "0"], "--nodes 0: give 1 to 256"),
        (["--roofline", "--tau", "four"], "--tau four"),
        (["--roofline", "--tau", "0.5"], "--tau 0.5"),
        (["--roofline", "--svg", "no/such/folder/x.svg"], "does not exist"),
    ],
)
def test_refusals_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not words:
        import jax

        if jax.default_backend() == "gpu":
            pytest.skip("there is a GPU")
    assert bench.main(words) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
