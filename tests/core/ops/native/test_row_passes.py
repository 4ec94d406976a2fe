"""A pass of drafts in one call: the pages and tokens of a batch, a forward pass and a sampler."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.drafting.rough_copy import rough_decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.core.ops.native.row_passes import NativeRowPasses
from foretoken.core.sampling.drafted_row import DraftedRow
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.sampling_rows import PROMPT_LEN, Countdown, random_wishes, sampling_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native_library() is None, reason="no native kernels on this machine"),
]
PAGE_SIZE, NUM_PAGES, NUM_BEST = 4, 64, 4


def decoder_of(
    folder: Path, kind: str, dtype: Literal["float32", "bfloat16"] = "bfloat16"
) -> Decoder:
    return load_decoder(make_checkpoint(folder, kind), dtype=dtype, backend="native")


class Drafting:
    """Two pools of the same content, and random nodes of requests behind it."""

    def __init__(self, decoder: Decoder, kv_dtype: KvDtype = "auto", seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.decoder = decoder
        self.pools = [
            decoder.make_pool(NUM_PAGES, page_size=PAGE_SIZE, kv_dtype=kv_dtype) for _ in range(2)
        ]
        self.passes = decoder.row_passes(self.pools[1])
        assert isinstance(self.passes, NativeRowPasses)
        ids = self.rng.sample(range(NUM_PAGES), NUM_PAGES)
        self.pages = [array("q", ids[at : at + 16]) for at in (0, 16, 32)]
        self.spare = [page * PAGE_SIZE + place for page in ids[48:] for place in range(PAGE_SIZE)]
        self.tokens = [self._ids(count) for count in (5, self.rng.randrange(3, 30), 49)]
        history = [
            Segment(tokens, 0, pages, 0)
            for tokens, pages in zip(self.tokens, self.pages, strict=True)
        ]
        decoder.forward(decoder.batch(history, page_size=PAGE_SIZE), self.pools[0])
        self.pools[1].data.copy_(self.pools[0].data)

    def _ids(self, count: int) -> array[int]:
        return array("q", (self.rng.randrange(VOCAB_SIZE) for _ in range(count)))

    def nodes(self) -> tuple[list[Segment], list[DraftedRow]]:
        """Roots, and nodes a few tokens below, whose path has left the pages or not."""
        segments, rows = list[Segment](), list[DraftedRow]()
        spare = iter(self.rng.sample(self.spare, len(self.spare)))
        for request, tokens in enumerate(self.tokens):
            for _ in range(self.rng.randrange(1, 4)):
                depth = self.rng.randrange(4)
                path = self._ids(depth)
                tail = [next(spare) for _ in range(self.rng.randrange(depth + 1))]
                last = path[-1:] or tokens[-1:]
                start = len(tokens) + depth - 1
                segments.append(Segment(last, start, self.pages[request], 1, tail))
                rows.append(DraftedRow(tokens, self._sampling(len(tokens)), path))
        return segments, rows

    def _sampling(self, num_tokens: int) -> SamplingMetadata:
        wishes = random_wishes(self.rng, VOCAB_SIZE)
        if num_tokens == 5 and self.rng.random() < 0.5:  # it counts down from ten
            wishes["constraint"] = Countdown(VOCAB_SIZE)
        return sampling_of(self.rng.getrandbits(60), **wishes)

    def check(self) -> None:
        segments, rows = self.nodes()
        batch = self.decoder.batch(segments, page_size=PAGE_SIZE)
        output = self.decoder.forward(batch, self.pools[0])
        expected = self.decoder.sampler.best(output.logits, rows, NUM_BEST)
        assert self.passes is not None
        found = self.passes.best(segments, rows, NUM_BEST)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert [each.error for each in found] == [each.error for each in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.scores == pytest.approx(other.scores, rel=1e-4, abs=1e-5)
        ours, theirs = (content(pool) for pool in self.pools)
        assert torch.equal(ours, theirs)


def content(pool: KVPool) -> Tensor:
    return pool.data.contiguous().view(torch.uint8)


KINDS = ("llama", "qwen3_moe", "gemma2", "gemma3", "gemma4", "gpt_oss", "deepseek_v3", "minicpm3")


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_writes_the_pages_and_finds_the_tokens_of_three(tmp_path: Path, kind: str) -> None:
    drafting = Drafting(decoder_of(tmp_path, kind))
    for _ in range(6):
        drafting.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_so_does_one_call_of_a_rough_copy(tmp_path: Path, dtype, kv_dtype: KvDtype) -> None:
    for seed in range(4):
        drafting = Drafting(rough_decoder(decoder_of(tmp_path, "qwen3", dtype)), kv_dtype, seed)
        drafting.check()


def test_tables_grow_with_positions(tmp_path: Path) -> None:
    decoder = load_decoder(
        make_checkpoint(tmp_path, "llama", max_position_embeddings=9000),
        dtype="float32", backend="native",
    )  # fmt: skip
    pools = [decoder.make_pool(3, page_size=4096) for _ in range(2)]
    passes = decoder.row_passes(pools[1])
    assert passes is not None
    pages, row = array("q", (2, 0, 1)), DraftedRow(array("q", [5] * PROMPT_LEN), sampling_of())
    for start in (0, 4095, 4096, 8500):
        segments = [Segment([7], start, pages, 1)]
        output = decoder.forward(decoder.batch(segments, page_size=4096), pools[0])
        assert passes.best(segments, [row], 3) == decoder.sampler.best(output.logits, [row], 3)
        assert torch.equal(*map(content, pools))


def test_a_row_beyond_its_pages_is_refused(tmp_path: Path) -> None:
    drafting = Drafting(decoder_of(tmp_path, "llama"))
    assert drafting.passes is not None
    segment = Segment([7], 16 * PAGE_SIZE, drafting.pages[0], 1)
    with pytest.raises(ValueError, match="16 pages are too few for 65 positions"):
        drafting.passes.best([segment], [DraftedRow(drafting.tokens[0], sampling_of())], 1)
