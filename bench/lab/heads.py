"""The cost of a pass of a head beside a plain step of its target, by the head's kind and size.

    python -m foretoken.bench.lab.heads [--model smollm2] [--threads 2] [--out FILE]

Weights of the heads are random: only times are measured, in turns with the target's plain step of
the same number of requests. A pass of a block head is a whole block, of Medusa heads a token of
each, drafted as a chain at temperature 1, the choice of its tokens included.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...api.build.model_files import find_model
from ...core.model.decoder import Decoder
from ...core.model.loader import load_decoder
from ...core.ops.batch import Segment
from ...core.ops.kv_pool import KVPool
from ...draft.heads.block_network import BlockConfig, BlockHead
from ...draft.heads.eagle_network import EagleConfig, EagleHead
from ...draft.heads.joined import JoinedHead, join_target
from ...draft.heads.medusa import MedusaConfig, MedusaHead
from ..report import Row, command, machine, table, write_json

PAGE_SIZE, NUM_PAGES = 16, 256
REQUESTS, NEAR = (1, 4), (64, 512)
REPEATS = 15
MARKOV_RANK = 64


def shapes(vocab_size: int) -> list[tuple[str, dict[str, Any]]]:
    """Heads to measure: kind, layers, tokens of a block, ids that it drafts."""
    return [
        ("block", {"num_layers": 2, "block_size": 7, "draft_vocab_size": vocab_size}),
        ("block", {"num_layers": 2, "block_size": 7, "draft_vocab_size": 8192}),
        ("block", {"num_layers": 1, "block_size": 4, "draft_vocab_size": 8192}),
        ("eagle3", {"num_layers": 1, "block_size": 1, "draft_vocab_size": vocab_size}),
        ("eagle3", {"num_layers": 1, "block_size": 1, "draft_vocab_size": 8192}),
        ("medusa", {"num_layers": 1, "block_size": 3, "draft_vocab_size": vocab_size}),
    ]


def make_head(target: Decoder, kind: str, shape: dict[str, Any]) -> JoinedHead:
    """A head of random weights, as wide as its target."""
    config = target.config
    if kind == "medusa":
        return _make_medusa(target, shape["num_layers"], shape["block_size"])
    same: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "taps": (2, config.num_layers // 2, config.num_layers - 3),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope": config.rope,
        "max_model_len": config.max_model_len,
    } | {name: value for name, value in shape.items() if kind == "block" or name != "block_size"}
    head: BlockHead | EagleHead
    if kind == "block":
        own: dict[str, Any] = {"mask_token_id": 0, "markov_rank": MARKOV_RANK}
        size = shape["draft_vocab_size"]
        head = BlockHead(BlockConfig(**same, **own, markov_vocab_size=size))
    else:
        head = EagleHead(EagleConfig(**same))
    return join_target(head, target, target.weights.embedding.clone)


def _make_medusa(target: Decoder, num_blocks: int, num_heads: int) -> JoinedHead:
    config = target.config
    head = MedusaHead(
        MedusaConfig(
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            hidden_size=config.hidden_size,
            taps=(config.num_layers,),
            num_heads=num_heads,
            num_blocks=num_blocks,
        )
    )
    return join_target(head, target, target.weights.embedding.clone)


def seconds(call: Callable[[], object]) -> float:
    """Time a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def step(target: Decoder, pool: KVPool, num_requests: int, near: int) -> None:
    """A token for each request; the pages' content is void."""
    pages = array("q", range(-(-(near + 1) // PAGE_SIZE)))
    segments = [Segment(array("q", [0]), near, pages, 1)] * num_requests
    target.forward(target.batch(segments, page_size=PAGE_SIZE), pool)


def measure(target: Decoder, kind: str, shape: dict[str, Any]) -> list[Row]:
    """Lines of one head."""
    joined = make_head(target, kind, shape)
    proposer = joined.proposer(joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
    pool = target.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    rows: list[Row] = []
    for num_requests in REQUESTS:
        for near in NEAR:
            proposer.try_draft(num_requests, near)
            steps, passes = [], []
            for _ in range(REPEATS):
                steps.append(seconds(lambda: step(target, pool, num_requests, near)))  # noqa: B023
                passes.append(seconds(lambda: proposer.try_draft(num_requests, near)))  # noqa: B023
            plain, taken = median(steps), median(passes)
            rows.append(
                {
                    "head": kind,
                    **shape,
                    "requests": num_requests,
                    "tokens before": near,
                    "plain step, ms": plain * 1e3,
                    "pass, ms": taken * 1e3,
                    "pass / step": taken / plain,
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/heads.json"))
    args = parser.parse_args(argv)
    target = load_decoder(find_model(args.model).path, dtype=args.dtype, backend="native")
    target.ops.set_threads(args.threads)
    torch.set_num_threads(1)  # as the engine does beside the native kernels
    rows: list[Row] = []
    for kind, shape in shapes(target.config.vocab_size):
        rows += measure(target, kind, shape)
    print(table(rows))
    about = {"command": command(), "machine": machine(), "model": args.model, "dtype": args.dtype}
    about |= {"backend": type(target.ops).__name__}
    write_json(args.out, {**about, "threads": args.threads, "passes": rows})


if __name__ == "__main__":
    main()
