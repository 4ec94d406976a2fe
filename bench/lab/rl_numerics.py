"""Numerics check of tinker-cookbook on this engine: `python -m foretoken.bench.lab.rl_numerics`.

The cookbook's `rl_numerics_check` trains on long episodes of many turns and logs two numbers per
step: `kl_sample_train_v1`, the mean of sampled minus trained log-probability of a generated token,
and `_v2`, half the mean square of this difference. Healthy systems log 0.0002 to 0.002.

This program plays such episodes with drafts: a document is read one page a turn, and an episode is
one growing sequence. After each step the policy is updated in the served engine by
`AsyncLLM.update_weights`. Before the first and after the last update, the numbers are measured for
each batch size, with the cache and without. "torch" is the same number with the log-probabilities
of the trainer's own forward pass, as other trainers take them.

Replaced: WikiText-103 by sentences made here; the model by SmolLM2-135M in float32 or a folder;
tool calls by pages that follow each answer, because these models call no tools; the reward by the
share of an answer's tokens that its document has, because these models do not count; the lengths.
The numbers do not depend on rewards. The exit status is 1 unless all numbers are 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ... import AsyncLLM
from ...api.build.model_files import BUILTIN, checked_smollm2
from ...api.train.losses import engine_valued, group_advantages, importance_sampling
from ...api.train.numerics import SampleTrainKL, kl_sample_train
from ...api.train.policy import FILE, LoraPolicy
from ...api.train.rollouts import POLICY, Tokens, score
from ...api.train.twins import write_twin
from ..common.report import RESULTS, heading, read_options, table, write_json

SUBJECTS = ("The miller", "A young clerk", "The last train", "Her brother", "The old harbour")
VERBS = ("waited", "was repaired", "changed its name", "kept a record", "lost the key")
LINKS = ("after", "before", "during", "until", "while", "although", "because", "when")
ENDS = ("the flood of spring", "a long winter", "the market closed", "several letters came")
QUESTION = "Count the word {!r} in the pages. Say what you read.\n"
DEPTH = 3  # draft tokens per request and step
GROUP = 4  # episodes of the same document in a training step
NUMBERS = ("kl_sample_train_v1", "kl_sample_train_v2")
_OUT = RESULTS / "rl_numerics.json"


@dataclass(frozen=True)
class Lengths:
    """Lengths of an episode and settings of the training."""

    pages: int = 4
    page_words: int = 48
    turn_tokens: int = 12
    learning_rate: float = 4e-5
    updates: int = 20
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)


@dataclass
class Episode:
    """One sequence of tokens, of which the spans were sampled."""

    token_ids: list[int]
    prompt_len: int  # tokens before the first answer
    spans: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    cached_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens(self) -> Tokens:
        """The first prompt, and all tokens after it."""
        return Tokens(
            tuple(self.token_ids[: self.prompt_len]), tuple(self.token_ids[self.prompt_len :])
        )

    @property
    def sampled(self) -> list[float]:
        """The log-probabilities of the sampled tokens."""
        return [value for _, values in self.spans for value in values]

    @property
    def places(self) -> list[int]:
        """Indices of the sampled tokens behind the prompt."""
        return [
            start - self.prompt_len + offset
            for start, values in self.spans
            for offset in range(len(values))
        ]


def make_text(order: random.Random, num_words: int) -> str:
    """Return sentences of at least ``num_words`` words."""
    words: list[str] = []
    while len(words) < num_words:
        parts = (order.choice(each) for each in (SUBJECTS, VERBS, LINKS, ENDS))
        words += f"{' '.join(parts)}.".split()
    return " ".join(words)


class Check:
    """A served engine, its trainer, and the random order of the episodes."""

    def __init__(self, llm: AsyncLLM, folder: Path, lengths: Lengths, seed: int) -> None:
        from transformers import AutoTokenizer

        self.llm, self.lengths, self.order = llm, lengths, random.Random(seed)
        self.policy = LoraPolicy(folder, seed=seed)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lengths.learning_rate)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def make_pages(self) -> list[list[int]]:
        """Return the token ids of a document's pages; the question is before the first one."""
        texts = [
            f"Page {number + 1}: {make_text(self.order, self.lengths.page_words)}\nNote:"
            for number in range(self.lengths.pages)
        ]
        texts[0] = QUESTION.format(self.order.choice(LINKS)) + texts[0]
        return [self._tokenizer(f"\n{text}").input_ids for text in texts]

    async def play(self, pages: Sequence[Sequence[int]], seed: int, *, caches: bool) -> Episode:
        """Play an episode of one turn per page."""
        episode = Episode([], len(pages[0]))
        for turn, page in enumerate(pages):
            episode.token_ids += page
            params = replace(
                POLICY,
                seed=seed + turn,
                max_tokens=self.lengths.turn_tokens,
                cache_salt=None if caches else f"{seed}/{turn}/{self.order.random()}",
            )
            found = await self.llm.generate(episode.token_ids, params)
            values = tuple(each.logprob for each in found.logprobs or ())
            episode.spans.append((len(episode.token_ids), values))
            episode.token_ids += found.token_ids
            episode.cached_tokens += found.usage.cached_tokens
            episode.accepted_tokens += found.usage.accepted_tokens
        return episode

    async def play_batch(self, size: int, *, caches: bool, is_group: bool = False) -> list[Episode]:
        """Play episodes at once; those in a group have the same document."""
        documents = [self.make_pages() for _ in range(1 if is_group else size)]
        seeds = [self.order.randrange(2**31) for _ in range(size)]
        plays = [
            self.play(documents[number % len(documents)], seed, caches=caches)
            for number, seed in enumerate(seeds)
        ]
        return [*await asyncio.gather(*plays)]

    async def trained(self, episodes: Sequence[Episode]) -> list[list[float]]:
        """Return the engine's log-probabilities of the sampled tokens, computed as one prompt."""
        scored = await score(self.llm, [each.tokens for each in episodes])
        return [
            [values[place] for place in each.places]
            for each, values in zip(episodes, scored, strict=True)
        ]

    def torch_trained(self, episodes: Sequence[Episode]) -> list[torch.Tensor]:
        """Return torch's log-probabilities of the sampled tokens, with their gradient."""
        found = self.policy.logprobs([each.tokens for each in episodes])
        return [values[each.places] for each, values in zip(episodes, found, strict=True)]

    async def train(self, work: Path) -> SampleTrainKL:
        """Play a group, take a gradient step, and serve the new weights. Return the numbers."""
        episodes = await self.play_batch(GROUP, caches=True, is_group=True)
        sampled = [each.sampled for each in episodes]
        values = await self.trained(episodes)
        advantages = group_advantages(torch.tensor([[_reward(each) for each in episodes]]))[0]
        weights = [
            float(advantage)
            for each, advantage in zip(sampled, advantages, strict=True)
            for _ in each
        ]
        logprobs = engine_valued(_flat(values), torch.cat(self.torch_trained(episodes)))
        loss = importance_sampling(logprobs, _flat(sampled), torch.tensor(weights))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        digest = self.policy.write(work)
        await self.llm.update_weights(work, sha256={FILE: digest})
        return kl_sample_train(sampled, values)

    async def measure(self, size: int, *, caches: bool) -> dict[str, object]:
        """Return a row of numbers for ``size`` episodes at once."""
        episodes = await self.play_batch(size, caches=caches)
        sampled = [each.sampled for each in episodes]
        found = kl_sample_train(sampled, await self.trained(episodes))
        with torch.no_grad():
            own = [each.tolist() for each in self.torch_trained(episodes)]
        torchs = kl_sample_train(sampled, own)
        return {
            "version": self.llm.weight_version,
            "batch": size,
            "cache": "on" if caches else "off",
            "kl_sample_train_v1": found.v1,
            "kl_sample_train_v2": found.v2,
            "different": f"{found.num_different} of {found.num_tokens}",
            "torch v1": f"{torchs.v1:.1e}",
            "torch v2": f"{torchs.v2:.1e}",
            "cached tokens": sum(each.cached_tokens for each in episodes),
            "accepted drafts": sum(each.accepted_tokens for each in episodes),
        }


