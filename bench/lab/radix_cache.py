"""What the radix tree costs: `python -m foretoken.bench.lab.radix_cache`.

Match, insert, touch and evict at 1k, 10k and 100k leaves, on one thread. The baseline, in the same
run on the same tree, is the eviction that SGLang uses: a heap of all leaves, built at each call.
Ratios inside one run are meaningful, absolute times on a shared machine hardly.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

from ...radix_cache import Match, Node, RadixTree
from ...radix_cache.eviction import EvictionIndex
from ..report import command, machine, write_json

NUM_LEAVES = (1_000, 10_000, 100_000)
PAGE_SIZES = (1, 16)
PREFIX_LEN = 2_000  # tokens
VOCABULARY = 50_000
BATCH = 100  # operations timed together; the same for all trees, or caches would favour some
SGLANG_PUBLISHED_US = 136_000.0  # one eviction at 100k leaves, SGLang's own figure


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds per operation over the repeats."""

    operation: str
    page_size: int  # tokens
    num_leaves: int
    median_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True, slots=True)
class Curve:
    """How one operation grows from the smallest tree to the largest."""

    operation: str
    page_size: int  # tokens
    ratio: float  # time at the most leaves over time at the fewest
    log_ratio: float  # what O(log n) alone would give
    linear_ratio: float  # what O(n) would give


def drawn(rng: random.Random, num_tokens: int) -> array[int]:
    """Random tokens."""
    return array("q", rng.choices(range(VOCABULARY), k=num_tokens))


def own_tokens(leaf: int, page_size: int) -> array[int]:
    """The two pages of tokens that only request number ``leaf`` has."""
    return array("q", [VOCABULARY + leaf]) + drawn(random.Random(leaf), 2 * page_size - 1)


def finished(leaf: int, prefix: array[int], page_size: int) -> tuple[array[int], array[int]]:
    """Tokens and pages of a finished request: the shared prefix, then two pages of its own."""
    num_shared = len(prefix) // page_size
    pages = array("q", range(num_shared))
    pages.extend((num_shared + 2 * leaf, num_shared + 2 * leaf + 1))
    return prefix + own_tokens(leaf, page_size), pages


def grown_tree(num_leaves: int, page_size: int, prefix: array[int]) -> RadixTree:
    """A prefix that ``num_leaves`` requests share."""
    tree = RadixTree(page_size)
    for leaf in range(num_leaves):
        tree.insert(*finished(leaf, prefix, page_size))
    return tree


def timed(operations: Sequence[Callable[[], object]]) -> float:
    """Microseconds of this thread's CPU time per operation: neighbours' turns do not count."""
    start = time.thread_time()
    for operation in operations:
        operation()
    return (time.thread_time() - start) / len(operations) * 1e6


def match_batch(tree: RadixTree, prefix: array[int], size: int) -> list[Callable[[], object]]:
    probes = [prefix + array("q", [-i]) * tree.page_size for i in range(1, size + 1)]
    return [partial(tree.match, probe) for probe in probes]


def insert_batch(tree: RadixTree, prefix: array[int], size: int) -> list[Callable[[], object]]:
    """Whole inserts: walking the prefix, adding a leaf, filing it."""
    new = range(tree.num_nodes, tree.num_nodes + size)
    return [partial(tree.insert, *finished(leaf, prefix, tree.page_size)) for leaf in new]


def touch_batch(tree: RadixTree, size: int) -> list[Callable[[], object]]:
    """Borrowing a random leaf and giving it back: pins and unpins the path, files it anew."""
    leaves = random.Random(size).sample(leaves_of(tree), size)
    matches = [whole_match(tree, leaf) for leaf in leaves]

    def touch(match: Match) -> None:
        tree.unlock(tree.lock(match))

    return [partial(touch, match) for match in matches]


def refile_batch(tree: RadixTree, size: int) -> list[Callable[[], object]]:
    """The index's share of a touch alone: one removal and one addition."""
    index = EvictionIndex()
    leaves = [Node(None, last_used=tick) for tick in range(tree.num_nodes - 1)]
    for leaf in leaves:
        index.add(leaf)
    clock = count(len(leaves))

    def refile(leaf: Node) -> None:
        index.remove(leaf)
        leaf.last_used = next(clock)
        index.add(leaf)

    return [partial(refile, leaf) for leaf in random.Random(size).sample(leaves, size)]


