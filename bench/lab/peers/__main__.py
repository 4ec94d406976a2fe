"""foretoken compared with other engines' servers: `python -m foretoken.bench.lab.peers`.

`setup` makes the environments and the checkpoint. `run` measures the rows of servers.py on one
checkpoint; if its weights are random, there are no rows of tasks. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..gguf import foretoken, llama_cpp
from ..servers import TASK_ROWS, add_flags, compare, show, token_rows
from .checkpoints import CHECKPOINTS, HOME, Checkpoint
from .environments import SOURCE, python, set_up

CONTEXT = 4096  # Context of a request in tokens, the same on every server.
Commands = dict[str, Sequence[str] | str]
"""Command lines of servers to start, or addresses of running servers, by column."""
DTYPES = ("bf16", "int8", "int4")
LOOK_UP_DEPTH = 8  # Draft tokens of an n-gram lookup.
DRAFT_DEPTH = 4
KV_GIB = 2  # KV memory of vLLM, about the same as the other servers have.


def commands(checkpoint: Checkpoint, args: argparse.Namespace) -> Commands:
    """Return command lines of the installed servers by column, and addresses of other servers."""
    made: Commands = _own(checkpoint, args)
    if (server := HOME / "llama_cpp" / "bin" / "llama-server").is_file():
        made |= _llama_cpp(server, checkpoint, args)
    if python("vllm").is_file() and args.dtype != "int4":
        made |= _vllm(checkpoint, args)
    made |= dict(args.url)
    return {name: made[name] for name in args.only or made}


def _own(checkpoint: Checkpoint, args: argparse.Namespace) -> Commands:
    command = foretoken(str(checkpoint.target), CONTEXT, args.threads)
    command += ["--dtype", "bfloat16"]
    if args.dtype != "bf16":
        command += ["--quantize", args.dtype]
    made: Commands = {"foretoken": command}
    made["plain"] = [*command, "--speculation", "off"]
    if checkpoint.has_draft and args.dtype == "bf16":
        draft = ["--draft", str(checkpoint.draft), "--speculation", str(DRAFT_DEPTH)]
        made["foretoken, draft"] = [*command, *draft]
    return made


def _llama_cpp(server: Path, checkpoint: Checkpoint, args: argparse.Namespace) -> Commands:
    file = checkpoint.folder / "gguf" / f"{args.dtype}.gguf"
    command = llama_cpp(server, file, CONTEXT, args.threads)
    made: Commands = {"llama.cpp": command}
    made["llama.cpp, n-gram"] = [*command, "--spec-type", "ngram-simple"]
    if checkpoint.has_draft and args.dtype == "bf16":
        made["llama.cpp, draft"] = [*command, "-md", str(file.with_name("bf16-draft.gguf"))]
    return made


def _vllm(checkpoint: Checkpoint, args: argparse.Namespace) -> Commands:
    """Return commands of vLLM's server with its defaults: compiled, prefix caching on."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: args.threads]))
    model = checkpoint.target if args.dtype == "bf16" else checkpoint.folder / "vllm" / "int8"
    command = ["env", f"VLLM_CPU_KVCACHE_SPACE={KV_GIB}", f"VLLM_CPU_OMP_THREADS_BIND={cores}"]
    command += ["VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1", str(python("vllm")), "-m"]
    command += ["vllm.entrypoints.openai.api_server", "--model", str(model), "--seed", "0"]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    ways: dict[str, dict[str, object]] = {
        "n-gram": {
            "method": "ngram", "num_speculative_tokens": LOOK_UP_DEPTH,
            "prompt_lookup_max": 4, "prompt_lookup_min": 2,
        },
    }  # fmt: skip
    if checkpoint.has_draft and args.dtype == "bf16":
        draft = {"method": "draft_model", "model": str(checkpoint.draft)}
        ways["draft"] = draft | {"num_speculative_tokens": DRAFT_DEPTH}
    made: Commands = {"vllm": command}
    for way, config in ways.items():
        made[f"vllm, {way}"] = [*command, "--speculative-config", json.dumps(config)]
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Set up; or measure, print and write JSON. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.peers", description=__doc__
    )
    add = parser.add_argument
    add("command", nargs="?", choices=["run", "setup"], default="run", help="command (%(default)s)")
    add("engines", nargs="*", metavar="ENGINE", help=f"engines to set up (all): {' '.join(SOURCE)}")
    add(
        "--checkpoint",
        choices=list(CHECKPOINTS),
        default="smollm2",
        help="checkpoint (%(default)s)",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="data type of the weights (%(default)s)")
    add(
        "--url", action="append", type=_named, default=[], metavar="NAME=URL",
        help="name and address of a running server for one more column; may be repeated",
    )  # fmt: skip
    add_flags(parser)
    args = parser.parse_args(argv)
    checkpoint = CHECKPOINTS[args.checkpoint]
    if unknown := set(args.engines) - set(SOURCE):
        parser.error(f"unknown engine {', '.join(sorted(unknown))}")
    if args.command == "setup":
        return 0 if set_up(args.engines or list(SOURCE), checkpoint, args.dtype) else 1
    checkpoint.write()
    rows = token_rows(checkpoint.prompt) | (TASK_ROWS if checkpoint.has_text else {})
    found = compare(commands(checkpoint, args), rows, args.turns, 0)
    show(f"{args.checkpoint}, {args.dtype}", found, args.out, checkpoint=args.checkpoint)
    return 0


def _named(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=URL")
    return name, url


if __name__ == "__main__":
    sys.exit(main())
