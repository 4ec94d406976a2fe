"""TextProposer: a draft model with another tokenizer, which exchanges text with the target.

The draft model has its own token ids, pages and prefix cache, because its positions differ from the
target's. Text before the last word is *settled*: its ids are final, and only they are cached. The
last word may still grow, so it is encoded again in each step. A tokenizer that merges across words
would encode the whole text differently, but then only fewer tokens are accepted.

A draft is a greedy chain. The target's tokenizer encodes the text of the target's last tokens and
of the chain together; the tokens after the known ones are the draft. The draft model cannot use the
verifier's noise, which is computed from the target's token ids. So at temperature 1 fewer tokens
are accepted than from a model with the target's tokenizer.
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
READ_TOKENS = 1024  # maximum number of the target's tokens that one step reads, over the batch
MOST_OPEN = 256  # maximum characters to encode again in each step; longer text is settled anyway
NUM_KNOWN = 8  # maximum number of the target's last tokens that are encoded along with a draft
WORD_START = re.compile(r"(?<=\S) (?=\w)")  # a space at which most tokenizers begin a token

# Acceptance probability of a token before any is observed; weight of this prior and maximum weight
# of all observations, in tokens.
PRIOR, PRIOR_WEIGHT, MOST_WEIGHT = 0.6, 8.0, 200.0
GREEDY = SamplingMetadata(params=TokenSamplingParams(temperature=0.0), seed=0, prompt_len=1)


@dataclass(slots=True)
class _Reading:
    """The text of one request, encoded with the draft model's tokenizer."""

    space: str  # namespace in the draft model's cache
    ids: array[int]  # token ids of settled text
    num_read: int = 0  # tokens of the target whose bytes are settled or in ``open``
    open: bytes = b""  # text after the settled text; it may end inside a character
    last_ids: Sequence[int] = ()  # token ids of ``open``
    lease: KVLease | None = None
    computed: array[int] = field(default_factory=lambda: array("q"))  # ids that have KV

    @property
    def tokens(self) -> array[int]:
        """Token ids of the settled text and of the text after it."""
        return self.ids + array("q", self.last_ids)


