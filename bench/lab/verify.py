"""Verification of answers: `python -m foretoken.bench.lab.verify PART`.

- ``speed``: seconds to generate an answer, to verify it, and to compute the same tokens as a prompt
  alone, in turns on one engine. No prefix is cached: each request has its own salt.
  ``--step-tokens`` sets the tokens of a step, in place of its time limit.
- ``detection``: answers of changed models and requests, verified by the unchanged model: tokens up
  to the first difference, and the share that the statistical verdict rejects.
- ``kernels``: answers of the torch backend, verified by the native kernels. The share of large
  margins is the rate of `api/runtime/verifying/agreement.py`.
- ``false``: answers of many parameters, generated with drafts and in batches by one process,
  verified in another order and other batches by another process without drafts: the number of false
  verdicts, by token ids and by text. ``--first`` continues with other seeds.

Each part reads ``--model``: ``smollm2``, ``builtin``, a folder, or ``off-grid``, the twin of
SmolLM2 in bfloat16 that `python -m foretoken.bench.off_grid` describes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import multiprocessing
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs
from torch import Tensor

from ... import AsyncLLM, Choice, SamplingParams, Verdict
from ...core.execution import step_layout
from ...core.execution.compared_answer import compare_answer
from ...core.interface.plan import ScheduledRequest
from ...core.sampling.sampler import Sampler
from ..common.report import RESULTS, heading, read_options, table, write_json
from ..off_grid import write_off_grid

SUBJECTS = ("rivers", "trains", "bread", "stars", "chess", "glass", "bees", "maps", "rain", "salt")
TASKS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List ten facts about {} as bullet points.",
    "Write a Python class that models {}.",
    "Translate into French: I read a long book about {} yesterday.",
)
SYSTEMS = ("You are a helpful assistant.", "You are a helpful and brief assistant.")
Row = Mapping[str, object]
Message = Mapping[str, str]
FORM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
TOOLS = [
    {"type": "function", "function": {"name": "measure", "parameters": FORM}},
    {"type": "function", "function": {"name": "forget", "parameters": {"type": "object"}}},
]
FREE: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "hot": {"temperature": 1.7},
    "cuts": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.15, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {300: 3.0, 206: -5.0}},
    "allowed": {"allowed_token_ids": [*range(150, 1000)]},
    "bans": {"bad_words": ["the", "of"]},
    "choices": {"n": 2, "temperature": 0.9, "top_p": 0.95},
    "log-probabilities": {"logprobs": 3, "repetition_penalty": 1.1},
}
# Parameters of `false`; each answer has one of them, and a seed of its own. Every other answer of
# `FREE` goes on after the model's stop token.
KINDS: Mapping[str, Mapping[str, Any]] = {
    **FREE,
    "stop": {"stop": ["e t", ".\n"], "min_tokens": 5},
    "stop ids": {"stop_token_ids": [30, 31, 260], "min_tokens": 9},
    "schema": {"json_schema": FORM},
    "regex": {"regex": r"[a-f]{3,9}-\d{2,60}"},
    "choice": {"choice": ["yes, certainly", "no"]},
    "grammar": {"grammar": 'start: WORD (" " WORD)*\nWORD: /[a-z]{2,9}/'},
    "forced call": {},
    "calls": {"temperature": 0.6},
}
CALLS: Mapping[str, Mapping[str, Any]] = {
    "forced call": {"tools": TOOLS, "tool_choice": "required"},
    "calls": {"tools": TOOLS},
}
AT_ONCE = 16  # answers that are generated together


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS, help="what to measure")
    parser.add_argument("--model", default="off-grid", help="model (off-grid)")
    parser.add_argument("--answers", type=int, default=20, help="number of answers (20)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--first", type=int, default=0, help="number of the first answer (0)")
    parser.add_argument("--draft", default="auto", help="drafts of the answers of false (auto)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of speed (5)")
    parser.add_argument("--step-tokens", type=int, help="tokens of a step of speed")
    parser.add_argument("--threads", type=int, default=2, help="threads of the model (2)")
    options = read_options(parser, argv)
    if options.model == "off-grid":
        options.model = str(write_off_grid(Path(tempfile.gettempdir()) / "smollm2-off-grid"))
    rows = PARTS[options.part](options)
    print(table(rows))
    out = options.out or RESULTS / f"verify-{options.part}.json"
    write_json(out, {**heading(), "rows": rows})


# -- speed -----------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> list[Row]:
    """Return the seconds of generation and verification, greedy and sampled."""
    return asyncio.run(_speed(options))


async def _speed(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    most = options.step_tokens
    sizes = {} if most is None else {"max_batch_tokens": most, "max_slowdown": math.inf}
    async with _llm(options, draft="none", **sizes) as llm:
        await _timed(llm, min(32, options.tokens), 1.0, options.rounds)  # warms up
        for temperature in (0.0, 1.0):
            rounds = [
                await _timed(llm, options.tokens, temperature, seed)
                for seed in range(options.rounds)
            ]
            rows.append(
                {
                    "temperature": temperature,
                    "tokens": options.tokens,
                    "generate_s": _spread([each.generated for each in rounds]),
                    "verify_s": _spread([each.verified for each in rounds]),
                    "prefill_s": _spread([each.prefilled for each in rounds]),
                    "choosing_s": _spread([each.choosing for each in rounds]),
                    "steps": max(each.steps for each in rounds),
                    "times_faster": _spread([each.generated / each.verified for each in rounds]),
                    "at_most": _spread([each.generated / each.prefilled for each in rounds]),
                }
            )
    return rows


class Times(NamedTuple):
    """Seconds of an answer, of its verification, of the choice of its tokens, and of a prefill."""

    generated: float
    verified: float
    choosing: float
    prefilled: float
    steps: int


async def _timed(llm: AsyncLLM, tokens: int, temperature: float, seed: int) -> Times:
    salt = f"{temperature}-{seed}"
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True, cache_salt=salt
    )
    messages = next(_conversations(1))
    began = time.perf_counter()
    answer = await llm.chat(messages, params)
    generated = time.perf_counter() - began
    other = dataclasses.replace(params, cache_salt=f"{salt}-verified")
    with _timed_choosing() as choosing:
        began = time.perf_counter()
        verdict = await llm.verify(messages, answer.choices[0], other)
        verified = time.perf_counter() - began
    if not verdict.verified:
        raise RuntimeError(f"a false verdict: {verdict.first_difference}")
    whole = SamplingParams(prompt_only=True, cache_salt=f"{salt}-prefilled")
    began = time.perf_counter()
    await llm.generate([*answer.prompt_token_ids, *answer.token_ids], whole)
    prefilled = time.perf_counter() - began
    return Times(generated, verified, sum(choosing), prefilled, verdict.usage.verify_steps)


@contextmanager
def _timed_choosing() -> Iterator[list[float]]:
    """Collect the seconds in which tokens are chosen from logits and compared."""
    seconds: list[float] = []

    def timed(scheduled: ScheduledRequest, logits: Tensor, sampler: Sampler) -> array[float]:
        began = time.perf_counter()
        try:
            return compare_answer(scheduled, logits, sampler)
        finally:
            seconds.append(time.perf_counter() - began)

    step_layout.compare_answer = timed  # type: ignore[attr-defined]
    try:
        yield seconds
    finally:
        step_layout.compare_answer = compare_answer  # type: ignore[attr-defined]


# -- detection -------------------------------------------------------------------------------------


def detection(options: argparse.Namespace) -> list[Row]:
    """Return how many tokens it takes to detect answers of other models and requests."""
    plain = {"temperature": 1.0}
    cases: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
        "the same model and request": ({}, plain, SYSTEMS[0]),
        "int8 twin, temperature 1": ({"quantize": "int8"}, plain, SYSTEMS[0]),
        "int8 twin, greedy": ({"quantize": "int8"}, {"temperature": 0}, SYSTEMS[0]),
        "int4 twin, temperature 1": ({"quantize": "int4"}, plain, SYSTEMS[0]),
        "int4 twin, greedy": ({"quantize": "int4"}, {"temperature": 0}, SYSTEMS[0]),
        "temperature 0.9 for 1": ({}, {"temperature": 0.9}, SYSTEMS[0]),
        "another system prompt": ({}, plain, SYSTEMS[1]),
    }
    rows: list[Row] = []
    for name, (engine, changed, system) in cases.items():
        choices = asyncio.run(_answers(options, engine, changed, system))
        claimed = changed if changed["temperature"] == 0 else plain
        verdicts = asyncio.run(_verdicts(options, choices, claimed))
        rows.append({"answers of": name, **_found(verdicts)})
        print(rows[-1], flush=True)
    choices = asyncio.run(_answers(options, {}, plain, SYSTEMS[0]))
    at = options.tokens // 2
    changed_ids = [
        structs.replace(each, token_ids=_one_changed(each.token_ids, at)) for each in choices
    ]
    found = asyncio.run(_verdicts(options, changed_ids, plain))
    late = sum(each.first_difference is None or each.first_difference.position != at
               for each in found)  # fmt: skip
    rows.append({"answers of": f"token {at} changed", **_found(found), "at another token": late})
    return rows


def _one_changed(ids: Sequence[int], at: int) -> list[int]:
    changed = list(ids)
    if len(changed) > at:
        changed[at] += 1
    return changed


def kernels(options: argparse.Namespace) -> list[Row]:
    """Return how often answers of the torch backend have large margins with native kernels."""
    rows: list[Row] = []
    cases: Mapping[str, Mapping[str, Any]] = {
        "greedy": {"temperature": 0},
        "temperature 1": {"temperature": 1.0},
        "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    }
    for name, params in cases.items():
        choices = asyncio.run(_answers(options, {"backend": "torch"}, params, SYSTEMS[0]))
        rows.append({"answers": name, **_found(asyncio.run(_verdicts(options, choices, params)))})
        print(rows[-1], flush=True)
    return rows


async def _answers(
    options: argparse.Namespace, engine: Mapping[str, Any], changed: Mapping[str, Any], system: str
) -> list[Choice]:
    async with _llm(options, **engine) as llm:
        asked = [
            llm.chat(messages, _params(options, seed, changed))
            for seed, messages in enumerate(_conversations(options.answers, system))
        ]
        return [each.choices[0] for each in await asyncio.gather(*asked)]


async def _verdicts(
    options: argparse.Namespace, choices: Sequence[Choice], params: Mapping[str, Any]
) -> list[Verdict]:
    async with _llm(options) as llm:
        asked = [
            llm.verify(messages, choice, _params(options, seed, params))
            for seed, (messages, choice) in enumerate(
                zip(_conversations(len(choices)), choices, strict=True)
            )
        ]
        return list(await asyncio.gather(*asked))


def _params(options: argparse.Namespace, seed: int, changed: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=options.tokens, ignore_eos=True, **changed)


def _found(verdicts: Sequence[Verdict]) -> Row:
    """Return how many tokens were needed until the first difference, and the shares of tokens."""
    until = sorted(
        each.first_difference.position + 1 for each in verdicts if each.first_difference is not None
    )
    num_tokens = sum(each.checked_tokens for each in verdicts)
    return {
        "number": len(verdicts),
        "detected": len(until),
        "median": statistics.median(until) if until else None,
        "p95": until[min(len(until) - 1, int(0.95 * len(until)))] if until else None,
        "tokens": num_tokens,
        "different": sum(each.different_tokens for each in verdicts),
        "large": sum(each.agreement.large_margins for each in verdicts),
        "rejected": sum(not each.agreement.same_model for each in verdicts),
    }


# -- false verdicts --------------------------------------------------------------------------------


class Given(NamedTuple):
    """The choices of one request of `false`, and how many of its tokens were drafted."""

    at: int
    choices: list[Choice]
    num_accepted: int


class Checked(NamedTuple):
    """A verdict of `false`."""

    kind: str
    verdict: Verdict
    is_text: bool


def false_verdicts(options: argparse.Namespace) -> list[Row]:
    """Return the number of false verdicts for each kind of parameters."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as other:  # another process, with drafts
        given = other.apply(_generated, (options,))
    checked = asyncio.run(_checked(options, given))
    rows: list[Row] = []
    for kind in KINDS:
        ids = [each.verdict for each in checked if each.kind == kind and not each.is_text]
        texts = [each.verdict for each in checked if each.kind == kind and each.is_text]
        rows.append(
            {
                "parameters": kind,
                "answers": len(ids),
                "tokens": sum(each.checked_tokens for each in ids),
                "longest": max((each.checked_tokens for each in ids), default=0),
                "drafted": sum(each.num_accepted for each in given if _kind(each.at) == kind),
                "false": sum(not each.verified for each in ids),
                "texts": len(texts),
                "false texts": sum(not each.verified for each in texts),
            }
        )
    return rows


