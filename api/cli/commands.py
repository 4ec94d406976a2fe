"""The command ``foretoken``. Heavy imports happen inside the commands: --help is instant."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest, ModelLoadError
from ...core.interface.settings import settings_of
from ..serving.limits import Limits
from ..serving.settings import FrontOptions, Joining, Listen, ObservingOptions, Settings
from ..types.sampling_params import SamplingParams
from .certify import KINDS as CERTIFY
from .certify import add_certify_flags, add_replay_flags, certify, replay
from .config import REPLICA, SERVE, TERMINAL, Chosen, Given
from .deploy import add_flags as add_deploy_flags
from .deploy import deploy
from .flags import Parser, add_show_drafts, engine_options
from .hub import add_commands as add_hub_commands
from .launch import KINDS as LAUNCH
from .launch import add_flags as add_launch_flags
from .launch import launch
from .run_batch import KINDS as RUN_BATCH
from .run_batch import add_flags as add_run_batch_flags
from .run_batch import run_batch
from .train_draft import add_flags as add_train_draft_flags
from .train_draft import train_draft

if TYPE_CHECKING:
    from ..cluster.front.front_client import Launcher
    from ..cluster.replica.front_session import FrontLink
    from ..runtime.engine_client import EngineClient

FRONT_ENGINE_OPTIONS = (
    "chat_template", "default_chat_template_kwargs", "step_timeout", "dump_dir", "lora",
    "max_loras",
)  # fmt: skip
"""Options of `EngineConfig` that a front has itself: its text, its event loop, its dumps, and the
adapters that it has its replicas load."""

SERVER_MODULES = ("starlette", "uvicorn", "h11", "uvloop")
"""Modules of the extra ``server``: all that speaks HTTP needs them, nothing else does."""

BENCHMARKS = ("offline", "phases", "plan", "real", "self", "serve")
"""Modules of `foretoken.bench` that are installed and have a ``main``; others are in bench/lab."""
EPILOG = (
    "--help-all shows all flags. Each may also be set by a variable FORETOKEN_<FLAG> or in the "
    "file of --config; a flag goes before a variable, a variable before the file."
)
TWO_MODELS = "MODEL and --model name two models"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code."""
    args = sys.argv[1:] if argv is None else list(argv)
    if args[:1] == ["bench"]:
        return _bench(args[1:])
    parser = _parser()
    args, client_args = _split(args) if args[:1] == ["launch"] else (args, [])
    parsed = parser.parse_args(args, argparse.Namespace(client_args=client_args))
    if parsed.command is None:
        parser.error("a command is needed")
    if getattr(parsed, "place", None) not in (None, getattr(parsed, "model", None)):
        parsed.parser.error(TWO_MODELS)
    command: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return command(parsed)
    except InvalidRequest as error:
        print(f"{parsed.parser.prog}: {error}", file=sys.stderr)
        return 2
    except ForetokenError as error:
        print(f"foretoken: {error}", file=sys.stderr)
        # What a flag names cannot be served, and a restart would not help.
        return 2 if isinstance(error, ModelLoadError) and not error.may_pass else 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVER_MODULES:
            raise
        message = f"needs the extra server: pip install 'foretoken[server]' ({error})"
        print(f"{parsed.parser.prog}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        _drop_output()
        return 141


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those behind "--", which are a client's."""
    at = args.index("--") if "--" in args else len(args)
    return args[:at], args[at + 1 :]


def _drop_output() -> None:
    """Drop buffered output, which would raise again at exit."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser(prog="foretoken", description="LLM inference with speculative decoding")
    parser.add_argument("--version", action="version", version=f"foretoken {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_serve(commands)
    _add_replica(commands)
    _add_run(commands)
    _add_chat(commands)
    _add_models(commands)
    _add_train_draft(commands)
    _add_calibrate(commands)
    _add_deploy(commands)
    _add_certify(commands)
    _add_replay(commands)
    add_hub_commands(commands)
    _add_run_batch(commands)
    _add_launch(commands)
    _add_selftest(commands)
    commands.add_parser(
        "bench", help="run a benchmark: serve, offline, plan, phases, real or self", add_help=False
    )
    return parser


def _add_calibrate(commands: argparse._SubParsersAction[Parser]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure a model's queries over a text, for --kv-evict triattention:N",
        usage="%(prog)s [MODEL] --data FILE --out FILE",
    )
    calibrate.set_defaults(run=_calibrate, parser=calibrate)
    _add_model(calibrate)
    add = calibrate.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="text, or JSON Lines with a field text; 65,536 tokens of it are read",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="file for the statistics")


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve an OpenAI- and Anthropic-compatible HTTP API",
        usage="%(prog)s [MODEL] [flags]",
        epilog=EPILOG,
    )
    serve.set_defaults(run=_serve, parser=serve)
    _add_model(serve)
    serve.add_settings(*SERVE)


def _add_replica(commands: argparse._SubParsersAction[Parser]) -> None:
    replica = commands.add_parser(
        "replica",
        help="run an engine for a front, which has the HTTP API",
        usage="%(prog)s [MODEL] --front tcp://HOST:PORT [flags]",
        epilog=EPILOG,
    )
    replica.set_defaults(run=_replica, parser=replica)
    _add_model(replica)
    replica.add_settings(*REPLICA)


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    run = commands.add_parser(
        "run",
        help="print one completion as it is generated",
        usage="%(prog)s PROMPT [MODEL] [flags]",
        epilog=EPILOG,
    )
    run.set_defaults(run=_run, parser=run)
    run.add_argument("prompt", metavar="PROMPT", help="text to continue")
    _add_model(run)
    add_show_drafts(run)
    run.add_settings(*TERMINAL)


def _add_chat(commands: argparse._SubParsersAction[Parser]) -> None:
    chat = commands.add_parser(
        "chat",
        help="hold a conversation in the terminal",
        usage="%(prog)s [MODEL] [flags]",
        epilog=EPILOG,
    )
    chat.set_defaults(run=_chat, parser=chat)
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    chat.add_argument(
        "--url", metavar="URL", help="server to talk to, in place of a model in this process"
    )
    chat.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key of that server (FORETOKEN_API_KEY)",
    )
    add_show_drafts(chat)
    chat.add_settings(*TERMINAL)


def _add_model(parser: Parser) -> None:
    """Add MODEL. Where it is not given it has no value that could replace the one of --model."""
    model = settings_of(Chosen)["model"]
    parser.set_defaults(model=None)
    parser.add_argument(
        "model",
        metavar=model.metavar,
        nargs="?",
        help=model.help,
        default=argparse.SUPPRESS,
        action=_Place,
    )


class _Place(argparse.Action):
    """The model's place, which must not name another one than --model before or behind it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002 - argparse's
    ) -> None:
        if namespace.model not in (None, values):
            parser.error(TWO_MODELS)
        namespace.model = namespace.place = values


