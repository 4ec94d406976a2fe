"""The kinds of drafters with weights. docs/contributing.md describes how to add one."""

from __future__ import annotations

from pathlib import Path

from .heads.assistant import ASSISTANT
from .heads.joined import HEAD
from .heads.mtp import MTP
from .proposers.kind import ProposerKind
from .proposers.lm_proposer import LM
from .proposers.self_draft import SELF

# Files are of the first kind that recognises them: a draft model is what nothing else is.
KINDS = (MTP, SELF, ASSISTANT, HEAD, LM)
NAMED = {kind.name: kind for kind in KINDS if kind.recognises is None}  # values of --draft


def kind_of(name: str, found: Path | None) -> ProposerKind:
    """Return the kind of a value of ``--draft``; ``found``: its files, unless it is in `NAMED`.

    Raises `ModelLoadError` for a head that is not supported.
    """
    if found is None:
        return NAMED[name]
    return next(kind for kind in KINDS if kind.recognises is not None and kind.recognises(found))
