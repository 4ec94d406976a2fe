"""Time of a recurrent layer alone: `python -m foretoken.bench.lab.states`.

Layers of the gated delta rule, by default of 32 heads of 128 x 128 as Qwen3.6-35B-A3B has them, are
computed one after the other over states that no cache holds all of. Figures are microseconds of one
layer: a decoding row at four places in its page, four rows (a token and three drafts), a row behind
which nothing is folded and one before which a page is, and a token of a prompt. With
``--checkpoint`` whole decode steps of a model are measured besides, at each place of a page and
where a page is folded, and passes of its MTP layer if it has one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import torch
from torch import Tensor

from ...api.build.drafts import has_mtp
from ...core.model.decoder import OwnDecoder
from ...core.model.loader import load_decoder
from ...core.ops.batch import Segment, SegmentState, build_batch
from ...core.ops.kv_pool import KVPool
from ...core.ops.native import Variant, native_library, variants
from ...core.ops.native.library import DTYPES
from ...core.ops.native.limits import best_seconds, read_bandwidth
from ...core.ops.native.native_ops import NativeOps
from ...core.ops.native.structs.state import RecurrentStructs
from ...core.ops.state_pool import STATE_PAGE_SIZES, StatePool
from ...core.ops.weights import DeltaWeights, HeadLayout, PackedLinear, RecurrentShape
from ...draft.heads.common.proposer import HeadProposer
from ...draft.heads.mtp import load_mtp
from ..common.report import RESULTS, heading, table, write_json

PLACES = (0, 5, 10, 15)  # of a decoding row in its page
PROMPT = 256  # tokens of a chunk
_OUT = RESULTS / "states.json"
_HEADS = HeadLayout(1, 1, 8, 1.0)
_NO_MATRIX = PackedLinear(torch.empty(0), None, packed=False)


class Figure(msgspec.Struct, frozen=True):
    """Microseconds of one layer, at the best of several turns."""

    what: str
    rows: int
    us: float
    us_per_row: float
    gbps: float  # of states, where each is read once


class _NoTurn:
    """`Rope` of a layer that turns nothing."""

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Ones and zeros."""
        return self.table(max(stop, len(positions)))

    def table(self, stop: int) -> tuple[Tensor, Tensor]:
        """Ones and zeros ``[stop, 4]``."""
        return torch.ones(stop, 4), torch.zeros(stop, 4)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    options = _parsed(argv)
    print(*(f"{key}: {value}" for key, value in heading().items()), sep="\n")
    report: dict[str, object] = {**heading(), **_settings(options)}
    for variant in options.variant:
        library = native_library(variant)
        if library is None:
            raise SystemExit(f"the kernels {variant} cannot be had on this machine")
        library.set_threads(options.threads)
        reads = read_bandwidth(library)
        print(f"{variant}: reads {reads / 1e9:.1f} GB/s")
        figures = list(_Layers(NativeOps(library), options).measured(options.turns))
        print(table([msgspec.structs.asdict(figure) for figure in figures]))
        report[variant] = {"read_gbps": round(reads / 1e9, 1), "figures": figures}
    if options.checkpoint is not None:
        report["steps"] = steps = _measured_steps(options)
        print(table([steps]))
    write_json(options.out, report)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.states", description=__doc__
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument(
        "--variant",
        action="append",
        choices=get_args(Variant),
        help="kernels to measure, repeatable (default: the fastest of this CPU)",
    )
    parser.add_argument("--heads", type=int, default=32, help="value heads (%(default)s)")
    parser.add_argument("--key-heads", type=int, default=16, help="key heads (%(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="items of a key and of a value")
    parser.add_argument("--layers", type=int, default=16, help="computed in turn (%(default)s)")
    parser.add_argument("--page-size", type=int, default=16, choices=STATE_PAGE_SIZES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--turns", type=int, default=15, help="times that each is run")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="model whose decode steps are measured"
    )
    parser.add_argument("--out", type=Path, default=_OUT)
    options = parser.parse_args(argv)
    options.variant = options.variant or [variants()[0]]
    return options


def _settings(options: argparse.Namespace) -> dict[str, object]:
    names = ("threads", "heads", "key_heads", "head_dim", "layers", "page_size", "dtype")
    return {name: getattr(options, name) for name in names}


def _measured_steps(options: argparse.Namespace) -> dict[str, object]:
    """Milliseconds of decode steps of one request, in turns over the places of a page."""
    decoder = load_decoder(options.checkpoint, dtype=options.dtype, backend="native")
    if not isinstance(decoder, OwnDecoder) or not decoder.states:
        raise SystemExit(f"{options.checkpoint} has no recurrent layers that kernels compute")
    decoder.ops.set_threads(options.threads)
    page, pages = options.page_size, array("q", range(PROMPT // options.page_size + 2))
    states = decoder.make_state_pool(1, 1, page_size=page)
    pool = decoder.make_pool(len(pages), page_size=page, states=states)
    pool.data.zero_()

    def step(position: int, at: int) -> float:
        states.stand_in(0, 0, at)
        segment = Segment([1], position, pages, 1, state=SegmentState(0, 0, position + 1))
        batch = decoder.batch([segment], page_size=page)
        began = time.perf_counter()
        decoder.forward(batch, pool)
        return time.perf_counter() - began

    has_layer = has_mtp(options.checkpoint, decoder)
    proposer = _mtp_proposer(options.checkpoint, decoder, pool, page) if has_layer else None
    plain, folding, passes = list[float](), list[float](), list[float]()
    for turn in range(options.turns + 1):
        found = [step(PROMPT + place, PROMPT + place) for place in range(page)]
        last = step(PROMPT + page, PROMPT)
        began = time.perf_counter()
        if proposer is not None:
            proposer.try_draft(1, PROMPT)
        passed = time.perf_counter() - began
        if turn:  # the first one warms up
            plain.append(statistics.median(found))
            folding.append(last)
            passes.append(passed)
    ratios = [last / median for last, median in zip(folding, plain, strict=True)]
    figures: dict[str, object] = {
        "checkpoint": options.checkpoint.name,
        "step, ms": round(1e3 * statistics.median(plain), 2),
        "step that folds, ms": round(1e3 * statistics.median(folding), 2),
        "step that folds / step": round(statistics.median(ratios), 3),
    }
    if proposer is None:
        return figures
    shares = sorted(each / median for each, median in zip(passes, plain, strict=True))
    return figures | {
        "MTP pass, ms": round(1e3 * statistics.median(passes), 2),
        "MTP pass / step": round(statistics.median(shares), 3),
        "its quarters": [round(shares[len(shares) * at // 4], 3) for at in (1, 3)],
    }


def _mtp_proposer(folder: Path, target: OwnDecoder, pool: KVPool, page_size: int) -> HeadProposer:
    """The checkpoint's MTP layer as a drafter."""
    joined = load_mtp(folder, target, keeps_packed=True)
    own = joined.make_pool(pool.num_pages, page_size=page_size)
    own.data.zero_()
    return joined.proposer(own)


class _Layers:
    """Layers alike, and the states of one sequence."""

    def __init__(self, ops: NativeOps, options: argparse.Namespace) -> None:
        dim, page_size = options.head_dim, options.page_size
        self._shape = RecurrentShape(options.key_heads, options.heads, dim, dim, conv_len=4)
        self._ops, self._page_size = ops, page_size
        self._dtype = getattr(torch, options.dtype)
        self._layers = [RecurrentStructs(self._drawn(layer)) for layer in range(options.layers)]
        shapes = [self._shape.state] * options.layers
        self._states = StatePool(1, 1, shapes, page_size=page_size, dtype=self._dtype, device="cpu")
        self._pool = KVPool(
            1, num_layers=1, num_kv_heads=1, head_dim=8, page_size=page_size,
            dtype=self._dtype, device="cpu", states=self._states,
        )  # fmt: skip

    def _drawn(self, layer: int) -> DeltaWeights:
        shape, heads = self._shape, self._shape.num_value_heads
        return DeltaWeights(
            in_proj=_NO_MATRIX,
            gates=_NO_MATRIX,
            conv=torch.randn(shape.conv_channels, shape.conv_len),
            decay=-torch.linspace(0.001, 1.0, heads),
            dt_bias=torch.zeros(heads),
            norm=torch.ones(shape.value_dim),
            norm_eps=1e-6,
            out=_NO_MATRIX,
            shape=shape,
            layer=layer,
        )

    def measured(self, turns: int) -> Iterator[Figure]:
        """Every figure. The chunk comes first: it leaves a state behind which rows decode."""
        page = self._page_size
        seconds = best_seconds(self._pass(0, PROMPT), repeats=turns)
        yield self._figure("prompt token", PROMPT, seconds)
        start = PROMPT
        self._pass(start, 1)()
        for place in (place for place in PLACES if place < page):
            run = self._pass(start + place, 1)
            yield self._figure(f"row, place {place}", 1, best_seconds(run, repeats=turns))
        run = self._pass(start + 5, 1, num_drafts=3)
        yield self._figure("4 rows", 4, best_seconds(run, repeats=turns))
        run = self._pass(start + page, 1, at=start)
        yield self._figure("row that folds", 1, best_seconds(run, repeats=turns))

    def _figure(self, what: str, rows: int, seconds: float) -> Figure:
        each = seconds / len(self._layers)
        num_bytes = self._states.slot(0, 0).state.nbytes
        return Figure(
            what=what,
            rows=rows,
            us=round(each * 1e6, 1),
            us_per_row=round(each * 1e6 / rows, 1),
            gbps=round(num_bytes / each / 1e9, 1),
        )

    def _pass(
        self, start: int, count: int, *, num_drafts: int = 0, at: int | None = None
    ) -> Callable[[], None]:
        """All layers over rows of a sequence, whose states are taken to stand at ``at``."""
        num_rows, stop = count + num_drafts, start + count
        at = start // self._page_size * self._page_size if at is None else at
        before = torch.full_like(self._states.at, at)
        state = SegmentState(0, 0, stop)
        pages = array("q", [0] * (1 + (start + num_rows) // self._page_size))
        segment = Segment([0] * num_rows, start, pages, 0, state=state)
        batch = build_batch([segment], page_size=self._page_size, device="cpu", min_rows=1)
        self._states.at.copy_(before)
        plan = self._ops.plan(batch, self._pool, _HEADS, _NoTurn())
        shape = self._shape
        width = shape.conv_channels + shape.num_value_heads * shape.value_dim
        mixed = torch.randn(num_rows, width).to(self._dtype)
        ba = torch.randn(num_rows, 2 * shape.num_value_heads)
        out = mixed.new_empty((num_rows, shape.num_value_heads * shape.value_dim))
        rows = (mixed, ba, out)
        compute, dtype = self._ops.library.c.ft_recur, DTYPES[self._dtype]

        def run() -> None:
            self._states.at.copy_(before)
            for layer in self._layers:
                compute(*map(Tensor.data_ptr, rows), plan.pointers[0], layer.pointer, dtype)

        return run


if __name__ == "__main__":
    main()
