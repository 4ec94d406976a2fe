"""The command ``foretoken``."""

from .commands import main

__all__ = ["main"]
