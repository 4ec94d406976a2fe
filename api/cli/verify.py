"""``foretoken verify``: check, without a server, whether a model gives recorded answers again."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest
from ..receipts.recorded import CheckedReceipts
from .config import Chosen, given_options
from .flags import Parser

if TYPE_CHECKING:
    from ..dialects.batches.bodies import OutputLine

KINDS = (Chosen, EngineConfig)
DIFFERENT, INEXACT = 1, 3  # exit statuses if an answer differs: of an exact model, or not
VERIFY = {"messages": "/v1/chat/completions/verify", "prompt": "/v1/completions/verify"}
"""Routes by the field of the request that holds the prompt."""


def add_flags(parser: Parser) -> None:
    """Add the arguments of ``foretoken verify``, except the model and settings."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help='JSON or JSON Lines file; each record is {"request": BODY, "response": BODY} of '
        "/v1/chat/completions or /v1/completions",
    )
    parser.add_argument(
        "--receipt",
        metavar="KEYS",
        help="check the signed receipts of the responses first, with the public keys of this file: "
        "the body of GET /v1/receipts/key",
    )


def verify(parsed: argparse.Namespace) -> int:
    """Verify all choices of all records, print a line for each, and return the exit status.

    Raises `InvalidRequest` for an invalid file, before the model is loaded.
    """
    model, options = given_options(parsed, KINDS)
    adapters = EngineConfig(lora=options.get("lora", ())).lora_folders
    receipts = None if parsed.receipt is None else CheckedReceipts(Path(parsed.receipt))
    lines = list(_lines(Path(parsed.file), adapters, receipts))
    return asyncio.run(_run(lines, model, options, receipts))


async def _run(
    lines: list[bytes],
    model: str | None,
    options: Mapping[str, Any],
    receipts: CheckedReceipts | None,
) -> int:
    from ..dialects import open_dialects
    from ..dialects.batches.lines import LineRunner
    from ..runtime.interrupts import ending_at_once
    from ..sdk.async_llm import AsyncLLM
    from ..serving.serving_context import Service
    from ..serving.settings import Settings

    found: dict[str, int] = {}

    async def put(line: OutputLine) -> None:
        text, found[line.custom_id] = _verdict_text(line)
        print(f"{line.custom_id}: {text}", flush=True)

    async def wanted() -> AsyncIterator[bytes]:
        for line in lines:
            yield line

    llm = AsyncLLM(model, **options)
    with ending_at_once():
        await llm.start()
    async with llm:
        if receipts is not None:
            receipts.check_model(llm.built.path)
        service = Service(llm, Settings())
        runner = LineRunner(
            service,
            open_dialects(service),
            num_places=lambda: llm.engine.limits.max_running,
        )
        await runner.run(wanted(), put)
    return DIFFERENT if DIFFERENT in found.values() else max(found.values())


def _verdict_text(line: OutputLine) -> tuple[str, int]:
    """Return the text to print for a verdict, and the exit status that it means."""
    import msgspec

    from ..dialects.batches.bodies import LineResponse
    from ..dialects.verifying.bodies import VerdictBody

    response = line.response
    body = response.body if isinstance(response, LineResponse) else None
    if not isinstance(body, VerdictBody):
        error = msgspec.to_builtins(body).get("error", {}) if body is not None else {}
        return f"not verified: {error.get('message', 'the request failed')}", DIFFERENT
    if body.verified:
        return f"verified, {body.checked_tokens} tokens", 0
    status = DIFFERENT if body.exact else INEXACT
    first = body.first_difference
    if first is None or (first.given is None and first.own is None):
        return f"different: the model's answer ends with {body.finish_reason}", status
    given, own = (
        "the end" if each is None else f"{each.text!r} ({each.logprob:.3f})"
        for each in (first.given, first.own)
    )
    text = f"different at token {first.position}: recorded {given}, the model gives {own}"
    if first.excluded_by is not None:
        return f"{text}, excluded by {first.excluded_by}", status
    return text if first.margin is None else f"{text}, margin {first.margin:.3f}", status


def _lines(
    file: Path, adapters: Collection[str], receipts: CheckedReceipts | None = None
) -> Iterator[bytes]:
    """Yield a request, as a line of a batch file, that verifies each choice of each record.

    A request that names one of the ``adapters`` is verified with it, any other with the base
    model. Raises `InvalidRequest`.
    """
    import msgspec

    for number, record in enumerate(_records(file), 1):
        where = f"{file}, record {number}"
        request, response = _field(record, "request", where), _field(record, "response", where)
        path = next((path for name, path in VERIFY.items() if name in request), None)
        choices = response.get("choices")
        if path is None or not isinstance(choices, list) or not choices:
            raise InvalidRequest(
                f"{where}: the request needs messages or a prompt, and the response choices",
                param="file",
            )
        asked = request.get("model")
        model = asked if isinstance(asked, str) and asked in adapters else None
        for at, choice in enumerate(choices):
            index = choice.get("index", at) if isinstance(choice, dict) else at
            answer = _answer(choice, request, f"{where}, choice {index}")
            body = {**request, "model": model, "answer": answer, "index": index, "checked_from": 0}
            if receipts is not None:
                place = f"{where}, choice {index}"
                body |= receipts.changes(request, response, choice, place, model)
            yield msgspec.json.encode(
                {
                    "custom_id": f"record {number}, choice {index}",
                    "method": "POST",
                    "url": path,
                    "body": body,
                }
            )


def _records(file: Path) -> list[Any]:
    """Return the records of a JSON or JSON Lines file. Raises `InvalidRequest`."""
    import msgspec

    try:
        data = file.read_bytes()
    except OSError as error:
        raise ForetokenError(f"{file}: {error.strerror}") from None
    bad_json = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    try:
        whole = msgspec.json.decode(data)
        records = whole if isinstance(whole, list) else [whole]
    except bad_json as whole_error:
        records = []
        for number, line in enumerate(data.splitlines(), 1):
            try:
                records += [msgspec.json.decode(line)] if line.strip() else []
            except bad_json as error:
                # The first line of a JSON file may be "{", which is no mistake.
                place, why = (f"{file}, line {number}", error) if records else (file, whole_error)
                raise InvalidRequest(f"{place} is not JSON: {why}", param="file") from None
    if not records:
        raise InvalidRequest(f"{file} has no records", param="file")
    return records


def _field(record: object, name: str, where: str) -> dict[str, Any]:
    found = record.get(name) if isinstance(record, dict) else None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{where}: {name} must be an object", param="file")
    return found


def _answer(choice: object, request: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the answer of a choice: its token ids, or its text if they were not recorded."""
    if not isinstance(choice, dict):
        raise InvalidRequest(f"{where} must be an object", param="file")
    reason = choice.get("finish_reason")
    if (ids := choice.get("token_ids")) is not None:
        return {"token_ids": ids, "finish_reason": reason}
    message = choice.get("message") or {}
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where}: message must be an object", param="file")
    text = message.get("content") if "messages" in request else choice.get("text")
    if not text or message.get("tool_calls") or request.get("echo"):
        raise InvalidRequest(
            f"{where} needs token_ids: record it with return_token_ids, since it has tool calls, "
            "an echoed prompt, or no text",
            param="file",
        )
    return {"text": text, "finish_reason": reason}
