"""On a GPU: what is compiled when, and how fast a second process is."""

from pathlib import Path

import pytest
from common import random_model
from start import LONGEST_WARM_START_S, Setting, in_new_process

from megaflow import MegaModel
from megaflow.backend import triton
from megaflow.kernel import megakernel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_nothing_is_compiled_after_the_first_token_nor_in_a_second_process_which_starts_fast(tmp_path: Path, schedule):
    setting = Setting(["Qwen3-0.6B"], [schedule], max_batch=128, prompt=64, timeout_s=300)
    cold, warm = (in_new_process("Qwen3-0.6B", schedule, setting, str(tmp_path)) for _ in range(2))
    print(f"{schedule}: {cold}, {warm}")
    assert (cold.compiled, cold.read, cold.compiled_later) == (3, 0, 0)
    assert (warm.compiled, warm.read, warm.compiled_later) == (0, 3, 0)
    assert warm.first_token_s < LONGEST_WARM_START_S


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_no_batch_size_of_a_model_with_experts_asks_for_another_kernel(monkeypatch: pytest.MonkeyPatch, schedule):
    source = random_model("Qwen3-30B-A3B", num_hidden_layers=2)
    model = MegaModel.from_hf(source, schedule=schedule, max_batch_size=64, max_seq_len=32, progress=False)
    megakernel.device_caches.clear()  # of this process: other tests may have filled them
    asked: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: asked.append(cache_hit))
    for batch in (1, 64, 2, 16, 17, 32, 33):
        model.generate([[5, 7]] * batch, 3, eos_token_id=[])
        assert len(asked) == 3
