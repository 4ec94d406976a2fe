"""One GGUF file on foretoken's and llama.cpp's servers: `python -m foretoken.bench.lab.gguf FILE`.

The rows are described in servers.py. Every server is also started alone, with the file in the page
cache, to measure the seconds until it is ready.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .servers import TASK_ROWS, add_flags, compare, show, token_rows, words

CONTEXT = 8192  # Context of a request in tokens, the same on every server.
ROWS = token_rows(words) | TASK_ROWS


def foretoken(model: str, context: int, threads: int) -> list[str]:
    """Return the command of foretoken's server, without its port."""
    command = [sys.executable, "-m", "foretoken", "serve", model, "--log-level", "error"]
    return [*command, "--max-model-len", str(context), "--threads", str(threads)]


def llama_cpp(server: Path, file: Path, context: int, threads: int) -> list[str]:
    """Return the command of llama.cpp's server with four slots, without its port."""
    command = [str(server), "-m", str(file), "-t", str(threads), "-np", "4"]
    return [*command, "-c", str(4 * context), "--host", "127.0.0.1"]


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command lines of the servers, by the name of their column."""
    own = foretoken(str(args.file), CONTEXT, args.threads)
    made = {"foretoken": own, "plain": [*own, "--speculation", "off"]}
    if args.draft is not None:
        made["foretoken, draft"] = [*own, "--draft", f"auto,{args.draft}"]
    if args.llama_server is not None:
        peer = llama_cpp(args.llama_server, args.file, CONTEXT, args.threads)
        made["llama.cpp"] = peer
        made["llama.cpp, n-gram"] = [*peer, "--spec-type", "ngram-simple"]
        if args.draft is not None:
            made["llama.cpp, draft"] = [*peer, "-md", str(args.draft)]
    return {name: made[name] for name in args.only or made}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m foretoken.bench.lab.gguf`; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m foretoken.bench.lab.gguf", description=__doc__)
    parser.add_argument("file", type=Path, help="GGUF file that every server loads")
    parser.add_argument(
        "--llama-server", type=Path, help="path of llama.cpp's server, to compare with"
    )
    parser.add_argument("--draft", type=Path, help="GGUF file of a draft model; adds two columns")
    add_flags(parser)
    args = parser.parse_args(argv)
    found = compare(commands(args), ROWS, args.turns, args.turns)
    size = args.file.stat().st_size / 1e9
    show(f"{args.file.name}, {size:.2f} GB", found, args.out, file_gb=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
