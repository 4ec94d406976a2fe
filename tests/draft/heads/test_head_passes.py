"""Heads by a backend's operations: the logits of their plain forward pass, and its best four.

Void slots of the pool hold NaN, and pages lie in no order.
"""

from __future__ import annotations

import copy
from array import array
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native import native_library
from foretoken.draft.heads.block import BLOCKS_A_PASS, BlockPass, _NumpyMarkov
from foretoken.draft.heads.block_network import BlockHead
from foretoken.draft.heads.common.head_kv import Written
from foretoken.draft.heads.common.layers import Head
from foretoken.draft.heads.common.packing import PassRows, pack_linears, seen_kv
from foretoken.draft.heads.common.proposer import DraftStart
from foretoken.draft.heads.eagle import EaglePass
from foretoken.draft.heads.eagle_network import EagleHead
from foretoken.draft.heads.joined import lend
from foretoken.draft.heads.medusa import MedusaHead
from support.native_variants import BACKENDS, slow
from support.quick_interpreter import quicken
from support.tiny_heads import block_config, eagle_config, medusa_config
from support.tiny_pair import write_pair

VOCAB_SIZE, NUM_PAGES = 256, 60
# Rows of a graph's size that are not there are void.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)[0]


@pytest.fixture(scope="module", params=[*BACKENDS, *slow("triton")])
def target(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    """Triton's kernels run under its interpreter."""
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    if request.param == "triton":
        pytest.importorskip("triton")
        quicken()
    return load_decoder(folder, backend=request.param, device="cpu", dtype="float32")


class Text:
    """A request's tokens and taps, and where the head's pool has its positions."""

    def __init__(self, head: Head, length: int, page_size: int) -> None:
        generator = torch.Generator().manual_seed(length)
        config = head.config
        self.page_size, self.length = page_size, length
        self.ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
        width = len(config.taps) * config.target_hidden_size
        self.taps = torch.randn(length - 1, width, generator=generator)
        self.pool = KVPool(
            NUM_PAGES, **config.kv_shape._asdict(), page_size=page_size,
            dtype=torch.float32, device="cpu",
        )  # fmt: skip
        self.pool.data.fill_(torch.nan)
        self.pages = array("q", torch.randperm(NUM_PAGES, generator=generator).tolist())

    def slot(self, position: int) -> int:
        return self.pages[position // self.page_size] * self.page_size + position % self.page_size

    def written(self, first: int) -> Written:
        """The positions from ``first`` to the one before the last token's."""
        positions = np.arange(first, self.length - 1)
        slots = np.array([self.slot(position) for position in positions.tolist()])
        return Written(
            self.taps[first:], self.ids[first : self.length - 1], positions, slots,
            np.zeros(1, dtype=np.int64), np.array([len(positions)]), [None],
        )  # fmt: skip

    @property
    def row(self) -> ScheduledRequest:
        sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1)
        return ScheduledRequest(
            request_id="a", tokens=array("q", self.ids.tolist()), start=self.length - 1,
            stop=self.length, page_ids=self.pages, sampling=sampling,
        )  # fmt: skip


AnyHead = TypeVar("AnyHead", bound=Head)


def lent(head: AnyHead, target: Decoder) -> tuple[AnyHead, AnyHead]:
    """A head with drawn weights beside its target, and its plain twin."""
    torch.manual_seed(5)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.25)
    alone = copy.deepcopy(head).eval().requires_grad_(False)
    alone.borrow(target.weights.embedding, target.weights.embedding)
    lend(head, target, target.weights.embedding.clone)
    return head, alone


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.topk(4).indices, expected.topk(4).indices)


DIALECTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "attention_bias": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "fc_bias": True, "draft_vocab_size": 90},
    {"head_dim": 12},  # which no Triton kernel computes
]


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
@pytest.mark.parametrize(
    ("page_size", "length", "first"),
    [(1, 9, 1), (4, 3, 1), (4, 19, 1), (4, 18, 6), (16, 37, 1), (16, 33, 16)],
)
@torch.inference_mode()
def test_the_columns_of_eagle_are_those_of_its_plain_pass(
    target: Decoder, dialect: dict[str, Any], page_size: int, length: int, first: int
) -> None:
    """The columns are the last token, and a tree: two tokens behind it, one behind each of them."""
    config = eagle_config(target.config, intermediate_size=40, **dialect)
    head, alone = lent(EagleHead(config), target)
    layers = EaglePass(head, target)
    text = Text(head, length, page_size)
    features = alone.features(text.taps)
    layers.write_context(text.pool, features[first - 1 : -1], text.written(first))
    seen = seen_kv(text.row, first, page_size)
    slots, spare = [text.slot(length - 1)], [text.pages[-1] * page_size, text.pages[-2] * page_size]
    behind = [[[], []], [[text.slot(length)], spare[:1]], [[text.slot(length + 1)], spare[1:]]]
    paths = [[[], []], [[7], [9]], [[7, 3], [9, 4]]]
    before = features[-1:].expand(2, -1)
    token_ids, slots_of = [int(text.ids[-1])] * 2, [slots, slots]
    for level in range(3):
        if level:
            token_ids = [path[-1] for path in paths[level]]
            slots_of = [[*known, *own] for known, own in zip(slots_of, behind[level], strict=True)]
        count = 1 if level == 0 else 2
        rows = [
            PassRows([token_id], length - 1 + level, own[-1:], seen, np.array(own))
            for token_id, own in zip(token_ids[:count], slots_of, strict=False)
        ]
        found = layers.compute(text.pool, before[:count].contiguous(), rows)
        assert found.taps is not None
        normed, hidden = found.hidden[:count], found.taps[:count]
        for at in range(count):
            check(
                head.project(normed)[at],
                eagle_logits(alone, text, first, paths[level][at]),
            )
        before = (normed if head.config.norm_output else hidden).expand(2, -1)


def eagle_logits(head: EagleHead, text: Text, first: int, path: list[int]) -> Tensor:
    """By the pass of training over the tokens that columns may see."""
    ids = torch.cat([text.ids[first - 1 :], torch.tensor(path, dtype=torch.int64)])
    taps = torch.cat(
        [text.taps[first - 1 :], text.taps.new_zeros(len(path) + 1, text.taps.shape[1])]
    )
    last = text.length - first
    return head.logits(head(ids[None], taps[None], len(path) + 1)[len(path)][0, last - 1])


