"""Eviction inside a sequence: what is lost at which budget, by who is kept.

``python -m foretoken.bench.lab.evict``. A text stands for an answer: its tokens are given, not
chosen, and their likelihood is measured behind a short prompt while KV is evicted. The text says
numbers of places at its beginning and in its first half, and asks for them at its end (*needles*).
*perplexity* is that of the second half, before the questions. Who is kept: by TriAttention, a
window, the attention of the latest queries (as SnapKV, arXiv 2404.14469), by lot; beside the whole
KV. TriAttention is calibrated on another text. All is computed in float32 by torch.

``--policies`` and ``--budgets`` measure a part. With ``--resume`` rows that the file has already
are kept, as long as they were measured with the same settings.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...api.build.model_files import find_model
from ...api.text.tokenizer_cache import load_tokenizer
from ...core.execution.calibration import measure_queries
from ...core.execution.eviction import EvictionPolicy, WindowEviction
from ...core.execution.triattention import (
    QueryStats,
    TriAttentionEviction,
    attention_ropes,
    read_keys,
)
from ...core.interface.eviction import KvPack, next_packing, num_evicted
from ...core.interface.plan import ScheduledRequest
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.model.decoder import OwnDecoder
from ...core.model.loader import load_decoder
from ...core.ops.base import ForwardPlan
from ...core.ops.batch import Segment
from ...core.ops.kv_pool import KVPool
from ...core.ops.weights import FIRST_TABLE, HeadNorm, Tables
from ..common.report import RESULTS, heading, table, write_json
from ..load.corpus import pool_text
from ..load.workloads import positive

PAGE_SIZE, PROMPT_LEN, CHUNK = 16, 64, 128
QUERIES = 32  # latest ones whose attention counts
PLACES = ("Oslo", "Lima", "Cairo", "Seoul", "Quito", "Perth", "Turin", "Dakar")
POLICIES = ("whole KV", "triattention", "window", "attention", "by lot")
SAMPLING = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=PROMPT_LEN)
Row = dict[str, Any]


# -- policies -----------------------------------------------------------------------------------


class RandomEviction:
    """Keeps tokens by lot, the same in every layer and head, and the latest ones always."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        """See `EvictionPolicy.kept`."""
        del pool, scheduled
        scores = torch.rand(pack.stop - pack.first, generator=self._generator)
        return _best(scores.view(1, 1, -1), pack)


class AttentionEviction:
    """Keeps in each KV head what the latest queries attend to most, and the latest tokens always.

    It stands in for the decoder's operations, to see the queries.
    """

    def __init__(self, decoder: OwnDecoder) -> None:
        self._ops, self._heads = decoder.ops, decoder.part_heads(0)
        self._queries: dict[int, Tensor] = {}  # by layer [rows, num_heads, head_dim], after RoPE

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the operations have
        return getattr(self._ops, name)

    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        plan: ForwardPlan,
        norm: HeadNorm | None,
        tables: Tables = FIRST_TABLE,
    ) -> Tensor:
        """See `Ops.rope_write`."""
        q = self._ops.rope_write(qkv, layer, plan, norm, tables)
        num_rows = int(plan.batch.lens.sum())  # type: ignore[attr-defined]  # the others are copies
        rows = q[:num_rows].reshape(num_rows, self._heads.num_heads, -1).float()
        known = self._queries.get(layer, rows[:0])
        self._queries[layer] = torch.cat([known, rows])[-QUERIES:].clone()
        return q

    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        """See `EvictionPolicy.kept`."""
        places = torch.arange(pack.stop)
        scores = [
            self._seen(queries, read_keys(pool, scheduled.page_ids, places, layer))
            for layer, queries in sorted(self._queries.items())
        ]
        return _best(torch.stack(scores)[:, :, pack.first :], pack)

    @staticmethod
    def _seen(queries: Tensor, keys: Tensor) -> Tensor:
        """Attention [num_kv_heads, n] that keys [num_kv_heads, n, head_dim] get, over a group."""
        num_kv_heads, _, width = keys.shape
        grouped = queries.transpose(0, 1).reshape(num_kv_heads, -1, width)
        return (grouped @ keys.mT).softmax(dim=2).mean(dim=1)


def _best(scores: Tensor, pack: KvPack) -> Tensor:
    """Places of the highest scores [.., n], as many as are kept; the latest ones always."""
    scores = scores.clone()
    scores[..., -pack.num_evicted :] = math.inf
    num_kept = scores.shape[-1] - pack.num_evicted
    return scores.topk(num_kept, dim=-1).indices.sort(dim=-1).values + pack.first


# -- texts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a prompt and an answer. ``answers``: where the numbers are that it asks for."""

    tokens: list[int]
    questions: int  # where the first question begins
    answers: list[range]


