"""Load on any OpenAI-compatible server, over HTTP.

``foretoken bench serve WORKLOAD --url URL``. Without --url, a ``foretoken serve`` is started for
the run, with the arguments after ``--``. Only OpenAI's API is required; further reports of a server
(cached tokens, speculation, /metrics, /tokenize) are used if they exist.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ..api.cli.flags import Parser
from ..core.errors import InvalidRequest
from .common.report import heading, table, write_json
from .common.roofline import Roofline, measured_roofline
from .load.cli import parsed, recorded, run
from .load.corpus import chat_corpus, id_corpus
from .load.generator import Job, Load, Piece
from .load.http import Failure, Http
from .load.openai import PATHS, OpenAIDriver
from .load.recording import Request, read_recordings
from .load.replay import Replay, Session, session_rows, summary
from .load.report import busy_note, out_path, show
from .load.server import (
    first_model,
    own_server,
    page_size,
    sampled,
    server_encode,
    wait_healthy,
)
from .load.workloads import Scene, above_zero, natural, positive

ABOUT = (
    "Measure an OpenAI-compatible server over HTTP under a workload: latency, throughput and cache "
    "hits. Without --url a foretoken server is started for the run, with the flags that follow --."
)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
HEALTHY_SECONDS = 300.0
NO_HISTORY = "--no-token-history"
LONG_CONTEXT = 2**16  # Context of the built-in model for sessions of agents.


def _speculation(text: str) -> str | int:
    return text if text in ("auto", "off") else natural(text)


def _own_flags(parser: Parser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--url", help="address of the server, with or without /v1; default: a new foretoken server")
    add("--model", help="name of the model on the server, or a local folder for a new "
        "server and the roofline")  # fmt: skip
    add("--api-key", metavar="KEY", help="API key to send (OPENAI_API_KEY)")
    add(
        "--endpoint",
        choices=list(PATHS),
        default="completions",
        help="route to use; completions: token ids of exact lengths; chat: text of approximate "
        "lengths",
    )
    add(
        "--vocab-size",
        type=positive,
        default=1000,
        metavar="N",
        help="number of token ids for random prompts, if the server has no /tokenize",
    )
    add(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="longest context in tokens, if the server does not report it",
    )
    add(
        "--speculation",
        type=_speculation,
        metavar="auto|off|K",
        help="speculation of each request: auto, off or a depth (foretoken servers only)",
    )
    add(
        "--timeout",
        type=above_zero,
        default=600.0,
        metavar="S",
        help="time limit of one request, in seconds",
    )


class Bench:
    """One server and its properties."""

    def __init__(self, url: str, args: argparse.Namespace, roofline: Roofline | None) -> None:
        self.args = args
        self.roofline = roofline
        self._wanted = None if args.model is None or Path(args.model).is_dir() else args.model
        key = args.api_key or os.environ.get("OPENAI_API_KEY")
        try:
            self.http = Http(url, key=key)
        except ValueError as error:
            raise SystemExit(f"--url: {error}") from None

    async def open(self) -> None:
        """Wait for the server, and find its model, context and tokenizer."""
        await wait_healthy(self.http, HEALTHY_SECONDS)
        args = self.args
        self.model, reported_len = await first_model(self.http, self._wanted)
        self.max_len = args.max_model_len or reported_len
        self.encode = await server_encode(self.http, self.model)

    async def measure(self, args: argparse.Namespace) -> bool:
        """Run one workload, print and write its figures; return whether any request was served."""
        driver, scene = await self._prepared(args)
        load = Load(driver, speculation=args.speculation)
        async with sampled(self.http) as kv_usage:
            figures, notes = await run(load, scene)
        figures["model"] = self.model
        figures["kv_usage"] = kv_usage.figures()
        figures["client_cpu"] = share = figures["process_cpu_share"]
        assert isinstance(share, float)
        if self.roofline is not None:
            figures["roofline"] = self.roofline.describe(figures)
        notes += [*self._notes(driver), *busy_note(share)]
        show(args.workload, figures, notes)
        report = {**heading(), "url": args.url or "own server", **figures, "notes": notes}
        if args.save_requests:
            report["records"] = load.records
        write_json(out_path(args.out, "serve", args.workload), report)
        return bool(figures["served"])

    async def replay(self, recordings: Mapping[str, Sequence[Request]]) -> list[Session]:
        """Send recorded sessions, one after another."""
        args = self.args
        replay = Replay(
            self.http,
            self.model,
            output_len=args.output_len,
            temperature=args.temperature,
            timeout=args.timeout,
            seed=args.seed,
            page_size=await page_size(self.http),
        )
        await replay.warm_up(args.warmup)
        found = []
        for name, each in recordings.items():
            found.append(await replay.session(name, each))
            print(f"{name}: {len(found[-1].turns)} of {len(each)} requests", flush=True)
        return found

    async def _prepared(self, args: argparse.Namespace) -> tuple[OpenAIDriver, Scene]:
        is_chat = args.endpoint == "chat"
        if is_chat:
            corpus = await chat_corpus(self.encode, args.seed)
        else:
            corpus = await id_corpus(self.encode, args.vocab_size, args.seed)
        driver = OpenAIDriver(
            self.http,
            self.model,
            args.endpoint,
            temperature=args.temperature,
            timeout=args.timeout,
            corpus=corpus,
            encode=self.encode,
        )
        hello = Job(name="probe", prompt=[Piece("user", corpus.cut("probe", 8))], output_len=2)
        try:
            await driver.probe(hello)
        except Failure as failure:
            raise SystemExit(
                f"the test request to {PATHS[args.endpoint]} failed: {failure}"
            ) from None
        return driver, Scene(args, corpus, self.max_len, args.seed)

    def _notes(self, driver: OpenAIDriver) -> list[str]:
        notes = list(driver.notes)
        if self.encode is None:
            notes.append(
                "the server has no /tokenize: prompts are random ids below --vocab-size, or text "
                "at "
                "4 characters per token"
            )
        notes += [f"tokens of a chunk: {how}" for how in driver.countings]
        if driver.num_stand_ins:
            notes.append(
                f"{driver.num_stand_ins} answers were replaced by other text in later prompts"
            )
        if self.max_len is None:
            notes.append("the server does not report its context length: prompts are not cut")
        return notes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the JSON; return 1 if nothing was served."""
    given = list(argv or [])
    at = given.index("--") if "--" in given else len(given)
    runs = parsed("foretoken bench serve", ABOUT, given[:at], _own_flags)
    server_args = given[at + 1 :]
    if runs[0].url is not None and server_args:
        raise SystemExit(
            "arguments after -- are passed to a new server and cannot be combined with --url"
        )
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n", flush=True)
    if (folder := recorded(runs[0])) is not None:
        return _replay(runs[0], server_args, read_recordings(folder))
    roofline = _roofline(runs[0], server_args)
    if runs[0].url is not None:
        return _run(runs[0].url, runs, roofline)
    model = [] if runs[0].model is None else [runs[0].model]
    with own_server([*model, "--log-level", "warning", *server_args]) as url:
        return _run(url, runs, roofline)


