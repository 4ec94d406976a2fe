"""Answers to JSON schemas at tight token limits: `python -m foretoken.bench.lab.forms FOLDER`.

Every ``*.json`` file below the folder is a JSON schema. For each one, answers are generated at
several token limits, the lowest of which is the length of the shortest valid answer. The models
have no weights and avoid ending an answer: ``random`` draws among the allowed tokens, ``letters``
takes the longest word or number, and ``opener`` opens as many objects, arrays and strings as it
can. An answer that is cut at its limit is unfinished. The report has the share of rejected schemas
with reasons, of unfinished and of invalid answers, and the CPU time of a token's mask. The file
that `--out` names has each answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...api.build.model_files import find_model
from ...api.structured.compiler import Grammars
from ...api.structured.matcher import Grammar
from ...api.text.tokenizer import Tokenizer
from ...api.types.sampling_params import SamplingParams
from ...core.errors import InvalidRequest
from ...core.interface.sampling import ConstraintFailed
from ..common.report import RESULTS, heading, table, write_json

SPARE = (0, 1, 2, 3, 5, 8, 13, 21, 40, 80)  # Tokens above the shortest answer and its stop token.
_OUT = RESULTS / "forms.json"


class Answer(msgspec.Struct, frozen=True):
    """One answer: how it ended, and the time of its masks in milliseconds."""

    schema: str
    model: str
    limit: int
    end: str  # One of whole, unchecked, unfinished, invalid and failed.
    num_tokens: int
    ms: float
    slowest_ms: float
    text: str = ""


class Drawn(msgspec.Struct):
    """Results of all schemas."""

    answers: list[Answer] = []
    refused: dict[str, str] = {}
    endless: list[str] = []  # Schemas for which no shortest answer is known.
    compile_ms: list[float] = []
    least: dict[str, int] = {}


class Drawer:
    """Draws answers with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, stop: int) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        texts = [tokenizer.token_bytes(token_id) for token_id in range(len(tokenizer.vocab))]
        plain = np.array([len(text) if text.isalnum() else 0 for text in texts])
        opens = np.array([text[-1:] in (b"{", b"[", b'"', b",", b" ") for text in texts])
        self._wishes = {"random": plain * 0.0, "letters": plain * 1.0, "opener": opens * 1.0}

    @property
    def models(self) -> list[str]:
        """Names of the models."""
        return list(self._wishes)

    def draw(
        self, grammar: Grammar, model: str, limit: int, seed: int
    ) -> tuple[array[int], list[float]]:
        """Return the tokens of an answer, and the seconds that each mask took."""
        matcher = grammar.matcher(frozenset({self._stop}), limit)
        rng, wishes = np.random.default_rng(seed), self._wishes[model]
        output, seconds = array("q"), []
        while len(output) < limit:
            began = time.process_time()
            mask = matcher.allowed(output, 0, ())
            seconds.append(time.process_time() - began)
            assert mask is not None
            allowed: NDArray[np.int64] = np.flatnonzero(np.frombuffer(mask, dtype=np.bool_))
            wanted = allowed[allowed != self._stop]
            if not len(wanted):
                output.append(self._stop)
                break
            scores = wishes[wanted] + rng.random(len(wanted))
            output.append(int(wanted[np.argmax(scores)]))
        return output, seconds

    def text(self, output: Sequence[int]) -> str:
        """Return the text of an answer, without its stop token."""
        data = b"".join(self._tokenizer.token_bytes(i) for i in output if i != self._stop)
        return data.decode(errors="replace")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the answers, print the figures, and write JSON to ``--out``."""
    options = _parsed(argv)
    print(*(f"{key}: {value}" for key, value in heading().items()), sep="\n")
    tokenizer = Tokenizer.load(find_model(options.model).path, max_model_len=8192)
    try:
        drawn = asyncio.run(_work(options, tokenizer))
    finally:
        tokenizer.close()
    _print_report(drawn)
    write_json(options.out, {**heading(), "drawn": drawn})


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=1000, help="number of schemas to use (1000)")
    parser.add_argument(
        "--limits", type=int, default=len(SPARE), help="number of token limits per schema (10)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", default="smollm2", help="model whose tokenizer is used (smollm2)"
    )
    parser.add_argument(
        "--stop", default="<|im_end|>", help="text of the token that ends an answer (<|im_end|>)"
    )
    parser.add_argument("--out", type=Path, default=_OUT)
    return parser.parse_args(argv)


async def _work(options: argparse.Namespace, tokenizer: Tokenizer) -> Drawn:
    stop = tokenizer.vocab[options.stop]
    grammars = Grammars(tokenizer, len(tokenizer.vocab), frozenset({stop}))
    drawer, drawn = Drawer(tokenizer, stop), Drawn()
    files = sorted(options.folder.rglob("*.json"))
    random.Random(options.seed).shuffle(files)
    try:
        for number, file in enumerate(files[: options.schemas]):
            await _draw_all(drawn, drawer, grammars, file, number, options)
            if number % 50 == 49:
                print(number + 1, dict(Counter(each.end for each in drawn.answers)), flush=True)
    finally:
        grammars.close()
    return drawn


async def _draw_all(
    drawn: Drawn,
    drawer: Drawer,
    grammars: Grammars,
    file: Path,
    number: int,
    options: argparse.Namespace,
) -> None:
    name = "/".join(file.parts[-2:])
    schema = _read(file)
    try:
        began = time.process_time()
        grammar = await grammars.compile(SamplingParams(json_schema=json.dumps(schema)))
    except InvalidRequest as error:
        drawn.refused[name] = str(error)
        return
    assert grammar is not None
    drawn.compile_ms.append((time.process_time() - began) * 1e3)
    if grammar.least is None:
        drawn.endless.append(name)
        return
    drawn.least[name] = grammar.least
    for place, spare in enumerate(SPARE[: options.limits]):
        model = drawer.models[(number + place) % len(drawer.models)]
        limit = grammar.least + 1 + spare
        drawn.answers.append(_answer(drawer, grammar, schema, (name, model, limit, number + place)))


def _read(file: Path) -> object:
    return json.loads(file.read_text(encoding="utf-8"))


def _answer(
    drawer: Drawer, grammar: Grammar, schema: object, case: tuple[str, str, int, int]
) -> Answer:
    name, model, limit, seed = case
    try:
        output, seconds = drawer.draw(grammar, model, limit, seed)
    except ConstraintFailed as error:
        return Answer(name, model, limit, "failed", 0, 0.0, 0.0, str(error))
    text = drawer.text(output)
    end = "whole" if output[-1] == drawer._stop else "unfinished"
    if end == "whole":
        end = _checked(text, schema)
    ms = sum(seconds) * 1e3
    kept = "" if end == "whole" else text
    return Answer(name, model, limit, end, len(output), ms, max(seconds) * 1e3, kept)


def _checked(text: str, schema: object) -> str:
    """Return whether an answer is "whole" (valid) or "invalid".

    "unchecked" means that the validator cannot handle the schema.
    """
    import jsonschema

    try:
        answer = json.loads(text)
    except ValueError:
        return "invalid"
    try:
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        return "whole" if kind(schema).is_valid(answer) else "invalid"
    # The validator raises errors of many types: for patterns, for references, and its own.
    except Exception as error:
        print(f"unchecked: {error!r}"[:200])
        return "unchecked"


def _print_report(drawn: Drawn) -> None:
    ends = Counter(each.end for each in drawn.answers)
    num = len(drawn.refused) + len(drawn.endless) + len(drawn.least)
    tokens = sum(each.num_tokens for each in drawn.answers)
    figures: dict[str, object] = {
        "schemas": num,
        "refused": len(drawn.refused),
        "without a known end": len(drawn.endless),
        "answers": len(drawn.answers),
        **{end: ends[end] for end in ("whole", "unchecked", "unfinished", "invalid", "failed")},
        "ms a token": sum(each.ms for each in drawn.answers) / max(1, tokens),
    }
    for title, values in (
        ("slowest mask (ms)", [each.slowest_ms for each in drawn.answers]),
        ("compile (ms)", drawn.compile_ms),
    ):
        low, high = np.quantile(values, (0.5, 0.99)) if values else (0.0, 0.0)
        figures[title] = f"p50 {low:.3g}, p99 {high:.3g}"
    print(table([{"figure": key, "value": value} for key, value in figures.items()]))
    for reason, count in Counter(map(_reason, drawn.refused.values())).most_common(30):
        print(count, reason)


def _reason(error: str) -> str:
    return error.partition("[")[0][:90] if "Unimplemented" not in error else error[:90]


if __name__ == "__main__":
    main()
