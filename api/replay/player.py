"""Player: a conversation again with something changed, turn by turn, through the server's routes.

Turns before the change are verified: their recorded answers are the drafts, so that they cost their
prompts, which the turns behind need anyway. Behind the change, answers are generated with the
recorded noise. Recorded results of tools are used while the calls are equal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import ForetokenError, InvalidRequest
from ..certify.records import RecordedRequest
from ..dialects import open_dialects
from ..runtime.chat import ChatAnswer
from ..runtime.conversation.normalize import Normalizer
from ..runtime.conversation.token_history import TokenHistory
from ..runtime.verifying.visible_text import VisibleText
from ..serving.errors import ApiError
from ..serving.serving_context import Service
from ..serving.settings import Settings
from ..text.tokenizer import Tokenizer
from ..types.results import TextDelta
from .changes import Changes
from .client import ReplayChat, ReplayClient, Taking, seed_of
from .conversation import Answered, Conversation
from .forms import Call, Item, route_of, token_id_fields
from .outcome import CallLine, Outcome, Played, Side, first_difference, sides, sides_by_text
from .sessions import Turn
from .tools import ToolCommand
from .verifying import usage_of

MOST_NEW = 64  # turns in a row that the recording lacks


class _Ended(Exception):  # noqa: N818 - the replay ends here, as the outcome says
    """Raised where the replay ends before the recording does."""


class _Stuck(_Ended):
    """Raised where the replay cannot continue, although the model would."""


@dataclasses.dataclass(slots=True)
class _Answer:
    """The answer of a turn: its response, its items and calls, and the recorded answer's calls."""

    played: Played
    items: list[Item]
    calls: list[Call]
    recorded_calls: list[Call]
    id: str  # id of the response


