"""A mistake gets a typed error that names value, limit and remedy, and leaves the model usable."""

import json

import pytest
import torch
from checkpoints import small_config, small_model

from megaflow import CapacityError, CheckpointError, ConfigError, InputError, MegaModel, ScheduleError


@pytest.fixture(scope="module")
def model():
    return MegaModel.from_hf(small_model(), max_batch_size=2, max_seq_len=32, progress=False)


@pytest.fixture
def checkpoint(tmp_path):
    small_model().save_pretrained(tmp_path, max_shard_size="200KB")
    return tmp_path


REQUESTS = {
    "too many new tokens": (
        lambda m: m.generate([[1] * 20], 13),
        CapacityError,
        r"20 tokens and 13 new ones need 33 positions, max_seq_len is 32; ask for fewer",
    ),
    "batch too large": (lambda m: m.generate([[1]] * 3, 1), CapacityError, r"3 sequences, max_batch_size is 2; split"),
    "prompt too long": (lambda m: m.prefill([[1] * 33]), CapacityError, r"prompt of 33 tokens, max_seq_len is 32"),
    "token id too large": (lambda m: m.generate([[1, 293]], 1), InputError, r"id 293 is out of range; .* 0 to 292"),
    "negative token id": (lambda m: m.prefill([[-5]]), InputError, r"token id -5 is out of range"),
    "empty prompt": (lambda m: m.generate([[1], []], 1), InputError, r"prompt 1 is empty; give at least one token"),
    "no prompts": (lambda m: m.generate([], 1), InputError, r"no sequences; give at least one prompt"),
    "no new tokens": (lambda m: m.generate([[1]], 0), InputError, r"is 0; it must be an integer of at least 1"),
    "fractional new tokens": (lambda m: m.generate([[1]], 2.5), InputError, r"max_new_tokens is 2.5; it must"),
    "pad beyond int32": (lambda m: m.generate([[1]], 1, pad_token_id=2**31), InputError, r"2147483648; .* 32 bits"),
    "mask as a list": (lambda m: m.prefill(torch.ones(1, 1).long(), [[1]]), InputError, r"attention_mask needs"),
    "one-dimensional ids": (lambda m: m.prefill(torch.tensor([1, 2])), InputError, r"\[2\]; it must be \[B, T\]"),
    "mask of another shape": (
        lambda m: m.generate(torch.ones(1, 3).long(), 1, attention_mask=torch.ones(1, 2)),
        InputError,
        r"attention_mask needs .* of the same shape",
    ),
    "top_p out of range": (lambda m: m.generate([[1]], 1, temperature=1.0, top_p=2.0), InputError, r"top_p is 2.0"),
    "negative temperature": (lambda m: m.generate([[1]], 1, temperature=-1.0), InputError, r"temperature is -1.0"),
    "too many eos ids": (lambda m: m.generate([[1]], 1, eos_token_id=list(range(17))), InputError, r"17 eos .* 16"),
    "unknown schedule": (lambda m: m.set_schedule("fast"), ScheduleError, r"'fast' is unknown; choose one of static"),
}


@pytest.mark.parametrize("mistake", REQUESTS)
def test_a_wrong_request_is_refused_and_the_model_stays_usable(model, mistake):
    request, error, message = REQUESTS[mistake]
    before = model.generate([[1, 2, 3]], 2)
    with pytest.raises(error, match=message):
        request(model)
    assert torch.equal(model.generate([[1, 2, 3]], 2), before)


def test_decode_checks_its_tokens_and_the_room_that_is_left(model):
    model.prefill([[1] * 31])
    with pytest.raises(InputError, match=r"2 next tokens for 1 sequences"):
        model.decode(torch.tensor([1, 2]))
    with pytest.raises(InputError, match=r"token id 293 is out of range"):
        model.decode(torch.tensor([293]))
    with pytest.raises(InputError, match=r"token ids are torch.float32; give integers"):
        model.decode(torch.tensor([1.7]))
    model.decode(torch.tensor([1]))
    with pytest.raises(CapacityError, match=r"needs 33 positions, max_seq_len is 32; create the model"):
        model.decode(torch.tensor([1]))


