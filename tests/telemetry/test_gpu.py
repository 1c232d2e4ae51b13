from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from nightshift.telemetry import gpu


@pytest.fixture(autouse=True)
def forget_handles() -> Iterator[None]:
    gpu._handles.cache_clear()
    yield
    gpu._handles.cache_clear()


def test_a_machine_without_a_gpu_has_no_figures() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert gpu.sample() == {}
    else:
        assert gpu.sample()


def test_a_figure_that_a_gpu_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here, so the driver's answers are ours; which of them are kept is not."""

    def untold(_: Any) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=83))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=3 * 2**20))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", untold)
    assert gpu.sample() == {"gpu/0/utilisation_percent": 83.0, "gpu/0/memory_mib": 3.0}
