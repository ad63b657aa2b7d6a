"""On a GPU: real geometries with random weights against transformers, repeatability, and a broken plan."""

import copy
import time

import numpy as np
import pytest
import torch
from common import random_model
from test_deadlock import broken, without
from test_user_schedules import USERS

from megaflow import DeadlockError, MegaModel
from megaflow.scheduler import SCHEDULES, Hybrid, Static, Unfused

pytestmark = pytest.mark.gpu
BATCHES = (1, 2, 7, 16, 33, 64)
PROMPT, STEPS = 512, 8


@pytest.fixture(scope="module", params=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B"])
def models(request):
    """transformers in bfloat16 and in float32, and megaflow, with the same weights."""
    hf = random_model(request.param)
    mega = MegaModel.from_hf(hf, max_batch_size=max(BATCHES), max_seq_len=PROMPT + 64, progress=False)
    reference = copy.deepcopy(hf).float()
    yield hf, reference, mega
    torch.cuda.empty_cache()


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """float32 [B, STEPS + 1, vocab], sequence by sequence."""
    with torch.no_grad():
        rows = [model(row[None], logits_to_keep=STEPS + 1, use_cache=False).logits.float() for row in ids]
    return torch.cat(rows)


@pytest.mark.parametrize("batch", BATCHES)
def test_errors_are_within_one_and_a_half_times_those_of_transformers(models, batch):
    hf, reference, mega = models
    ids = torch.randint(0, hf.config.vocab_size, (batch, PROMPT + STEPS), device="cuda")
    exact, theirs = logits_of(reference, ids), logits_of(hf, ids)
    scale = exact.norm(dim=-1)
    their_error = (theirs - exact).norm(dim=-1) / scale
    for schedule in ("static", "dynamic"):
        mega.set_schedule(schedule)
        got = [mega.prefill(ids[:, :PROMPT])] + [mega.decode(ids[:, PROMPT + i]) for i in range(STEPS)]
        error = (torch.stack(got, 1) - exact).norm(dim=-1) / scale
        print(f"{schedule} batch {batch}: {error.mean():.5f}, transformers bf16 {their_error.mean():.5f}")
        assert (error.mean(0) <= 1.5 * their_error.mean(0)).all(), schedule
        assert error.max() <= 1.5 * their_error.max(), schedule


@pytest.fixture(scope="module")
def sparse_models():
    """Four layers of Qwen3-30B-A3B: transformers in bfloat16 and in float32, and megaflow, with the same weights."""
    hf = random_model("Qwen3-30B-A3B", num_hidden_layers=4)
    mega = MegaModel.from_hf(hf, max_batch_size=128, max_seq_len=128, progress=False)
    yield hf, copy.deepcopy(hf).float(), mega
    torch.cuda.empty_cache()


@pytest.mark.parametrize("batch", [1, 8, 64, 128])
def test_errors_of_a_model_with_experts_are_within_one_and_a_half_times_those_of_transformers(sparse_models, batch):
    hf, reference, mega = sparse_models
    ids = torch.randint(0, hf.config.vocab_size, (batch, 96 + STEPS), device="cuda")
    exact, theirs = logits_of(reference, ids), logits_of(hf, ids)
    their_error = (theirs - exact).norm(dim=-1) / exact.norm(dim=-1)
    runs = []
    for schedule in ("static", "dynamic", "hybrid", "unfused"):
        mega.set_schedule(schedule)
        got = [mega.prefill(ids[:, :96])] + [mega.decode(ids[:, 96 + i]) for i in range(STEPS)]
        runs.append(torch.stack(got, 1))
        error = (runs[-1] - exact).norm(dim=-1) / exact.norm(dim=-1)
        print(f"{schedule} batch {batch}: {error.mean():.5f}, transformers bf16 {their_error.mean():.5f}")
        assert error.mean() <= 1.5 * their_error.mean(), schedule
        assert torch.equal(runs[-1], runs[0]), schedule


@pytest.mark.slow
def test_a_thousand_steps_of_qwen3_30b_a3b_are_the_same_in_every_mode():
    mega = MegaModel.from_hf(random_model("Qwen3-30B-A3B"), max_batch_size=8, max_seq_len=1024, progress=False)
    for batch in (1, 8):
        prompts = [torch.randint(0, mega.geometry.vocab, (9 + i,)) for i in range(batch)]
        tokens = {}
        for schedule in ("static", "dynamic", "hybrid"):
            mega.set_schedule(schedule)
            tokens[schedule] = mega.generate(prompts, 1000, eos_token_id=[])
        assert torch.equal(tokens["dynamic"], tokens["static"])
        assert torch.equal(tokens["hybrid"], tokens["static"])


@pytest.mark.parametrize("batch", [1, 7, 33])
def test_a_step_repeated_200_times_is_bit_identical_in_static_mode(models, batch):
    mega = models[2]
    mega.set_schedule("static")
    lengths = [PROMPT - 37 * i % PROMPT for i in range(batch)]
    mega.prefill([torch.randint(0, mega.geometry.vocab, (n,)) for n in lengths])
    tokens = torch.randint(0, mega.geometry.vocab, (batch,), device="cuda")
    first = mega.decode(tokens)
    for _ in range(200):
        mega.decoder.rewind(lengths)
        assert torch.equal(mega.decode(tokens), first)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_logits_are_the_same_to_the_bit_in_every_schedule_that_fills_queues_on_the_host(models, batch):
    mega = models[2]
    prompts = [torch.randint(0, mega.geometry.vocab, (PROMPT - 37 * i % PROMPT,)) for i in range(batch)]
    results = []
    for schedule in (Static(), Static(interleave=True), Hybrid(), Unfused(), *USERS):
        mega.set_schedule(schedule)
        results.append((mega.generate(prompts, 20, eos_token_id=[]), mega._decoder.logits()))
    for tokens, logits in results[1:]:
        assert torch.equal(tokens, results[0][0])
        assert torch.equal(logits, results[0][1])


def test_both_modes_give_the_same_tokens_over_many_steps_in_few_launches(models):
    mega = models[2]
    prompts = [torch.randint(0, mega.geometry.vocab, (n,)) for n in (300, 512, 77)]
    tokens = {}
    for schedule in ("static", "dynamic"):
        mega.set_schedule(schedule)
        tokens[schedule] = mega.generate(prompts, 60, eos_token_id=[])
    assert torch.equal(tokens["static"], tokens["dynamic"])


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_launch_replays_from_a_cuda_graph(models, schedule):
    mega = models[2]
    mega.set_schedule(schedule)
    prompt = [torch.randint(0, mega.geometry.vocab, (40,)) for _ in range(2)]
    wanted = mega.generate(prompt, 10, eos_token_id=[])[:, 40:]
    decoder = mega._decoder
    first = mega.prefill(prompt).argmax(1)
    for sequence in range(2):
        decoder._cache.reserve(sequence, 50)
    decoder._state["tokens"][:2] = first.to(torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.plan(mega.schedule).launch(3)
    tokens = [first[:, None]]
    for _ in range(3):
        graph.replay()
        assert decoder.plan(mega.schedule).finish() == 3
        tokens.append(decoder._state["generated"][:2, :3].long())
    assert torch.equal(torch.cat(tokens, 1), wanted)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_broken_plan_ends_in_a_deadlock_error_within_two_seconds(models, schedule):
    mega = models[2]
    mega.set_schedule(schedule)
    prompt = [torch.randint(0, mega.geometry.vocab, (9,))]
    wanted = mega.generate(prompt, 5, eos_token_id=[])
    decoder = mega._decoder
    good = decoder.plan(mega.schedule)
    place = int((good.plan.column("operator") == 3).nonzero()[0][0])  # a tile of layers.0.o_proj
    decoder._plans[1, mega.schedule] = broken(good, without(good.plan, "notify0", place, -1))
    mega.prefill(prompt)
    start = time.perf_counter()
    with pytest.raises(DeadlockError, match=r"layers.0.gate_up\[.* for event layers.0.o_proj"):
        mega.decode(torch.tensor([1]))
    assert time.perf_counter() - start < 2
    decoder._plans[1, mega.schedule] = good
    good.reset()
    assert torch.equal(mega.generate(prompt, 5, eos_token_id=[]), wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_trace_has_all_tasks_in_order_on_all_multiprocessors(models, schedule):
    mega = models[2]
    mega.set_schedule(schedule)
    prompts = [torch.randint(0, mega.geometry.vocab, (100,)) for _ in range(2)]
    wanted = mega.generate(prompts, 5, eos_token_id=[])
    with mega.trace() as trace:
        assert torch.equal(mega.generate(prompts, 5, eos_token_id=[]), wanted)
    (launch,) = trace.launches
    assert launch.start.min() > 0
    assert (launch.start <= launch.wait_start).all()
    assert (launch.wait_start <= launch.run_start).all()
    assert (launch.run_start <= launch.end).all()
    assert (launch.phases()["take"] >= 0).all()
    graph = launch.plan.graph
    for edge in graph.edges:
        if edge.covers:  # each of the producer's tiles is waited for by some tile of the consumer
            producer, consumer = graph.operator == edge.producer, graph.operator == edge.consumer
            assert (launch.end[:, producer].max(1) <= launch.end[:, consumer].max(1)).all()
    assert len(np.unique(launch.sm)) == torch.cuda.get_device_properties(0).multi_processor_count
    assert sum(row.time for row in trace.by_operator()) == pytest.approx(trace.step_time, rel=0.1)