def _run(url: str, runs: Sequence[argparse.Namespace], roofline: Roofline | None) -> int:
    async def work() -> int:
        bench = Bench(url, runs[0], roofline)
        await bench.open()
        try:
            served = [await bench.measure(args) for args in runs]
            return 0 if all(served) else 1
        finally:
            bench.http.close()

    return asyncio.run(work())


# -- recorded sessions --------------------------------------------------------------------------


def _replay(
    args: argparse.Namespace,
    server_args: Sequence[str],
    recordings: Mapping[str, Sequence[Request]],
) -> int:
    """Replay recorded sessions; a server started here also runs without its token history."""
    found = dict(_replayed(args, server_args, recordings))
    rows = [row for name, each in found.items() for row in session_rows(name, each)]
    errors = [
        f"{session.name}, {name}: {session.error}"
        for name, sessions in found.items()
        for session in sessions
        if session.error is not None
    ]
    print(f"\n{table(rows)}\n", *(f"- {error}" for error in errors), sep="\n", flush=True)
    servers = {name: [summary(session) for session in each] for name, each in found.items()}
    report = {**heading(), "workload": args.workload, "servers": servers, "notes": errors}
    write_json(args.out or out_path(None, "serve", "agents-recorded"), report)
    return 1 if errors else 0


def _replayed(
    args: argparse.Namespace,
    server_args: Sequence[str],
    recordings: Mapping[str, Sequence[Request]],
) -> Iterator[tuple[str, list[Session]]]:
    async def work(url: str) -> list[Session]:
        bench = Bench(url, args, None)
        await bench.open()
        try:
            return await bench.replay(recordings)
        finally:
            bench.http.close()

    if args.url is not None:
        yield args.url, asyncio.run(work(args.url))
        return
    flags = [[NO_HISTORY]] if NO_HISTORY in server_args else [[], [NO_HISTORY]]
    given = [each for each in server_args if each != NO_HISTORY]
    with long_builtin() if args.model is None else nullcontext(args.model) as model:
        for more in flags:
            with own_server([model, "--log-level", "warning", *given, *more]) as url:
                yield " ".join(more) or "token history", asyncio.run(work(url))


@contextmanager
def long_builtin() -> Iterator[str]:
    """Yield a folder of the built-in model with a context long enough for sessions of agents.

    The model was not trained for that context; its answers do not matter here. Raises
    `InvalidRequest` outside a checkout.
    """
    from ..api.build.model_files import BUILTIN

    if not BUILTIN.is_dir():
        raise InvalidRequest(
            "recorded sessions need --model or --url outside a checkout", param="model"
        )
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "builtin-64k"
        shutil.copytree(BUILTIN / "target", copied)
        config = json.loads((copied / "config.json").read_text("utf-8"))
        config["max_position_embeddings"] = LONG_CONTEXT
        (copied / "config.json").write_text(json.dumps(config), "utf-8")
        yield str(copied)


def _roofline(args: argparse.Namespace, server_args: Sequence[str]) -> Roofline | None:
    """Return the roofline if the model's files and the server are on this machine, else None."""
    if "--quantize" in server_args:
        return None  # Quantised weights are smaller than the files.
    if args.model is not None:
        is_here = args.url is None or Http(args.url).host in LOCAL_HOSTS
        return measured_roofline(Path(args.model)) if is_here else None
    if args.url is not None:
        return None
    from ..api.build.model_files import find_model

    return measured_roofline(find_model().path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
