"""TextProposer: a draft model with another tokenizer; it and the target meet in text.

The draft model keeps token ids, pages and a prefix cache of its own for each request: its positions
are not the target's. Text up to the last word is *settled*: its ids are kept, so they alone are
cached. The last word is encoded anew in each step, for it may have grown. A tokenizer that merges
across words would give other ids, which can cost accepted tokens and nothing else.

A draft is a greedy chain. Its text, behind the target's last tokens, is encoded by the target's
tokenizer; what follows the tokens that are known is the draft. Noise is keyed by the target's ids,
which the draft model does not have, so at temperature 1 fewer tokens are accepted than of a model
with the target's tokenizer.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from ...core.errors import InvalidRequest
from ...core.execution.proposer import VerifiedRequest
from ...core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ...core.interface.plan import ScheduledRequest
from ...core.interface.protocols import ProposerTraits
from ...core.interface.sampling import ConstraintFailed, SamplingMetadata, TokenSamplingParams
from ...core.model.decoder import Decoder
from ...core.ops.batch import ForwardOutput, RaggedBatch, Segment, Taps
from ...core.ops.kv_pool import KVPool
from ...radix_cache import PrefixCache
from ...radix_cache.node import KVLease
from ..control.outcome import DraftNote
from ..sources.merge import common_len
from .kind import TokenText
from .tree_grower import DecoderProposer, Opened
from .tree_growth import ROOT, TreeGrowth

SOURCE = "text"
READ_TOKENS = 1024  # of the target, whose text one step encodes at most over the whole batch
MOST_OPEN = 256  # characters that may be encoded anew in each step: text without spaces is settled
NUM_KNOWN = 8  # tokens of the target in front of a draft that are encoded along with it
WORD_START = re.compile(r"(?<=\S) (?=\w)")  # most tokenizers begin a token there
PRIOR, PRIOR_WEIGHT, MOST_WEIGHT = 0.6, 8.0, 200.0  # chance of a token; tokens that it counts for
GREEDY = SamplingMetadata(params=TokenSamplingParams(temperature=0.0), seed=0, prompt_len=1)


@dataclass(slots=True)
class _Reading:
    """One request as the draft model reads it."""

    space: str  # namespace in the cache
    ids: array[int]  # of settled text
    num_read: int = 0  # tokens of the target whose bytes are settled or in ``open``
    open: bytes = b""  # behind the settled text; may end inside a character
    last_ids: Sequence[int] = ()  # of ``open``
    lease: KVLease | None = None
    computed: array[int] = field(default_factory=lambda: array("q"))  # ids that have KV

    @property
    def tokens(self) -> array[int]:
        """All ids."""
        return self.ids + array("q", self.last_ids)


class TextProposer(DecoderProposer):
    """Drafts by running ``decoder`` on the text of requests.

    ``target`` and ``own``: the texts of the target's tokens and of the decoder's. ``window``:
    tokens of missing KV that one step may catch up over the whole batch.
    """

    source = SOURCE
    taps: Taps = ()
    traits = ProposerTraits(tokens_per_pass=1, catches_up=True, weighs=False)

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        *,
        target: TokenText,
        own: TokenText,
        window: int = 256,
    ) -> None:
        super().__init__(decoder, pool)
        self._target, self._own = target, own
        self._window = window
        self.cache = PrefixCache(pool.num_pages, pool.page_size)
        self._readings: dict[str, _Reading] = {}  # by request
        self._spaces: dict[int, str] = {}  # by the first page of the requests that share one
        self._num_spaces = 0  # ever, for their names
        self._chances = {False: _Chance(), True: _Chance()}  # by whether tokens are sampled

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """End the leases of these requests; drop what is cached behind these pages of the target.

        Requests share KV where their first page in the target's pool is the same, and so never
        across the target's namespaces.
        """
        for request_id in request_ids:
            reading = self._readings.pop(request_id, None)
            if reading is not None and reading.lease is not None:
                whole = min(len(reading.computed), len(reading.ids))
                self.cache.release(reading.lease, reading.ids, whole)
        stale = [self._spaces.pop(each) for each in newly_allocated_pages if each in self._spaces]
        if stale:
            self.cache.flush(*stale)

    def _space(self, page_id: int) -> str:
        if page_id not in self._spaces:
            self._spaces[page_id] = str(self._num_spaces)
            self._num_spaces += 1
        return self._spaces[page_id]

    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Encode new text, catch up within the window, then draft where all KV is there."""
        readings, room = [], READ_TOKENS
        for scheduled in requests:
            reading = self._reading(scheduled)
            room -= self._read(reading, scheduled.tokens, room)
            readings.append(reading)
        self.cache.take_newly_allocated_pages()  # nothing of this pool is marked by page
        trees = [
            self._tree(*each) if each[1].num_read == len(each[0].tokens) else None
            for each in zip(requests, readings, strict=True)
        ]
        whole = self._catch_up(readings, trees)
        self._grow(readings, trees, whole)
        drafts = zip(requests, readings, trees, strict=True)
        return [self._draft(*each) for each in drafts]

    def observe(
        self,
        batch: RaggedBatch,  # noqa: ARG002
        output: ForwardOutput,  # noqa: ARG002
        verified: Sequence[VerifiedRequest],
    ) -> None:
        """Learn how often its tokens are accepted."""
        for each in verified:
            draft = each.output.draft
            if SOURCE in draft.sources and each.output.error is None:
                is_sampled = each.scheduled.sampling.params.temperature > 0.0
                self._chances[is_sampled].learn(len(each.output.path), len(draft.token_ids))

    # -- text -----------------------------------------------------------------------------------

    def _reading(self, scheduled: ScheduledRequest) -> _Reading:
        reading = self._readings.get(scheduled.request_id)
        if reading is None:
            space = self._space(scheduled.page_ids[0])
            reading = _Reading(space, array("q", self._own.first_ids))
            self._readings[scheduled.request_id] = reading
        return reading

    def _read(self, reading: _Reading, tokens: array[int], room: int) -> int:
        """Encode at most ``room`` more of the target's tokens; returns how many it tried.

        Text that the tokenizer refuses stays unread, and the request without drafts.
        """
        new = tokens[reading.num_read : reading.num_read + max(0, room)]
        if not new:
            return 0
        text, pending = _whole_characters(reading.open + b"".join(map(self._target.piece, new)))
        starts = [found.start() for found in WORD_START.finditer(text)]
        cut = starts[-1] if starts else 0
        if len(text) - cut > MOST_OPEN:
            cut = len(text)
        try:
            settled = self._own.encode(text[:cut]) if cut else []
            last_ids = self._own.encode(text[cut:]) if cut < len(text) else []
        except InvalidRequest:
            return len(new)
        # Not before: an encoder that fails has read nothing.
        num_same = min(len(reading.computed), len(reading.ids))
        reading.ids.extend(settled)
        reading.last_ids, reading.open = last_ids, text[cut:].encode() + pending
        reading.num_read += len(new)
        computed, now = reading.computed[num_same:], reading.tokens[num_same:]
        del reading.computed[num_same + common_len(computed, now) :]
        return len(new)

    # -- pages and passes -----------------------------------------------------------------------

    def _tree(self, scheduled: ScheduledRequest, reading: _Reading) -> TreeGrowth | None:
        """The chain of a request whose text is read; None where context or pool has no room."""
        tokens = reading.tokens
        if not tokens:
            return None
        own = ScheduledRequest(
            request_id=scheduled.request_id,
            tokens=tokens,
            start=len(tokens) - 1,
            stop=len(tokens),
            page_ids=array("q"),
            sampling=GREEDY,
            draft_plan=DraftPlan(max_draft=scheduled.draft_plan.max_draft),
        )
        if not self._grower.has_room(own):
            return None
        if reading.lease is None:
            limit = len(reading.ids)
            reading.lease = self.cache.acquire(tokens, namespace=reading.space, limit=limit)
            reading.computed = tokens[: reading.lease.num_cached_tokens]
        if not self.cache.extend(reading.lease, len(tokens) + own.draft_plan.max_draft):
            return None
        return self._grower.tree(replace(own, page_ids=reading.lease.page_ids))

    def _catch_up(
        self, readings: Sequence[_Reading], trees: Sequence[TreeGrowth | None]
    ) -> Opened | None:
        """Compute missing KV; chains that reach their last token get their first one."""
        room = self._window + len(trees)
        segments: list[Segment] = []
        computed: list[tuple[_Reading, array[int]]] = []
        whole: list[tuple[TreeGrowth, int]] = []
        pairs = [(r, tree) for r, tree in zip(readings, trees, strict=True) if tree is not None]
        for reading, tree in sorted(pairs, key=lambda pair: _num_owed(*pair)):
            tokens = tree.scheduled.tokens
            start = min(len(reading.computed), len(tokens) - 1)  # the last one's logits are wanted
            stop = min(len(tokens), start + room)
            if stop <= start:
                continue
            room -= stop - start
            is_whole = stop == len(tokens)
            segments.append(
                Segment(tokens[start:stop], start, tree.scheduled.page_ids, int(is_whole))
            )
            computed.append((reading, tokens[:stop]))
            if is_whole:
                whole.append((tree, ROOT))
        if not segments:
            return None
        opened = self._grower.run(segments, whole)
        for reading, tokens in computed:  # not before: a pass that fails computes nothing
            reading.computed = tokens
        return opened

    def _grow(
        self,
        readings: Sequence[_Reading],
        trees: Sequence[TreeGrowth | None],
        whole: Opened | None,
    ) -> None:
        """Grow the chains that have begun; their nodes have KV, but for the last ones."""
        if whole is None or not whole.nodes:
            return
        self._grower.grow([tree for tree, _ in whole.nodes], whole)
        for reading, tree in zip(readings, trees, strict=True):
            if tree is not None and tree.nodes:
                nodes = (node.token_id for node in tree.nodes if node.is_open)
                reading.computed = tree.scheduled.tokens + array("q", nodes)

    # -- drafts ---------------------------------------------------------------------------------

    def _draft(
        self, scheduled: ScheduledRequest, reading: _Reading, tree: TreeGrowth | None
    ) -> Draft:
        """The chain in the target's tokens, or the tokens looked up where these are likelier."""
        chain = [] if tree is None else [node.token_id for node in tree.nodes]
        owed = len(scheduled.tokens) - reading.num_read
        if not owed and tree is not None and not chain:  # without room nothing is caught up
            owed = _num_owed(reading, tree)
        note = DraftNote(() if tree is None else tuple(tree.pass_rows), owed)
        token_ids = self._allowed(scheduled, self._translated(scheduled, reading, chain))
        survival = self._chances[scheduled.sampling.params.temperature > 0.0].survival(
            len(token_ids)
        )
        known = scheduled.draft_plan.draft.trunk()
        if known.survival and sum(known.survival) >= sum(survival):
            return replace(known, survival=[0.0] * len(known.survival), note=note)
        if not token_ids:
            return replace(NO_DRAFT, note=note)
        return Draft(token_ids, (SOURCE,) * len(token_ids), survival=survival, note=note)

    def _translated(
        self, scheduled: ScheduledRequest, reading: _Reading, chain: Sequence[int]
    ) -> list[int]:
        """The target's tokens for the text of a chain; none where its tokenizer refuses that."""
        text = _whole_characters(self._text_of(chain))[0].encode()
        pending = _whole_characters(reading.open)[1]
        if len(text) <= len(pending):
            return []
        known = self._known(scheduled.tokens, len(pending))
        before = b"".join(map(self._target.piece, known))
        whole, broken = _whole_characters(before[: len(before) - len(pending)] + text)
        try:
            if not broken and known:
                token_ids = self._target.encode(whole)
                if token_ids[: len(known)] == known:
                    return token_ids[len(known) :]
            return [] if pending else self._target.encode(text.decode())
        except InvalidRequest:
            return []

    def _text_of(self, chain: Sequence[int]) -> bytes:
        """The bytes of a chain up to its first token that stands for no text."""
        end = next((i for i, each in enumerate(chain) if each in self._own.special_ids), len(chain))
        return b"".join(map(self._own.piece, chain[:end]))

    def _known(self, tokens: array[int], num_pending: int) -> list[int]:
        """The target's last tokens, a few, from where its tokenizer is likely to begin a token.

        That is a word, or the text behind a special token. Without one there are none; or those
        that reach back to the character whose first ``num_pending`` bytes are at the end.
        """
        last, special = list(tokens[-NUM_KNOWN:]), self._target.special_ids
        pieces = [self._target.piece(each) for each in last]
        first = max((at + 1 for at, each in enumerate(last) if each in special), default=0)
        if words := [at for at in range(first, len(last)) if pieces[at][:1] == b" "]:
            return last[words[0] :]
        if first:
            return last[first:]
        start, num_bytes = len(last), 0
        while start and num_bytes < num_pending:
            start -= 1
            num_bytes += len(pieces[start])
        return last[start:]

    def _allowed(self, scheduled: ScheduledRequest, token_ids: Sequence[int]) -> Sequence[int]:
        """Cut a draft to its plan's length, and before a token that the constraint forbids."""
        token_ids = token_ids[: scheduled.draft_plan.max_draft]
        constraint, start = scheduled.sampling.constraint, scheduled.sampling.prompt_len
        if constraint is None or not token_ids:
            return token_ids
        try:
            return token_ids[: constraint.count_allowed(scheduled.tokens, start, token_ids)]
        except ConstraintFailed:  # the verifier finds it, too, and ends the request
            return ()


