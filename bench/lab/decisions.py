"""Time of many questions about one input: `python -m foretoken.bench.lab.decisions`.

Each kind of question is asked `--questions` times in one call. The baseline generates one token
for each of the same prompts, submitted together. The call and the baseline alternate on the same
engine, each time with a new cache salt, so that each computes the input once. A ratio is the time
of a call divided by the time of the baseline in the same round. Rows are tokens that the model
computes; their number does not depend on the machine. `products, ratio` is the ratio of the
multiply-adds of all matrices, so it is the least ratio of times that can be expected.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import AsyncLLM, SamplingParams
from ...api.runtime.chat import ChatClient
from ...api.runtime.conversation.chat_input import ChatInput
from ...api.runtime.decisions.decider import Decider, Deciding
from ...api.runtime.decisions.questions import read_questions
from ...api.runtime.pooled.pooled_prompts import pool_params
from ...core.interface.request import Usage
from ...core.model.opening import read_config
from ...core.model.weights.layer import tensor_shapes
from ..common.report import RESULTS, heading, table, write_json

SENTENCE = "The parcel of order {} arrived on time, but its box was open and one cup was broken. "
WORDS = "refund a cup or send green boxes because most parcels were open today but nothing broke "
CLAIM = "Claim {:03d}: the customer of the message above asks for a new cup."
KINDS: Mapping[str, Mapping[str, Any]] = {
    "predicate": {"type": "predicate"},
    "score, 5 levels": {"type": "score", "levels": [{"label": f"level {at}"} for at in range(5)]},
    "choice, 4 short labels": {
        "type": "choice",
        "choices": [{"value": text} for text in ("red", "blue", "green", "black")],
    },
    "choice, 4 long labels": {
        "type": "choice",
        "choices": [
            {"value": f"{text} of the whole order"}
            for text in ("refund", "replacement", "repair", "refusal")
        ],
    },
}
COUNTS = {f"choice, 4 labels of {count} tokens": count for count in (1, 2, 4)}
_OUT = RESULTS / "decisions.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="folder or file of the model (smollm2)")
    parser.add_argument("--questions", type=int, default=400, help="questions of a call (400)")
    parser.add_argument("--sentences", type=int, default=12, help="sentences of the input (12)")
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=[*KINDS, *COUNTS],
        choices=[*KINDS, *COUNTS],
        help="kinds to ask",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the model (2)")
    parser.add_argument("--out", type=Path, default=_OUT, help="file to write")
    options = parser.parse_args(argv)
    print(*(f"{key}: {value}" for key, value in heading().items()), sep="\n", flush=True)
    rows = asyncio.run(measured(options))
    print(table(rows))
    write_json(options.out, {**heading(), "options": vars(options) | {"out": ""}, "rows": rows})


async def measured(options: argparse.Namespace) -> list[dict[str, object]]:
    """Return the table's rows, one for each kind of question."""
    config = {
        "draft": "none",
        "threads": options.threads,
        "max_running": options.questions,
        "max_queued": 4 * options.questions,
    }
    async with AsyncLLM(options.model, **config) as llm:
        decider = Decider(ChatClient(llm), llm)
        rows = []
        for name in options.kinds:
            rows.append(await _kind(llm, decider, name, options))
            print(rows[-1], flush=True)
        return rows


async def _kind(
    llm: AsyncLLM, decider: Decider, name: str, options: argparse.Namespace
) -> dict[str, object]:
    """Measure one kind of question; return a row of the table."""
    kind = KINDS[name] if name in KINDS else _choice(llm, COUNTS[name])
    questions = [{**kind, "instructions": CLAIM.format(at)} for at in range(options.questions)]
    found: list[tuple[float, float]] = []
    for turn in range(options.rounds + 1):  # The first round is a warm-up.
        text = "".join(SENTENCE.format(index) for index in range(options.sentences))
        asked, seconds, num_rows = await _decided(decider, text, questions, f"call {name} {turn}")
        prompts = [await asked.prompt_ids(index) for index in range(len(questions))]
        lone_seconds, num_lone_rows = await _generated(llm, prompts, f"rows {name} {turn}")
        found.append((seconds, lone_seconds))
    ratios = [ours / theirs for ours, theirs in found[1:]]
    lengths = [len(each) for each in prompts]
    of_row, of_read = _products(llm)
    num_products = num_rows * of_row + asked.num_reads * of_read
    num_lone_products = num_lone_rows * of_row + len(questions) * of_read
    return {
        "questions": name,
        "reads each": asked.num_reads / len(questions),
        "tokens of a prompt": round(statistics.mean(lengths)),
        "rows": num_rows,
        "rows, ratio": round(num_rows / num_lone_rows, 3),
        "products, ratio": round(num_products / num_lone_products, 3),
        "call, s": round(statistics.median(ours for ours, _ in found[1:]), 3),
        "rows, s": round(statistics.median(theirs for _, theirs in found[1:]), 3),
        "call / rows": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
    }


async def _decided(
    decider: Decider, text: str, questions: Sequence[Mapping[str, Any]], salt: str
) -> tuple[Deciding, float, int]:
    """Ask questions about a text. Return the call, its seconds and the computed rows."""
    params = pool_params(cache_salt=salt)
    began = time.perf_counter()
    chat = ChatInput(messages=[{"role": "user", "content": text}], params=params)
    asked = await decider.open(chat, read_questions(questions), params)
    pooled = await asked.prompts.read()
    asked.decide(pooled)
    return asked, time.perf_counter() - began, sum(_num_computed(each.usage) for each in pooled)


async def _generated(llm: AsyncLLM, prompts: Sequence[list[int]], salt: str) -> tuple[float, int]:
    """Generate one token for each prompt. Return the seconds and the computed rows."""
    params = SamplingParams(max_tokens=1, temperature=0, cache_salt=salt)
    began = time.perf_counter()
    answers = await llm.generate(prompts, params)
    return time.perf_counter() - began, sum(_num_computed(each.usage) for each in answers)


def _products(llm: AsyncLLM) -> tuple[int, int]:
    """Return the multiply-adds of a row in the matrices of all layers, and in the vocabulary's.

    The model must be dense.
    """
    config = read_config(llm.built.path)
    shapes = tensor_shapes(config)
    own = (math.prod(shape) for name, shape in shapes.items() if ".layers." in name)
    return sum(own), config.vocab_size * config.hidden_size


def _num_computed(usage: Usage) -> int:
    return usage.prompt_tokens - usage.cached_tokens


def _choice(llm: AsyncLLM, count: int) -> Mapping[str, Any]:
    """Return a question with four labels of ``count`` tokens, whose first tokens differ."""
    labels: dict[int, str] = {}  # by the first token
    starts = [at for at, letter in enumerate(WORDS) if at == 0 or WORDS[at - 1] == " "]
    for text in (
        WORDS[start : start + length].strip() for length in range(1, 24) for start in starts
    ):
        ids = llm.tokenizer.encode_after(text)
        if len(ids) == count:
            labels.setdefault(ids[0], text)
    chosen = [*labels.values()][:4]
    if len(chosen) < 4:
        raise ValueError(f"found {len(chosen)} labels of {count} tokens, not 4")
    return {"type": "choice", "choices": [{"value": text} for text in chosen]}


if __name__ == "__main__":
    main()
