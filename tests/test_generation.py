"""What a user of generate, prefill and decode can rely on."""

import pytest
import torch
from checkpoints import reference_tokens, small_model

from megaflow import MegaModel

pytestmark = pytest.mark.interpreter

PROMPTS = [[5, 17, 200], [7], [1, 2, 3, 4, 5, 6]]


@pytest.fixture(scope="module")
def hf():
    return small_model()


@pytest.fixture(scope="module")
def model(hf):
    return MegaModel.from_hf(hf, max_batch_size=3, max_seq_len=64, page_size=16, steps_per_launch=3, progress=False)


def continuations(hf, new: int) -> list[list[int]]:
    return [reference_tokens(hf, torch.tensor(p), new)[len(p) :].tolist() for p in PROMPTS]


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_sequence_stops_at_its_eos_and_is_padded_while_others_go_on(hf, model, schedule):
    wanted = continuations(hf, 6)
    eos = wanted[1][2]
    assert eos not in wanted[0] and eos not in wanted[2], "choose another seed"
    model.set_schedule(schedule)
    out = model.generate(PROMPTS, 6, eos_token_id=eos, pad_token_id=99)
    assert out[0, 6:].tolist() == wanted[0]
    assert out[1, 6:].tolist() == wanted[1][:3] + [99] * 3
    assert out[2, 6:].tolist() == wanted[2]


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_generation_ends_early_when_all_sequences_have_ended(hf, model, schedule):
    wanted = reference_tokens(hf, torch.tensor(PROMPTS[0]), 6)[3:].tolist()
    first = next(i for i, token in enumerate(wanted) if i >= 1 and token not in wanted[:i])
    model.set_schedule(schedule)
    out = model.generate(PROMPTS[:1], 40, eos_token_id=wanted[first])
    assert out[0, 3:].tolist() == wanted[: first + 1]
    again = model.generate(PROMPTS[:1], 3, eos_token_id=[])
    assert again[0, 3:].tolist() == wanted[:3], "an early end must leave the counters right"


def test_eos_as_the_very_first_token_needs_no_step(hf, model):
    first = reference_tokens(hf, torch.tensor(PROMPTS[0]), 1)[-1].item()
    assert model.generate(PROMPTS[:1], 9, eos_token_id=first)[0].tolist() == [*PROMPTS[0], first]


def test_prompts_come_back_padded_on_the_left_and_a_mask_is_the_same_as_ragged_lists(model):
    ragged = model.generate(PROMPTS, 2)
    longest = max(map(len, PROMPTS))
    for row, prompt in zip(ragged, PROMPTS, strict=True):
        assert row[:longest].tolist() == [0] * (longest - len(prompt)) + prompt
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    assert torch.equal(model.generate(ragged[:, :longest], 2, attention_mask=mask), ragged)


def test_sampling_follows_the_seed_and_top_k_1_is_greedy(model):
    greedy = model.generate(PROMPTS, 3)
    assert torch.equal(model.generate(PROMPTS, 3, temperature=0.7, top_k=1), greedy)
    first = model.generate(PROMPTS, 3, temperature=5.0, top_p=0.9, seed=3)
    assert torch.equal(model.generate(PROMPTS, 3, temperature=5.0, top_p=0.9, seed=3), first)
    assert not torch.equal(model.generate(PROMPTS, 3, temperature=5.0, top_p=0.9, seed=4), first)


def test_decode_goes_on_after_an_end_that_generate_found(hf, model):
    wanted = reference_tokens(hf, torch.tensor(PROMPTS[0]), 6)[3:].tolist()
    end = next(i for i, token in enumerate(wanted) if i >= 1 and token not in wanted[:i])
    model.generate(PROMPTS[:1], 6, eos_token_id=wanted[end])
    with torch.no_grad():
        for new in ([wanted[end]], [wanted[end], 9], [wanted[end], 9, 8]):
            ids = torch.tensor([[*PROMPTS[0], *wanted[:end], *new]])
            assert torch.allclose(model.decode(ids[:, -1]), hf(ids).logits[:, -1], atol=2e-5)


def test_a_new_prefill_forgets_the_sequences_before(hf, model):
    model.generate(PROMPTS, 4)
    ids = torch.tensor([[9, 8, 7, 6]])
    model.prefill(ids[:, :3])
    with torch.no_grad():
        assert torch.allclose(model.decode(ids[:, 3]), hf(ids).logits[:, -1], atol=2e-5)


def test_sequences_that_are_cut_back_go_on_as_before(hf, model):
    prompt = PROMPTS[0]
    wanted = reference_tokens(hf, torch.tensor(prompt), 3)[len(prompt) :].tolist()
    first = model.prefill([prompt]).argmax(1)
    for _ in range(2):
        assert [first.item(), *model.decoder.run(first, 2, model.schedule)[0].tolist()] == wanted
        model.decoder.rewind([len(prompt)])


@pytest.mark.parametrize("at_once", [1, 4])  # the first two prompts together, or each alone
def test_prompts_that_are_read_a_few_at_a_time_give_the_same_logits_and_cache(monkeypatch, hf, model, at_once):
    monkeypatch.setattr("megaflow.models.prefill.TOKENS_AT_ONCE", at_once)
    next_tokens = torch.tensor([8, 9, 10])
    found = model.prefill(PROMPTS), model.decode(next_tokens)
    with torch.no_grad():
        for i, prompt in enumerate(PROMPTS):
            wanted = hf(torch.tensor([[*prompt, next_tokens[i]]])).logits[0, -2:]
            assert torch.allclose(torch.stack([logits[i] for logits in found]), wanted, atol=2e-5)


def test_pages_are_given_back(model):
    for _ in range(5):  # 3 sequences of up to 64 tokens fit; leaked pages would run out
        model.generate([list(range(40))] * 3, 1)


def test_unknown_keywords_are_refused(hf, model):
    with pytest.raises(TypeError):
        model.generate(PROMPTS, 1, do_sampel=True)
    with pytest.raises(TypeError):
        MegaModel.from_hf(hf, max_batch=3)
