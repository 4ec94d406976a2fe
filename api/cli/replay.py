"""``foretoken replay``: compute a recorded answer or session again, as it was or changed."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest
from .config import Chosen, given_options
from .flags import Parser, above_zero
from .outputs import check_out, write_out

if TYPE_CHECKING:
    from ..certify.records import RecordedRequest
    from ..replay.changes import Changes
    from ..replay.outcome import Outcome, Played
    from ..replay.sessions import Session, Turn
    from ..replay.tools import ToolCommand

KINDS = (Chosen, EngineConfig)
DIFFERENT, INEXACT = 1, 3  # exit statuses: tokens differ, or the replay is stuck; not exact


def add_flags(parser: Parser) -> None:
    """Add the arguments of ``foretoken replay``, except the model and settings."""
    parser.add_argument(
        "id", metavar="ID", help="id of an answer or of a session, or a file of one session"
    )
    parser.add_argument(
        "--requests",
        metavar="DIR",
        help="folder of `foretoken serve --record-requests`, or a file in it; required with an id",
    )
    parser.add_argument(
        "--session",
        action="store_true",
        help="replay all turns of the session that the answer ID belongs to",
    )
    for flag, metavar, text in (
        (
            "--change",
            "PATH=TEXT",
            "replace a value of the bodies, such as messages[7].content=TEXT; PATH:=JSON for "
            "other values than texts; repeatable",
        ),
        ("--sampling", "NAME=VALUE", "sampling parameter, such as temperature=0; repeatable"),
        (
            "--tool-result",
            "CALL=TEXT",
            "replace the result of a tool call, given by its id or its number from 1; repeatable",
        ),
    ):
        parser.add_argument(flag, action="append", default=[], metavar=metavar, help=text)
    parser.add_argument("--system", metavar="FILE", help="text file with another system prompt")
    parser.add_argument(
        "--tools",
        metavar="COMMAND",
        help="command that gets a call that was not recorded as JSON on its standard input, and "
        "prints the result (default: the replay ends there)",
    )
    parser.add_argument(
        "--tool-seconds",
        type=above_zero,
        default=60.0,
        metavar="S",
        help="time limit of a run of --tools, in seconds (60)",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write the answers side by side to a page of HTML"
    )


def replay(parsed: argparse.Namespace) -> int:
    """Compute a recorded answer or session again, print it, and return the exit status.

    The status is 0 if the answers are equal, or if a changed replay came to its end. It is 1 if
    answers differ, a turn is refused or a call has no result, and 3 if they differ and the model is
    not exact.
    """
    model, options = given_options(parsed, KINDS)
    from ..certify.records import find_record
    from ..replay.sessions import find_session, only_session

    changes = _changes(parsed)
    tools = _tools(parsed.tools, parsed.tool_seconds)
    if parsed.html is not None:
        check_out(Path(parsed.html), "html")
    is_file = parsed.requests is None and Path(parsed.id).is_file()
    if parsed.requests is None and not is_file:
        message = f"--requests is required: {parsed.id} is not a file"
        raise InvalidRequest(message, param="requests")
    if is_file:
        session, turn = only_session(Path(parsed.id)), None
    else:
        session, turn = find_session(parsed.id, Path(parsed.requests))
    is_single = turn is not None and not parsed.session
    if turn is not None and is_single and _is_plain(changes, turn):
        if parsed.html is None and any(each.id == parsed.id for each in turn.records):
            return _single(find_record(parsed.id, Path(parsed.requests)), model, options)
        session = dataclasses.replace(session, turns=[turn])
    _check_alike(session)
    run = _Run(session, turn if is_single else None, changes, tools, _sources(parsed))
    outcome = asyncio.run(run.replay(model, options))
    return _end(outcome, parsed.html)


def _single(record: RecordedRequest, model: str | None, options: Mapping[str, Any]) -> int:
    """Compute one answer again and print it."""
    from ..certify.replay import replay as compute

    if record.redacted is not None:
        raise ForetokenError(f"{record.id} was redacted: the recording has no tokens to compare")
    found = asyncio.run(compute(record, model, options))
    print(found.text)
    if record.kernels != found.kernels:
        _tell(f"recorded with {record.kernels} kernels, computed with {found.kernels} now")
    if found.position is None:
        _tell(f"the same {len(found.tokens)} tokens, finish reason {found.finish_reason}")
        return 0
    at = found.position
    _tell(
        f"the answers differ from token {at} on: recorded {record.tokens[at : at + 8]}, finish "
        f"reason {record.finish_reason}; now {found.tokens[at : at + 8]}, {found.finish_reason}"
    )
    if record.exact and found.exact:
        return DIFFERENT
    _tell("the model is not exact: its tokens may depend on the batch (docs/models.md)")
    return INEXACT


class _Run:
    """The replay of one session, as recorded or with changes."""

    def __init__(
        self,
        session: Session,
        last: Turn | None,
        changes: Changes,
        tools: ToolCommand | None,
        sources: Mapping[str, str],
    ) -> None:
        self._session, self._changes, self._tools = session, changes, tools
        self._turns = session.conversation(last) if changes else session.turns
        self._sources = sources
        self._width = shutil.get_terminal_size((100, 24)).columns
        if changes:  # refuse a wrong change before the model is loaded
            from ..replay.conversation import Conversation

            Conversation(self._turns, changes)

    async def replay(self, model: str | None, options: Mapping[str, Any]) -> Outcome:
        """Load the model and replay the turns."""
        from ..replay.client import ReplayClient
        from ..replay.conversation import texts_of
        from ..replay.player import Player
        from ..replay.verifying import verify_session
        from ..runtime.interrupts import ending_at_once

        first = self._session.first
        llm = ReplayClient(model or first.model, **self._options(first, options))
        with ending_at_once():
            await llm.start()
        async with llm:
            if not self._changes.other_model:
                _check_model(first, llm.built.path)
            if not self._changes:
                return await verify_session(llm, self._session, self._show)
            player = Player(llm, self._turns, self._changes, tools=self._tools, tell=self._show)
            outcome = await player.run(self._session.name)
            outcome.changes = texts_of(self._changes, self._sources)
            left_out = len(self._session.turns) - len(self._turns)
            if left_out:
                outcome.notes.append(
                    f"{left_out} other requests of the session are not part of this conversation"
                )
            return outcome

    def _options(self, first: RecordedRequest, given: Mapping[str, Any]) -> dict[str, Any]:
        if self._changes.other_model:
            return dict(given)
        template = ("chat_template", "default_chat_template_kwargs")
        prompts = {name: first.serving[name] for name in template if name in first.serving}
        return {**first.options, **prompts, **given}

    def _show(self, turn: Played) -> None:
        from ..replay.report import turn_lines

        for line in turn_lines(turn, self._width):
            print(line, flush=True)


def _end(outcome: Outcome, html: str | None) -> int:
    """Print the summary, write the page, and return the exit status."""
    from ..replay.outcome import printable
    from ..replay.page import page
    from ..replay.report import summary

    for line in summary(outcome):
        print(printable(line))
    if html is not None:
        write_out(Path(html), page(outcome))
        print(f"page: {html}")
    if outcome.is_stuck:
        return DIFFERENT
    if not outcome.count("parted"):
        return 0
    return DIFFERENT if outcome.exact else INEXACT


def _changes(parsed: argparse.Namespace) -> Changes:
    from ..replay.changes import Changes, read_change, read_results, read_sampling

    return Changes(
        bodies=[read_change(each) for each in parsed.change],
        sampling=read_sampling(parsed.sampling),
        results=read_results(parsed.tool_result),
        system=None if parsed.system is None else _text_of(parsed.system),
        other_model=_other_model(parsed),
    )


def _other_model(parsed: argparse.Namespace) -> bool:
    """Whether ``--model`` names the model; the place behind ID is for the recorded model."""
    return parsed.model is not None and getattr(parsed, "place", None) is None


def _is_plain(changes: Changes, turn: Turn) -> bool:
    """Whether an answer is computed as recorded; without a body, another model may do it, too."""
    return not (dataclasses.replace(changes, other_model=False) if turn.body is None else changes)


def _sources(parsed: argparse.Namespace) -> dict[str, str]:
    found = {} if parsed.system is None else {"system prompt": parsed.system}
    return found | ({"model": parsed.model} if _other_model(parsed) else {})


def _tools(command: str | None, seconds: float) -> ToolCommand | None:
    from ..replay.tools import ToolCommand

    return None if command is None else ToolCommand(command, seconds)


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text("utf-8-sig")
    except OSError as error:
        raise InvalidRequest(f"--system {file}: {error.strerror}", param="system") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"--system {file}: not UTF-8", param="system") from None


def _check_alike(session: Session) -> None:
    """Raise `ForetokenError` if the turns were recorded with different models or options."""
    first = session.first
    for turn in session.turns:
        for record in turn.records:
            own = (record.mark or record.model, record.options)
            if own != (first.mark or first.model, first.options):
                raise ForetokenError(
                    f"turn {turn.number} ({record.id}) was recorded with {record.model} and "
                    f"{record.options}, turn 1 with {first.model} and {first.options}: a session "
                    "of two models cannot be replayed"
                )


def _check_model(record: RecordedRequest, path: Path) -> None:
    """Raise `ForetokenError` if the model in ``path`` is not the recorded one."""
    from ..certify.identity import model_mark

    try:
        mark = model_mark(path)
    except OSError as error:
        raise ForetokenError(f"{path}: {error.strerror}") from None
    if record.mark and mark != record.mark:
        raise ForetokenError(
            f"{path} is another model than the recorded {record.model}; --model {path} generates "
            "the session with it"
        )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
