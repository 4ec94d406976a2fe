"""ProposerKind: a drafter with weights, as `--draft` names it, and how it is loaded.

Each kind is one entry in its own file, and a line in the table of api/build/drafts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ...core.config import EngineConfig
from ...core.execution.proposer import Proposer
from ...core.interface.kv_codec import KvDtype
from ...core.model.decoder import Decoder
from ...core.model.formats.checkpoint import OnRead
from ...core.ops.kv_pool import KVPool


class TokenText(Protocol):
    """Text of token ids and back. Calls come from the model thread."""

    @property
    def first_ids(self) -> Sequence[int]:
        """Ids in front of any text, such as that of BOS."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token, empty where it stands for no text that the other side reads."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as it stands behind other text. Raises `InvalidRequest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a drafter is loaded beside, and what its loading may use.

    ``path``: the target's folder or file. ``found``: the drafter's; None for one that has no files
    of its own. ``is_optional``: the engine goes on without it, see `LeftOutError`. ``on_read`` is
    called with the tensors of a head. ``load_decoder`` loads a model with the engine's options.
    ``texts_between``: the texts of the tokens of the target and of a model with its path; None
    where these are the same. It raises `ModelLoadError` for tokens that may not differ.
    """

    path: Path
    target: Decoder
    config: EngineConfig
    found: Path | None
    is_optional: bool
    on_read: OnRead | None
    load_decoder: Callable[[Path], Decoder]
    texts_between: Callable[[Path, Decoder], tuple[TokenText, TokenText] | None]

    @property
    def keeps_packed(self) -> bool:
        """Whether quantised matrices stay as they are stored, as the target's do."""
        return self.config.dtype == "auto" and self.config.quantize == "none"


class LeftOutError(Exception):
    """An optional drafter cannot be had or does not pay; the message says why, without subject."""


class Pooled(Protocol):
    """A model with a KV pool: a decoder or a head."""

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype) -> KVPool:
        """Make a pool of its shape."""

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype) -> int:
        """Bytes of one page."""


class LoadedDrafter(NamedTuple):
    """A drafter with its weights.

    ``make_proposer`` makes what drafts, on a pool of ``pooled``, which has a page for each of the
    target's; without ``pooled`` it gets the target's pool.
    """

    make_proposer: Callable[[KVPool], Proposer]
    pooled: Pooled | None = None


def accept_all(config: EngineConfig) -> None:
    """Do nothing: every option goes with the drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerKind:
    """One kind of drafter with weights.

    ``name``: a value of `--draft`, unless there is ``recognises``, which says whether a folder or
    file holds one; it raises `ModelLoadError` for one that is not supported. ``load`` raises
    `ModelLoadError`, `InvalidRequest`, or `LeftOutError` for one that is optional. ``check`` raises
    `InvalidRequest` for options that it does not go with.
    """

    name: str
    load: Callable[[Beside], LoadedDrafter]
    recognises: Callable[[Path], bool] | None = None
    check: Callable[[EngineConfig], None] = accept_all
