"""Measure the pair on held-out modules and write `METRICS.json`.

Words: a step drafts a chain of `DEPTH` tokens, and verification stops at the first that differs
from the target's choice; then the target's own token follows. *Conditional* acceptance at position
j: of the steps whose first j - 1 drafts were accepted, the share that accepts the j-th.
*Cumulative*: the share of all steps that accepts j drafts. *Accepted per proposed*: the mean of the
cumulative shares.

A draft token counts only while every one before it equals the target's, so the draft may be asked
once, on the target's own text: position by position that is the same question as in a real chain.
"""

import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from . import models
from .data import END_OF_TEXT, IM_END, Corpus
from .packing import Ids, encode, in_order
from .tokenizer import load_tokenizer

DEPTH = 4
WINDOW = 1024
NUM_WINDOWS = 60  # over which the overlap is averaged
PROMPT_TOKENS = 256
NEW_TOKENS = 128
NUM_PROMPTS = 96
BATCH = 32

SAMPLE_PROMPTS = ("import os\n\ndef ", "class Foo:\n    def __init__(self")
SAMPLE_QUESTION = "hi"
SAMPLE_TOKENS = 96


@dataclass(frozen=True)
class Loss:
    """Held-out loss over complete documents, read in windows of `WINDOW` tokens."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int


@torch.inference_mode()
def loss_over(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> Loss:
    """The model's loss over `texts`, in fp32; the end of a document is not counted in the bytes."""
    total, count = 0.0, 0
    for rows in in_order(encode(tokenizer, texts), WINDOW):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits[0], rows[0, 1:], reduction="sum").item()
        count += rows.shape[1] - 1
    num_bytes = sum(len(text.encode()) for text in texts)
    return Loss(round(total / count, 4), round(total / math.log(2) / num_bytes, 4), count)


@torch.inference_mode()
def matches(
    target: Qwen3ForCausalLM, draft: Qwen3ForCausalLM, prompts: torch.Tensor, noise_seed: int | None
) -> torch.Tensor:
    """Mask of equal choices under the same noise (None: greedy), [num_prompts, NEW_TOKENS]."""
    found = []
    for index, batch in enumerate(torch.split(prompts, BATCH)):
        noise = None
        if noise_seed is not None:
            generator = torch.Generator().manual_seed(noise_seed + index)
            noise = [
                gumbel(len(batch), target.config.vocab_size, generator) for _ in range(NEW_TOKENS)
            ]
        text = generate(target, batch, noise, NEW_TOKENS)
        logits = draft(input_ids=text[:, :-1], use_cache=False, logits_to_keep=NEW_TOKENS).logits
        if noise is not None:
            logits = logits + torch.stack(noise, 1)
        found.append(logits.argmax(-1) == text[:, -NEW_TOKENS:])
    return torch.cat(found)


def accepted_lengths(row: list[bool]) -> list[int]:
    """Accepted drafts of each step along one text; a chain past the text's end is not begun."""
    lengths, at = [], 0
    while at + DEPTH <= len(row):
        run = next((j for j in range(DEPTH) if not row[at + j]), DEPTH)
        lengths.append(run)
        at += run + 1
    return lengths


def acceptance(matched: torch.Tensor) -> dict[str, Any]:
    """Acceptance of chains over matches [num_prompts, NEW_TOKENS]."""
    lengths = torch.tensor([n for row in matched.tolist() for n in accepted_lengths(row)])
    reached = [(lengths >= j).sum().item() for j in range(DEPTH + 1)]
    return {
        "accepted_per_proposed": round(sum(reached[1:]) / (DEPTH * reached[0]), 4),
        "tokens_per_step": round(1 + sum(reached[1:]) / reached[0], 4),
        "conditional_by_position": [
            round(reached[j] / max(reached[j - 1], 1), 4) for j in range(1, DEPTH + 1)
        ],
        "cumulative_by_position": [round(reached[j] / reached[0], 4) for j in range(1, DEPTH + 1)],
        "agreement_per_token": round(matched.float().mean().item(), 4),
        "steps": reached[0],
    }


