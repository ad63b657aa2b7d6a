"""The command megaflow: generate text; say what the environment is; show, simulate, trace or check a plan.

torch, transformers and the kernels are imported inside the commands, so that --help answers at once.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from megaflow.errors import CheckpointError, ConfigError, InputError, MegaflowError

app = typer.Typer(
    help="Decode Qwen3 language models in one persistent GPU kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local checkpoint directory or a hub id.")]
Schedule = Annotated[str, typer.Option(help="static, dynamic, hybrid, unfused or auto.")]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(help="Most tokens of a sequence, prompt and generated together.", show_default="2048, or the model's"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def errors_reported() -> Iterator[None]:
    """Around a command: a MegaflowError becomes one line on stderr and exit code 2."""
    try:
        yield
    except MegaflowError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
@errors_reported()
def generate(
    model: Model,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Several prompts are one batch.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 32,
    schedule: Schedule = "static",
    max_seq_len: MaxSeqLen = None,
    page_size: Annotated[int, typer.Option(help="Positions in a page of the KV cache.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the sampling; 0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample within this much probability; 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.", show_default="random")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Take ids like 1,2,3; print ids.")] = False,
) -> None:
    """Continue prompts and print what was generated, without the prompt."""
    from megaflow.models.generation import end_tokens
    from megaflow.models.mega_model import MegaModel

    tokenizer = None if token_ids else read_tokenizer(model)
    ids = tokenizer(prompts)["input_ids"] if tokenizer else [parse_ids(prompt) for prompt in prompts]
    mega = MegaModel.from_hf(
        model,
        schedule=schedule,
        max_batch_size=len(prompts),
        max_seq_len=max_seq_len,
        page_size=page_size,
        progress=sys.stderr.isatty(),
    )
    sequences = mega.generate(
        ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    ends, _ = end_tokens(mega.generation_config)
    longest = max(len(prompt) for prompt in ids)
    for number, sequence in enumerate(sequences[:, longest:].tolist(), 1):
        new = until_end(sequence, ends)
        if tokenizer is None:
            typer.echo(",".join(map(str, new)))
        else:
            text = tokenizer.decode(new, skip_special_tokens=True)
            typer.echo(text if len(prompts) == 1 else f"[{number}] {text}")


def read_tokenizer(source: str) -> Any:
    """The transformers tokenizer of a checkpoint. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{source}: the tokenizer cannot be read ({error}); give a checkpoint directory or a hub id"
        ) from error
    if not tokenizer("a")["input_ids"]:  # transformers makes an empty tokenizer where there are no files
        raise CheckpointError(f"{source}: tokenizer files are missing; copy them too, or use --token-ids")
    return tokenizer


def parse_ids(prompt: str) -> list[int]:
    """Token ids from "1,2,3". Raises InputError for anything else."""
    try:
        return [int(part) for part in prompt.split(",")]
    except ValueError:
        raise InputError(f"prompt {prompt!r} is no list of token ids; write it like 1,2,3") from None


def until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Tokens up to the first end token, with it; what follows is padding."""
    stop = next((i for i, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:stop]


@app.command()
@errors_reported()
def env(as_json: AsJson = False) -> None:
    """Print versions, the GPU and what will run on it."""
    from megaflow.environment import current_environment

    facts = asdict(current_environment())
    if as_json:
        typer.echo(json.dumps(facts))
        return
    memory = facts.pop("memory_bytes")
    del facts["workers"]  # part of `runs`
    if facts["device"] is None:
        facts |= {"device": "no CUDA device", "multiprocessors": "none"}
    facts["memory"] = "none" if memory is None else f"{memory / 1e9:.1f} GB"
    for name, fact in facts.items():
        typer.echo(f"{name:<16} {fact}")


Batch = Annotated[int, typer.Option(help="Sequences that are decoded at once.")]
Workers = Annotated[int, typer.Option(min=1, help="Resident programs; an H200 has 264.")]


@dataclass(frozen=True)
class PlannedStep:
    """A plan made without a GPU and weights. `limit`: the longest sequence; `planning_ms`: how long planning took."""

    plan: Any
    layers: int
    limit: int
    planning_ms: float


def plan_step(model: str, batch: int, schedule: str, max_seq_len: int | None, workers: int) -> PlannedStep:
    """Plan a decode step of a checkpoint's geometry. Raises the errors of from_hf."""
    from megaflow.models.geometry import read_geometry
    from megaflow.models.mega_model import LARGEST_BATCH, read_configs
    from megaflow.models.planner import make_plan
    from megaflow.models.qwen3 import qwen3_graph
    from megaflow.models.tiling import tiling
    from megaflow.scheduler import find_schedule
    from megaflow.target import Device

    geometry = read_geometry(read_configs(model)[0])
    limit = geometry.sequence_limit(max_seq_len)
    if not 1 <= batch <= LARGEST_BATCH:
        raise ConfigError(f"batch is {batch}; it must be 1 to {LARGEST_BATCH}")
    device = Device(workers=workers, tiling_workers=workers, interpreted=False)
    start = time.perf_counter()
    made = make_plan(
        qwen3_graph(geometry, limit),
        tiling(geometry, batch, device, "bfloat16"),
        find_schedule(schedule),
        workers,
    )
    return PlannedStep(made, geometry.layers, limit, 1e3 * (time.perf_counter() - start))