def _generated(options: argparse.Namespace) -> list[Given]:
    return asyncio.run(_generate(options))


async def _generate(options: argparse.Namespace) -> list[Given]:
    async with _llm(options, draft=options.draft) as llm:

        async def one(at: int) -> Given:
            async with room:
                params, calls = _kind_params(options, at), CALLS.get(_kind(at), {})
                found = await llm.chat(_conversation(at), params, **calls)
                return Given(at, found.choices, found.usage.accepted_tokens)

        room = asyncio.Semaphore(AT_ONCE)
        numbers = range(options.first, options.first + options.answers)
        return await asyncio.gather(*map(one, numbers))


async def _checked(options: argparse.Namespace, given: Sequence[Given]) -> list[Checked]:
    """Verify all choices, the last ones first and three at once; some of them by their text, too.

    A choice whose text cannot tell its tokens, because it has calls or none, has no such verdict.
    """
    async with _llm(options, draft="none") as llm:
        room = asyncio.Semaphore(3)

        async def one(each: Given, choice: Choice, *, is_text: bool) -> Checked:
            async with room:
                kind, params = _kind(each.at), _kind_params(options, each.at)
                found = await llm.verify(
                    _conversation(each.at),
                    choice.text if is_text else choice,
                    params,
                    finish_reason=choice.finish_reason if is_text else None,
                    index=choice.index,
                    **CALLS.get(kind, {}),
                )
            if not found.verified:
                first = found.first_difference
                print(
                    f"false: answer {each.at}, choice {choice.index}, {kind}: {first}", flush=True
                )
            return Checked(kind, found, is_text)

        asked = [
            one(each, choice, is_text=is_text)
            for each in reversed(given)
            for choice in each.choices
            for is_text in ((False, True) if _has_text(each.at, choice) else (False,))
        ]
        return await asyncio.gather(*asked)


