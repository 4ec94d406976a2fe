"""``foretoken run``: one answer in the terminal, or a conversation without a prompt."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import mimetypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....core.errors import InvalidRequest, PromptTooLong
from ...build.model_files import names_model
from ...sdk.async_llm import AsyncLLM
from ...types.sampling_params import SamplingParams
from ..config import TERMINAL, Given, model_options, with_adapter
from ..flags import TWO_MODELS
from .chat import chat
from .progress import print_startup_steps, watch_loading
from .terminal import LocalModel, Style, style_of

MAX_INPUT_BYTES = 64 * 2**20
NOTHING_CAME = "[no text: --raw continues the prompt as it is; without --raw the model answers]"
ONLY_THOUGHTS = "[no answer: the model was still reasoning; raise --max-tokens]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt with its system message and images."""

    prompt: str
    system: str | None
    images: Sequence[str]  # data URLs
    is_raw: bool

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The first messages of the conversation that this question begins."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        if not self.images:
            return [*system, {"role": "user", "content": self.prompt}]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        text = {"type": "text", "text": self.prompt}
        return [*system, {"role": "user", "content": [*parts, text]}]


def run(parsed: argparse.Namespace) -> int:
    """Print an answer, or hold a conversation. Return the exit status."""
    if parsed.verbose:
        print_startup_steps()
    named, prompt = read_words(parsed)
    if named is not None:
        parsed.model = named
    given = Given(parsed, TERMINAL)
    given.warn_of_unknown_variables()
    model, options = model_options(given)
    params = with_adapter(given.make(SamplingParams), options)
    if parsed.json_schema is not None:
        params = replace(params, json_schema=read_schema(parsed.json_schema))
    images, style = [data_url(Path(each)) for each in parsed.image], style_of(parsed)
    question = _question(parsed, prompt, images)
    if question is None:
        return chat(model, params, options, parsed.system, style)
    try:
        asyncio.run(_answer(question, model, params, options, style))
    except PromptTooLong as error:
        excess = error.num_tokens - error.limit
        raise InvalidRequest(f"{error} Shorten the prompt by at least {excess:,} tokens.") from None
    return 0


def _question(
    parsed: argparse.Namespace, prompt: str | None, images: Sequence[str]
) -> Question | None:
    """Return the question; None to hold a conversation.

    Raises `InvalidRequest` for incompatible flags, and for an empty prompt.
    """
    if parsed.raw and (parsed.system or images):
        flag = "--system" if parsed.system else "--image"
        raise InvalidRequest(
            f"{flag} cannot be combined with --raw: it needs the chat template", param="raw"
        )
    piped = piped_text()
    text = joined(piped or "", prompt or "", is_raw=parsed.raw)
    if text.strip():
        return Question(prompt=text, system=parsed.system, images=images, is_raw=parsed.raw)
    if prompt is None and piped is None and sys.stdin is not None:
        if images or parsed.raw:
            raise InvalidRequest(f"{'--image' if images else '--raw'} needs a prompt")
        return None
    where = "the prompt" if prompt is not None else "standard input"
    raise InvalidRequest(
        f"{where} is empty: give a prompt, or run it on a terminal without a prompt to chat"
    )


async def _answer(
    question: Question,
    model: str | None,
    params: SamplingParams,
    options: Mapping[str, Any],
    style: Style,
) -> None:
    texts: list[str] = []
    llm = AsyncLLM(model, **options)
    await watch_loading(model, llm.start())
    async with llm:
        partner = LocalModel(llm, style)
        is_raw = question.is_raw or not llm.tokenizer.chat_template
        if not is_raw:
            await partner.answer(question.messages, params, texts)
        elif question.is_raw or not (question.system or question.images):
            await partner.complete(question.prompt, params, texts)
        else:
            flag = "--system" if question.system else "--image"
            raise InvalidRequest(f"{flag} needs a chat template, and {partner.name} has none")
    if not "".join(texts).strip():
        print(NOTHING_CAME if is_raw else ONLY_THOUGHTS, file=sys.stderr)


# -- arguments and standard input ----------------------------------------------------------------


def read_words(parsed: argparse.Namespace) -> tuple[str | None, str | None]:
    """Return the model and the prompt, each None if it is missing.

    A single argument is the model if it can name one and --model is not given; otherwise, and after
    "--", it is the prompt. Exits with status 2 for more than two arguments, and if the first of two
    does not name a model.
    """
    words, refuse = [*parsed.words, *parsed.rest], parsed.parser.error
    if len(words) > 2:
        parsed.parser.refuse(words[2])
    if len(words) == 2:
        model, prompt = words
        if not names_model(model):
            if names_model(prompt):
                refuse(f"the model comes before the prompt: foretoken run {prompt} PROMPT")
            refuse(f"{model!r} is not a model; quote a prompt with spaces")
        if parsed.model not in (None, model):
            refuse(TWO_MODELS)
        return model, prompt
    if not words:
        return None, None
    (word,) = words
    is_model = parsed.model is None and not parsed.rest and names_model(word)
    return (word, None) if is_model else (None, word)


def piped_text() -> str | None:
    """Return the text of standard input; None if it is a terminal or closed.

    Raises `InvalidRequest` for data that is not text, and for more than 64 MiB.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise InvalidRequest(f"standard input has more than {MAX_INPUT_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input is not text in UTF-8: byte {error.start:,} is "
            f"0x{data[error.start]:02x}"
        ) from None
    if "\0" in text:
        raise InvalidRequest("standard input is not text: it contains NUL bytes")
    return text


def joined(piped: str, prompt: str, *, is_raw: bool) -> str:
    """Return standard input and the prompt as two paragraphs, or unchanged if ``is_raw``."""
    if is_raw:
        return piped + prompt
    return "\n\n".join(part for part in (piped.strip("\r\n"), prompt) if part.strip())


def read_schema(given: str) -> dict[str, object]:
    """Return a JSON schema from a file or from the text itself. Raises `InvalidRequest`."""
    is_file = not given.lstrip().startswith("{")
    try:
        text = Path(given).read_text("utf-8") if is_file else given
        found = json.loads(text)
    except OSError as error:
        raise InvalidRequest(f"--json-schema: {given}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--json-schema: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("--json-schema: a schema must be a JSON object")
    return found


def data_url(path: Path) -> str:
    """Return an image file as a data URL. Raises `InvalidRequest`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"--image: {path}: {error.strerror}") from None
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    if not kind.startswith("image/"):
        raise InvalidRequest(f"--image: {path} is not an image but {kind}")
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
