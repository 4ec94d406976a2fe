"""HeadProposer: what proposers with a trained head share, the block head's and EAGLE-3's.

A head's KV lies under the same page ids as the target's, in a pool of its own. It is written
behind each verified step, from the target's hidden states, for the positions that were committed:
a draft's own columns never enter the pool, so nothing is ever rolled back or corrected. The KV of a
position depends on tokens up to that position alone, hence a prefix hit brings it along.

A page whose positions all have head KV carries a ready mark. Where head KV is missing (a proposer
that failed, a page that came without it) drafts see only what lies behind the hole. The target
computes nothing for a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.execution.proposer import DraftRow, VerifiedRow
from ...core.interface.sampling_params import TokenSamplingParams
from ...core.interface.step import Draft, PlanRow, SamplingMetadata
from ...core.ops.batch import ForwardOutput, RaggedBatch, Taps
from ...core.ops.kv_pool import KVPool
from ...core.sampling.logits_processors import SampleRow
from ...core.sampling.rejection import SampledDraft, draw
from ...core.sampling.sampler import Sampler
from ...core.sampling.verifier import Choice
from .head_layers import HeadConfig, KeysValues

SOURCE = "lm"

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class _Track:
    """The positions of one request that have head KV: ``start`` to ``stop``, and those of pages
    before that are ready.
    """

    start: int = 0
    stop: int = 0
    feature: Tensor | None = None  # [hidden] of position ``stop - 1``, for heads that want it


@dataclass(slots=True)
class _Chain:
    """One request's draft as it grows."""

    token_ids: list[int] = field(default_factory=list)
    drawn_from: list[Tensor] = field(default_factory=list)  # [vocab] each, if independent


class Written(NamedTuple):
    """Positions that the target has computed, over all requests of a step."""

    taps: Tensor  # [num, num_taps * target_hidden]
    token_ids: Tensor  # [num]
    positions: Tensor  # [num]
    firsts: IntArray  # [num_requests] where the positions of each begin
    before: Sequence[Tensor | None]  # [num_requests] the feature of the position before; or None


class Anchors(NamedTuple):
    """The last tokens of the requests that draft, and the head KV that they see."""

    token_ids: Tensor  # [b]
    positions: Tensor  # [b]
    context: list[KeysValues]  # of each layer, [b, num_kv_heads, T, head_dim] each
    seen: Tensor  # bool [b, T]
    features: Sequence[Tensor | None]  # [b] of the position before; or None


class Drafting(ABC):
    """One draft of some requests, token by token."""

    @abstractmethod
    def logits(self, live: Sequence[int], last: Sequence[int]) -> Tensor:
        """Of the next token of each ``live`` request behind its ``last``, [len(live), draft_vocab].

        ``live`` only ever shrinks.
        """


