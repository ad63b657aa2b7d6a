"""What tests of the benchmarks share."""

from contextlib import AbstractContextManager

import common
import pytest
import torch

from megaflow.backend import interpreted

interpreter_only = pytest.mark.skipif(not interpreted(), reason="compares in float32, on the CPU")


def uncompiled() -> AbstractContextManager[None]:
    """Inside, what torch.compile made runs as plain Python."""
    return torch.compiler.set_stance("force_eager")


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's whole run finds a GPU and can copy 1 GB/s, with an L2 cache of 50 MiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(common, "environment", lambda: {"device": "CPU", "commit": "0123456789ab"})
    monkeypatch.setattr(common, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(common, "l2_bytes", lambda: 50 * 2**20)