class Player:
    """Replays one conversation on a started client."""

    def __init__(
        self,
        llm: ReplayClient,
        turns: Sequence[Turn],
        changes: Changes,
        *,
        tools: ToolCommand | None = None,
        tell: Callable[[Played], None] = lambda _: None,
    ) -> None:
        """Apply the changes. Raises `InvalidRequest` for a change without an effect."""
        self._llm, self._turns, self._changes = llm, turns, changes
        self._conversation = Conversation(turns, changes)
        self._tools, self._tell = tools, tell
        self._first = turns[0].records[0]
        self._has_diverged = False  # whether a call was not in the recording
        self._told: set[int] = set()  # identities of reported turns
        self._last_id = ""  # id of the last response
        self._recorded_tokenizer: Tokenizer | None = None  # only for a comparison of two models

    async def run(self, session: str) -> Outcome:
        """Replay all turns; the outcome says where and why it ended."""
        llm = self._llm
        self._dialects = open_dialects(self._service())
        outcome = self._outcome = Outcome(
            session=session,
            model=llm.built.name,
            num_turns=len(self._turns),
            exact=llm.built.exact and self._first.exact,
        )
        if self._changes.other_model:
            self._recorded_tokenizer = await asyncio.to_thread(_tokenizer_of, self._first)
        try:
            await self._play_all()
        except _Ended as reason:
            outcome.ended, outcome.is_stuck = str(reason), isinstance(reason, _Stuck)
        return outcome

    def _service(self) -> Service:
        """Return the context of the routes, with the recorded settings of prompts."""
        facts = self._first.serving
        names = ("tool_parser", "reasoning_parser", "normalize", "token_history")
        own = {} if self._changes.other_model else {n: facts[n] for n in names if n in facts}
        settings = Settings(**own)
        service = Service(self._llm, settings)
        service.chat = ReplayChat(
            self._llm,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            history=TokenHistory(max_bytes=settings.token_history_bytes)
            if settings.token_history
            else None,
            normalizer=Normalizer(settings.normalize),
        )
        return service

    async def _play_all(self) -> None:
        at: int | None = 0
        while at is not None:
            items = self._conversation.items(at)
            answer = await self._play(at, items)
            try:
                at = await self._next(at, items, answer)
            finally:
                self._tell_once(answer.played)

    async def _next(self, at: int, items: list[Item], answer: _Answer) -> int | None:
        """Put the answer into the later turns; return the next turn, or None at the end."""
        conversation = self._conversation
        answered = conversation.answered(at, answer.recorded_calls)
        is_equal = answer.played.kind in ("equal", "same")
        if is_equal and not self._has_diverged:
            if answered is None:
                return None
            if conversation.continues_by_id(at + 1) and answered.results:
                parts = self._recorded_parts(answered, answer.calls)
                conversation.rename(at, answered, parts)
            answer.played.calls = [CallLine(c.text, c.text, "recording") for c in answer.calls]
            return at + 1
        if not answer.calls:
            return self._after_words(at, answered, answer)
        if answered is None and self._same_calls(answer.calls, answer.recorded_calls):
            answer.played.calls = [CallLine(c.text, c.text, "") for c in answer.calls]
            return None
        parts = await self._results(answered, answer)
        self._tell_once(answer.played)  # before turns that are added
        if answered is not None and answered.calls:
            conversation.replace(at, answered, answer.items, parts)
            return at + 1
        added = [*answer.items, *conversation.form.results((), parts)]
        added += await self._play_new(at, items, added)
        if answered is None:
            return None
        conversation.replace(at, answered, added, ())
        return at + 1

    def _recorded_parts(self, answered: Answered, calls: Sequence[Call]) -> list[Item]:
        recorded = self._conversation.recorded_results(answered)
        form = self._conversation.form
        pairs = zip(recorded, calls, strict=False)
        return [form.with_id(part, call) for part, call in pairs if part is not None]

    def _after_words(self, at: int, answered: Answered | None, answer: _Answer) -> int | None:
        """Continue after an answer without calls, with the user's next message."""
        conversation = self._conversation
        known = answer.recorded_calls if answered is None else answered.calls
        answer.played.calls = [CallLine("", each.text, "") for each in known]
        if answered is None:
            return None
        if not answered.calls:
            conversation.replace(at, answered, answer.items, ())
            return at + 1
        found = conversation.next_words(at, answered.start)
        if found is None:
            missing = f"the other {len(self._turns) - at - 1} recorded turns have no counterpart"
            raise _Ended(f"the model answers without a call here; {missing}")
        later, index = found
        if later > at + 1:
            numbers = f"{self._turns[at + 1].number} to {self._turns[later - 1].number}"
            note = f"recorded turns {numbers} have no counterpart: the model made no call"
            answer.played.notes.append(note)
        conversation.skip(later, answered.start, index, answer.items)
        return later

    @staticmethod
    def _same_calls(calls: Sequence[Call], recorded: Sequence[Call]) -> bool:
        return [each.key for each in calls] == [each.key for each in recorded]

    async def _results(self, answered: Answered | None, answer: _Answer) -> list[Item]:
        """Return a result of each call: the recorded one while calls are equal, else the tool's."""
        conversation, form = self._conversation, self._conversation.form
        recorded = [] if answered is None else conversation.recorded_results(answered)
        known = [] if answered is None else answered.calls
        parts: list[Item] = []
        for index, call in enumerate(answer.calls):
            before = known[index] if index < len(known) else None
            part = recorded[index] if index < len(recorded) else None
            is_equal = before is not None and before.key == call.key and part is not None
            line = CallLine(call.text, "" if before is None else before.text, "")
            if is_equal and part is not None and not self._has_diverged:
                parts.append(form.with_id(part, call))
                line = dataclasses.replace(line, source="recording")
            else:
                self._has_diverged = True
                answer.played.calls.append(line)
                parts.append(form.result(call, await self._ask(call)))
                line = dataclasses.replace(answer.played.calls.pop(), source="tool")
            answer.played.calls.append(line)
        answer.played.calls += [CallLine("", each.text, "") for each in known[len(answer.calls) :]]
        return parts

    async def _ask(self, call: Call) -> str:
        if self._tools is None:
            raise _Stuck(
                f"the recording has no result for {call.text}; --tools 'COMMAND' runs a tool"
            )
        try:
            return await self._tools.ask(call)
        except ForetokenError as error:
            raise _Stuck(str(error)) from None

    async def _play_new(self, at: int, items: Sequence[Item], added: list[Item]) -> list[Item]:
        """Play turns that the recording lacks, up to an answer without calls; return their items.

        ``added``: the items after turn ``at``.
        """
        new: list[Item] = []
        for _ in range(MOST_NEW):
            answer = await self._play(at, [*items, *added, *new], is_new=True)
            new += answer.items
            try:
                parts = await self._results(None, answer)
            finally:
                self._tell_once(answer.played)
            if not answer.calls:
                return new
            new += self._conversation.form.results((), parts)
        raise _Stuck(f"the model still makes calls after {MOST_NEW} turns that were not recorded")

    def _tell_once(self, turn: Played) -> None:
        """Report a turn, once its calls have results."""
        if id(turn) not in self._told:
            self._told.add(id(turn))
            self._tell(turn)

    # -- one turn -------------------------------------------------------------------------------

    async def _play(self, at: int, items: Sequence[Item], *, is_new: bool = False) -> _Answer:
        """Submit a turn and return its answer. Raises `_Ended` if the server refuses it."""
        turn, conversation = self._turns[at], self._conversation
        records = {} if is_new else {_part(each): each for each in turn.records}
        number = len(self._outcome.turns) + 1
        taking = Taking(
            records=records,
            is_same=not is_new and conversation.is_same(at),
            seed=seed_of(self._first, number),
            sampling=self._changes.sampling,
            other_model=self._changes.other_model,
        )
        by_id = conversation.continues_by_id(at) or (is_new and self._is_by_id)
        own = self._own_items(items) if is_new and by_id else items
        body = conversation.body(at, own, (self._last_id or None) if by_id else None)
        if conversation.continues_by_id(at) and not self._last_id:
            before = body["previous_response_id"]
            raise _Stuck(f"turn {turn.number} continues {before}, which was not recorded")
        name = f"a turn after turn {turn.number}" if is_new else f"turn {turn.number}"
        began = time.perf_counter()
        whole = await self._submit(turn.path, body, taking, name)
        seconds = time.perf_counter() - began
        answer = self._answer(turn, whole, taking, is_new=is_new)
        answer.played.num_items, answer.played.seconds = len(items), seconds
        if taking.other_model and (names := token_id_fields(body)):
            note = f"token ids of the recorded model are used as they are: {', '.join(names)}"
            answer.played.notes.append(note)
        self._last_id = answer.id
        self._outcome.turns.append(answer.played)
        return answer

    def _own_items(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items of a new turn that the server does not have: those after its answer."""
        last = max(i for i, item in enumerate(items) if self._conversation.form.is_answer(item))
        return items[last + 1 :]

    @property
    def _is_by_id(self) -> bool:
        """Whether any turn names the response that it continues."""
        return any(map(self._conversation.continues_by_id, range(len(self._turns))))

    async def _submit(
        self, path: str, body: dict[str, Any], taking: Taking, name: str
    ) -> Mapping[str, Any]:
        dialect = self._dialects[route_of(path)]
        try:
            data = msgspec.json.encode(body)
        except UnicodeEncodeError:  # surrogates from the command line
            message = f"{name}: a changed text is not valid Unicode"
            raise InvalidRequest(message, param="change") from None
        self._llm.taking = taking
        try:
            reply = await dialect.submit(dialect.decode(data))
            try:
                whole = msgspec.to_builtins(await reply.whole())
            finally:
                reply.close()
        except (ForetokenError, ApiError) as error:
            raise _Stuck(f"{name} was refused: {error}") from None
        finally:
            self._llm.taking = None
        if not taking.opened:
            raise _Stuck(f"{name} has no answer")
        found: Mapping[str, Any] = whole
        return found

    def _answer(
        self, turn: Turn, whole: Mapping[str, Any], taking: Taking, *, is_new: bool
    ) -> _Answer:
        opened, form, llm = taking.opened[-1], self._conversation.form, self._llm
        generation, record = opened.answer.generations[0], opened.records[0]
        request = generation.request
        tokens = request.tokens[request.prompt_len :].tolist()
        reason = generation.finish_reason or ""
        decode = partial(llm.tokenizer.decode, skip_special_tokens=False)
        items = form.answer(whole)
        played = Played(
            number=None if is_new else turn.number,
            id=str(whole.get("id", "")) or opened.answer.request_id,
            kind="new",
            recorded=None,
            now=Side(decode(tokens), num_tokens=len(tokens), finish_reason=reason),
            **usage_of(opened.answer),
        )
        recorded_calls: list[Call] = []
        if record is not None and record.redacted is not None:
            played.recorded = Side(record.redacted, finish_reason=record.finish_reason)
        elif record is not None:
            if taking.chats and not taking.other_model:
                recorded_calls = _recorded_calls(llm, taking.chats[-1], record)
            self._compare(played, record, tokens, reason, taking)
            played.recorded_seconds = record.seconds
        if taking.has_other_prompt:
            note = "the template renders another prompt now; the recorded prompt was used"
            played.notes.append(note)
        answer_id = str(whole.get("id", ""))
        return _Answer(played, items, form.calls(items), recorded_calls, answer_id)

    def _compare(
        self,
        played: Played,
        record: RecordedRequest,
        tokens: list[int],
        reason: str,
        taking: Taking,
    ) -> None:
        """Compare an answer with the recorded one; another model's tokens by their text."""
        decode = partial(self._llm.tokenizer.decode, skip_special_tokens=False)
        if taking.other_model:
            if self._recorded_tokenizer is not None:
                text = self._recorded_tokenizer.decode(record.tokens, skip_special_tokens=False)
                played.recorded, own, played.position = sides_by_text(text, tokens, decode)
                played.now = dataclasses.replace(own, finish_reason=reason)
            played.kind = "changed"
            return
        position = first_difference(record.tokens, tokens, (record.finish_reason, reason))
        recorded, now = sides(record.tokens, tokens, position, decode)
        played.recorded = dataclasses.replace(recorded, finish_reason=record.finish_reason)
        played.now = dataclasses.replace(now, finish_reason=reason)
        played.position = position
        kinds = ("equal", "parted") if taking.is_same else ("same", "changed")
        played.kind = kinds[0] if position is None else kinds[1]  # type: ignore[assignment]


def _part(record: RecordedRequest) -> int:
    return 0 if record.asked is None else record.asked.part


def _tokenizer_of(record: RecordedRequest) -> Tokenizer | None:
    """Return the tokenizer of the recorded model; None if the model is not here."""
    try:
        return Tokenizer.load(Path(record.model), max_model_len=len(record.prompt) + 1)
    except (ForetokenError, OSError):
        return None


def _recorded_calls(llm: ReplayClient, chat: ChatAnswer, record: RecordedRequest) -> list[Call]:
    """Return the calls of a recorded answer, read as the server reads an answer."""
    reader = chat.reader()
    text = VisibleText(llm, chat.answer, reader)
    for index, token_id in enumerate(record.tokens):
        end = None
        if index == len(record.tokens) - 1:
            end = TextDelta(finish_reason=record.finish_reason, stop_reason=record.stop_reason)
        text.add(token_id, end)
    return [Call(each.name, each.arguments) for each in reader.choice.tool_calls]
