"""The command ``foretoken``: a table of commands whose code is imported on demand.

--version and --help thus answer at once, and a command imports only the modules that it needs.
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
"""Modules of the extra ``server``, which everything that speaks HTTP needs."""

BENCHMARKS = ("offline", "phases", "plan", "real", "serve")
"""Modules of `foretoken.bench` that are installed and have a ``main``."""
EPILOG = (
    "--help-all shows all flags. Each flag can also be set by a variable FORETOKEN_<FLAG> or in "
    "the file of --config; flags take precedence over variables, and variables over the file."
)


class Command(NamedTuple):
    """A command of ``foretoken``.

    ``run``, ``add`` and ``settings`` name code of this package as MODULE:NAME.
    """

    name: str
    help: str
    usage: str  # arguments after the command's name
    run: str  # function that takes the parsed arguments and returns the exit status
    add: str = ""  # function that adds the command's own arguments to its parser
    has_model: bool = False  # whether MODEL is the last positional argument
    settings: str = ""  # dataclasses whose settings are flags
    epilog: str | None = None
    takes_rest: bool = False  # whether arguments after "--" are passed on unparsed, as ``rest``

    def fill(self, parser: Parser) -> None:
        """Add all arguments to the command's parser."""
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
        epilog=f"Piped standard input is put before the prompt. {EPILOG}",
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
        "serve the HTTP APIs of OpenAI, Anthropic, Ollama and Gemini",
        "[MODEL] [flags]",
        "serve:serve",
        "flags:add_verbose",
        has_model=True,
        settings="config:SERVE",
        epilog=EPILOG,
    ),
    Command(
        "replica",
        "run an engine for a front, which serves the HTTP API",
        "[MODEL] --front tcp://HOST:PORT [flags]",
        "serve:replica",
        has_model=True,
        settings="config:REPLICA",
        epilog=EPILOG,
    ),
    Command(
        "launch",
        "start a coding agent with a running server or a new one",
        "claude|codex|opencode [MODEL] [flags] [-- ARGUMENTS OF THE CLIENT]",
        "commands:_launch",
        "launch:add_flags",
        has_model=True,
        settings="launch:KINDS",
        epilog="With a MODEL or an engine flag, a new server is started on a free port; it "
        "ends with "
        "the client.",
        takes_rest=True,
    ),
    Command(
        "list",
        "list the models on this machine and the kinds of models that can be served",
        "",
        "models:list_all",
    ),
    Command(
        "show",
        "describe a model without loading it: files, type, memory, implementation, or "
        "why it cannot "
        "be served",
        "MODEL [flags]",
        "models:show",
        "models:add_show_flags",
        settings="models:KINDS",
    ),
    Command(
        "models",
        "old name of list; models check MODEL is the old name of show",
        "[check MODEL]",
        "models:models",
        "models:add_models_flags",
    ),
    Command(
        "pull",
        "download a model from the hub into the cache",
        "MODEL [flags]",
        "models:pull",
        "models:add_flags",
        settings="models:KINDS",
    ),
    Command(
        "rm",
        "delete a hub model from the cache",
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
        epilog="Exit status: 0 if all requests were answered, 1 if some failed.",
    ),
    Command(
        "certify",
        "verify that speculation, batching and caching do not change answers",
        "[MODEL] [flags]",
        "certify:certify",
        "certify:add_certify_flags",
        has_model=True,
        settings="certify:KINDS",
        epilog="Exit status: 0 if no token differs, 1 if one differs, 3 if the model is not exact.",
    ),
    Command(
        "replay",
        "compute a recorded answer or session again, as it was or with changes",
        "ID [MODEL] [--requests DIR] [flags]",
        "replay:replay",
        "replay:add_flags",
        has_model=True,
        settings="replay:KINDS",
        epilog="Exit status: 0 for the same tokens, or at the end of a changed session; 1 for "
        "other tokens, or a call without a result; 3 for other tokens of an inexact model.",
    ),
    Command(
        "verify",
        "verify that a model gives recorded answers, with their seeds",
        "FILE [MODEL] [flags]",
        "verify:verify",
        "verify:add_flags",
        has_model=True,
        settings="verify:KINDS",
        epilog="Exit status: 0 if the model gives all answers, 1 if one differs, 3 if answers of "
        "an inexact model differ.",
    ),
    Command(
        "compare",
        "find out which of two models, prompts or settings answers tasks better",
        "A B --tasks FILE [flags]",
        "compare:compare",
        "compare:add_flags",
        settings="compare:KINDS",
        epilog="Both variants get the same seeds, and it stops when the difference is certain. "
        "Exit status: 0 with a verdict or none, 1 if an answer or a scorer failed.",
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
        "measure a model's queries on a text, for --kv-evict triattention:N",
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
    """Run a command and return the exit status of the process."""
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
        # a restart cannot help: the flags name a model that cannot be served
        return 2 if isinstance(error, ModelLoadError) and not error.may_pass else 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVER_MODULES:
            raise
        message = f"needs the extra server: pip install 'foretoken[server]' ({error})"
        print(f"{program}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        _drop_output()
        return 141
    except OSError as error:  # for example a full disk under redirected output
        try:
            print(end="", flush=True)
        except OSError:
            _drop_output()
        print(f"foretoken: {error}", file=sys.stderr)
        return 1


def parse(args: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. An invalid one prints one line and exits with status 2."""
    parser = _parser(args[:1])
    command = BY_NAME.get(args[0]) if args else None
    own, rest = _split(args) if command is not None and command.takes_rest else (args, [])
    parsed = parser.parse_args(own, argparse.Namespace(rest=rest))
    if parsed.command is None:
        parser.error("a command is required")
    if getattr(parsed, "place", None) not in (None, getattr(parsed, "model", None)):
        parsed.parser.error(TWO_MODELS)
    return parsed


def _parser(needed: Collection[str] = BY_NAME) -> Parser:
    """Return a parser that knows all commands, but only the arguments of those in ``needed``."""
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
    """Return the arguments before and after the first "--"."""
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at + 1 :]


def _load(name: str) -> Any:  # noqa: ANN401 - a function, or dataclasses
    """Import a module of this package and return its attribute; ``name`` is MODULE:NAME."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)


def _drop_output() -> None:
    """Send stdout to the null device, so that flushing its buffer at exit cannot fail."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _launch(parsed: argparse.Namespace) -> int:
    from ...core.config import EngineConfig
    from .flags import engine_options
    from .launch import launch

    EngineConfig(**engine_options(parsed))  # report invalid flags here, not in a server's log
    return launch(parsed, parsed.rest)


def _add_calibrate_flags(parser: Parser) -> None:
    """Add the flags of ``foretoken calibrate`` without importing its code, which needs torch."""
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="text file, or JSON Lines file with the text in a field text; the first 65,536 tokens "
        "are used",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write, for --kv-evict-stats",
    )


def _calibrate(parsed: argparse.Namespace) -> int:
    from .calibrate import calibrate

    return calibrate(parsed.model, parsed.data, parsed.out)


def _add_selftest_flags(parser: Parser) -> None:
    """Add the flags of ``foretoken selftest`` without importing its code, which needs torch."""
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="number of CPU threads (1)"
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="check a model that is sharded across N processes (1: check the kernels)",
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
    """Run ``foretoken.bench.NAME``, which parses its own flags, and return the exit status."""
    parser = Parser(prog="foretoken bench", description="measure a server, an engine or a model")
    parser.add_argument("name", choices=BENCHMARKS, help="NAME --help lists the flags")
    parsed = parser.parse_args(args[:1])
    module = importlib.import_module(f"...bench.{parsed.name}", __package__)
    code: int | None = module.main(list(args[1:]))
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