@pytest.mark.parametrize(
    "shape",
    [
        {"markov_rank": 0},
        {"markov_rank": 0, "windows": (9, None)},
        {"predicts_at_anchor": False, "markov_rank": 0, "attention_bias": True},
        {"num_layers": 1, "markov_kind": "gated", "draft_vocab_size": 90},
    ],
    ids=str,
)
@pytest.mark.parametrize(("page_size", "lengths"), [(1, (9, 5)), (4, (2, 19)), (16, (37, 33))])
@torch.inference_mode()
def test_the_blocks_of_a_pass_are_those_of_the_plain_head(
    target: Decoder, shape: dict[str, Any], page_size: int, lengths: tuple[int, ...]
) -> None:
    """Several requests together; of each the hidden states of its block."""
    config = block_config(target.config, block_size=5, intermediate_size=40, **shape)
    head, alone = lent(BlockHead(config), target)
    layers = BlockPass(head, target)
    texts = [Text(head, length, page_size) for length in lengths]
    pool = KVPool(
        NUM_PAGES + -(-BLOCKS_A_PASS * config.block_size // page_size),
        **config.kv_shape._asdict(), page_size=page_size, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    pool.data.fill_(torch.nan)
    pages = texts[0].pages
    for index, text in enumerate(texts):
        text.pages = pages[index * 25 : index * 25 + 25]
        vectors = head.context_vectors(text.taps).contiguous()
        layers.write_context(pool, vectors, text.written(0))
    found = layers.hidden(pool, NUM_PAGES, [DraftStart(text.row, 0, None) for text in texts])
    found = found[:, config.block_size - config.num_drafted :]
    for text, hidden in zip(texts, found, strict=True):
        taps = torch.cat([text.taps, text.taps.new_zeros(1, text.taps.shape[1])])
        expected = alone(text.ids[None], taps[None], torch.tensor([[text.length - 1]]))[0, 0]
        before = torch.randint(0, VOCAB_SIZE, (config.num_drafted,))
        for ours, theirs in zip(
            head.logits(hidden, before), alone.logits(expected, before), strict=True
        ):
            check(ours, theirs)


@torch.inference_mode()
def test_pairs_are_the_markov_heads_and_unknown_tokens_have_none(target: Decoder) -> None:
    """A head of fewer ids: the look-up in NumPy gives what the plain head computes."""
    shape = {"draft_vocab_size": 90, "markov_vocab_size": 90}
    head = BlockHead(block_config(target.config, **shape))
    head.set_draft_ids(torch.arange(90) * 2 + 3)
    head, alone = lent(head, target)
    pack_linears(head, target.ops)
    pairs = _NumpyMarkov.of(head)
    assert pairs is not None
    assert alone.markov_head is not None
    before, rows = [3, 4, 181, 200, 0], [0, 2, 2, 1, 0]
    unary = torch.randn(3, 90)
    ids = alone.markov_ids(torch.tensor(before))
    hidden = torch.zeros(len(rows), target.config.hidden_size)
    bias, _ = alone.markov_head(ids, hidden, alone.first_state(hidden))
    assert [bool(each.any()) for each in bias] == [True, False, True, False, False]
    for ours, theirs in zip(pairs.added(unary, rows, before), unary[rows] + bias, strict=True):
        check(ours, theirs)


@torch.inference_mode()
def test_medusas_heads_are_the_plain_ones(target: Decoder) -> None:
    head, alone = lent(MedusaHead(medusa_config(target.config, num_blocks=2)), target)
    pack_linears(head, target.ops)
    states = torch.randn(3, target.config.hidden_size)
    for index in range(head.config.num_heads):
        for ours, theirs in zip(
            head.logits(states, index), alone.logits(states, index), strict=True
        ):
            check(ours, theirs)


@torch.inference_mode()
def test_output_layers_make_float32_and_the_others_what_they_read(folder: Path) -> None:
    if native_library() is None:
        pytest.skip("no native kernels on this machine")
    target = load_decoder(folder, backend="native", dtype="bfloat16")
    block = BlockHead(block_config(target.config, owns_output=True))
    medusa = MedusaHead(medusa_config(target.config))
    for head in (block, medusa):
        pack_linears(head.bfloat16(), target.ops)
    assert block.lm_head is not None
    assert block.markov_head is not None
    first_head: Any = medusa.medusa_head[0]
    outputs = (block.lm_head, block.markov_head.markov_w2, first_head[-1])
    others = (block.layers[0].mlp.up_proj, first_head[0])  # type: ignore[union-attr]
    hidden = torch.zeros(3, target.config.hidden_size, dtype=torch.bfloat16)
    rank = hidden[:, : block.config.markov_rank]
    made = [layer(rank if layer is outputs[1] else hidden).dtype for layer in (*outputs, *others)]
    assert made == [torch.float32] * 3 + [torch.bfloat16] * 2


def test_the_log_names_heads_that_the_kernels_do_not_support(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    target = load_decoder(folder, backend="triton", device="cpu", dtype="float32")
    head, _ = lent(EagleHead(eagle_config(target.config, head_dim=12)), target)
    EaglePass(head, target)
    assert "using PyTorch for the layers of the draft head: heads of 12 dimensions" in caplog.text


def test_a_pool_of_columns_is_written_where_they_are_only(target: Decoder) -> None:
    """No slot beside those of the positions that were written, and none of another page."""
    head, _ = lent(EagleHead(eagle_config(target.config, intermediate_size=40)), target)
    text = Text(head, 11, 4)
    features = torch.randn(6, target.config.hidden_size)
    rows = text.written(4)
    EaglePass(head, target).write_context(text.pool, features, rows)
    assert written_slots(text.pool) == sorted(rows.slots.tolist())


def written_slots(pool: KVPool) -> list[int]:
    """Slots without a NaN."""
    is_there = ~pool.data.isnan().any(-1).flatten(1, 3)  # [pages, .., page_size]
    whole = is_there.view(pool.num_pages, -1, pool.page_size).all(1)
    return [int(slot) for slot in whole.flatten().nonzero()]