def make_text(pool: Sequence[int], ids: Callable[[str], list[int]], seed: int, size: int) -> Text:
    """A text of ``size`` tokens and the questions behind it, with the places in its first half."""
    rng = random.Random(seed)
    at = rng.randrange(len(pool) - size)
    numbers = {place: rng.randrange(10_000, 100_000) for place in PLACES}
    needles = [ids(f"\nThe secret number of {place} is {numbers[place]}.\n") for place in PLACES]
    plain = list(pool[at : at + size - sum(map(len, needles))])
    step = (size // 2 - PROMPT_LEN) // len(needles)
    tokens = plain[:PROMPT_LEN]
    for number, needle in enumerate(needles):
        first = PROMPT_LEN + number * step
        tokens += needle + plain[first : first + step]
    tokens += plain[PROMPT_LEN + len(needles) * step :]
    questions, answers = len(tokens), list[range]()
    for place in rng.sample(PLACES, len(PLACES)):
        tokens += ids(f"\nThe secret number of {place} is")
        answer = ids(f" {numbers[place]}")
        answers.append(range(len(tokens), len(tokens) + len(answer)))
        tokens += [*answer, *ids(".\n")]
    return Text(tokens, questions, answers)


# -- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Forced:
    """Figures of each token behind the first: its loss, and whether it was the argmax."""

    losses: Tensor
    is_right: Tensor
    most_pages: int


@torch.inference_mode()
def forced(
    decoder: OwnDecoder, tokens: Sequence[int], policy: EvictionPolicy | None, budget: int
) -> Forced:
    """Compute given tokens as an answer behind the first `PROMPT_LEN`, packing where it is due."""
    pool = decoder.make_pool(-(-len(tokens) // PAGE_SIZE), page_size=PAGE_SIZE)
    pages, found, most, start = array("q", range(pool.num_pages)), list[Tensor](), 0, 0
    right = list[Tensor]()
    while start < len(tokens) - 1:
        stop = min(start + CHUNK, len(tokens) - 1)
        shift = 0
        if policy is not None:
            stop = min(stop, next_packing(PROMPT_LEN, budget, start))
            before, shift = (num_evicted(PROMPT_LEN, budget, each) for each in (start, stop))
            if shift > before:
                row = ScheduledRequest(
                    request_id="", tokens=array("q"), start=start, stop=stop, page_ids=pages,
                    sampling=SAMPLING, num_evicted=shift,
                )  # fmt: skip
                pack = KvPack(PROMPT_LEN, start - before, shift - before)
                pool.pack(pages, policy.kept(pool, row, pack), pack.first)
        segment = Segment(
            array("q", tokens[start:stop]), start - shift, pages, stop - start, shift=shift
        )
        logits = decoder.forward(decoder.batch([segment], page_size=PAGE_SIZE), pool).logits
        target = torch.tensor(tokens[start + 1 : stop + 1])
        found.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
        right.append(logits.argmax(dim=1) == target)
        most, start = max(most, -(-(stop - shift) // PAGE_SIZE)), stop
    return Forced(torch.cat(found), torch.cat(right), most)


def row_of(texts: Sequence[Text], runs: Sequence[Forced]) -> Row:
    """Figures of all texts under one policy."""
    late, asked, needles = list[Tensor](), list[Tensor](), list[bool]()
    for text, run in zip(texts, runs, strict=True):
        late.append(run.losses[text.questions // 2 : text.questions - 1])
        for each in text.answers:  # the row before a token predicts it
            rows = slice(each.start - 1, each.stop - 1)
            asked.append(run.losses[rows])
            needles.append(bool(run.is_right[rows].all()))
    return {
        "perplexity": math.exp(float(torch.cat(late).mean())),
        "NLL of a needle's token": float(torch.cat(asked).mean()),
        "needles": sum(needles),
        "of": len(needles),
        "most pages": max(run.most_pages for run in runs),
    }


class Bench:
    """A model, its texts, and what is measured once for all rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        path = find_model(args.model).path
        encode = load_tokenizer(path).backend_tokenizer.encode

        def ids(text: str) -> list[int]:
            found: list[int] = encode(text, add_special_tokens=False).ids
            return found

        decoder = load_decoder(path, dtype="float32", backend="torch")
        if not isinstance(decoder, OwnDecoder):
            raise SystemExit(f"{args.model}: a model of transformers' modules")
        self.decoder = decoder
        chars = 8 * (2 * args.tokens * args.texts + args.calibration)  # more than enough
        text = pool_text()[:chars]
        half = len(text) // 2
        self._other = ids(text[half:])[: args.calibration]
        pool = ids(text[:half])
        self.texts = [make_text(pool, ids, seed, args.tokens) for seed in range(args.texts)]

    @cache  # noqa: B019 - there is one bench
    def stats(self) -> QueryStats:
        """Mean queries over another text."""
        return measure_queries(self.decoder, [self._other])

    def measure(self, name: str, budget: int) -> Row:
        """A row of the table."""
        ops = self.decoder.ops
        try:
            return row_of(self.texts, [self._run(name, budget, text) for text in self.texts])
        finally:
            self.decoder.ops = ops

    def _run(self, name: str, budget: int, text: Text) -> Forced:
        policy: EvictionPolicy | None = None
        match name:
            case "triattention":
                policy = TriAttentionEviction(self.stats(), attention_ropes(self.decoder))
            case "window":
                policy = WindowEviction()
            case "attention":
                if isinstance(self.decoder.ops, AttentionEviction):
                    self.decoder.ops = self.decoder.ops._ops
                policy = AttentionEviction(self.decoder)
                self.decoder.ops = policy
            case "by lot":
                policy = RandomEviction(1)
        return forced(self.decoder, text.tokens, policy, budget)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON after each row."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.evict", description=str(__doc__).partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    add("--budgets", type=positive, nargs="+", default=[256, 512, 1024])
    add("--tokens", type=positive, default=2048, help="tokens of a text")
    add("--texts", type=positive, default=2)
    add("--calibration", type=positive, default=2048, help="tokens that are calibrated on")
    add("--threads", type=positive, default=1, help="threads of torch; more wait for each other")
    add("--resume", action="store_true", help="keep the rows that the file has already")
    add("--out", type=Path, default=RESULTS / "evict.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), "", sep="\n", flush=True)
    names = ("model", "tokens", "texts", "calibration")
    report["settings"] = settings = {name: getattr(args, name) for name in names}
    known: list[Row] = []
    if args.resume and args.out.exists():
        last = json.loads(args.out.read_text())
        known = last["rows"] if last.get("settings") == settings else []
    rows = {(each["kept"], each["budget"]): each for each in known}
    bench = Bench(args)
    for name, budget in wanted(args):
        if (name, budget) not in rows:
            rows[name, budget] = {"budget": budget, "kept": name, **bench.measure(name, budget)}
            print(table([rows[name, budget]]), flush=True)
            report["rows"] = in_order(rows.values())
            write_json(args.out, report)
    print("", table(in_order(rows.values())), sep="\n")


def wanted(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Policies and budgets to measure; the whole KV has no budget: 0."""
    budgets = {name: [0] if name == "whole KV" else args.budgets for name in args.policies}
    return [(name, budget) for name, each in budgets.items() for budget in each]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows by budget and policy."""
    return sorted(rows, key=lambda each: (each["budget"], POLICIES.index(each["kept"])))


if __name__ == "__main__":
    main()
