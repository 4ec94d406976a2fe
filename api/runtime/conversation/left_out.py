"""Warnings about parts of a conversation that do not reach the model, logged once per kind."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)
MAX_KINDS = 256  # maximum number of kinds to log, since clients choose their names
MAX_CHARS = 64
_told: set[str] = set()


def tell_left_out(what: str, kind: str = "") -> None:
    """Warn once that parts of a conversation do not reach the model.

    ``what``: the parts; ``kind``: the name of their type in the request's body, if they have one.
    """
    told = f"{what} {kind[:MAX_CHARS]!a}" if kind else what
    if told in _told or len(_told) >= MAX_KINDS:
        return
    _told.add(told)
    logger.warning("%s are not passed to the model (logged once)", told)
