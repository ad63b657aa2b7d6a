"""Whole models decode to transformers' greedy tokens, in float32, in both modes."""

import pytest
import torch
from checkpoints import reference_tokens, small_model

from megaflow import MegaModel

pytestmark = pytest.mark.interpreter

GEOMETRIES = {
    "gqa1-head64-tied": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "gqa2-head64-untied": {"tie_word_embeddings": False},
    "gqa2-head128-hidden112": {"head_dim": 128, "hidden_size": 112, "num_key_value_heads": 1, "num_attention_heads": 2},
    "gqa4-head64-hidden272": {"hidden_size": 272, "num_attention_heads": 4, "num_key_value_heads": 1},
    "gqa4-head128-untied": {"head_dim": 128, "num_key_value_heads": 1, "tie_word_embeddings": False},
    "gqa8-head64-hidden48": {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 1},
    "gqa1-head128-yarn": {
        "head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                            "original_max_position_embeddings": 128},
    },
}  # fmt: skip
PROMPT_LENGTHS = (9, 1, 17, 4, 70)
NEW_TOKENS = 4


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_greedy_tokens_equal_transformers_in_both_modes(geometry, batch):
    hf = small_model(seed=batch, **GEOMETRIES[geometry])
    prompts = [torch.randint(0, hf.config.vocab_size, (n,)) for n in PROMPT_LENGTHS[:batch]]
    wanted = [reference_tokens(hf, p, NEW_TOKENS)[len(p) :].tolist() for p in prompts]
    model = MegaModel.from_hf(hf, max_batch_size=batch, max_seq_len=128, page_size=16, progress=False)
    for schedule in ("static", "dynamic"):
        model.set_schedule(schedule)
        got = model.generate(prompts, NEW_TOKENS)
        assert got[:, -NEW_TOKENS:].tolist() == wanted, schedule


def test_logits_of_prefill_and_decode_equal_transformers():
    hf = small_model(hidden_size=272, tie_word_embeddings=False)
    ids = torch.randint(0, hf.config.vocab_size, (2, 19))
    model = MegaModel.from_hf(hf, max_batch_size=2, max_seq_len=64, progress=False)
    with torch.no_grad():
        wanted = hf(ids).logits[:, -4:]
    got = [model.prefill(ids[:, :-3])] + [model.decode(ids[:, i]) for i in range(-3, 0)]
    assert torch.allclose(torch.stack(got, 1), wanted, atol=2e-5)


def test_more_sequences_than_a_token_tile_holds():
    hf = small_model(num_hidden_layers=1, intermediate_size=64)
    ids = torch.randint(0, hf.config.vocab_size, (34, 3))
    model = MegaModel.from_hf(hf, max_batch_size=34, max_seq_len=16, progress=False)
    with torch.no_grad():
        wanted = hf(ids).logits[:, -1]
    for schedule in ("static", "dynamic"):
        model.set_schedule(schedule)
        model.prefill(ids[:, :-1])
        assert torch.allclose(model.decode(ids[:, -1]), wanted, atol=2e-5)
