"""Search for the shortest completion of an answer.

A node of the search is the text written since its start. Nodes are expanded in order of their
length in tokens. Of similar nodes, with the same position in the answer and the same allowed
tokens, only some are expanded, since the content of a value seldom affects what may follow it. Thus
an object with a hundred required properties takes a few hundred nodes, and a string with a pattern
a few dozen. The effort is limited in nodes and not in time, so equal states have equal results.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from .protocols import Matcher, Tokens
from .spelling import Speller, text_of
from .token_table import Allowed, TokenTable

Ids = Sequence[int]
NUM_ENDS = 3  # number of completions to compare: fewer bytes are not always fewer tokens
NUM_MORE = 24  # number of nodes to expand after the first completion
OPENING, CLOSING = b"[{(", b"]})"
COMMA, COLON, QUOTE = b',:"'
STRUCTURE = frozenset(b'[{(]}),"')
ENDS_OF_VALUES, BETWEEN_VALUES = b'}])"<', b",\n"
OF_NUMBERS = b"0123456789.eE+-"
AFTER_VALUES = frozenset(b",:]}) \n\r\t")  # bytes that may follow a value or a key
# first bytes of values and keys, including blanks
BEGINNINGS = frozenset(b'"{[-0123456789tfn \n\r\t')
LINE_BREAK, BLANKS = b"\n"[0], frozenset(b" \n\r\t")
BOTH_BLANKS = frozenset(b" \n")  # allowed between JSON elements and never inside a string
LAYOUT = BEGINNINGS | AFTER_VALUES  # all bytes that may be allowed between JSON elements
BLANK_COST = 1024  # cost of an unnecessary blank in tokens, when nodes are ordered
DIGITS, LETTERS, CAPITALS = range(0x30, 0x3A), range(0x61, 0x7B), range(0x41, 0x5B)
KINDS = (DIGITS, LETTERS, CAPITALS)
SAME = frozenset(b"0123456789anzANZ")  # bytes to try if all digits, letters or capitals are allowed
HIGH = 0x80  # the first byte value that is part of a character of several bytes
OTHERS = frozenset(range(HIGH)).difference(*KINDS)
ESCAPE = b"\\"[0]
OBJECT, WORD = b"{"[0], frozenset(b"w")
WORDS = bytes(0x77 if chr(byte).isalnum() or byte >= HIGH else byte for byte in range(256))
MOST_SHAPE = 8  # maximum number of bytes of a shape


class Position(NamedTuple):
    """The position of a node in the answer, relative to the start of the search.

    ``stack``: open brackets, each with the number of commas after it, or with a hash of the present
    key; the first entry stands for brackets that were open before the search. ``num_closed``:
    number of brackets from before the search that were closed. ``forced``: the last forced text
    with a bracket, comma or quotation mark, such as a key. ``run``: number of tokens since the last
    bracket, comma or quotation mark. ``shape``: the end of the text since then, in which each word
    is replaced by one letter and a repeated character is written once.
    """

    stack: tuple[tuple[int, int], ...] = ((0, 0),)
    num_closed: int = 0
    forced: bytes = b""
    run: int = 0
    shape: bytes = b""

    def after(self, text: bytes, num_tokens: int, *, is_forced: bool = False) -> Position:
        """Return the position after a text of ``num_tokens`` tokens."""
        stack, num_closed = list(self.stack), self.num_closed
        if STRUCTURE.isdisjoint(text):
            if COLON in text and stack[-1][0] == OBJECT:
                stack[-1] = (OBJECT, zlib.crc32(self.forced))
            shape = _shape(self.shape, text)
            return self._replace(stack=tuple(stack), run=self.run + num_tokens, shape=shape)
        for byte in text:
            if byte in OPENING:
                stack.append((byte, 0))
            elif byte in CLOSING:
                stack.pop()
                if not stack:
                    stack, num_closed = [(0, 0)], num_closed + 1
            elif byte == COMMA:
                bracket, num_commas = stack[-1]
                stack[-1] = (bracket, num_commas + 1)
        if is_forced and COLON in text and stack[-1][0] == OBJECT:
            # The text that may follow depends on the present key, but not on earlier properties.
            stack[-1] = (OBJECT, zlib.crc32(text))
        return Position(tuple(stack), num_closed, text if is_forced else self.forced)


def _shape(shape: bytes, text: bytes) -> bytes:
    for byte in text.translate(WORDS):
        if not shape or byte != shape[-1]:
            shape += bytes([byte])
    return shape[-MOST_SHAPE:]


class Node(NamedTuple):
    """A node of the search: the tokens written so far, their number, and their position.

    ``parent``: number of the node before. ``allowed``: a hash of the tokens that were allowed after
    the parent. ``step``: the tokens that were added to the parent. ``shape``: the shape at the
    parent. ``num_blanks``: number of blanks that were chosen although other tokens were allowed.
    """

    cost: int
    path: tuple[int, ...]
    position: Position
    parent: int
    allowed: int
    step: tuple[int, ...]
    shape: bytes
    num_blanks: int = 0


class Hints(NamedTuple):
    """Texts worth trying that the allowed tokens do not suggest.

    ``marks``: texts that may end a free text, such as the end of reasoning. ``values``: short
    values for the grammar's schemas and ends of such values, shortest first. ``named``: tokens with
    text that the grammar refers to by number.
    """

    marks: Sequence[Ids] = ()
    values: Sequence[Ids] = ()
    named: Sequence[int] = ()


class Width(NamedTuple):
    """The maximum number of similar nodes to expand, of one shape and of all shapes together.

    ``learns``: whether steps that have once led to the same allowed tokens are treated as equal
    from then on.
    """

    one_shape: int
    all_shapes: int
    learns: bool


NARROW = Width(2, 96, True)
WIDE = Width(24, 192, False)


class EndSearch:
    """A search from the position of ``matcher``, which it changes."""

    def __init__(self, matcher: Matcher, tokens: Tokens, table: TokenTable, hints: Hints) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._table = table
        self._hints = hints
        self._path: tuple[int, ...] = ()  # tokens that the matcher has consumed
        self.num_nodes = 0  # number of nodes expanded so far

    def find(
        self, most_nodes: int, width: Width = NARROW, most: int | None = None
    ) -> list[int] | None:
        """Return the shortest completion that is found; None if none is found.

        ``most_nodes``: maximum number of nodes to expand. ``most``: maximum number of tokens of a
        node.
        """
        self._begin(width)
        ends: list[list[int]] = []
        last = self.num_nodes + most_nodes
        while self._heap and len(ends) < NUM_ENDS and self.num_nodes < last:
            _, order, node = heappop(self._heap)
            if node.parent in self._closed or (most is not None and node.cost > most):
                continue
            self.num_nodes += 1
            end = self._expand(node, order)
            if end is not None:
                ends.append(end)
                last = min(last, self.num_nodes + NUM_MORE)
            if self._matcher.is_error():
                break
        return min(ends, key=self._length, default=None)

    def _begin(self, width: Width) -> None:
        self._width = width
        self._heap: list[tuple[int, int, Node]] = []
        self._alike: Counter[tuple[Position, int]] = Counter()
        self._closed: set[int] = set()  # nodes with a child after which the value may end
        # hash of the state after a step, by the hash of the allowed tokens and by the step
        self._led: dict[int, dict[tuple[int, ...], int]] = {}
        self._num_pushed = 0
        self._push(Node(0, (), Position(), -1, 0, (), b""))

    def _length(self, ids: Ids) -> tuple[int, int]:
        return len(ids), len(text_of(self._tokens, ids))

    def _push(self, node: Node) -> None:
        order = self._num_pushed
        self._num_pushed += 1
        price = node.cost + len(node.position.stack) + BLANK_COST * node.num_blanks
        heappush(self._heap, (price, order, node))

    def _expand(self, node: Node, order: int) -> list[int] | None:
        """Push the successors of a node.

        If the answer is complete at the node, return the completion instead.
        """
        if not self._goto(node.path) or (along := self._along(node)) is None:
            return None
        is_last = along.cost == node.cost
        if self._matcher.is_accepting():
            if is_last:
                self._closed.add(node.parent)
            return self._rewritten(along.path)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return None
        number = zlib.crc32(bits)
        led = zlib.crc32(text_of(self._tokens, along.path[len(node.path) :]), number)
        self._led.setdefault(node.allowed, {})[node.step] = led
        allowed, position = self._table.allowed(bits), along.position
        if led == node.allowed:  # the step has not changed the allowed tokens
            position = position._replace(shape=node.shape)
        if not self._is_new(position, led, node.parent):
            return None
        ends = [*self._value_ends(allowed)] or [*self._hinted(allowed)]
        if ends and is_last:
            self._closed.add(node.parent)
        has_layout = _has_layout(allowed.by_byte) and not BLANKS.issuperset(allowed.by_byte)
        for ids in ends or self._unlike(number, self._choices(allowed)):
            text = text_of(self._tokens, ids)
            is_blank = has_layout and bool(text) and BLANKS.issuperset(text)
            if is_blank and self._width.learns:
                continue  # a blank never shortens a completion
            self._push(
                Node(
                    along.cost + len(ids),
                    (*along.path, *ids),
                    position.after(text, len(ids)),
                    order,
                    number,
                    tuple(ids),
                    position.shape,
                    along.num_blanks + is_blank,
                )
            )
        return None

    def _is_new(self, position: Position, number: int, parent: int) -> bool:
        """Count a node, and return whether few enough similar nodes were counted to expand it."""
        kinds = (
            (position, self._width.one_shape),
            (position._replace(shape=b"*"), self._width.all_shapes),
        )
        siblings = Position(run=parent, shape=b"siblings"), self._width.one_shape
        is_new = True
        for kind, most in (*kinds, siblings):
            self._alike[kind, number] += 1
            is_new &= self._alike[kind, number] <= most
        return is_new

    def _unlike(self, number: int, steps: Iterator[Ids]) -> Iterator[Ids]:
        """Yield the steps, except those known to lead to the same state as steps before them."""
        known = self._led.get(number, {}) if self._width.learns else {}
        counts: Counter[int] = Counter()
        for ids in steps:
            led = known.get(tuple(ids), -1)
            counts[led] += 1
            if (
                led < 0
                or counts[led] <= self._width.one_shape
                or len(text_of(self._tokens, ids)) > 1
            ):
                yield ids

    # -- the way ----------------------------------------------------------------------------------

    def _goto(self, path: tuple[int, ...]) -> bool:
        """Move the matcher after these tokens. Return False if they are not allowed."""
        same = 0
        for ours, theirs in zip(self._path, path, strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(self._path):
            self._matcher.rollback(len(self._path) - same)
        self._path = path[:same]
        return self._consume(path[same:])

    def _consume(self, ids: Ids) -> bool:
        count = self._matcher.try_consume_tokens(list(ids)) if ids else 0
        if self._matcher.is_error():
            return False
        self._path += tuple(ids[:count])
        return count == len(ids)

    def _along(self, node: Node) -> Node | None:
        """Follow forced tokens as far as possible. Return the node after them; None on failure."""
        while not self._matcher.is_accepting():
            ids = self._forced()
            if not ids:
                break
            if not self._consume(ids):
                return None
            position = node.position.after(text_of(self._tokens, ids), len(ids), is_forced=True)
            node = node._replace(cost=node.cost + len(ids), path=self._path, position=position)
        return None if self._matcher.is_error() else node

    def _forced(self) -> Ids:
        """Return the tokens that must follow.

        If the grammar forces bytes, they are tokens that spell these bytes.
        """
        ids: Ids = self._tokens.spell(self._matcher.compute_ff_bytes())
        if ids and self._matcher.validate_tokens(list(ids)) == len(ids):
            return ids
        return list(self._matcher.compute_ff_tokens())

    def _rewritten(self, path: tuple[int, ...]) -> list[int]:
        self._goto(())
        ids = Speller(self._matcher, self._tokens).rewritten(path)
        is_whole = not self._matcher.is_error() and self._matcher.is_accepting()
        self._path = tuple(ids)
        return ids if is_whole else list(path)

    # -- what may follow --------------------------------------------------------------------------

    def _value_ends(self, allowed: Allowed) -> Iterator[Ids]:
        """Yield the tokens that end a text, a value or a list.

        If there are any, no other tokens lead to a shorter completion.
        """
        if allowed.is_free:
            yield from (ids for ids in self._hints.marks if self._end_value(ids, is_free=True))
            return
        found = allowed.by_byte
        for byte in ENDS_OF_VALUES + BETWEEN_VALUES:
            if byte in BETWEEN_VALUES and not found.keys().isdisjoint(ENDS_OF_VALUES):
                return
            if byte == LINE_BREAK and _has_layout(found):
                return
            if byte in found and self._end_value([found[byte]], is_sure=byte != QUOTE):
                yield [found[byte]]
                yield from self._special(allowed)
                return
        if found and found.keys() <= set(OF_NUMBERS):
            yield from self._special(allowed)

    def _hinted(self, allowed: Allowed) -> Iterator[Ids]:
        """Yield the first hint that is a whole value here, or the end of the present value."""
        firsts = allowed.by_byte
        for ids in self._hints.values:
            is_possible = self._table.firsts[ids[0]] in firsts
            if is_possible and self._end_value(ids):
                yield ids
                return

    def _end_value(self, ids: Ids, *, is_free: bool = False, is_sure: bool = False) -> bool:
        """Whether these tokens end a free text or a value."""
        if self._matcher.validate_tokens(list(ids)) < len(ids):
            return False
        num = self._matcher.try_consume_tokens(list(ids))
        try:
            if num < len(ids) or self._matcher.is_error():
                return False
            if self._matcher.is_accepting():
                return True
            return self._has_ended(is_free=is_free, is_sure=is_sure)
        finally:
            if not self._matcher.is_error():
                self._matcher.rollback(num)

    def _has_ended(self, *, is_free: bool, is_sure: bool) -> bool:
        """Whether a free text or a value has just ended.

        If ``is_sure``, any text that is forced to follow shows that it has ended.
        """
        forced = self._matcher.compute_ff_bytes()
        if forced:
            return is_free or is_sure or forced[0] in AFTER_VALUES
        allowed = self._table.allowed(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            return False
        if is_free:
            return not allowed.is_free
        found = allowed.by_byte
        if is_sure and _has_layout(found) and BEGINNINGS.issuperset(found):
            return True
        return bool(found) and AFTER_VALUES.issuperset(found)

    def _choices(self, allowed: Allowed) -> Iterator[Ids]:
        """Yield a token for each kind of text that may follow."""
        found = allowed.by_byte
        yield from self._special(allowed)
        kinds = {kind: [byte for byte in kind if byte in found] for kind in KINDS}
        for kind, runs in ((LETTERS, self._table.letters), (DIGITS, self._table.digits)):
            if len(kinds[kind]) == len(kind):
                yield from ([token_id] for token_id in self._parts(allowed, runs))
        for kind, some in kinds.items():
            yield from ([found[b]] for b in some if len(some) < len(kind) or b in SAME)
        others = [byte for byte in found if byte in OTHERS]
        if self._width.learns and any(kinds.values()) and ESCAPE in others:
            others.remove(ESCAPE)  # an escape sequence writes one character with several
        yield from ([found[byte]] for byte in others)
        high = [token_id for byte, token_id in found.items() if byte >= HIGH]
        if high and len(high) == len(found):
            yield from ([token_id] for token_id in {high[0], high[len(high) // 2], high[-1]})

    def _special(self, allowed: Allowed) -> Iterator[Ids]:
        named = (token_id for token_id in self._hints.named if allowed.has(token_id))
        for token_id in (*allowed.special, *named):
            if self._matcher.validate_tokens([token_id]) == 1:
                yield [token_id]

    def _parts(self, allowed: Allowed, runs: Ids) -> list[int]:
        """Return long tokens of letters or digits, for texts with a minimum length."""
        long = [token_id for token_id in runs if allowed.has(token_id)]
        return [long[index] for index in sorted({0, len(long) // 2, len(long) - 1})] if long else []


def _has_layout(found: Collection[int]) -> bool:
    """Whether blanks are allowed, and no bytes other than those between JSON elements."""
    return BOTH_BLANKS.issubset(found) and LAYOUT.issuperset(found)