def _add_models(commands: argparse._SubParsersAction[Parser]) -> None:
    models = commands.add_parser("models", help="list models to serve, or describe one")
    models.set_defaults(run=_models, parser=models)
    models.add_argument(
        "action",
        nargs="?",
        choices=("check",),
        help="describe MODEL without loading it: type, memory, code path, or the reason why it "
        "cannot be served",
    )
    models.add_argument("model", nargs="?", metavar="MODEL", help="model, as for `foretoken serve`")


def _add_train_draft(commands: argparse._SubParsersAction[Parser]) -> None:
    train = commands.add_parser("train-draft", help="train a draft for a model on your own data")
    train.set_defaults(run=_train_draft, parser=train)
    add_train_draft_flags(train)


def _add_deploy(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "deploy",
        help="print manifests for many engines: Ray Serve, KubeRay or llm-d",
        usage="%(prog)s ray|kuberay|llm-d [flags]",
        epilog="Flags of the engine are those of each replica or server. When to use which target: "
        "docs/scale.md.",
    )
    command.set_defaults(run=deploy, parser=command)
    add_deploy_flags(command)


def _add_certify(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "certify",
        help="compare answers with speculation on and off, in any batch, cached or not",
        usage="%(prog)s [MODEL] [flags]",
        epilog="Exit codes: 0 no token differs, 1 one does, 3 the model has no exact bits.",
    )
    command.set_defaults(run=_certify, parser=command)
    _add_model(command)
    add_certify_flags(command)


def _add_replay(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "replay",
        help="compute a recorded answer again",
        usage="%(prog)s ID [MODEL] --requests DIR [flags]",
        epilog="Exit codes: 0 the same tokens, 1 others, 3 others of a model without exact bits.",
    )
    command.set_defaults(run=_replay, parser=command)
    command.add_argument("id", metavar="ID", help="id of the answer, as its body had it")
    _add_model(command)
    add_replay_flags(command)


def _add_run_batch(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "run-batch",
        help="answer the requests of a JSON Lines file, without a server",
        usage="%(prog)s IN OUT [MODEL] [flags]",
        epilog="Exit codes: 0 all requests are answered, 1 some failed.",
    )
    command.set_defaults(run=_run_batch, parser=command)
    add_run_batch_flags(command)
    _add_model(command)
    command.add_settings(*RUN_BATCH)


