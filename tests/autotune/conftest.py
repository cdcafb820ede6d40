"""Fakes begin every test afresh."""

from __future__ import annotations

import pytest

from tests.autotune.fakes import FakeWorker


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(FakeWorker, "started", [])
    monkeypatch.setattr(FakeWorker, "wrong", staticmethod(lambda params: False))
    monkeypatch.setattr(FakeWorker, "dies", staticmethod(lambda params: False))
    monkeypatch.setattr(FakeWorker, "on_call", staticmethod(lambda call: 1.0))
    monkeypatch.setattr(FakeWorker, "calls", 0)
    return FakeWorker