@torch.inference_mode()
def mean_overlap(target: Qwen3ForCausalLM, draft: Qwen3ForCausalLM, documents: list[Ids]) -> float:
    """Mean of sum min(p, q) over held-out text itself, at temperature 1."""
    total, count = 0.0, 0
    for _, rows in zip(range(NUM_WINDOWS), in_order(documents, WINDOW), strict=False):
        p, q = (
            m(input_ids=rows[:, :-1], use_cache=False).logits.softmax(-1) for m in (target, draft)
        )
        total += torch.minimum(p, q).sum().item()
        count += rows.shape[1] - 1
    return round(total / count, 4)


def samples(target: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, str]]:
    """Three greedy completions of the target, special tokens shown."""
    question = [{"role": "user", "content": SAMPLE_QUESTION}]
    chat = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ends = {tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, IM_END)}
    written = []
    for prompt in (*SAMPLE_PROMPTS, str(chat)):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        text = generate(target, ids, None, SAMPLE_TOKENS)[0, ids.shape[1] :].tolist()
        length = next((i + 1 for i, token in enumerate(text) if token in ends), SAMPLE_TOKENS)
        written.append({"prompt": prompt, "completion": str(tokenizer.decode(text[:length]))})
    return written


def cpu_model() -> str:
    """The processor's name, where the system has it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def training_record(folder: Path, role: models.Role) -> dict[str, Any] | None:
    """Read the record beside the weights: settings, steps, tokens, seconds, machine."""
    path = folder / role / "training.json"
    record: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return record


def measure(folder: Path, corpus: Corpus, *, threads: int, seed: int) -> dict[str, Any]:
    """All numbers of the model card."""
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(folder / "target")
    pair = {role: models.load(folder / role) for role in models.SHAPES}
    documents = encode(tokenizer, corpus.held_code)
    generator = torch.Generator().manual_seed(seed)
    prompts = random_prompts(documents, NUM_PROMPTS, PROMPT_TOKENS, generator)
    report: dict[str, Any] = {
        "measured_with": {
            "cpu": cpu_model(),
            "threads": threads,
            "torch": torch.__version__,
            "dtype": "float32",
            "seed": seed,
        },
        "python": platform.python_version(),
        "depth": DEPTH,
        "prompts": {"count": NUM_PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS},
    }
    for role, model in pair.items():
        report[role] = {
            "parameters": models.num_parameters(model),
            "held_out_code": vars(loss_over(model, tokenizer, corpus.held_code)),
            "held_out_chat": vars(loss_over(model, tokenizer, corpus.held_chat)),
            "training": training_record(folder, role),
        }
    report["overlap_on_held_out_code"] = mean_overlap(pair["target"], pair["draft"], documents)
    for name, noise_seed in (("temperature_0", None), ("temperature_1_coupled", seed)):
        report[name] = acceptance(matches(pair["target"], pair["draft"], prompts, noise_seed))
    report["samples"] = samples(pair["target"], tokenizer)
    return report


def write_metrics(folder: Path, report: dict[str, Any]) -> None:
    """Write the report beside the models."""
    (folder / "METRICS.json").write_text(json.dumps(report, indent=2) + "\n")


# -- text from a model: greedy, or by Gumbel noise (argmax of logits plus noise is a sample) -------


def gumbel(num_rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Gumbel noise [num_rows, vocab]."""
    uniform_hazard = torch.empty(num_rows, vocab).exponential_(generator=generator)
    return -uniform_hazard.clamp_min_(1e-30).log_()


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM,
    prompts: torch.Tensor,
    noise: list[torch.Tensor] | None,
    new_tokens: int,
) -> torch.Tensor:
    """Continue prompts [batch, length]: argmax of logits, plus the position's noise if given."""
    text, cache, fed = prompts, None, prompts
    for position in range(new_tokens):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        scores = out.logits[:, -1] if noise is None else out.logits[:, -1] + noise[position]
        fed, cache = scores.argmax(-1, keepdim=True), out.past_key_values
        text = torch.cat([text, fed], 1)
    return text


def random_prompts(
    documents: list[Ids], count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Prompts [count, length] from places drawn evenly over all tokens of the documents."""
    usable = [torch.from_numpy(document) for document in documents if len(document) > 2 * length]
    weights = torch.tensor([len(d) - length for d in usable], dtype=torch.float64)
    prompts = []
    for index in torch.multinomial(weights, count, replacement=True, generator=generator).tolist():
        start = int(torch.randint(0, len(usable[index]) - length, (1,), generator=generator))
        prompts.append(usable[index][start : start + length])
    return torch.stack(prompts)