class HeadProposer(ABC):
    """Follows the target's KV and drafts chains.

    ``independent``: drafts for rejection sampling, drawn with noise of their own.
    """

    first = 0  # the first position that has a column

    def __init__(
        self, config: HeadConfig, pool: KVPool, sampler: Sampler, *, independent: bool = False
    ) -> None:
        self.config, self.pool = config, pool
        self._sampler, self._independent = sampler, independent
        self._ready = np.zeros(pool.num_pages, dtype=np.bool_)
        self._tracks: dict[str, _Track] = {}
        self._taps: Taps = tuple(dict.fromkeys(config.taps))
        self.dtype, self.device = pool.dtype, pool.data.device
        self._order = [self._taps.index(boundary) for boundary in config.taps]

    @property
    def taps(self) -> Taps:
        """The boundaries that the head reads, each once."""
        return self._taps

    # -- what heads do --------------------------------------------------------------------------

    @property
    @abstractmethod
    def tokens_a_pass(self) -> int:
        """Tokens of a draft that one pass of the head yields."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of a draft at most."""

    @abstractmethod
    def columns(self, written: Written) -> tuple[list[KeysValues], Tensor | None]:
        """Keys and values [num, num_kv_heads, head_dim] of each layer, and features [num, hidden].

        A column whose feature before is unknown is void.
        """

    @abstractmethod
    def begin(self, anchors: Anchors, num_drafted: int) -> Drafting:
        """Draft up to ``num_drafted`` tokens behind each anchor."""

    # -- the target's steps ---------------------------------------------------------------------

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget requests that released their pages; pages that were allocated are void."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)
        if newly_allocated_pages:
            self._ready[np.asarray(newly_allocated_pages)] = False

    @torch.inference_mode()
    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRow]
    ) -> None:
        """Write the head KV of what was committed."""
        del batch
        assert output.taps is not None
        rows = [each for each in verified if self._is_live(each)]
        if not rows:
            return
        tracks = [self._reached(each.row) for each in rows]
        counts = np.array([len(each.batch_rows) for each in rows])
        firsts = np.cumsum(counts) - counts
        device = output.taps.device
        at = torch.tensor([i for each in rows for i in each.batch_rows], device=device)
        owners = np.repeat(np.arange(len(rows)), counts)
        starts = np.array([each.row.start for each in rows])
        positions = np.arange(len(owners)) + (starts - firsts)[owners]
        written = Written(
            self._ordered(output.taps.index_select(0, at)),
            torch.tensor([i for each in rows for i in _token_ids(each)], device=device),
            torch.from_numpy(positions).to(device),
            firsts,
            [track.feature for track in tracks],
        )
        columns, features = self.columns(written)
        page_size = self.pool.page_size
        at_pages = zip(owners.tolist(), (positions // page_size).tolist(), strict=True)
        pages = np.array([rows[owner].row.page_ids[page] for owner, page in at_pages])
        self._write(columns, pages, positions % page_size)
        for each, track, start, count in zip(rows, tracks, firsts, counts, strict=True):
            mine = None if features is None else features[start : start + count]
            self._advance(each.row, track, int(count), mine)

    def _is_live(self, verified: VerifiedRow) -> bool:
        """Whether a row was committed, to pages that are still the request's.

        A step launched ahead may end behind the one in which its request did: then its pages may
        have gone to others, and the request has been forgotten.
        """
        row = verified.row
        is_known = len(row.tokens) >= row.stop
        return (
            bool(verified.batch_rows)
            and is_known
            and not (row.is_ahead and row.request_id not in self._tracks)
        )

    def _reached(self, row: DraftRow) -> _Track:
        """The track of a request whose columns from ``row.start`` on are about to be written."""
        track = self._tracks.get(row.request_id)
        if track is None or track.stop != row.start:
            track = _Track(row.start, row.start, self._feature_before(row))
            self._tracks[row.request_id] = track
        return track

    def _feature_before(self, row: DraftRow) -> Tensor | None:
        """The feature of the position before a row, if a ready page ends there."""
        page, rest = divmod(row.start, self.pool.page_size)
        if rest or not page or not self._ready[row.page_ids[page - 1]]:
            return None
        return self.page_feature(row.page_ids[page - 1])

    @abstractmethod
    def page_feature(self, page_id: int) -> Tensor | None:
        """The feature of a ready page's last position, for heads that want it."""

    @abstractmethod
    def keep_page_feature(self, page_id: int, feature: Tensor) -> None:
        """Keep the feature of a page's last position."""

    def _advance(self, row: DraftRow, track: _Track, count: int, features: Tensor | None) -> None:
        """Columns of a request were written: mark the pages that became whole."""
        begin, page_size = track.stop, self.pool.page_size
        if features is not None and track.feature is None and track.start == begin:
            track.start = begin + 1  # the first column lacks its feature
        track.stop = begin + count
        for page in range(begin // page_size, track.stop // page_size):
            if max(page * page_size, self.first) >= track.start:
                self._ready[row.page_ids[page]] = True
            if features is not None:
                last = (page + 1) * page_size - 1
                self.keep_page_feature(row.page_ids[page], features[last - begin])
        if features is not None:
            track.feature = features[-1].clone()

    def _ordered(self, taps: Tensor) -> Tensor:
        """Taps in the order of the head's, which may name one twice."""
        if self._order == list(range(len(self._taps))):
            return taps
        parts = taps.chunk(len(self._taps), dim=-1)
        return torch.cat([parts[index] for index in self._order], dim=-1)

    # -- the pool -------------------------------------------------------------------------------

    def _write(self, columns: list[KeysValues], pages: IntArray, places: IntArray) -> None:
        data = self.pool.data
        at, where = (torch.from_numpy(each).to(data.device) for each in (pages, places))
        for layer, pair in enumerate(columns):
            for kind, values in enumerate(pair):
                data[:, layer, kind][at, :, where] = values.to(data.dtype)

    def _read(
        self, rows: Sequence[DraftRow], firsts: Sequence[int]
    ) -> tuple[list[KeysValues], Tensor]:
        """The KV of each row's positions from ``firsts`` to its last token; and which are seen."""
        page_size, data = self.pool.page_size, self.pool.data
        stops = np.array([len(row.tokens) - 1 for row in rows])
        num_pages = max(1, -(-int(stops.max()) // page_size))
        table = np.zeros((len(rows), num_pages), dtype=np.int64)
        for index, row in enumerate(rows):
            count = -(-int(stops[index]) // page_size)
            table[index, :count] = row.page_ids[:count]
        places = np.arange(num_pages * page_size)
        seen = torch.from_numpy((places >= np.array(firsts)[:, None]) & (places < stops[:, None]))
        seen = seen.to(data.device)
        ids = torch.from_numpy(table).to(data.device)
        void = ~seen[:, None, :, None]
        context: list[KeysValues] = []
        for layer in range(self.pool.num_layers):
            # [b, pages, 2, kv, page_size, dim] -> [2, b, kv, positions, dim]
            found = data[:, layer][ids].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            # a copy by now: what is not seen may be NaN, and NaN times weight 0 would be NaN
            keys, values = found.masked_fill_(void, 0.0).unbind()
            context.append((keys, values))
        return context, seen

    def _first_seen(self, row: DraftRow, track: _Track) -> int:
        """The lowest position from which on all head KV is there."""
        page_size = self.pool.page_size
        num_whole = (len(row.tokens) - 1) // page_size
        if track.start > num_whole * page_size:
            return track.start
        missing = np.flatnonzero(~self._ready[np.asarray(row.page_ids[:num_whole], np.int64)])
        return max(self.first, (int(missing[-1]) + 1) * page_size if len(missing) else 0)

    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        """Compute what the first tokens of so many drafts cost, over void head KV; to be timed."""
        count = max(1, min(num_tokens // self.pool.page_size, self.pool.num_pages))
        pages = array("q", range(count))
        tokens = array("q", [0] * (count * self.pool.page_size))
        sampling = SamplingMetadata(
            params=TokenSamplingParams(temperature=1.0), seed=0, prompt_len=1
        )
        row = PlanRow(
            request_id="", tokens=tokens, start=0, stop=0, page_ids=pages, sampling=sampling,
            max_draft=self.tokens_a_pass,
        )  # fmt: skip
        feature = torch.zeros(self.config.hidden_size, dtype=self.dtype, device=self.device)
        track = _Track(self.first, len(tokens), feature)
        self._grow([row] * num_requests, [track] * num_requests, [self.first] * num_requests)

    # -- drafts ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """A chain for each row that has head KV, with the verifier's noise."""
        chains = [_Chain() for _ in rows]
        live = [index for index, row in enumerate(rows) if self._can_draft(row)]
        if live:
            drafting = [rows[i] for i in live]
            tracks = [self._tracks[row.request_id] for row in drafting]
            firsts = [self._first_seen(*each) for each in zip(drafting, tracks, strict=True)]
            grown = self._grow(drafting, tracks, firsts)
            for index, chain in zip(live, grown, strict=True):
                chains[index] = chain
        return [_draft(chain) for chain in chains]

    def _can_draft(self, row: DraftRow) -> bool:
        track = self._tracks.get(row.request_id)
        return track is not None and track.stop >= len(row.tokens) - 1

    @torch.inference_mode()
    def _grow(
        self, rows: Sequence[DraftRow], tracks: Sequence[_Track], firsts: Sequence[int]
    ) -> list[_Chain]:
        chains = [_Chain() for _ in rows]
        context, seen = self._read(rows, firsts)
        device = self.device
        anchors = Anchors(
            torch.tensor([row.tokens[-1] for row in rows], device=device),
            torch.tensor([len(row.tokens) - 1 for row in rows], device=device),
            context,
            seen,
            [track.feature for track in tracks],
        )
        lengths = [min(row.max_draft, self.longest) for row in rows]
        drafting = self.begin(anchors, max(lengths))
        live = list(range(len(rows)))
        while live := [i for i in live if len(chains[i].token_ids) < lengths[i]]:
            last = [(chains[i].token_ids or rows[i].tokens)[-1] for i in live]
            live = self._draw(rows, chains, live, self._widened(drafting.logits(live, last)))
        return chains

    def _widened(self, logits: Tensor) -> Tensor:
        """``[n, draft_vocab]`` to ``[n, vocab]`` float32: what the head cannot draft is banned."""
        ids = self.draft_ids
        if ids is None:
            return logits.float()
        wide = logits.new_full((len(logits), self.config.vocab_size), -torch.inf, dtype=torch.float)
        wide[:, ids] = logits.float()
        return wide

    @property
    def draft_ids(self) -> Tensor | None:
        """The target's ids of the head's, [draft_vocab]; None if they are the same."""
        return None

    def _draw(
        self,
        rows: Sequence[DraftRow],
        chains: Sequence[_Chain],
        live: Sequence[int],
        logits: Tensor,
    ) -> list[int]:
        """One more token for each live row. Returns the rows whose logits were sound."""
        wanted = [SampleRow(rows[i].tokens, rows[i].sampling, chains[i].token_ids) for i in live]
        choices, drawn_from = self._choose(logits, wanted)
        sound = []
        for index, choice, probs in zip(live, choices, drawn_from, strict=True):
            if choice.error is None:
                chains[index].token_ids.append(choice.token_id)
                chains[index].drawn_from.extend(() if probs is None else (probs,))
                sound.append(index)
        return sound

    def _choose(
        self, logits: Tensor, wanted: Sequence[SampleRow]
    ) -> tuple[Sequence[Choice], Sequence[Tensor | None]]:
        """By the target's own sampler, or as rejection sampling wants it."""
        if not self._independent:
            return self._sampler.sample(logits, wanted), [None] * len(wanted)
        choices, drawn_from = draw(logits, wanted)
        return choices, list(drawn_from)


def _draft(chain: _Chain) -> Draft:
    sources = (SOURCE,) * len(chain.token_ids)
    if not chain.drawn_from:
        return Draft(chain.token_ids, sources)
    return SampledDraft(chain.token_ids, sources, probs=torch.stack(chain.drawn_from))


def _token_ids(verified: VerifiedRow) -> Sequence[int]:
    """Of the committed rows: pending tokens, then accepted ones."""
    row = verified.row
    pending = row.tokens[row.start : row.stop]
    num_accepted = len(verified.batch_rows) - len(pending)
    return [*pending, *verified.output.token_ids[:num_accepted]]
