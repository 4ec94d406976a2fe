"""ComparedTokens: recorded token ids beside the model's own tokens, and how both answers end."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.errors import InvalidRequest
from ....core.interface.extras.token_comparison import TokenComparison
from ....core.scheduling.output_processor import end_at
from ...types.results import TextDelta
from .asked import Opened
from .recorded import RecordedAnswer


class ComparedTokens:
    """Reads the comparisons of an answer and follows its text to its end.

    - ``own``: the model's tokens that were compared with recorded ones.
    - ``text``: the visible text of the recorded tokens.
    - ``differences``: the comparisons in which the tokens differ.
    - ``num_same``: number of tokens before the end of the model's or of the recorded answer.
    - ``given_after_end``: the recorded token after the end of the model's answer, if there is one.
    - ``own_after_end``: the model's token after the end of the recorded answer, if the answer must
      end there.
    - ``ends_otherwise``: whether the two answers end for different reasons.

    ``comparisons`` come from the engine. ``context``: maximum number of tokens of prompt and
    answer. Reading a long answer takes seconds, so it is done in a thread. Raises `InvalidRequest`
    if the request's parameters allow no token somewhere.
    """

    def __init__(
        self,
        opened: Opened,
        recorded: RecordedAnswer,
        token_ids: Sequence[int],
        comparisons: Sequence[TokenComparison],
        context: int,
    ) -> None:
        self._request, self._visible = opened.answer.request, opened.text
        self._by_position = {each.position: each for each in comparisons}
        self.token_ids, self._recorded = token_ids, recorded
        wanted, room = opened.answer.params.max_tokens, context - self._request.prompt_len
        self._most = room if wanted is None else min(room, wanted)
        self._num_read = 0  # number of tokens in the text
        self.own: list[int] = []
        self.text = ""
        self.differences: list[TokenComparison] = []
        self.num_same = 0
        self.given_after_end: int | None = None
        self.own_after_end: TokenComparison | None = None
        self.ends_otherwise = False
        if self._follow():
            self._compare_ends()

    def _follow(self) -> bool:
        """Read the recorded tokens; return whether their end, or the model's, was reached."""
        for position, token_id in enumerate(self.token_ids):
            if position >= self._recorded.checked_from and not self._take(position, token_id):
                return False
            self.num_same += 1
            if self._ends_with(token_id):
                return True
        return True

    def _take(self, position: int, token_id: int) -> bool:
        """Take the comparison of a token; return whether there is one."""
        found = self._by_position.get(position)
        if found is None or found.own < 0:
            if not self.differences:
                raise _nothing_allowed(position)
            return False
        self.own.append(found.own)
        if found.own != token_id:
            self.differences.append(found)
        return True

    def _compare_ends(self) -> None:
        reason = self._recorded.finish_reason
        if self.num_same < len(self.token_ids):
            self.given_after_end = self.token_ids[self.num_same]
            return
        after = None
        if self._visible.finish_reason is None:
            after = self._by_position.get(self.num_same)
        # Token ids may lack only a stop token; a text also lacks the end of a stop string.
        is_text = self._recorded.token_ids is None
        may_lack = after is not None and (is_text or after.own in self._request.stop_ids)
        if after is not None and may_lack and after.own >= 0 and self._ends_with(after.own):
            self.num_same += 1
            if is_text:
                self.own.append(after.own)
        if self._recorded.may_continue:
            return
        if self._visible.finish_reason is None:
            if after is not None and after.own < 0:
                raise _nothing_allowed(self.num_same)
            self.own_after_end = after
            self.ends_otherwise = after is None
        else:
            self.ends_otherwise = self._visible.finish_reason != reason

    def _ends_with(self, token_id: int) -> bool:
        """Add a token to the text; return whether it ends the answer."""
        self._num_read += 1
        is_full = self._num_read >= self._most
        end = end_at(self._request, token_id, is_full=is_full)
        last = None
        if end is not None:
            last = TextDelta(token_ids=[token_id], finish_reason=end[0].value, stop_reason=end[1])
        self.text += self._visible.add(token_id, last)
        return end is not None


def _nothing_allowed(position: int) -> InvalidRequest:
    message = f"the request's parameters allow no token after the answer's first {position} tokens"
    return InvalidRequest(message, param="answer")
