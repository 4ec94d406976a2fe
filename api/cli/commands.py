"""The command ``foretoken``: a table of its commands, whose code is imported when it is needed.

So --version and --help answer at once, and a command imports nothing that only another one needs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..._version import __version__
from ...core.errors import ForetokenError, InvalidRequest, ModelLoadError
from ...core.ops.machine.imports import uncollected
from ..runtime.interrupts import ending_at_once
from .flags import TWO_MODELS, Parser

SERVER_MODULES = ("starlette", "uvicorn", "h11", "uvloop", "python_multipart")
"""Modules of the extra ``server``: all that speaks HTTP needs them, nothing else does."""

BENCHMARKS = ("offline", "phases", "plan", "real", "serve")
"""Modules of `foretoken.bench` that are installed and have a ``main``; others are in bench/lab."""
EPILOG = (
    "--help-all shows all flags. Each may also be set by a variable FORETOKEN_<FLAG> or in the "
    "file of --config; a flag goes before a variable, a variable before the file."
)


class Command(NamedTuple):
    """A command. Code is named as MODULE:NAME, a module of this folder."""

    name: str
    help: str
    usage: str  # behind the name
    run: str  # function that takes the parsed arguments and returns the exit code
    add: str = ""  # function that adds the command's own arguments to its parser
    has_model: bool = False  # whether MODEL is an argument behind those
    settings: str = ""  # dataclasses whose settings are flags
    epilog: str | None = None
    takes_rest: bool = False  # arguments behind "--" are not parsed and come as ``rest``

    def fill(self, parser: Parser) -> None:
        """Add all arguments to its parser."""
        parser.set_defaults(parser=parser, command=self)
        if self.add:
            _load(self.add)(parser)
        if self.has_model:
            _load("config:add_model")(parser)
        if self.settings:
            parser.add_settings(*_load(self.settings))


COMMANDS = (
    Command(
        "run",
        "answer one prompt in the terminal",
        '[MODEL] ["PROMPT"] [flags]',
        "terminal.run:run",
        "terminal.flags:add_run_flags",
        settings="config:TERMINAL",
        epilog=f"Standard input, where it is piped, goes before the prompt. {EPILOG}",
        takes_rest=True,
    ),
    Command(
        "chat",
        "hold a conversation in the terminal",
        "[MODEL] [flags]",
        "terminal.chat:run",
        "terminal.flags:add_chat_flags",
        has_model=True,
        settings="config:TERMINAL",
        epilog=EPILOG,
    ),
    Command(
        "serve",
        "serve an HTTP API: OpenAI's, Anthropic's, Ollama's and Gemini's",
        "[MODEL] [flags]",
        "serve:serve",
        "flags:add_verbose",
        has_model=True,
        settings="config:SERVE",
        epilog=EPILOG,
    ),
    Command(
        "replica",
        "run an engine for a front, which has the HTTP API",
        "[MODEL] --front tcp://HOST:PORT [flags]",
        "serve:replica",
        has_model=True,
        settings="config:REPLICA",
        epilog=EPILOG,
    ),
    Command(
        "launch",
        "start a coding agent against a running server or a fresh one",
        "claude|codex|opencode [MODEL] [flags] [-- ARGUMENTS OF THE CLIENT]",
        "commands:_launch",
        "launch:add_flags",
        has_model=True,
        settings="launch:KINDS",
        epilog="With a MODEL or a flag of the engine a fresh server serves it, on a free port, and "
        "ends with the client.",
        takes_rest=True,
    ),
    Command(
        "list",
        "list the models of this machine, and what else can be served",
        "",
        "models:list_all",
    ),
    Command(
        "show",
        "describe a model without loading it: files, type, memory, code path, or the reason why it "
        "cannot be served",
        "MODEL [flags]",
        "models:show",
        "models:add_show_flags",
        settings="models:KINDS",
    ),
    Command(
        "models",
        "former name of list, and with check MODEL of show",
        "[check MODEL]",
        "models:models",
        "models:add_models_flags",
    ),
    Command(
        "pull",
        "download a model of the hub into the cache",
        "MODEL [flags]",
        "models:pull",
        "models:add_flags",
        settings="models:KINDS",
    ),
    Command(
        "rm",
        "delete a model of the hub from the cache",
        "MODEL [flags]",
        "models:remove",
        "models:add_flags",
        settings="models:KINDS",
    ),
    Command(
        "run-batch",
        "answer the requests of a JSON Lines file, without a server",
        "IN OUT [MODEL] [flags]",
        "run_batch:run_batch",
        "run_batch:add_flags",
        has_model=True,
        settings="run_batch:KINDS",
        epilog="Exit codes: 0 all requests are answered, 1 some failed.",
    ),
    Command(
        "certify",
        "compare answers with speculation on and off, in any batch, cached or not",
        "[MODEL] [flags]",
        "certify:certify",
        "certify:add_certify_flags",
        has_model=True,
        settings="certify:KINDS",
        epilog="Exit codes: 0 no token differs, 1 one does, 3 the model has no exact bits.",
    ),
    Command(
        "replay",
        "compute a recorded answer again",
        "ID [MODEL] --requests DIR [flags]",
        "certify:replay",
        "certify:add_replay_flags",
        has_model=True,
        settings="certify:KINDS",
        epilog="Exit codes: 0 the same tokens, 1 others, 3 others of a model without exact bits.",
    ),
    Command(
        "train-draft",
        "train a draft for a model on your own data",
        "--target MODEL --data PATH... --kind KIND --out DIR [flags]",
        "train_draft:train_draft",
        "train_draft:add_flags",
    ),
    Command(
        "calibrate",
        "measure a model's queries over a text, for --kv-evict triattention:N",
        "[MODEL] --data FILE --out FILE",
        "commands:_calibrate",
        "commands:_add_calibrate_flags",
        has_model=True,
    ),
    Command(
        "selftest",
        "check and time the native kernels",
        "[flags]",
        "commands:_selftest",
        "commands:_add_selftest_flags",
    ),
    Command(
        "bench",
        "run a benchmark: serve, offline, plan, phases or real",
        "NAME [flags]",
        "commands:_bench",
    ),
)
BY_NAME = {command.name: command for command in COMMANDS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    args = sys.argv[1:] if argv is None else list(argv)
    run: Callable[[], int]
    if args[:1] == ["bench"]:
        program, run = " ".join(("foretoken", *args[:2])), partial(_bench, args[1:])
    else:
        with ending_at_once(), uncollected():
            parsed = parse(args)
            program, run = parsed.parser.prog, partial(_load(parsed.command.run), parsed)
    try:
        return run()
    except InvalidRequest as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except ForetokenError as error:
        print(f"foretoken: {error}", file=sys.stderr)
        # What a flag names cannot be served, and a restart would not help.
        return 2 if isinstance(error, ModelLoadError) and not error.may_pass else 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVER_MODULES:
            raise
        message = f"needs the extra server: pip install 'foretoken[server]' ({error})"
        print(f"{program}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        _drop_output()
        return 141
    except OSError as error:  # a full disk below our output, say
        try:
            print(end="", flush=True)
        except OSError:
            _drop_output()
        print(f"foretoken: {error}", file=sys.stderr)
        return 1


def parse(args: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exit with status 2 and one line for one that is wrong."""
    parser = _parser(args[:1])
    command = BY_NAME.get(args[0]) if args else None
    own, rest = _split(args) if command is not None and command.takes_rest else (args, [])
    parsed = parser.parse_args(own, argparse.Namespace(rest=rest))
    if parsed.command is None:
        parser.error("a command is needed")
    if getattr(parsed, "place", None) not in (None, getattr(parsed, "model", None)):
        parsed.parser.error(TWO_MODELS)
    return parsed


