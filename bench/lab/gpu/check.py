"""The whole check: stages in processes of their own, most important first, each with a time limit.

A stage that fails, hangs or dies affects only itself: its results so far are kept, and the next
stage begins.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ....core.errors import ModelLoadError
from ....core.ops.machine.device import choose_device
from ...common.report import RESULTS, machine, write_json
from ...common.roofline import Limits
from .page import PAGE, read_results, render
from .stage import Place, Result, Stage, first_line, read_result

HERE = __package__ or ""
FACTS = "facts"  # This stage always runs: the others are compared with the limits that it measures.
MINUTES = 8.8  # Limit of the whole run.
LEAST_SECONDS = 8.0  # A stage does not start if less time than this is left.
GRACE = 5.0  # Seconds between the end that a stage plans for and the end that is enforced.
LAST_LINES = 20  # Last lines of the log to print for a stage that did not end well.
LOG, COMBINED = "gpu-check.log", "gpu-check.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One stage: the location of its code, and its time limit."""

    title: str
    code: str  # Module and function.
    seconds: float  # Time limit.


PARTS: dict[str, Part] = {
    FACTS: Part("The card", "limits:run", 45),
    "compiling": Part("Compiling", "compiling:run", 75),
    "oracle": Part("The kernels against the oracle", "oracle:run", 105),
    "equality": Part("Equal bits, equal streams", "equality:run", 100),
    "decode": Part("Decoding", "decode:run", 105),
    "verify": Part("Verifying drafts", "verify:run", 60),
    "drafts": Part("Passes of drafts", "drafts:run", 60),
    "prefill": Part("Prompts", "prefill:run", 45),
    "speculation": Part("Speculation", "speculation:run", 60),
    "kinds": Part("Fewer bytes, experts, states", "decode:run_kinds", 75),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected stages; return 1 if one failed or found an error, 2 without a GPU."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.rehearse:
        try:
            choose_device("cuda")
        except ModelLoadError as error:
            parser.error(f"{error}; --rehearse runs the stages without one")
    with _folder(args.work) as work:
        place = Place(work=work, rehearses=args.rehearse)
        if args.stage:
            return run_stage(args.stage, place, args.seconds)
        return _run_all(args, place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m foretoken.bench.lab.gpu", description=__doc__)
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        choices=list(PARTS),
        metavar="STAGE",
        help=f"stages to run: {' '.join(PARTS)}",
    )
    add(
        "--minutes",
        type=float,
        default=MINUTES,
        help="time limit of all stages together, in minutes",
    )
    add(
        "--limit",
        nargs="+",
        default=[],
        type=_limit,
        metavar="STAGE=SECONDS",
        help="time limit of single stages, in seconds",
    )
    add(
        "--rehearse",
        action="store_true",
        help="run tiny shapes on this processor; no results are kept",
    )
    add(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder for the JSON files, and for the page if given",
    )
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--stage", choices=list(PARTS), help=argparse.SUPPRESS)
    add("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    return parser


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name} is not one of {' '.join(PARTS)}")
    return name, float(seconds)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """Yield the folder that the stages share: ``given``, or a temporary one."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        yield Path(name)


# -- one stage, in its own process --------------------------------------------------------------


def run_stage(name: str, place: Place, seconds: float) -> int:
    """Run one stage in this process, and write its results."""
    from .facts import card, versions

    result = empty_result(name, place)
    result.card, result.versions = card(place), versions()
    stage = Stage(place, result, seconds)
    stage.save()
    module, _, function = PARTS[name].code.partition(":")
    run: Callable[[Stage], None] = getattr(importlib.import_module(f".{module}", HERE), function)
    with stage.listening(), stage.part(name):
        run(stage)
    result.status = "failed" if result.errors else "ok"
    stage.save()
    return int(result.status != "ok")


def empty_result(name: str, place: Place) -> Result:
    """Return the result of a stage that has not measured anything yet."""
    return Result(
        stage=name,
        title=PARTS[name].title,
        command="bench/lab/gpu_check.sh",
        machine=machine(),
        card={},
        versions={},
        simulated=place.rehearses,
        limits=_limits(place),
    )


def _limits(place: Place) -> Limits | None:
    """Return the limits that the first stage measured in this run; None if it has not."""
    path = place.result(FACTS)
    return read_result(path).limits if path.is_file() else None


# -- all stages, from outside -------------------------------------------------------------------


def _run_all(args: argparse.Namespace, place: Place) -> int:
    until = time.monotonic() + 60 * args.minutes
    wanted = [name for name in PARTS if args.only is None or name in (FACTS, *args.only)]
    found: dict[str, Result] = {}
    for name in wanted:
        most = dict(args.limit).get(name, PARTS[name].seconds)
        seconds = min(most, until - time.monotonic())
        found[name] = _run_part(name, place, seconds)
        found[name].command = _shown(args)
        _print_result(place, found[name])
        # Written after every stage, so that an interrupted run leaves its results.
        page = _keep(args, place, found)
    print(f"\n{page}")
    return int(any(each.status != "ok" for each in found.values()))


def _print_result(place: Place, result: Result) -> None:
    """Print one line for an ended stage, and the last lines of its log if it did not end well."""
    print(f"{result.stage}: {result.status}, {result.seconds:.1f} s", flush=True)
    log = _log_path(result.stage, place)
    if result.status != "ok" and log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(*(f"  {line}" for line in lines[-LAST_LINES:]), sep="\n", flush=True)


def _shown(args: argparse.Namespace) -> str:
    """Return the command as it would be typed."""
    only = ["--only", *args.only] if args.only else []
    return " ".join(["bench/lab/gpu_check.sh", *(["--rehearse"] if args.rehearse else []), *only])


def _run_part(name: str, place: Place, seconds: float) -> Result:
    """Run one stage in its own process, killed at its time limit; return its results so far."""
    if seconds < LEAST_SECONDS:
        result = empty_result(name, place)
        result.status = "not run"
        result.notes.append("There was no time left.")
        return result
    began = time.monotonic()
    command = [sys.executable, "-m", f"{HERE}.check", "--stage", name, "--work", str(place.work)]
    command += [f"--seconds={seconds - GRACE}", *(["--rehearse"] if place.rehearses else [])]
    more = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    more["TRITON_INTERPRET"] = "1" if place.rehearses else "0"
    with _log_path(name, place).open("w", encoding="utf-8") as log:
        code = _wait(command, more, log.fileno(), seconds)
    result = _outcome(name, place, code, seconds)
    result.seconds = time.monotonic() - began
    return result


def _log_path(name: str, place: Place) -> Path:
    """Return the path of the log with everything that a stage printed."""
    return place.work / f"gpu-{name}.log"


def _wait(
    command: Sequence[str], more: Mapping[str, str], output: int, seconds: float
) -> int | None:
    """Run a command and return its exit code; kill it and return None at the time limit.

    ``more`` is added to the environment. The command's child processes are killed, too.
    """
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **more},
        start_new_session=True,
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _outcome(name: str, place: Place, code: int | None, seconds: float) -> Result:
    try:
        result = read_result(place.result(name))
    except (OSError, msgspec.DecodeError) as error:
        result = empty_result(name, place)
        result.errors.append(f"no results were written: {first_line(error)}")
    if code is None:
        result.status = "out of time"
        result.errors.append(f"stopped after {seconds:.0f} s; the results until then are kept")
    elif result.status == "running":
        result.status = "failed"
        result.errors.append(f"the process ended with code {code}; see the log")
    return result


# -- results ------------------------------------------------------------------------------------


def _keep(args: argparse.Namespace, place: Place, found: Mapping[str, Result]) -> str:
    """Write the JSON of each stage and one page about all stages, and return the page.

    Copies the results, the page and the logs to ``$OUT`` if it is set.
    """
    out = place.work / "results" if place.rehearses else args.out
    for name, result in found.items():
        write_json(out / f"gpu-{name}.json", msgspec.to_builtins(result))
    page = render(read_results(out))
    if not place.rehearses:
        path = PAGE if out == RESULTS else out / PAGE.name
        path.write_text(page, encoding="utf-8")
    if folder := os.environ.get("OUT"):
        _copy_out(Path(folder), place, found, page)
    return page


def _copy_out(folder: Path, place: Place, found: Mapping[str, Result], page: str) -> None:
    """Write three files: all results, the page, and all logs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / COMBINED, {name: msgspec.to_builtins(each) for name, each in found.items()})
    (folder / PAGE.name).write_text(page, encoding="utf-8")
    logs = {name: _log_path(name, place) for name in found}
    texts = [f"== {name}\n{log.read_text()}\n" for name, log in logs.items() if log.is_file()]
    (folder / LOG).write_text("".join(texts), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