def _has_text(at: int, choice: Choice) -> bool:
    is_chosen = at // len(KINDS) % 5 == 0
    return is_chosen and bool(choice.text) and not choice.tool_calls


def _kind(at: int) -> str:
    return [*KINDS][at % len(KINDS)]


def _kind_params(options: argparse.Namespace, at: int) -> SamplingParams:
    """Return the parameters of an answer of an eighth of ``--tokens`` to all of them."""
    name, least = _kind(at), max(1, options.tokens // 8)
    length = least + (at * 101) % (options.tokens - least + 1)
    goes_on = name in FREE and at // len(KINDS) % 2 == 0
    return SamplingParams(seed=at, max_tokens=length, ignore_eos=goes_on, **KINDS[name])


# -- common ----------------------------------------------------------------------------------------


def _llm(options: argparse.Namespace, **changed: Any) -> AsyncLLM:  # noqa: ANN401 - of the engine
    own: dict[str, Any] = {"kv_tokens": 32768, "threads": options.threads, **changed}
    if options.model != "builtin":
        own["dtype"] = "bfloat16"
    return AsyncLLM(options.model, **own)


def _conversations(count: int, system: str = SYSTEMS[0]) -> Iterator[list[Message]]:
    """Yield conversations; equal ones recur after 50, but their answers have other seeds."""
    for at in range(count):
        yield _conversation(at, system)


def _conversation(at: int, system: str = SYSTEMS[0]) -> list[Message]:
    task = TASKS[at % len(TASKS)].format(SUBJECTS[at // len(TASKS) % len(SUBJECTS)])
    return [{"role": "system", "content": system}, {"role": "user", "content": task}]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f} .. {max(values):.2f}]"


PARTS: Mapping[str, Callable[[argparse.Namespace], list[Row]]] = {
    "speed": speed,
    "detection": detection,
    "kernels": kernels,
    "false": false_verdicts,
}

if __name__ == "__main__":
    main()
