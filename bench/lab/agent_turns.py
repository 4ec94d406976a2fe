"""Look-ups in agents' long conversations: `python -m foretoken.bench.lab.agent_turns`.

Agents share a history of thousands of tokens, which is cached. One agent is given a text and
repeats it as it is asked to. In a second run it calls a tool in a few tokens instead, and another
agent, whose own prompt lacks the text, repeats it. Prompts and answers are recorded ones of SmolLM2
(recorded_steps.py), the history is made of other recorded texts. No model computes: the look-ups of
``--draft auto`` guess at a fixed depth, and what comes true is taken. Figures are tokens a step.
"""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from ...draft.control.controller import Controller
from ...draft.control.cost_model import CostModel
from ...draft.control.estimators import AcceptanceModel
from ..common.real_tasks import ADVERSARIAL
from ..common.report import RESULTS, command, heading, table, write_json
from .recorded_steps import FILE, Recording, load
from .regret import Run, new_request, speculator

CONTEXTS = (8_000, 16_000, 30_000)  # tokens of the history
KINDS = ("edit", "agent", "quote")
DEPTH = 8
LAST_MESSAGE = 40  # tokens of the other agent's
CALL_LEN = 6  # tokens of a short answer


def history(recording: Recording, kind: str, num_tokens: int) -> array[int]:
    """Recorded prompts and answers of other kinds, again and again."""
    texts = [text for text in recording.texts if text.kind not in (kind, ADVERSARIAL)]
    pieces = [piece for text in texts for pair in text.requests() for piece in pair]
    random.Random(1).shuffle(pieces)
    made = array("q")
    for piece in cycle(pieces):
        made += piece
        if len(made) >= num_tokens:
            return made[:num_tokens]
    raise ValueError("nothing is recorded")


class Agents:
    """Requests behind one cached history, one after another."""

    def __init__(self, shared: array[int]) -> None:
        self._history = shared
        self._look_ups = speculator(Controller(CostModel()), AcceptanceModel())

    def serve(self, last: array[int], answer: array[int]) -> tuple[int, int]:
        """Give a request its answer; return its tokens and steps."""
        request = new_request("shared", self._history + last, answer, 0.0, DEPTH)
        request.usage.cached_tokens = len(self._history)
        run = Run(self._look_ups)
        run.join(request, answer)
        num_steps = 0
        while not run.has_ended(request):
            run.step()
            num_steps += 1
            self._look_ups.work()
        run.leave(request)
        self._look_ups.work()
        return run.outcome.num_tokens, num_steps


def tokens_per_step(recording: Recording, kind: str, num_cached: int) -> tuple[float, float]:
    """Tokens a step of an agent whose prompt has the text, and of another that lacks it."""
    text = next(each for each in recording.texts if each.kind == kind and not each.temperature)
    shared, rng = history(recording, kind, num_cached), random.Random(2)
    alone, beside = Agents(shared), Agents(shared)
    own, others = [], []
    for prompt, answer in text.requests():
        own.append(alone.serve(prompt, answer))
        beside.serve(prompt, answer[:CALL_LEN])
        words = array("q", rng.choices(shared, k=LAST_MESSAGE))
        others.append(beside.serve(words, answer))
    first, second = (sum(n for n, _ in found) / sum(n for _, n in found) for found in (own, others))
    return first, second


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.agent_turns", description=__doc__
    )
    parser.add_argument("--recording", type=Path, default=FILE)
    parser.add_argument("--out", type=Path, default=RESULTS / "agent_turns.json")
    args = parser.parse_args(argv)
    recording = load(args.recording)
    lines: list[dict[str, object]] = []
    for kind in KINDS:
        for num_cached in CONTEXTS:
            first, second = tokens_per_step(recording, kind, num_cached)
            line = {"task": kind, "cached tokens": num_cached, "the same agent": first}
            lines.append(line | {"another agent": second})
    print(command(), table(lines), sep="\n")
    write_json(args.out, {**heading(), "lines": lines})


if __name__ == "__main__":
    main()
