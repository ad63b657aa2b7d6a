"""Without a GPU kernels run in Triton's interpreter and tests marked `gpu` are skipped; with one, `interpreter`."""

import pytest
import torch

from megaflow.backend import interpreted  # first: it chooses the interpreter before anything imports Triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {"gpu": None if torch.cuda.is_available() else "needs a CUDA device",
               "interpreter": None if interpreted() else "compares float32 results of the interpreter"}  # fmt: skip
    for item in items:
        for marker, reason in reasons.items():
            if reason and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