def _add_launch(commands: argparse._SubParsersAction[Parser]) -> None:
    command = commands.add_parser(
        "launch",
        help="start a coding agent against a running server or a fresh one",
        usage="%(prog)s claude|codex|opencode [MODEL] [flags] [-- ARGUMENTS OF THE CLIENT]",
        epilog="With a MODEL or a flag of the engine a fresh server serves it, on a free port, and "
        "ends with the client.",
    )
    command.set_defaults(run=_launch, parser=command)
    add_launch_flags(command)
    _add_model(command)
    command.add_settings(*LAUNCH)


def _add_selftest(commands: argparse._SubParsersAction[Parser]) -> None:
    selftest = commands.add_parser("selftest", help="check and time the native kernels")
    selftest.set_defaults(run=_selftest, parser=selftest)
    selftest.add_argument(
        "--threads", type=int, default=1, metavar="N", help="number of CPU threads (1)"
    )
    selftest.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="check N processes that compute one model instead (1: check the kernels)",
    )


def _serve(parsed: argparse.Namespace) -> int:
    given = Given(parsed, SERVE)
    model, options = _model_options(given)
    listen, observed = listen_options(given), given.make(ObservingOptions)
    front = given.make(FrontOptions)
    if not front.is_given:
        from ..sdk.async_llm import AsyncLLM

        llm: EngineClient = AsyncLLM(model, **options)
    else:
        llm = _front_client(parsed, model, front, options)
    from ..server.observation.logs import configure
    from ..server.observation.observability import make_observing
    from ..server.process import run

    configure(listen.log_level, listen.log_format)
    given.warn_of_unknown_variables()
    return run(llm, listen, make_observing(observed, listen))


def _front_client(
    parsed: argparse.Namespace, model: str | None, front: FrontOptions, options: dict[str, Any]
) -> EngineClient:
    """The model of a front. Variables and the file may be those of its replicas, flags are its own.

    Raises `InvalidRequest` for a flag of an engine, an address that is none, or without the extra.
    """
    for name in () if front.ray else engine_options(parsed):
        if name not in FRONT_ENGINE_OPTIONS:
            flag = settings_of(EngineConfig)[name].flag
            raise InvalidRequest(f"{flag} is a flag of the replicas, not of --front", param=name)
    from ..cluster.front.front_client import FrontClient

    own = {name: value for name, value in options.items() if name in FRONT_ENGINE_OPTIONS}
    try:
        launcher = _ray_replicas(model, front, options) if front.ray else None
        return FrontClient(model, front, launcher, **own)
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        message = f"--front needs the extra events: pip install 'foretoken[events]' ({error})"
        raise InvalidRequest(message, param="front") from None


def _ray_replicas(model: str | None, front: FrontOptions, options: dict[str, Any]) -> Launcher:
    """Make what starts replicas with these engine options on Ray.

    Raises `InvalidRequest` without the extra, and for a cluster that cannot reach the front.
    """
    from ..cluster import ray_environment

    if "kv_transfer" in options:
        message = "kv_transfer: replicas of --ray are alike; start foretoken replica with roles"
        raise InvalidRequest(message, param="kv_transfer")
    is_joined = ray_environment.is_joined()
    if is_joined and front.front is None:
        message = "--ray with RAY_ADDRESS needs --front: an address that the cluster reaches"
        raise InvalidRequest(message, param="front")
    if importlib.util.find_spec("ray") is None:
        message = "--ray needs the extra ray: pip install 'foretoken[ray,events]'"
        raise InvalidRequest(message, param="ray")
    ray_environment.prepare()
    from ..cluster.launcher import PlannedReplicas, plan_of
    from ..cluster.ray_app import RayCluster

    own = {name: value for name, value in options.items() if name != "lora"}  # by the front
    return PlannedReplicas(plan_of(model, front, own), RayCluster(owns_ray=not is_joined))


def _replica(parsed: argparse.Namespace) -> int:
    given = Given(parsed, REPLICA)
    joining, (model, options) = given.make(Joining), _model_options(given)
    dial = _dialling(joining.front)
    from ..cluster.replica.process import run
    from ..server.observation.logs import configure

    configure(joining.log_level, joining.log_format)
    given.warn_of_unknown_variables()
    config, num_shares = EngineConfig(**options), joining.replicas
    return run(model, config, dial, address=joining.front, num_shares=num_shares)


