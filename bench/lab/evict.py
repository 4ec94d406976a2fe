"""Eviction inside a sequence: what is lost at which budget, by who is kept.

``python -m foretoken.bench.lab.evict``. A text stands for an answer: its tokens are given, not
chosen, and their negative log-likelihood is measured behind a short prompt while KV is evicted, by
TriAttention, by a window and by lot, beside the whole KV. *needle*: the same of a number that was
said once, early in the answer, and is asked for at its end. TriAttention is calibrated on another
text. Memory is told in pages.
"""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...api.build.model_files import find_model
from ...api.text.tokenizer_cache import load_tokenizer
from ...core.execution.calibration import measure_queries
from ...core.execution.eviction import EvictionPolicy, WindowEviction
from ...core.execution.triattention import TriAttentionEviction, attention_ropes
from ...core.interface.eviction import KvPack, next_packing, num_evicted
from ...core.interface.plan import ScheduledRequest
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.model.decoder import OwnDecoder
from ...core.model.loader import load_decoder
from ...core.ops.batch import Segment
from ...core.ops.kv_pool import KVPool
from ..common.report import RESULTS, heading, table, write_json
from ..load.corpus import pool_text
from ..load.workloads import positive

PAGE_SIZE, PROMPT_LEN, CHUNK = 16, 64, 128
NEEDLE, QUESTION = (
    "\nThe magic number of this file is 58213.\n",
    "\nThe magic number of this file is",
)
ANSWER = " 58213"
SAMPLING = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=PROMPT_LEN)


class RandomEviction:
    """Keeps tokens by lot, the same in every layer and head, and the latest ones always."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        """See `EvictionPolicy.kept`."""
        del pool, scheduled
        scores = torch.rand(pack.stop - pack.first, generator=self._generator)
        scores[-pack.num_evicted :] = 2.0
        kept = scores.topk(len(scores) - pack.num_evicted).indices.sort().values
        return (kept + pack.first).view(1, 1, -1)


@dataclass(frozen=True, slots=True)
class Forced:
    """Negative log-likelihoods of given tokens, [tokens behind the prompt], and most pages."""

    losses: Tensor
    most_pages: int


@torch.inference_mode()
def forced(
    decoder: OwnDecoder, tokens: Sequence[int], policy: EvictionPolicy | None, budget: int
) -> Forced:
    """Compute given tokens as an answer behind the first `PROMPT_LEN`, packing where it is due."""
    pool = decoder.make_pool(-(-len(tokens) // PAGE_SIZE), page_size=PAGE_SIZE)
    pages, losses, most, start = array("q", range(pool.num_pages)), list[Tensor](), 0, 0
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
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
        most, start = max(most, -(-(stop - shift) // PAGE_SIZE)), stop
    return Forced(torch.cat(losses)[PROMPT_LEN - 1 :], most)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.evict", description=str(__doc__).partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--budgets", type=positive, nargs="+", default=[256, 512, 1024])
    add("--tokens", type=positive, default=3000, help="tokens of a text")
    add("--texts", type=positive, default=2)
    add("--calibration", type=positive, default=8192, help="tokens that are calibrated on")
    add("--out", type=Path, default=RESULTS / "evict.json")
    args = parser.parse_args(argv)
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), "", sep="\n", flush=True)
    report["rows"] = rows = measured(args)
    print(table(rows), "", sep="\n")
    write_json(args.out, report)


def measured(args: argparse.Namespace) -> list[dict[str, object]]:
    """A line for each budget and policy, the whole KV first."""
    path = find_model(args.model).path
    encode = load_tokenizer(path).backend_tokenizer.encode

    def ids(text: str) -> list[int]:
        found: list[int] = encode(text, add_special_tokens=False).ids
        return found

    pool = ids(pool_text())
    slow = load_decoder(path, dtype="float32", backend="torch")
    fast = load_decoder(path)
    assert isinstance(slow, OwnDecoder)
    assert isinstance(fast, OwnDecoder)
    stats = measure_queries(slow, [pool[-args.calibration :]])
    rng = random.Random(0)
    texts = [
        pool[(at := rng.randrange(len(pool) // 2)) : at + args.tokens] for _ in range(args.texts)
    ]
    needles = [with_needle(text, ids) for text in texts]
    num_last = len(ids(ANSWER))
    policies: dict[str, Callable[[], EvictionPolicy]] = {
        "triattention": lambda: TriAttentionEviction(stats, attention_ropes(fast)),
        "window": WindowEviction,
        "by lot": lambda: RandomEviction(1),
    }
    rows = [row("all", "whole KV", fast, texts, needles, num_last, None, 0)]
    for budget in args.budgets:
        for name, make in policies.items():
            rows.append(row(budget, name, fast, texts, needles, num_last, make(), budget))
            print(table(rows[-1:]), flush=True)
    return rows


def with_needle(text: Sequence[int], ids: Callable[[str], list[int]]) -> list[int]:
    """A text whose beginning says a number and whose end asks for it."""
    early, late = ids(NEEDLE), [*ids(QUESTION), *ids(ANSWER)]
    at = PROMPT_LEN + 64
    return [*text[:at], *early, *text[at : len(text) - len(early) - len(late)], *late]


def row(
    budget: object,
    name: str,
    decoder: OwnDecoder,
    texts: Sequence[Sequence[int]],
    needles: Sequence[Sequence[int]],
    num_last: int,
    policy: EvictionPolicy | None,
    limit: int,
) -> dict[str, object]:
    """A line of the table."""
    plain = [forced(decoder, text, policy, limit) for text in texts]
    asked = [forced(decoder, text, policy, limit) for text in needles]
    late = torch.cat([each.losses[len(each.losses) // 2 :] for each in plain])
    return {
        "budget": budget,
        "kept": name,
        "NLL of late tokens": float(late.mean()),
        "NLL of the needle": float(torch.cat([e.losses[-num_last:] for e in asked]).mean()),
        "most pages": max(each.most_pages for each in plain),
    }


if __name__ == "__main__":
    main()
