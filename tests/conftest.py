"""Without a GPU kernels run in Triton's interpreter, and tests marked `gpu` are skipped."""

import pytest
import torch

import megaflow.backend  # noqa: F401 (chooses the interpreter before anything imports Triton)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
