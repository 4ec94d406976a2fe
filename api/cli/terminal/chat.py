"""``foretoken chat``: a conversation in the terminal, with a local model or a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from json import dumps, loads
from pathlib import Path
from typing import Any, Protocol

from ....core.errors import ForetokenError, InvalidRequest
from ....core.ops.machine.cache_folder import cache_folder
from ...sdk.async_llm import AsyncLLM
from ...serving.settings import Settings
from ...types.sampling_params import LeftOut, SamplingParams
from ..config import SAMPLING_FLAGS, TERMINAL, Given, model_options, with_adapter
from ..flags import engine_options
from .progress import print_startup_steps, watch_loading
from .remote import ServerModel
from .terminal import PLAIN, LocalModel, Style, style_of

HISTORY_LINES = 1000
MANY_LINES = '"""'  # begins and ends a message of several lines
HELP = f"""\
/system TEXT      set the system message; without TEXT remove it
/set NAME VALUE   set a sampling parameter; without VALUE show it, without NAME list all
/clear            begin a new conversation; the system message stays
/save FILE        write the conversation to FILE as JSON
/exit             end (also Ctrl-D)
{MANY_LINES}               begins and ends a message of several lines
Ctrl-C            stop the answer"""


class Partner(Protocol):
    """The model that answers a conversation: a local one or a server's."""

    name: str
    sampling: Mapping[str, Any]  # values of parameters that are left out, by name

    async def answer(
        self, messages: list[dict[str, Any]], params: SamplingParams, texts: list[str]
    ) -> list[int] | None:
        """Print an answer as it arrives, and append its text to ``texts`` even if interrupted.

        Returns the token ids that can replace the answer in later prompts, or None.
        """


def run(parsed: argparse.Namespace) -> int:
    """Hold a conversation with a local model or a server. Return the exit status."""
    if parsed.verbose:
        print_startup_steps()
    given = Given(parsed, TERMINAL)
    given.warn_of_unknown_variables()
    params, style = given.make(SamplingParams), style_of(parsed)
    if parsed.url is None:
        model, options = model_options(given)
        return chat(model, with_adapter(params, options), options, parsed.system, style)
    if local := _flags_of_a_model_here(parsed):
        parsed.parser.error(
            f"{local} cannot be combined with --url: the server has already loaded its model"
        )
    key = next(iter(given.make(Settings).api_keys), None)
    return chat_with_server(parsed.url, key, params, parsed.system, style)


def _flags_of_a_model_here(parsed: argparse.Namespace) -> str:
    """Return the given arguments that only apply to a local model, comma-separated."""
    names = ["MODEL"] if parsed.model is not None else []
    names += ["--revision"] if parsed.revision is not None else []
    names += ["--offline"] if parsed.offline else []
    names += ["--" + name.replace("_", "-") for name in engine_options(parsed)]
    names += ["--show-drafts"] if parsed.show_drafts else []
    return ", ".join(names)


def chat(
    model: str | None,
    params: SamplingParams,
    options: Mapping[str, Any],
    system: str | None = None,
    style: Style = PLAIN,
) -> int:
    """Hold a conversation with a local model: one turn per message, until stdin ends."""

    async def hold() -> None:
        llm = AsyncLLM(model, **options)
        await watch_loading(model, llm.start())
        async with llm:
            await Conversation(LocalModel(llm, style), params, system).hold()

    asyncio.run(hold())
    return 0


def chat_with_server(
    url: str,
    key: str | None,
    params: SamplingParams,
    system: str | None = None,
    style: Style = PLAIN,
) -> int:
    """Hold a conversation with a running server: one turn per message, until stdin ends."""

    async def hold() -> None:
        partner = await ServerModel.connect(url, key, style)
        await Conversation(partner, params, system).hold()

    asyncio.run(hold())
    return 0


