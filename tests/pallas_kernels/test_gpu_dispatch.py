"""Which form runs where, what insisting on one means, and what is said about it."""

from __future__ import annotations

import json
import logging

import jax
import pytest

from pallas_kernels import dispatch, triton_call, tuned
from pallas_kernels.gpu_target import TARGETS, on_abstract
from pallas_kernels.native import KernelError
from pallas_kernels.tree_attention import api, specs
from tests.pallas_kernels.attention_cases import random_call


def works() -> None:
    pass


def broken() -> None:
    raise KernelError("out of order")


def select(implementation: str, target: str | None, op: str, **forms):
    """`dispatch.select` as on a GPU; every test names an op of its own, for it logs once."""
    if target is None:
        return dispatch.select(op, implementation, forms)
    with on_abstract(TARGETS[target]):
        return dispatch.select(op, implementation, forms)


@pytest.mark.parametrize(
    "target,expected",
    [
        ("h100", "mosaic_gpu"),
        ("h200", "mosaic_gpu"),
        ("rtx-pro-6000", "triton"),
        ("a100", "triton"),
        ("l40s", "triton"),
        (None, "cpu"),
    ],
)
def test_auto_takes_the_first_form_that_the_device_allows(target, expected):
    forms = {"mosaic_gpu": works, "triton": works, "cpu": works}
    assert select("auto", target, f"order-{target}", **forms) == expected


def test_auto_says_once_what_runs_and_why(caplog):
    forms = {"mosaic_gpu": broken, "triton": works}
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(2):
            assert select("auto", "h100", "said", **forms) == "triton"
    (record,) = caplog.records
    assert record.getMessage() == (
        "said: triton (first that NVIDIA H100 80GB HBM3 allows; mosaic_gpu: out of order)"
    )


def test_the_reference_is_a_warning_that_names_every_failure(caplog):
    forms = {"mosaic_gpu": broken, "triton": broken}
    assert select("auto", "h100", "fallen", **forms) == "xla"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "fallen: xla (mosaic_gpu: out of order; triton: out of order)"


def test_strict_does_not_fall_back():
    forms = {"mosaic_gpu": broken, "triton": broken}
    with dispatch.strict():
        with pytest.raises(KernelError, match="mosaic_gpu: out of order; triton: out of order"):
            select("auto", "h100", "strict", **forms)
        assert select("auto", "h100", "strict 2", triton=works) == "triton"
        assert select("xla", "h100", "strict 3", **forms) == "xla"
        # no kernel is written for such a device: nothing was lost
        assert select("auto", None, "strict 4", **forms) == "xla"
    assert select("auto", "h100", "strict", **forms) == "xla"


@pytest.mark.parametrize(
    "implementation,target,forms,message",
    [
        ("mosaic_gpu", None, {"mosaic_gpu": works}, "it needs a Hopper GPU .*not 'cpu'"),
        ("mosaic_gpu", "rtx-pro-6000", {"mosaic_gpu": works}, "it needs a Hopper GPU"),
        ("triton", None, {"triton": works}, "it needs an NVIDIA GPU"),
        ("cpu", "h100", {"cpu": works}, "it needs JAX's cpu backend, not 'NVIDIA H100"),
        ("mosaic_gpu", "h100", {"mosaic_gpu": broken}, "not available: out of order; use 'auto'"),
        (
            "triton",
            "h100",
            {"mosaic_gpu": works},
            "has no implementation 'triton'.*mosaic_gpu, xla",
        ),
        ("fast", "h100", {"mosaic_gpu": works}, "unknown kernel implementation 'fast'"),
    ],
)
def test_insisting_is_strict(implementation, target, forms, message):
    with pytest.raises(KernelError, match=message) as caught:
        select(implementation, target, "insisted", **forms)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_an_op_without_gpu_kernels_says_so(implementation):
    with pytest.raises(KernelError, match=f"op has no implementation '{implementation}'"):
        dispatch.choose("op", implementation, works)


def test_tree_attention_on_a_cpu_refuses_the_gpu_forms():
    call = random_call(0, lengths=[3], rows=2, capacity=64)
    with pytest.raises(KernelError, match="'mosaic_gpu' is not available: it needs a Hopper GPU"):
        api.tree_attention(*call, scale=1.0, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"dim": 96}, "head dimension 96"),
        ({"rows": 257}, "257 rows: at most 256"),
        ({"capacity": 100}, "a cache of 100 slots: a multiple of 64"),
        ({"dtype": jax.numpy.float32}, "float32 rows: wgmma multiplies bfloat16"),
    ],
)
def test_calls_that_the_hopper_kernel_does_not_take_name_the_reason(change, reason):
    call = random_call(0, **({"lengths": [3], "rows": 2, "capacity": 64} | change))
    with on_abstract(TARGETS["h100"]), pytest.raises(KernelError, match=reason):
        api.tree_attention(*call, scale=1.0, implementation="mosaic_gpu")


def test_triton_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(triton_call.metadata, "version", lambda name: "9.9")
    with pytest.raises(KernelError, match=r"jax-triton 9.9 is installed, 0.4.1 is needed: install"):
        triton_call.load("tree_attention")


# --- tuned tables -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,expected",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("cpu", None),
    ],
)
def test_families_of_devices(kind, expected):
    assert tuned.family(kind) == expected


def test_a_table_overrides_the_heuristics(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "_FOLDER", tmp_path)
    tuned._table.cache_clear()
    (tmp_path / "h100").mkdir()
    table = {"mosaic_gpu": {"segment": 512, "dim=128": {"segment": 2048}}}
    (tmp_path / "h100" / "op.json").write_text(json.dumps(table))
    kind, defaults = TARGETS["h100"].name, {"segment": 1024}
    assert tuned.lookup("op", "mosaic_gpu", kind, defaults, dim=64) == {"segment": 512}
    assert tuned.lookup("op", "mosaic_gpu", kind, defaults, dim=128) == {"segment": 2048}
    assert tuned.lookup("op", "triton", kind, defaults, dim=128) == defaults
    assert tuned.lookup("op", "mosaic_gpu", "NVIDIA A100", defaults, dim=128) == defaults
    with pytest.raises(KernelError, match=r"tuned/h100/op.json: mosaic_gpu has no parameter 'seg"):
        tuned.lookup("op", "mosaic_gpu", kind, {"stages": 2})
    tuned._table.cache_clear()


@pytest.mark.parametrize("device", ["h100", "h200", "rtx-pro-6000"])
def test_the_shipped_table_of_tree_attention_is_read(device):
    kind = TARGETS[device].name
    (form,) = set(tuned._table(device, specs.OP)) - {"source"}
    assert form == ("triton" if device == "rtx-pro-6000" else "mosaic_gpu")
    names = ("segment", "num_warps", "num_stages") if form == "triton" else ("segment",)
    for dim in (64, 128):
        found = tuned.lookup(specs.OP, form, kind, dict.fromkeys(names, -1), dim=dim)
        assert set(found) == set(names) and min(found.values()) > 0
