"""Spawned processes compute with one thread each."""

from __future__ import annotations

import os

import pytest

from nightshift import spawning


def test_a_spawned_process_computes_with_one_thread_and_this_one_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with spawning.processes(1) as executor:
        assert {name: executor.submit(os.getenv, name).result() for name in spawning.ONE_THREAD} == spawning.ONE_THREAD
    assert os.environ["OMP_NUM_THREADS"] == "4"
    assert "OPENBLAS_NUM_THREADS" not in os.environ
