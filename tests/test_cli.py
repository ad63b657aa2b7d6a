"""The command line: what it prints, and how it fails."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import reference_tokens, small_config, small_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from megaflow.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    small_config().save_pretrained(tmp_path)
    return tmp_path


def test_env_names_versions_and_what_runs():
    result = run("env", "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0
    assert facts["torch"] == torch.__version__
    assert set(facts) >= {"megaflow", "python", "triton", "transformers", "numpy", "device", "runs"}
    assert facts["workers"] >= 1
    assert facts["runs"] in run("env").stdout


def test_plan_lists_operators_and_balance_without_weights(config_only: Path):
    result = run("plan", config_only, "--max-seq-len", 256, "--batch", 3)
    assert result.exit_code == 0, result.output
    first_words = [line.split()[0] for line in result.stdout.splitlines() if line]
    layer = [f"layers.0.{part}" for part in ("qkv", "attention", "o_proj", "gate_up", "down")]
    assert first_words[:9] == ["operator", "embedding", *layer, "layer", "lm_head"]
    assert "layer 1: as layer 0; layers.1.qkv waits for layers.0.down" in result.stdout
    assert "bytes per worker: min" in result.stdout
    assert "pairs of tiles that touch the same elements are in order" in result.stdout


def test_plan_as_json_accounts_for_every_task(config_only: Path):
    arguments = ("plan", config_only, "--max-seq-len", 256, "--workers", 8, "--json")
    static = json.loads(run(*arguments).stdout)
    tiles = {line["name"]: line["tiles"] for line in static["lines"]}
    in_layer = sum(n for name, n in tiles.items() if name.startswith("layers."))
    assert static["tasks"] == sum(tiles.values()) + (static["layers"] - 1) * in_layer
    assert static["queue_length"]["mean"] * 8 == pytest.approx(static["tasks"])
    assert 0 < static["waits_left"] <= static["waits"]
    dynamic = json.loads(run(*arguments, "--schedule", "dynamic").stdout)
    assert dynamic["queue_length"] is None
    assert dynamic["waits_left"] == dynamic["waits"] == static["waits"]


def test_simulate_predicts_a_step_and_says_where_its_time_goes(config_only: Path):
    arguments = ("simulate", config_only, "--max-seq-len", 256, "--context", 200, "--batch", 3, "--schedule", "auto")
    summary = json.loads(run(*arguments, "--json").stdout)
    parts = {op["name"]: 1e3 * op["seconds"] for op in summary["operators"]}
    assert sum(parts.values()) + summary["between_steps_ms"] == pytest.approx(summary["step_ms"])
    assert 0 < summary["bubble_share"] < 1
    printed = run(*arguments).stdout
    assert "layers.*.gate_up x2" in printed
    assert f"predicted step: {summary['step_ms']:.3f} ms" in printed
    longer = json.loads(run(*arguments[:5], 256, *arguments[6:], "--json").stdout)
    assert longer["step_ms"] >= summary["step_ms"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="bfloat16 on a GPU: close logits may change places")
def test_generated_token_ids_are_those_of_transformers(tmp_path: Path):
    model = small_model(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    prompts = [[5, 17, 200], [31]]
    texts = [",".join(map(str, prompt)) for prompt in prompts]
    result = run("generate", tmp_path, *texts, "--token-ids", "--max-new-tokens", 3, "--max-seq-len", 64)
    assert result.exit_code == 0, result.output
    printed = [[int(i) for i in line.split(",")] for line in result.stdout.splitlines()]
    for prompt, new in zip(prompts, printed, strict=True):
        assert prompt + new == reference_tokens(model, torch.tensor(prompt), 3).tolist()


def test_text_goes_through_the_tokenizer_and_stops_at_its_end(tmp_path: Path):
    words = WordLevel({f"w{i}": i for i in range(293)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    model = small_model(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    options = ("--max-new-tokens", 2, "--max-seq-len", 64)
    ids = run("generate", tmp_path, "5,17", "31", "--token-ids", *options).stdout.split()
    texts = [" ".join(f"w{i}" for i in line.split(",")) for line in ids]
    two = run("generate", tmp_path, "w5 w17", "w31", *options)
    assert two.stdout.splitlines() == [f"[{n}] {text}" for n, text in enumerate(texts, 1)]
    model.generation_config.eos_token_id = int(ids[1].split(",")[0])
    model.generation_config.save_pretrained(tmp_path)
    assert run("generate", tmp_path, "w31", *options).stdout == f"{texts[1].split()[0]}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "MODEL", "1", "--token-ids"), "model.safetensors is missing"),
        (("generate", "MODEL", "one", "--token-ids"), "prompt 'one' is no list of token ids"),
        (("generate", "MODEL", "text"), "tokenizer files are missing"),
        (("generate", "MODEL/absent", "1", "--token-ids"), "the configuration cannot be read"),
        (("plan", "MODEL", "--batch", "0"), "batch is 0; it must be 1 to 128"),
        (("plan", "MODEL", "--schedule", "fastest"), "schedule 'fastest' is unknown"),
        (("simulate", "MODEL", "--context", "257"), "context is 257; it must be 1 to max-seq-len, 256"),
    ],
)
def test_mistakes_end_with_code_2_and_a_message(config_only: Path, arguments: tuple[str, ...], message: str):
    given = [a.replace("MODEL", str(config_only)) for a in arguments]
    result = run(*given, "--max-seq-len", 256)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
