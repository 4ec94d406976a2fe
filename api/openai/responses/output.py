"""The output of a response: deltas in, items and their events out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....core.interface.output import TokenLogprob
from ...runtime.chat_types import Call, TurnDelta
from ...types.results import Body
from .parts import CallPiece, MessagePiece, Piece, ReasoningPiece

Spell = Callable[[Sequence[TokenLogprob]], list[Body]]
"""Writes logprobs down."""


class Output:
    """Builds the output items; at most one item is open at a time, the last."""

    def __init__(self, spell: Spell) -> None:
        self.pieces: list[Piece] = []
        self.num_reasoning_tokens = 0
        self._spell = spell
        self._open: Piece | None = None
        self._unplaced: list[Body] = []  # logprobs of tokens that have shown no text yet

    @property
    def items(self) -> list[Body]:
        """All output items."""
        return [piece.body() for piece in self.pieces]

    def add(self, delta: TurnDelta) -> list[Body]:
        """The events of a step: the open call, then reasoning, then text, then new calls."""
        events: list[Body] = []
        if delta.logprobs:
            self._unplaced += self._spell(delta.logprobs)
        for call in delta.calls:
            if not call.id:
                events += self._continue(call)
        if delta.reasoning:
            # A step that ends the thinking counts for it: where in it the end lies is not known.
            self.num_reasoning_tokens += len(delta.token_ids)
            events += self._think(delta.reasoning)
        if delta.words or (self._unplaced and isinstance(self._open, MessagePiece)):
            events += self._say(delta.words)
        for call in delta.calls:
            if call.id:
                events += self._begin(CallPiece(index=len(self.pieces), call=call))
                events += self._continue(call)
        return events

    def end(self, *, is_whole: bool) -> list[Body]:
        """The events of the end. An answer without text and calls gets an empty message."""
        events: list[Body] = []
        if is_whole and all(isinstance(piece, ReasoningPiece) for piece in self.pieces):
            events += self._say("")
        return events + self._leave(is_whole=is_whole)

    def _think(self, text: str) -> list[Body]:
        self._unplaced.clear()
        events: list[Body] = []
        piece = self._open
        if not isinstance(piece, ReasoningPiece):
            piece = ReasoningPiece(index=len(self.pieces))
            events += self._begin(piece)
        return [*events, piece.add(text)]

    def _say(self, text: str) -> list[Body]:
        events: list[Body] = []
        piece = self._open
        if not isinstance(piece, MessagePiece):
            piece = MessagePiece(index=len(self.pieces))
            events += self._begin(piece)
        logprobs, self._unplaced = self._unplaced, []
        if text or logprobs:
            events.append(piece.say(text, logprobs))
        return events

    def _continue(self, call: Call) -> list[Body]:
        """Continue the open call, and end it."""
        self._unplaced.clear()
        piece = self._open
        if not isinstance(piece, CallPiece):
            raise RuntimeError("a call goes on that was not begun")
        events = [piece.add(call.arguments)] if call.arguments else []
        return events + (self._close("completed") if call.is_done else [])

    def _begin(self, piece: Piece) -> list[Body]:
        """Close the open item and open the next."""
        events = self._leave(is_whole=True)
        self.pieces.append(piece)
        self._open = piece
        return events + piece.opening()

    def _leave(self, *, is_whole: bool) -> list[Body]:
        """Close the open item; a complete call is closed already."""
        is_cut = isinstance(self._open, CallPiece)
        return self._close("completed" if is_whole and not is_cut else "incomplete")

    def _close(self, status: str) -> list[Body]:
        piece, self._open = self._open, None
        return [] if piece is None else piece.closing(status)