def _flat(values: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([value for each in values for value in each])


def _reward(episode: Episode) -> float:
    """Return the share of sampled tokens that also stand outside the answers."""
    chosen = {*episode.places}
    tail = episode.tokens.answer
    given = {*episode.tokens.prompt, *(id for at, id in enumerate(tail) if at not in chosen)}
    return sum(tail[at] in given for at in chosen) / len(chosen)


async def check(
    folder: Path,
    work: Path,
    lengths: Lengths,
    *,
    draft: str = "auto,self",
    threads: int = 2,
    seed: int = 0,
) -> list[dict[str, object]]:
    """Run the check on a folder of safetensors; return the rows of `Check.measure`.

    The last row has the numbers over all training steps. ``work``: folder for new weights.
    """
    torch.set_num_threads(threads)
    async with AsyncLLM(
        folder,
        allow_weight_updates=True,
        exact="batch",
        draft=draft,
        speculation=DEPTH,
        threads=threads,
        kv_tokens=32768,
        max_model_len=2048,
    ) as llm:
        run = Check(llm, folder, lengths, seed)
        rows = [await run.measure(max(lengths.batches), caches=True)]
        steps = []
        for number in range(lengths.updates):
            steps.append(await run.train(work))
            print(f"update {number + 1}: v1 {steps[-1].v1}, v2 {steps[-1].v2}", flush=True)
        for size in lengths.batches:
            for caches in (True, False):
                rows.append(await run.measure(size, caches=caches))
    different = sum(each.num_different for each in steps)
    total = {
        "version": "all steps",
        "batch": GROUP,
        "cache": "on",
        "kl_sample_train_v1": max((abs(each.v1) for each in steps), default=0.0),
        "kl_sample_train_v2": max((each.v2 for each in steps), default=0.0),
        "different": f"{different} of {sum(each.num_tokens for each in steps)}",
    }
    return [*rows, total]


def is_zero(rows: Sequence[dict[str, object]]) -> bool:
    """Whether both numbers are exactly 0 in all rows."""
    return all(row[name] == 0.0 for row in rows for name in NUMBERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON to ``--out``; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, builtin or a folder (smollm2)")
    parser.add_argument("--draft", default="auto,self", help="drafts of the engine (auto,self)")
    parser.add_argument("--threads", type=int, default=2, help="threads (2)")
    for name in ("updates", "pages", "page_words", "turn_tokens"):
        default = getattr(Lengths, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"number of {name} ({default})")
    args = read_options(parser, argv)
    lengths = Lengths(args.pages, args.page_words, args.turn_tokens, updates=args.updates)
    with tempfile.TemporaryDirectory(prefix="foretoken-numerics-") as name:
        work = Path(name)
        folder = BUILTIN / "target" if args.model == "builtin" else Path(args.model)
        if args.model == "smollm2":
            folder = write_twin(checked_smollm2(), work / "base")
        run = check(folder, work / "new", lengths, draft=args.draft, threads=args.threads)
        rows = asyncio.run(run)
    print(table(rows))
    for name in NUMBERS:
        print(f"{name}: {max(abs(float(str(row[name]))) for row in rows)}")
    write_json(args.out or _OUT, {**heading(), "rows": rows})
    return 0 if is_zero(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
