"""The whole check: stages in processes of their own, most important first, each with its limit.

A stage that fails, hangs or dies costs itself alone: what it had found stays, and the next begins.
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
FACTS = "facts"  # always run: the others are held against its limits
MINUTES = 8.8  # for everything
LEAST_SECONDS = 8.0  # with less left a stage is not begun
GRACE = 5.0  # seconds from a stage's own end of time to the one that is enforced
LAST_LINES = 20  # of the log of a stage that did not end well
LOG, COMBINED = "gpu-check.log", "gpu-check.json"


@dataclass(frozen=True, slots=True)
class Part:
    """One stage: where its code is, and how long it may take."""

    title: str
    code: str  # module and function
    seconds: float  # at most


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
    """Run what is asked for; 1 where a stage failed or found something wrong, 2 without a GPU."""
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
        "--only", nargs="+", choices=list(PARTS), metavar="STAGE", help=f"stages: {' '.join(PARTS)}"
    )
    add("--minutes", type=float, default=MINUTES, help="minutes for all stages together")
    add(
        "--limit",
        nargs="+",
        default=[],
        type=_limit,
        metavar="STAGE=SECONDS",
        help="less time for single stages, where the card is lent for minutes",
    )
    add("--rehearse", action="store_true", help="tiny shapes on this processor; nothing is kept")
    add("--out", type=Path, default=RESULTS, help="folder of the JSON, and of the page if given")
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
    """The folder that the stages share; a temporary one for the process that starts them."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        yield Path(name)


# -- one stage, in its own process --------------------------------------------------------------


def run_stage(name: str, place: Place, seconds: float) -> int:
    """Run one stage here, and write what it finds."""
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
    """A stage that has found nothing yet."""
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
    """Limits that the first stage measured in this run; None before it."""
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
        _tell(place, found[name])
        page = _keep(args, place, found)  # at once: whoever ends this run leaves what there is
    print(f"\n{page}")
    return int(any(each.status != "ok" for each in found.values()))


def _tell(place: Place, result: Result) -> None:
    """One line as a stage ends; where it did not end well, the last of what it printed, too."""
    print(f"{result.stage}: {result.status}, {result.seconds:.1f} s", flush=True)
    log = _log_path(result.stage, place)
    if result.status != "ok" and log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(*(f"  {line}" for line in lines[-LAST_LINES:]), sep="\n", flush=True)


def _shown(args: argparse.Namespace) -> str:
    """The command, as it would be typed."""
    only = ["--only", *args.only] if args.only else []
    return " ".join(["bench/lab/gpu_check.sh", *(["--rehearse"] if args.rehearse else []), *only])


def _run_part(name: str, place: Place, seconds: float) -> Result:
    """One stage, ended by force where it must be; what it found by then."""
    if seconds < LEAST_SECONDS:
        result = empty_result(name, place)
        result.status = "not run"
        result.notes.append("No time was left.")
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
    """Path of the log with all that a stage printed."""
    return place.work / f"gpu-{name}.log"


def _wait(
    command: Sequence[str], more: Mapping[str, str], output: int, seconds: float
) -> int | None:
    """The exit code; None where time ran out: then all of its processes are killed.

    ``more`` is added to the environment.
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
        result.errors.append(f"nothing was written: {first_line(error)}")
    if code is None:
        result.status = "out of time"
        result.errors.append(f"ended after {seconds:.0f} s; what had been found by then is kept")
    elif result.status == "running":
        result.status = "failed"
        result.errors.append(f"the process ended with code {code}; the log tells why")
    return result


# -- what is kept -------------------------------------------------------------------------------


def _keep(args: argparse.Namespace, place: Place, found: Mapping[str, Result]) -> str:
    """The JSON of each stage, the page of all; and both with the log where ``OUT`` says.

    Returns the page.
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
    """Three files, whatever the number of stages."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / COMBINED, {name: msgspec.to_builtins(each) for name, each in found.items()})
    (folder / PAGE.name).write_text(page, encoding="utf-8")
    logs = {name: _log_path(name, place) for name in found}
    texts = [f"== {name}\n{log.read_text()}\n" for name, log in logs.items() if log.is_file()]
    (folder / LOG).write_text("".join(texts), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