def heapify_batch(tree: RadixTree, size: int) -> list[Callable[[], object]]:
    """Baseline: choosing one victim by a heap of all leaves, their list given for free."""
    leaves = leaves_of(tree)

    def choose() -> Node:
        heap = [(leaf.last_used, number) for number, leaf in enumerate(leaves)]
        heapq.heapify(heap)
        return leaves[heapq.heappop(heap)[1]]

    return [choose] * size


def evict_batch(tree: RadixTree, size: int) -> list[Callable[[], object]]:
    return [partial(tree.evict, 2)] * size  # a leaf has two pages


def leaves_of(tree: RadixTree) -> list[Node]:
    """All leaves; the baseline would have to keep or to collect them."""
    return [node for node in tree.nodes() if not node.children]


def whole_match(tree: RadixTree, leaf: Node) -> Match:
    """A match that ends exactly at ``leaf``."""
    tokens = array("q")
    for node in leaf.path():
        tokens += node.key
    return tree.match(tokens)


def measured(num_leaves: int, page_size: int, repeats: int) -> list[Figure]:
    """All operations on one tree; those that change its size come last."""
    prefix = drawn(random.Random(0), PREFIX_LEN)
    tree = grown_tree(num_leaves, page_size, prefix)
    batches: dict[str, Callable[[], list[Callable[[], object]]]] = {
        "match": lambda: match_batch(tree, prefix, BATCH),
        "touch": lambda: touch_batch(tree, BATCH),
        "touch: index alone": lambda: refile_batch(tree, BATCH),
        "evict: heapify all": lambda: heapify_batch(tree, 3),
        "insert": lambda: insert_batch(tree, prefix, BATCH),
        "evict": lambda: evict_batch(tree, BATCH),
    }
    figures = []
    for operation, batch in batches.items():
        times = [timed(batch()) for _ in range(repeats)]
        spread = statistics.median(times), min(times), max(times)
        figures.append(Figure(operation, page_size, num_leaves, *spread))
    return figures


def curves(figures: Sequence[Figure]) -> list[Curve]:
    """Growth of every operation between the fewest and the most leaves measured."""
    few, many = min(f.num_leaves for f in figures), max(f.num_leaves for f in figures)
    median = {(f.operation, f.page_size, f.num_leaves): f.median_us for f in figures}
    logs = math.log(many) / math.log(few)
    return [
        Curve(operation, size, time_us / median[operation, size, few], logs, many / few)
        for (operation, size, leaves), time_us in median.items()
        if leaves == many
    ]


def print_figures(figures: Sequence[Figure]) -> None:
    print(f"\n{'operation':20} {'page':>4} {'leaves':>8} {'median us':>10}   spread")
    for f in sorted(figures, key=lambda f: (f.operation, f.page_size, f.num_leaves)):
        row = f"{f.operation:20} {f.page_size:4} {f.num_leaves:8,} {f.median_us:10.2f}"
        print(f"{row}   {f.low_us:.2f} to {f.high_us:.2f}")
    published = f"{'SGLang, published':20} {'':4} {100_000:8,} {SGLANG_PUBLISHED_US:10.0f}"
    print(f"{published}   one eviction; not measured here")


def print_curves(growth: Sequence[Curve]) -> None:
    print(f"\n{'growth, fewest to most':24} {'page':>4} {'time x':>8} {'log n x':>8} {'n x':>6}")
    for c in growth:
        ratios = f"{c.ratio:8.2f} {c.log_ratio:8.2f} {c.linear_ratio:6.0f}"
        print(f"{c.operation:24} {c.page_size:4} {ratios}")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m foretoken.bench.lab.radix_cache")
    parser.add_argument("--out", type=Path, default=Path("bench/results/radix_cache.json"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--leaves", type=int, nargs="+", default=list(NUM_LEAVES))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes JSON to ``--out``."""
    options = parsed(argv)
    host = machine()
    print(command(), *(f"{key}: {value}" for key, value in host.items()), sep="\n")
    gc.disable()  # a collection over 100k nodes would land in some figure at random
    figures = [
        figure
        for page_size in PAGE_SIZES
        for num_leaves in options.leaves
        for figure in measured(num_leaves, page_size, options.repeats)
    ]
    gc.enable()
    growth = curves(figures)
    print_figures(figures)
    print_curves(growth)
    report = {
        "command": command(),
        "machine": host,
        "prefix_len": PREFIX_LEN,
        "figures": [asdict(figure) for figure in figures],
        "growth": [asdict(curve) for curve in growth],
        "published": {"sglang_evict_100k_us": SGLANG_PUBLISHED_US},
    }
    write_json(options.out, report)


if __name__ == "__main__":
    main()
