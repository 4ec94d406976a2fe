"""The command ``foretoken``. Heavy imports happen inside the commands: --help is instant."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from .._version import __version__
from ..core.config import EngineConfig, parse_size
from ..core.errors import ForetokenError, InvalidRequest
from ..core.params import SamplingParams

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
MAX_PORT = 65535
SAMPLING_FLAGS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Errors are one line; flags are not guessed from their beginnings."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    args = sys.argv[1:] if argv is None else list(argv)
    if args[:1] == ["bench"]:
        return _bench(args[1:])
    parser = _parser()
    parsed = parser.parse_args(args)
    if parsed.command is None:
        parser.error("a command is needed")
    command: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return command(parsed)
    except InvalidRequest as error:
        print(f"{parsed.parser.prog}: {error}", file=sys.stderr)
        return 2
    except ForetokenError as error:
        print(f"foretoken: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        _drop_output()
        return 141


def _drop_output() -> None:
    """What is still buffered would raise again at exit."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser(prog="foretoken", description="LLM inference with speculative decoding")
    parser.add_argument("--version", action="version", version=f"foretoken {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_serve(commands)
    _add_run(commands)
    _add_chat(commands)
    commands.add_parser("bench", help="measure something; see bench/README.md", add_help=False)
    return parser


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    serve = commands.add_parser("serve", help="an OpenAI-compatible HTTP server")
    serve.set_defaults(run=_serve, parser=serve)
    _add_model(serve)
    _add_engine_flags(serve)
    _add_server_flags(serve)


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    run = commands.add_parser("run", help="one completion, streamed to the terminal")
    run.set_defaults(run=_run, parser=run)
    run.add_argument("prompt", metavar="PROMPT")
    _add_model(run)
    _add_show_drafts(run)
    _add_sampling_flags(run)
    _add_engine_flags(run)


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    chat = commands.add_parser("chat", help="a conversation in the terminal")
    chat.set_defaults(run=_chat, parser=chat)
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    _add_show_drafts(chat)
    _add_sampling_flags(chat)
    _add_engine_flags(chat)


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder in Hugging Face layout, or a hub id; nothing: the built-in pair",
    )


def _add_show_drafts(parser: Parser) -> None:
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="colour each token by the source that drafted it, the target's own plain, and end "
        "with a legend; in colour on a terminal or with FORCE_COLOR, never with NO_COLOR",
    )


def _add_engine_flags(parser: Parser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--draft",
        help="auto, none, or a comma list of radix, suffix, ngram, PATH, oracle:P",
        metavar="SPEC",
    )
    add("--speculation", type=_depth, metavar="auto|off|K", help="K: fixed draft tokens a step")
    add("--verify", choices=("coupled", "rejection"))
    add("--exact", choices=("spec", "batch", "off"))
    add("--device", choices=("auto", "cpu", "cuda"))
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    add("--quantize", choices=("none", "int8", "int4"))
    add("--kv-cache-dtype", choices=("auto", "int8", "fp8"))
    pool = group.add_mutually_exclusive_group()
    pool.add_argument("--kv-memory", type=_size, metavar="SIZE", help="of the KV pool, e.g. 4GiB")
    pool.add_argument("--kv-tokens", type=int, metavar="N", help="size of the KV pool")
    add("--page-size", type=int, metavar="N", help="tokens of one KV page")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    add("--max-batch-tokens", type=int, metavar="N", help="tokens of one step")
    add("--max-running", type=int, metavar="N", help="requests in one step")
    add("--max-queued", type=int, metavar="N", help="requests that may wait")
    add("--threads", type=int, metavar="N", help="of the model on the CPU")
    add("--load-format", choices=("auto", "random"), help="random: seeded random weights")


def _add_server_flags(parser: Parser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=_port, default=8000, help="0: any free one")
    add("--uds", metavar="PATH", help="listen on a Unix socket instead")
    add("--api-key", action="append", metavar="KEY", help="or FORETOKEN_API_KEY; repeatable")
    add("--served-model-name", metavar="NAME")
    add("--log-level", choices=LOG_LEVELS, default="info")
    add("--drain-seconds", type=_seconds, default=30.0, metavar="S", help="after SIGTERM")


def _add_sampling_flags(parser: Parser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, metavar="N")
    add("--min-tokens", type=int, metavar="N")
    add("--temperature", type=float, metavar="T", help="0: greedy")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="K")
    add("--min-p", type=float, metavar="P")
    add("--seed", type=int, metavar="N")
    add("--stop", action="append", metavar="TEXT", help="repeatable")
    add("--ignore-eos", action="store_true", default=None)
    add("--presence-penalty", type=float, metavar="X")
    add("--frequency-penalty", type=float, metavar="X")
    add("--repetition-penalty", type=float, metavar="X")


def _depth(text: str) -> str | int:
    if text in ("auto", "off"):
        return text
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not auto, off or a number")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except InvalidRequest:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 4GiB") from None


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port from 0 to {MAX_PORT}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e6:  # also false for nan
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return seconds


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that were given."""
    given = {name: getattr(parsed, name) for name in EngineConfig.names()}
    return {name: value for name, value in given.items() if value is not None}


def sampling_params(parsed: argparse.Namespace) -> SamplingParams:
    """The sampling flags that were given."""
    given = {name: getattr(parsed, name) for name in SAMPLING_FLAGS}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _serve(parsed: argparse.Namespace) -> int:
    options = engine_options(parsed)
    EngineConfig(**options)  # before the slow imports
    from .sdk import AsyncLLM
    from .server import Listen, run
    from .service import Settings

    listen = Listen(
        host=parsed.host,
        port=parsed.port,
        uds=parsed.uds,
        log_level=parsed.log_level,
        drain_seconds=parsed.drain_seconds,
        settings=Settings(api_keys=_api_keys(parsed), served_name=parsed.served_model_name),
    )
    return run(AsyncLLM(parsed.model, **options), listen)


def _api_keys(parsed: argparse.Namespace) -> tuple[str, ...]:
    keys = list(parsed.api_key or ())
    if "FORETOKEN_API_KEY" in os.environ and not keys:
        keys = [os.environ["FORETOKEN_API_KEY"]]
    if not all(keys):
        parsed.parser.error("an API key must not be empty")
    return tuple(keys)


def _run(parsed: argparse.Namespace) -> int:
    from .terminal import run

    params, options = sampling_params(parsed), engine_options(parsed)
    return run(parsed.prompt, parsed.model, params, options, show_drafts=parsed.show_drafts)


def _chat(parsed: argparse.Namespace) -> int:
    from .terminal import chat

    params, options = sampling_params(parsed), engine_options(parsed)
    return chat(parsed.model, params, options, parsed.system, show_drafts=parsed.show_drafts)


def _bench(args: Sequence[str]) -> int:
    """``foretoken bench NAME ...`` runs ``foretoken.bench.NAME``, which parses the rest itself."""
    package = importlib.import_module("..bench", __package__)
    names = sorted(
        module.name for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_"
    )
    parser = Parser(prog="foretoken bench", description="measure something")
    parser.add_argument("name", choices=names, help="what to measure; NAME --help tells more")
    parsed = parser.parse_args(args[:1])
    module = importlib.import_module(f"..bench.{parsed.name}", __package__)
    if not hasattr(module, "main"):
        parser.error(f"{parsed.name} is no benchmark")
    code: int | None = module.main(list(args[1:]))
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
