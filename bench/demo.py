"""The demo: a small random Qwen3 checkpoint, decoded by megaflow and compared with transformers.

On the CPU (Triton's interpreter) megaflow computes in float32, and every greedy token must be the same.
On a GPU it computes in bfloat16, where the best two of random logits may be too close to tell apart: how many
tokens agree with transformers in bfloat16 is only reported. On both, the logits must be close to those of a
float32 model. Exits with 1 where something differs.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from megaflow import MegaModel
from megaflow.models.planner import make_plan
from megaflow.models.qwen3 import qwen3_graph
from megaflow.models.tiling import tiling
from megaflow.plan import Plan
from megaflow.scheduler import SCHEDULES
from megaflow.target import current_device

PROMPT_LENGTHS = (1, 5, 12)
NEW_TOKENS = 8
LOGIT_STEPS = 2
MAX_SEQ_LEN = 64
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # of logits, relative, by megaflow's dtype


def small_config() -> Qwen3Config:
    """A Qwen3 model whose sizes are no multiples of the kernel's tiles, without an end token."""
    return Qwen3Config(
        vocab_size=293,
        hidden_size=80,
        intermediate_size=208,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=None,
        pad_token_id=0,
    )


def write_checkpoint(directory: Path) -> None:
    """Save a model with random weights in bfloat16, so that all dtypes read the same numbers."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(small_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norm weights are 1 at first, and a forgotten one would not show
                parameter.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(directory)


def reference(directory: Path, dtype: torch.dtype, device: torch.device) -> Qwen3ForCausalLM:
    """The checkpoint in transformers."""
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()


def greedy(model: Qwen3ForCausalLM, prompts: list[torch.Tensor]) -> torch.Tensor:
    """transformers' greedy tokens after each prompt, one prompt at a time: int64 [prompts, NEW_TOKENS]."""
    new = []
    for prompt in prompts:
        ids = prompt[None].to(model.device)
        sequence = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        new.append(sequence[0, len(prompt) :])
    return torch.stack(new)


@torch.no_grad()
def logit_error(
    mega: MegaModel, exact: Qwen3ForCausalLM, prompts: list[torch.Tensor], tokens: torch.Tensor
) -> float:
    """Largest error, relative in norm, of the logits after the prompts and after LOGIT_STEPS more tokens."""
    logits = [mega.prefill(prompts)] + [mega.decode(tokens[:, step]) for step in range(LOGIT_STEPS)]
    worst = 0.0
    for row, prompt in enumerate(prompts):
        ids = torch.cat((prompt.to(tokens.device), tokens[row, :LOGIT_STEPS]))
        wanted = exact(ids[None]).logits[0, len(prompt) - 1 :]
        found = torch.stack([step[row] for step in logits])
        worst = max(worst, float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()))
    return worst


def plan_of(mega: MegaModel, dtype: torch.dtype) -> Plan:
    """The plan of a decode step of the prompts."""
    device = current_device(mega.device)
    cut = tiling(mega.geometry, len(PROMPT_LENGTHS), device, str(dtype).removeprefix("torch."))
    return make_plan(qwen3_graph(mega.geometry, MAX_SEQ_LEN), cut, mega.schedule, device.workers)


def run(directory: Path) -> bool:
    """Decode, compare and say so. Returns whether all was as it must be."""
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    write_checkpoint(directory)
    mega = MegaModel.from_hf(
        directory, max_batch_size=len(PROMPT_LENGTHS), max_seq_len=MAX_SEQ_LEN, progress=False
    )
    on_cpu = mega.device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    where = "Triton's interpreter on the CPU" if on_cpu else torch.cuda.get_device_name(mega.device)
    sizes = mega.geometry
    print(
        f"model: Qwen3, {sizes.layers} layers, hidden {sizes.hidden}, {sizes.heads} heads, "
        f"{sizes.kv_heads} KV heads, vocabulary {sizes.vocab}, random weights"
    )
    print(f"runs: {where}, {dtype}")
    plan = plan_of(mega, dtype)
    graph = plan.graph
    print(
        f"plan of a step: {len(graph.operators)} operators, {graph.tasks} tasks, "
        f"{len(graph.event_need)} events; workers: {plan.workers}"
    )
    print(f"prompts: {', '.join(map(str, PROMPT_LENGTHS))} tokens; {NEW_TOKENS} new ones for each")
    prompts = [torch.randint(sizes.vocab, (length,)) for length in PROMPT_LENGTHS]
    exact = reference(directory, torch.float32, mega.device)
    expected = greedy(exact if on_cpu else reference(directory, dtype, mega.device), prompts)
    good = True
    for schedule in SCHEDULES:
        mega.set_schedule(schedule)
        start = time.perf_counter()
        new = mega.generate(prompts, NEW_TOKENS)[:, max(PROMPT_LENGTHS) :]
        seconds = time.perf_counter() - start
        equal = int((new == expected).sum())
        print(f"{schedule}: {new.numel()} tokens in {seconds:.1f} s, first launch included")
        if equal == new.numel():
            print("  all tokens equal to transformers'")
        else:
            print(f"  {equal} of {new.numel()} tokens equal to transformers' ({equal / new.numel():.0%})")
            good &= not on_cpu
        error = logit_error(mega, exact, prompts, expected)
        print(f"  logits: relative error {error:.1e} from float32, allowed {LARGEST_ERROR[dtype]:.0e}")
        good &= error < LARGEST_ERROR[dtype]
    print("demo passed" if good else "demo FAILED")
    return good


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if run(Path(folder)) else 1)