def test_decode_before_prefill_is_refused():
    fresh = MegaModel.from_hf(small_model(), max_seq_len=32, progress=False)
    with pytest.raises(InputError, match=r"no sequences to continue; call prefill first"):
        fresh.decode(torch.tensor([1]))


CONFIGS = {
    "another architecture": ({"model_type": "gpt2"}, r"model_type is 'gpt2'; megaflow decodes 'qwen3'"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, r"quant_method is 'fp8'; quantised .* use the bf"),
    "attention bias": ({"attention_bias": True}, r"attention_bias is True; supported: False"),
    "head_dim": ({"head_dim": 96}, r"head_dim is 96; supported: one of \(64, 128\)"),
    "rope": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        r"rope_parameters.rope_type is 'dynamic'",
    ),
    "partial rope": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        r"rope_parameters.partial_rotary_factor is 0.5",
    ),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
    "width": ({"hidden_size": 72}, r"hidden_size is 72; supported: a multiple of 16"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_an_unsupported_configuration_is_refused_by_field(checkpoint, case):
    changes, message = CONFIGS[case]
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        MegaModel.from_hf(checkpoint, progress=False)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_batch_size": 0}, r"max_batch_size is 0; it must be 1 to 128"),
        ({"max_batch_size": 129}, r"max_batch_size is 129"),
        ({"max_seq_len": 513}, r"max_seq_len is 513; .* 1 to 512"),
        ({"page_size": 48}, r"page_size is 48; it must be a power of two"),
        ({"steps_per_launch": 0}, r"steps_per_launch is 0; it must be 1 to 4096"),
    ],
)
def test_options_out_of_range_are_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        MegaModel.from_hf(small_model(num_hidden_layers=1), progress=False, **({"max_seq_len": 64} | option))


def test_a_sharded_checkpoint_loads_and_a_missing_shard_is_named(checkpoint):
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 1
    model = MegaModel.from_hf(checkpoint, max_seq_len=32, progress=False)
    direct = MegaModel.from_hf(small_model(), max_seq_len=32, progress=False)
    assert torch.equal(model.prefill([[1, 2, 3]]), direct.prefill([[1, 2, 3]]))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{shards[1].name} is missing .* copy the whole checkpoint"):
        MegaModel.from_hf(checkpoint, max_seq_len=32, progress=False)


def test_a_truncated_shard_is_named(checkpoint):
    shard = sorted(checkpoint.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=rf"{shard.name} cannot be read"):
        MegaModel.from_hf(checkpoint, max_seq_len=32, progress=False)


def test_weights_that_do_not_fit_the_configuration_are_named(checkpoint):
    path = checkpoint / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"intermediate_size": 224}))
    with pytest.raises(CheckpointError, match=r"mlp.* has shape .*208.*, .* asks for .*224.* not of the same model"):
        MegaModel.from_hf(checkpoint, max_seq_len=32, progress=False)
    path.write_text(json.dumps(fields | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    with pytest.raises(CheckpointError, match=r"11 tensors are missing, the first is model.layers.2"):
        MegaModel.from_hf(checkpoint, max_seq_len=32, progress=False)
    path.write_text(json.dumps(fields | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.* has no place"):
        MegaModel.from_hf(checkpoint, max_seq_len=32, progress=False)


def test_an_architecture_that_transformers_does_not_know_is_refused(checkpoint):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "unheard_of"}))
    with pytest.raises(CheckpointError, match=r"the configuration cannot be read"):
        MegaModel.from_hf(checkpoint, progress=False)


def test_eos_tokens_come_from_the_generation_configuration(checkpoint):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "pad_token_id": 4}))
    model = MegaModel.from_hf(checkpoint, progress=False)
    assert model.generation_config.eos_token_id == [5, 6]
    assert model.max_seq_len == 512, "the default is no longer than the configuration allows"


def test_a_directory_without_weights_is_named(tmp_path):
    small_config().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors is missing"):
        MegaModel.from_hf(tmp_path, max_seq_len=32, progress=False)