def without_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without token ids, for a template that cannot render them."""
    return [
        {name: each for name, each in message.items() if name != "token_ids"}
        for message in messages
    ]


class Conversation:
    """The messages so far, the parameters of the next answer, and commands that change them."""

    def __init__(self, partner: Partner, params: SamplingParams, system: str | None) -> None:
        self._partner, self._params = partner, params
        self._messages: list[dict[str, Any]] = []
        if system:
            self._messages = [{"role": "system", "content": system}]
        self._prompt = ""  # prompt of the line that is being read
        self._answering: asyncio.Task[list[int] | None] | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/system": self._set_system,
            "/set": self._set,
            "/clear": self._clear,
            "/save": self._save,
        }

    async def hold(self) -> None:
        """Read messages and answer them until stdin ends."""
        if sys.stdin is None:
            return
        is_terminal = sys.stdin.isatty()
        with _line_editor() if is_terminal else contextlib.nullcontext():
            if is_terminal:
                print(f"{self._partner.name}: write a message, or /help; Ctrl-C stops an answer")
                self._watch_for_interrupts()
            while (text := await self._read_message(is_terminal=is_terminal)) is not None:
                name, _, rest = text.partition(" ")
                if not name.startswith("/") or not is_terminal:
                    await self._answer(text)
                elif name in ("/exit", "/quit", "/bye"):
                    return
                else:
                    self._command(name, rest.strip())

    # -- answers --------------------------------------------------------------------------------

    async def _answer(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        texts: list[str] = []
        token_ids: list[int] | None = None
        self._answering = asyncio.create_task(self._ask(messages, texts), name="answer")
        try:
            token_ids = await self._answering
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the whole conversation was cancelled, not the answer
            print("[stopped]", file=sys.stderr)
        except ForetokenError as error:  # for example a prompt that is too long
            print(f"foretoken: {error}", file=sys.stderr)
            return
        finally:
            self._answering = None
        said: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if token_ids:
            said["token_ids"] = token_ids
        self._messages = [*messages, said]

    async def _ask(self, messages: list[dict[str, Any]], texts: list[str]) -> list[int] | None:
        """Print an answer. If the token ids in messages are rejected, ask again without them."""
        try:
            return await self._partner.answer(messages, self._params, texts)
        except InvalidRequest as error:
            if not (error.param or "").endswith("token_ids"):
                raise
        messages[:] = without_ids(messages)
        return await self._partner.answer(messages, self._params, texts)

    def _watch_for_interrupts(self) -> None:
        with contextlib.suppress(NotImplementedError):  # on Windows Ctrl-C ends the conversation
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        """Stop the answer, but not the conversation."""
        if self._answering is not None:
            self._answering.cancel()
        else:
            print("\n(Ctrl-D or /exit ends the conversation)", file=sys.stderr, flush=True)
            # show the unfinished line again
            print(self._prompt, _half_line(), sep="", end="", flush=True)

    # -- commands -------------------------------------------------------------------------------

    def _command(self, name: str, rest: str) -> None:
        command = self._commands.get(name)
        if command is None:
            print(f"unknown command {name}; /help lists the commands", file=sys.stderr)
            return
        try:
            command(rest)
        except InvalidRequest as error:
            print(f"foretoken: {error}", file=sys.stderr)
        except OSError as error:
            print(f"foretoken: {error.filename}: {error.strerror}", file=sys.stderr)

    def _set_system(self, text: str) -> None:
        others = [each for each in self._messages if each["role"] != "system"]
        system = [{"role": "system", "content": text}] if text else []
        self._messages = system + others
        print("(the system message is set)" if text else "(the system message is removed)")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name not in ("", *SAMPLING_FLAGS):
            known = ", ".join(SAMPLING_FLAGS)
            raise InvalidRequest(f"{name} is not one of {known}", param=name)
        if value:
            try:
                given = loads(value)
            except ValueError:
                given = value
            self._params = replace(self._params, **{name: given})
        for each in (name,) if name else SAMPLING_FLAGS:
            print(each, self._in_force(each))

    def _in_force(self, name: str) -> str:
        """Return the value of a parameter as text.

        If it is not set, the text says that the model's default applies, with its value if known.
        """
        value = getattr(self._params, name)
        if not isinstance(value, LeftOut):
            return dumps(value)
        if name not in self._partner.sampling:
            return "(the model's default)"
        return f"(the model's default: {dumps(self._partner.sampling[name])})"

    def _clear(self, _text: str) -> None:
        self._messages = [each for each in self._messages if each["role"] == "system"]
        print("(a new conversation)")

    def _save(self, text: str) -> None:
        if not text:
            raise InvalidRequest("/save needs the name of a file", param="file")
        document = dumps(without_ids(self._messages), ensure_ascii=False, indent=2)
        path = Path(text).expanduser()
        path.write_text(document + "\n", "utf-8")
        print(f"(saved to {path})")

    # -- messages -------------------------------------------------------------------------------

    async def _read_message(self, *, is_terminal: bool) -> str | None:
        """Return the next non-empty message; None at the end of stdin."""
        while (line := await self._read("> " if is_terminal else "")) is not None:
            if not line.startswith(MANY_LINES) or not is_terminal:
                if line.strip():
                    return line
                continue
            lines = [line.removeprefix(MANY_LINES)]
            while not lines[-1].endswith(MANY_LINES):
                more = await self._read(". ")
                if more is None:
                    return None
                lines.append(more)
            return "\n".join(lines).removesuffix(MANY_LINES).strip("\n")
        return None

    async def _read(self, prompt: str) -> str | None:
        self._prompt = prompt
        return await _read_line(prompt)


# -- stdin ------------------------------------------------------------------------------------


async def _read_line(prompt: str) -> str | None:
    """Return the next line of stdin without its end; None at the end of stdin.

    It is read in a daemon thread, since an executor's thread would block the exit.
    """
    future: Future[str | None] = Future()
    # otherwise `set_result` would fail after the waiting task was cancelled
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(input(prompt) if prompt else _piped_line())
        except EOFError:
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, name="foretoken-stdin", daemon=True).start()
    return await asyncio.wrap_future(future)


def _piped_line() -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _half_line() -> str:
    """Return the typed part of the current line, if readline is available."""
    readline = sys.modules.get("readline")
    return "" if readline is None else readline.get_line_buffer()


@contextlib.contextmanager
def _line_editor() -> Iterator[None]:
    """Enable arrow keys and a history in the cache folder, if readline is available."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(cache_folder() / "chat_history")
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(cache_folder() / "chat_history")