class _Chance:
    """The chance that a token is accepted where those before it were; recent tokens count more."""

    def __init__(self) -> None:
        self._hits, self._tries = PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT

    def learn(self, num_accepted: int, num_verified: int) -> None:
        num_tried = min(num_accepted + 1, num_verified)
        fade = min(1.0, MOST_WEIGHT / (self._tries + num_tried))
        self._hits = (self._hits + num_accepted) * fade
        self._tries = (self._tries + num_tried) * fade

    def survival(self, num_tokens: int) -> list[float]:
        """The chance of each token of a chain and all before it, [num_tokens]."""
        chance = self._hits / self._tries
        return [chance**level for level in range(1, num_tokens + 1)]


def _num_owed(reading: _Reading, tree: TreeGrowth) -> int:
    return len(tree.scheduled.tokens) - len(reading.computed)


def _whole_characters(text: bytes) -> tuple[str, bytes]:
    """Split off the beginning of a character at the end; bytes that are no text are replaced."""
    for size in range(1, min(3, len(text)) + 1):
        lead = text[-size]
        if lead >= 0xC0:  # the first byte of a character of 2 to 4
            length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            if lead < 0xF8 and length > size:
                return text[:-size].decode("utf-8", "replace"), text[-size:]
            break
        if lead < 0x80:
            break
    return text.decode("utf-8", "replace"), b""