@app.command()
@errors_reported()
def plan(
    model: Model,
    batch: Batch = 1,
    schedule: Schedule = "static",
    max_seq_len: MaxSeqLen = None,
    workers: Workers = 264,
    as_json: AsJson = False,
) -> None:
    """Print how a decode step is cut and scheduled on a GPU like an H200. Needs no GPU and no weights."""
    from megaflow.plansummary import print_summary, summarise

    step = plan_step(model, batch, schedule, max_seq_len, workers)
    summary = summarise(step.plan, step.layers, step.planning_ms)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    else:
        print_summary(summary)


@app.command()
@errors_reported()
def simulate(
    model: Model,
    batch: Batch = 1,
    schedule: Schedule = "static",
    max_seq_len: MaxSeqLen = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of each sequence that are in the KV cache.", show_default="max-seq-len"),
    ] = None,
    workers: Workers = 264,
    as_json: AsJson = False,
) -> None:
    """Predict the time of a decode step on an H200 and say where it goes. Needs no GPU and no weights."""
    from megaflow.scheduler.simulation import print_simulation, summarise
    from megaflow.scheduler.simulator import simulate as simulate_plan

    step = plan_step(model, batch, schedule, max_seq_len, workers)
    context = step.limit if context is None else context
    if not 1 <= context <= step.limit:
        raise ConfigError(f"context is {context}; it must be 1 to max-seq-len, {step.limit}")
    summary = summarise(simulate_plan(step.plan, fill=context / step.limit))
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    else:
        print_simulation(summary)


@app.command()
@errors_reported()
def trace(
    model: Model,
    batch: Batch = 1,
    prompt_length: Annotated[int, typer.Option(min=1, help="Random tokens that each sequence begins with.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps that are traced.")] = 4,
    schedule: Schedule = "static",
    out: Annotated[Path | None, typer.Option(help="A file to write, for ui.perfetto.dev.", show_default="none")] = None,
    as_json: AsJson = False,
) -> None:
    """Decode random prompts and print where the time of a step goes, by operator."""
    from megaflow.models.mega_model import MegaModel
    from megaflow.models.tracing import trace_random_prompts
    from megaflow.tracetable import print_trace, trace_facts

    mega = MegaModel.from_hf(
        model,
        schedule=schedule,
        max_batch_size=batch,
        max_seq_len=prompt_length + steps + 1,
        progress=sys.stderr.isatty(),
    )
    recorded = trace_random_prompts(mega, batch, prompt_length, steps, out)
    if as_json:
        typer.echo(json.dumps(trace_facts(recorded)))
    else:
        print_trace(recorded)


@app.command()
@errors_reported()
def check(
    model: Model,
    batch: Annotated[int, typer.Option(help="Sequences, of random tokens; the later ones are shorter.")] = 1,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens of the first sequence.")] = 128,
    schedule: Schedule = "static",
    stop_after: Annotated[str | None, typer.Option(help='Last operator to compare, like "layers.0.qkv".')] = None,
    layers: Annotated[int | None, typer.Option(help="Compare this many layers only.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest difference, over the tensor's largest value.", show_default="0.02; float32: 1e-4"),
    ] = None,
    max_seq_len: MaxSeqLen = None,
) -> None:
    """Compare one decode step of the kernel with torch, tile by tile. Exit code 1 if a tile differs."""
    import torch

    from megaflow.models.comparison import compare
    from megaflow.models.mega_model import MegaModel

    mega = MegaModel.from_hf(
        model, schedule=schedule, max_batch_size=batch, max_seq_len=max_seq_len, progress=sys.stderr.isatty()
    )
    random = torch.Generator().manual_seed(0)
    lengths = [prompt_length - i * prompt_length // (2 * batch) for i in range(batch)]
    logits = mega.prefill([torch.randint(mega.geometry.vocab, (n,), generator=random) for n in lengths])
    found = compare(mega, logits.argmax(1), stop_after=stop_after, layers=layers, tolerance=tolerance)
    if found.difference is None:
        largest = ", ".join(f"{kind} {value:.1e}" for kind, value in found.largest.items())
        typer.echo(f"all {found.tiles:,} tiles of {found.operators} operators agree (largest difference: {largest})")
    else:
        typer.echo(str(found.difference))
        raise typer.Exit(1)