class TextProposer(DecoderProposer):
    """Drafts by running ``decoder`` on the text of requests.

    ``target`` and ``own`` convert between text and the token ids of the target and of the decoder.
    ``window``: maximum number of tokens whose missing KV one step computes, over the whole batch.
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
        self._readings: dict[str, _Reading] = {}  # readings by request id
        self._spaces: dict[int, str] = {}  # namespaces by the requests' first page in the target
        self._num_spaces = 0  # number of namespaces ever made, for unique names
        self._chances = {False: _Chance(), True: _Chance()}  # chances by whether tokens are sampled

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """End the leases of ended requests; drop draft KV that no request can share any more.

        Requests share draft KV if they have the same first page in the target's pool. So they never
        share it across the target's namespaces, and it is dropped when that page is allocated
        again.
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
        """Encode new text and compute missing KV within the window.

        Then draft for the requests whose KV is complete.
        """
        readings, room = [], READ_TOKENS
        for scheduled in requests:
            reading = self._reading(scheduled)
            room -= self._read(reading, scheduled.tokens, room)
            readings.append(reading)
        self.cache.take_newly_allocated_pages()  # Discard the list: this pool has no marks by page.
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
        """Update the acceptance probability of the proposer's tokens."""
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
        """Encode at most ``room`` more of the target's tokens; return the number attempted.

        If the tokenizer cannot encode the text, the request gets no drafts, and the next step tries
        again.
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
        # The state changes only after both encodings have succeeded.
        num_same = min(len(reading.computed), len(reading.ids))
        reading.ids.extend(settled)
        reading.last_ids, reading.open = last_ids, text[cut:].encode() + pending
        reading.num_read += len(new)
        computed, now = reading.computed[num_same:], reading.tokens[num_same:]
        del reading.computed[num_same + common_len(computed, now) :]
        return len(new)

    # -- pages and passes -----------------------------------------------------------------------

    def _tree(self, scheduled: ScheduledRequest, reading: _Reading) -> TreeGrowth | None:
        """Return an empty chain for a request whose text has been encoded.

        Returns None if the request has no tokens, if it is too long for the context, or if the pool
        has no free pages.
        """
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
        """Compute missing KV; return the first token of each chain whose KV is now complete.

        Requests with the least missing KV come first, until the window of the step is used up.
        Returns None if nothing is computed.
        """
        room = self._window + len(trees)
        segments: list[Segment] = []
        computed: list[tuple[_Reading, array[int]]] = []
        whole: list[tuple[TreeGrowth, int]] = []
        pairs = [(r, tree) for r, tree in zip(readings, trees, strict=True) if tree is not None]
        for reading, tree in sorted(pairs, key=lambda pair: _num_owed(*pair)):
            tokens = tree.scheduled.tokens
            # The last token is always computed, because its logits are needed.
            start = min(len(reading.computed), len(tokens) - 1)
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
        # The readings change after the pass, because a pass that fails computes no KV.
        for reading, tokens in computed:
            reading.computed = tokens
        return opened

    def _grow(
        self,
        readings: Sequence[_Reading],
        trees: Sequence[TreeGrowth | None],
        whole: Opened | None,
    ) -> None:
        """Grow the chains of requests with complete KV; record the tokens whose KV was computed."""
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
        """Return the chain in the target's tokens, or the looked-up chain if it is likelier."""
        chain = [] if tree is None else [node.token_id for node in tree.nodes]
        owed = len(scheduled.tokens) - reading.num_read
        # A request without room has no tree. Its KV is never computed, so it owes no tokens.
        if not owed and tree is not None and not chain:
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
        """Return the target's tokens for the text of a chain; none if it cannot be encoded."""
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
        """Return the bytes of a chain up to its first special token."""
        end = next((i for i, each in enumerate(chain) if each in self._own.special_ids), len(chain))
        return b"".join(map(self._own.piece, chain[:end]))

    def _known(self, tokens: array[int], num_pending: int) -> list[int]:
        """Return a few of the target's last tokens, from a likely token boundary on.

        A likely boundary is the start of a word or the end of a special token. Without one, return
        the tokens that contain the last ``num_pending`` bytes, which begin a character that the
        next token continues. If ``num_pending`` is 0, the result is then empty.
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
        """Cut a draft to its plan's length and before the first token the constraint forbids."""
        token_ids = token_ids[: scheduled.draft_plan.max_draft]
        constraint, start = scheduled.sampling.constraint, scheduled.sampling.prompt_len
        if constraint is None or not token_ids:
            return token_ids
        try:
            return token_ids[: constraint.count_allowed(scheduled.tokens, start, token_ids)]
        except ConstraintFailed:  # The verifier meets the failure, too, and ends the request.
            return ()


class _Chance:
    """The probability that a token of a chain is accepted if all tokens before it were accepted.

    It is estimated from verified drafts; recent ones weigh more.
    """

    def __init__(self) -> None:
        self._hits, self._tries = PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT

    def learn(self, num_accepted: int, num_verified: int) -> None:
        num_tried = min(num_accepted + 1, num_verified)
        fade = min(1.0, MOST_WEIGHT / (self._tries + num_tried))
        self._hits = (self._hits + num_accepted) * fade
        self._tries = (self._tries + num_tried) * fade

    def survival(self, num_tokens: int) -> list[float]:
        """Return the probability that the first 1, 2, ... tokens of a chain are all accepted."""
        chance = self._hits / self._tries
        return [chance**level for level in range(1, num_tokens + 1)]


def _num_owed(reading: _Reading, tree: TreeGrowth) -> int:
    return len(tree.scheduled.tokens) - len(reading.computed)


def _whole_characters(text: bytes) -> tuple[str, bytes]:
    """Decode UTF-8, without the bytes of an incomplete last character; return text and bytes.

    Invalid bytes are replaced.
    """
    for size in range(1, min(3, len(text)) + 1):
        lead = text[-size]
        if lead >= 0xC0:  # first byte of a character of 2 to 4 bytes
            length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            if lead < 0xF8 and length > size:
                return text[:-size].decode("utf-8", "replace"), text[-size:]
            break
        if lead < 0x80:
            break
    return text.decode("utf-8", "replace"), b""
