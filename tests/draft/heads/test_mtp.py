"""MTP layers: their logits are those of transformers, wherever a checkpoint has them."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment, Wanted
from foretoken.core.ops.native import native_library
from foretoken.draft.heads.head_kv import Written
from foretoken.draft.heads.mtp import MtpProposer, load_mtp
from foretoken.draft.heads.proposer import DraftStart, Query
from support.mtp_checkpoints import MtpReference, save_mtp
from support.quick_interpreter import quicken
from support.tiny_models import VOCAB

PAGE_SIZE, NUM_PAGES = 4, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_mtp(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> MtpReference:
    return MtpReference(folder)


def load(folder: Path, backend: str) -> OwnDecoder:
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    if backend == "triton":  # under its interpreter
        pytest.importorskip("triton")
        quicken()
    found = load_decoder(folder, backend=backend, device="cpu", dtype="float32")  # type: ignore[arg-type]
    assert isinstance(found, OwnDecoder)
    return found


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    ids: list[int] = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
    return ids


class Levels:
    """The layer's logits behind a text and behind each token of a chain, level by level."""

    def __init__(self, folder: Path, target: OwnDecoder) -> None:
        joined = load_mtp(folder, target, keeps_packed=False)
        pool = joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
        pool.data.fill_(float("nan"))
        proposer = joined.proposer(pool)
        assert isinstance(proposer, MtpProposer)
        self.proposer, self.target = proposer, target
        self.draft_ids = proposer.head.draft_ids

    @torch.inference_mode()
    def of(self, token_ids: list[int], drafted: list[int]) -> list[Tensor]:
        last, pages = len(token_ids) - 1, array("q", reversed(range(NUM_PAGES)))
        features = self._write(token_ids[:-1], pages)
        sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=last + 1)
        scheduled = ScheduledRequest(
            request_id="a", tokens=array("q", token_ids), start=last, stop=last + 1,
            page_ids=pages, sampling=sampling, draft_plan=DraftPlan(max_draft=len(drafted) + 1),
        )  # fmt: skip
        drafting = self.proposer.begin([DraftStart(scheduled, 1, features[-1])], 1)
        found, slots = [], list[int]()
        for level, token_id in enumerate([token_ids[-1], *drafted]):
            if level:
                at = last + level
                slots.append(pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
            query = Query(0, level, level - 1 if not level else 0, token_id, tuple(slots))
            found.append(drafting.logits([query])[0])
        return found

    def _write(self, token_ids: list[int], pages: array[int]) -> Tensor:
        num_pages = -(-len(token_ids) // PAGE_SIZE)
        pool = self.target.make_pool(num_pages, page_size=PAGE_SIZE)
        segment = Segment(array("q", token_ids), 0, array("q", range(num_pages)), 0)
        batch = self.target.batch([segment], page_size=PAGE_SIZE)
        taps = self.target.forward(batch, pool, Wanted(taps=self.proposer.taps)).taps
        assert taps is not None
        positions = np.arange(len(token_ids))
        slots = np.asarray(pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        written = Written(
            taps[: len(token_ids)], torch.tensor(token_ids), positions, slots,
            np.zeros(1, dtype=np.int64), np.array([len(token_ids)]), [None],
        )  # fmt: skip
        return self.proposer.write_head_kv(written)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("backend", ["torch", "native", "triton"])
def test_the_logits_of_each_level_are_those_of_transformers(
    folder: Path, reference: MtpReference, backend: str
) -> None:
    levels = Levels(folder, load(folder, backend))
    for length in (2, 9, 30):
        drafted = [5, 7, 11]
        found = levels.of(prompt_of(length), drafted)
        expected = reference.levels(prompt_of(length), drafted)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