def _dialling(front: str) -> Callable[[], FrontLink]:
    """Check a front's address; return a function that opens a connection to it."""
    try:
        from ..cluster.wire.transport import ReplicaSocket, check_address, cluster_key
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        message = f"a replica needs the extra events: pip install 'foretoken[events]' ({error})"
        raise InvalidRequest(message, param="front") from None
    key = cluster_key()
    check_address(front, key)
    return lambda: ReplicaSocket(front, key)


def listen_options(given: Given) -> Listen:
    """Address and TLS files to listen with, and the options of the HTTP side."""
    from ..server.guards.foreign_pages import is_loopback

    address = given.make(Listen)
    settings = given.make(
        Settings,
        limits=given.make(Limits),
        loopback_only=address.uds is None and is_loopback(address.host),
    )
    return replace(address, settings=settings)


def _run(parsed: argparse.Namespace) -> int:
    given = _given_in_terminal(parsed)
    params, (model, options) = given.make(SamplingParams), _model_options(given)
    from ..build.model_files import BY_NAME
    from .terminal.terminal import run

    if parsed.prompt in BY_NAME and model not in (None, *BY_NAME):
        parsed.parser.error(f"the prompt comes before the model {parsed.prompt}")
    params = _with_adapter(params, options)
    return run(parsed.prompt, model, params, options, show_drafts=parsed.show_drafts)


def _chat(parsed: argparse.Namespace) -> int:
    given = _given_in_terminal(parsed)
    params = given.make(SamplingParams)
    if parsed.url is None:
        model, options = _model_options(given)
    from .terminal.chat import chat, chat_with_server

    if parsed.url is None:
        params = _with_adapter(params, options)
        return chat(model, params, options, parsed.system, show_drafts=parsed.show_drafts)
    if local := _flags_of_a_model_here(parsed):
        parsed.parser.error(
            f"--url talks to a server, which has its model and engine flags: leave out {local}"
        )
    key = next(iter(given.make(Settings).api_keys), None)
    return chat_with_server(parsed.url, key, params, parsed.system)


def _with_adapter(params: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """The parameters, with the adapter of ``--lora``. Raises `InvalidRequest` for several."""
    names = [*EngineConfig(lora=options.get("lora", ())).lora_folders]
    if len(names) > 1:
        raise InvalidRequest("--lora: run and chat take one adapter", param="lora")
    return replace(params, lora=names[0]) if names else params


def _flags_of_a_model_here(parsed: argparse.Namespace) -> str:
    """Arguments that were given and are of no use with a model in another process."""
    names = ["MODEL"] if parsed.model is not None else []
    names += ["--" + name.replace("_", "-") for name in engine_options(parsed)]
    names += ["--show-drafts"] if parsed.show_drafts else []
    return ", ".join(names)


def _given_in_terminal(parsed: argparse.Namespace) -> Given:
    given = Given(parsed, TERMINAL)
    given.warn_of_unknown_variables()
    return given


def _model_options(given: Given) -> tuple[str | None, dict[str, Any]]:
    """The model and the engine's options, which are checked before the slow imports."""
    from ..build.hub import at_revision, go_offline

    given.make(EngineConfig)
    chosen = given.make(Chosen)
    if chosen.offline:
        go_offline()
    return at_revision(chosen.model, chosen.revision), given.options(EngineConfig)


def _models(parsed: argparse.Namespace) -> int:
    from ..build.model_files import check_model, list_models

    if parsed.action is None:
        return list_models()
    if parsed.model is None:
        parsed.parser.error("models check needs a model: a folder, a GGUF file or a name")
    return check_model(parsed.model)


def _train_draft(parsed: argparse.Namespace) -> int:
    return train_draft(parsed)


def _calibrate(parsed: argparse.Namespace) -> int:
    from .calibrate import calibrate

    return calibrate(parsed.model, parsed.data, parsed.out)


def _certify(parsed: argparse.Namespace) -> int:
    given = Given(parsed, CERTIFY)
    given.warn_of_unknown_variables()
    return certify(parsed, *_model_options(given))


def _replay(parsed: argparse.Namespace) -> int:
    given = Given(parsed, CERTIFY)
    given.warn_of_unknown_variables()
    return replay(parsed, *_model_options(given))


def _run_batch(parsed: argparse.Namespace) -> int:
    given = Given(parsed, RUN_BATCH)
    given.warn_of_unknown_variables()
    return run_batch(parsed, *_model_options(given))


def _launch(parsed: argparse.Namespace) -> int:
    EngineConfig(**engine_options(parsed))  # bad flags are told here, not in a server's log
    return launch(parsed, parsed.client_args)


def _selftest(parsed: argparse.Namespace) -> int:
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
