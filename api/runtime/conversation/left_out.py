"""Log lines about parts of a conversation that do not reach the model, one for each kind."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)
MAX_KINDS = 256  # clients name them
MAX_CHARS = 64
_told: set[str] = set()


def tell_left_out(what: str, kind: str = "") -> None:
    """Log that parts of a conversation do not reach the model. ``kind``: as the body names it."""
    told = f"{what} {kind[:MAX_CHARS]!a}" if kind else what
    if told in _told or len(_told) >= MAX_KINDS:
        return
    _told.add(told)
    logger.warning("%s do not reach the model (logged once)", told)
