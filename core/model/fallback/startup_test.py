"""The startup test of `TransformersDecoder`: several passes must give the logits of one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...ops.batch import Segment
from ...ops.row_extras import RowExtras, SegmentState
from ...ops.state_pool import STATE_PAGE_SIZES
from .transformers_decoder import TransformersDecoder
from .transformers_probe import HOOKS

# page sizes in tokens, for models without and with recurrent states
_PAGE, _STATE_PAGE = 4, STATE_PAGE_SIZES[0]
_NUM_PAGES = 3
# Tolerances, in standard deviations of the logits: transformers sums in another order.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


def startup_test(decoder: TransformersDecoder) -> bool:
    """Whether a row's bits are the same in any batch. Writes only to a pool of its own.

    The test computes some tokens in one pass, and in several passes beside another sequence and a
    wrong draft; with recurrent states, also from a kept state. Raises `ModelLoadError` if the
    logits differ from transformers' own, computed without pages.
    """
    if decoder.states:
        decoder.takes_chunks = _takes_chunks(decoder)
    vocab = decoder.config.vocab_size
    generator = torch.Generator().manual_seed(5)
    page_size = _STATE_PAGE if decoder.states else _PAGE
    num_tokens = _NUM_PAGES * page_size
    ids, other = torch.randint(0, vocab, (2, num_tokens), generator=generator).tolist()
    expected = _by_transformers(decoder, ids)
    if not expected.isfinite().all():
        raise ModelLoadError(f"its logits are NaN or infinite in {decoder.dtype}")
    spread = max(float(expected.std()), 1e-9)
    found = []
    for stops in ([12], [5, 6, 12]):
        test = _Test(decoder, page_size)
        found.append(test.in_pieces(ids, other, [stop * page_size // 4 for stop in stops]))
        _check_logits(decoder, found[-1], expected, spread)
    if decoder.states:
        _check_logits(decoder, test.resumed(ids), expected[page_size:], spread)
    return not decoder.states and torch.equal(*found)


def _check_logits(
    decoder: TransformersDecoder, found: Tensor, expected: Tensor, spread: float
) -> None:
    errors = (found - expected).abs().amax(dim=1) / spread
    # Rounding may route a row to another expert, which changes all logits of that row.
    off = float(errors.median() if decoder.has_experts else errors.max())
    if not off <= _TOLERANCE[decoder.dtype]:
        more = "the states in transformers' cache" if decoder.states else "keys and values"
        raise ModelLoadError(
            f"its logits with KV pages differ by {off:.1g} standard deviations from its logits "
            f"without them, so it depends on more than {more}"
        )


class _Test:
    """The two sequences of the startup test, with their pages, and with recurrent states if any."""

    def __init__(self, decoder: TransformersDecoder, page_size: int) -> None:
        self._decoder, self._page_size = decoder, page_size
        self.states = decoder.make_state_pool(4, 3, page_size=page_size) if decoder.states else None
        self._pool = decoder.make_pool(3 * _NUM_PAGES, page_size=page_size, states=self.states)

    def in_pieces(self, ids: list[int], other: list[int], stops: list[int]) -> Tensor:
        """Return the logits of every position, computed beside another sequence and wrong drafts.

        The state at the end of the first page is kept.
        """
        found, start, page_size = [], 0, self._page_size
        for index, stop in enumerate(stops):
            draft = other[:1] if stop < len(ids) else []
            keeps = ((page_size, 3),) if start < page_size <= stop else ()
            segments = [self.segment(0, ids[start:stop], start, draft, keeps)]
            if draft:
                segments.append(self.segment(1, other[3 * index : 3 * index + 3], 3 * index))
            found.append(self.logits(segments)[: stop - start])
            start = stop
        return torch.cat(found)

    def resumed(self, ids: list[int]) -> Tensor:
        """Return the logits of positions after the first page, from the state kept at its end."""
        assert self.states is not None
        self.states.copy_slot(3, 2)
        return self.logits([self.segment(2, ids[self._page_size :], self._page_size)])

    def segment(
        self,
        index: int,
        ids: list[int],
        start: int,
        draft: Sequence[int] = (),
        keeps: tuple[tuple[int, int], ...] = (),
    ) -> Segment:
        """Return rows of one of three sequences, all with logits.

        The third sequence has the same first page as the first.
        """
        first = index * _NUM_PAGES
        pages = array("q", [0 if index == 2 else first, *range(first + 1, first + _NUM_PAGES)])
        extras = None
        if self.states is not None:
            extras = RowExtras(state=SegmentState(index, index, start + len(ids), keeps))
        rows = [*ids, *draft]
        return Segment(rows, start, pages, len(rows), extras=extras)

    def logits(self, segments: list[Segment]) -> Tensor:
        """Return the logits of a pass."""
        batch = self._decoder.batch(segments, page_size=self._page_size)
        return self._decoder.forward(batch, self._pool).logits.clone()


def _takes_chunks(decoder: TransformersDecoder) -> bool:
    """Whether the modules can continue from a state with several rows in one pass.

    Raises `ModelLoadError` if they cannot continue with a single row, either.
    """
    if not _reads_states(decoder, 1):
        raise ModelLoadError("it does not read the states that it writes to transformers' cache")
    return _reads_states(decoder, 2)


def _reads_states(decoder: TransformersDecoder, num_rows: int) -> bool:
    """Whether NaN in each kind of state tensor makes the logits of later rows NaN."""
    assert decoder.kept is not None
    num_conv, num_all = decoder.kept.num_conv, len(decoder.kept.tensors)
    parts = (slice(0, num_conv), slice(num_conv, num_all))
    for part in (each for each in parts if each.start < each.stop):
        test = _Test(decoder, _STATE_PAGE)
        assert test.states is not None
        for view in test.states.slot_views(0, 0)[part]:
            view.fill_(torch.nan)
        test.states.at[0] = _STATE_PAGE
        logits = test.logits([test.segment(0, [0] * num_rows, _STATE_PAGE)])
        if not logits[-1].isnan().all():
            return False
    return True


@torch.inference_mode()
def _by_transformers(decoder: TransformersDecoder, ids: list[int]) -> Tensor:
    """Return the logits that transformers' own attention computes with the packed weights."""
    model = decoder.model
    tokens = torch.tensor([ids], device=decoder.device)
    model.set_attn_implementation("eager")
    try:
        with decoder.hooked():
            found = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    finally:
        model.set_attn_implementation(HOOKS)
    logits: Tensor = found.logits[0, :, : decoder.config.vocab_size].float()
    return logits
