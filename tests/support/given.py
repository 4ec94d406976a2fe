"""Options as ``foretoken serve`` reads them from its flags, the environment and a file."""

from __future__ import annotations

import argparse
from functools import cache

from foretoken.api.cli import commands
from foretoken.api.cli.config import SERVE, Given
from foretoken.api.cli.serve import listen_options
from foretoken.api.serving.settings import Listen


@cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, which takes longer to make than to use."""
    return commands._parser()


def given(*args: str) -> Given:
    """The settings of ``foretoken serve ARGS``."""
    return Given(parser().parse_args(["serve", *args]), SERVE)


def listening(*args: str) -> Listen:
    """Return where and how ``foretoken serve ARGS`` listens."""
    return listen_options(given(*args))