def _parser(needed: Collection[str] = BY_NAME) -> Parser:
    """Return the parser of all commands; only those that are needed have their arguments."""
    parser = Parser(prog="foretoken", description="LLM inference with speculative decoding")
    parser.add_argument("--version", action="version", version=f"foretoken {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, command in BY_NAME.items():
        own = commands.add_parser(
            name,
            help=command.help,
            usage=f"%(prog)s {command.usage}",
            epilog=command.epilog,
            add_help=name != "bench",
        )
        if name in needed:
            command.fill(own)
    return parser


def _split(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Arguments up to the first "--", and those behind it."""
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at + 1 :]


def _load(name: str) -> Any:  # noqa: ANN401 - a function, or dataclasses
    """Import a name of the table."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)


def _drop_output() -> None:
    """Drop buffered output, which would raise again at exit."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _launch(parsed: argparse.Namespace) -> int:
    from ...core.config import EngineConfig
    from .flags import engine_options
    from .launch import launch

    EngineConfig(**engine_options(parsed))  # bad flags are told here, not in a server's log
    return launch(parsed, parsed.rest)


def _add_calibrate_flags(parser: Parser) -> None:
    """Add the flags of ``foretoken calibrate``, without its code, which imports torch."""
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="text, or JSON Lines with a field text; 65,536 tokens of it are read",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file for the statistics"
    )


def _calibrate(parsed: argparse.Namespace) -> int:
    from .calibrate import calibrate

    return calibrate(parsed.model, parsed.data, parsed.out)


def _add_selftest_flags(parser: Parser) -> None:
    """Add the flags of ``foretoken selftest``, without its code, which imports torch."""
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="number of CPU threads (1)"
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="check N processes that compute one model instead (1: check the kernels)",
    )


def _selftest(parsed: argparse.Namespace) -> int:
    from ...core.config import EngineConfig

    EngineConfig(threads=parsed.threads, tp=parsed.tp)
    if parsed.tp > 1:
        from .selftest_ranks import selftest_ranks

        return selftest_ranks(parsed.tp, threads=parsed.threads)
    from .selftest import selftest

    return selftest(threads=parsed.threads)


def _bench(args: Sequence[str]) -> int:
    """``foretoken bench NAME ...`` runs ``foretoken.bench.NAME``, which parses the rest itself."""
    parser = Parser(prog="foretoken bench", description="measure a server, an engine or a model")
    parser.add_argument("name", choices=BENCHMARKS, help="NAME --help lists the flags")
    parsed = parser.parse_args(args[:1])
    module = importlib.import_module(f"...bench.{parsed.name}", __package__)
    code: int | None = module.main(list(args[1:]))
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
