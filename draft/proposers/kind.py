"""ProposerKind: a kind of drafter with weights that `--draft` can select, and its loader.

Each kind is defined in its own file and listed in the table of api/build/drafts.py.
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
    """Converts token ids to text and back. The model thread calls it."""

    @property
    def first_ids(self) -> Sequence[int]:
        """Ids at the start of any text, for example BOS."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids without text."""

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for a special token that the other model lacks."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text.

        Raises `InvalidRequest` if the text cannot be encoded.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """The target that a drafter is loaded for, and functions for loading it.

    ``path``: folder or file of the target. ``found``: folder or file of the drafter; None if it has
    no files of its own. ``is_optional``: whether the engine starts without the drafter after a
    `LeftOutError`. ``on_read`` is called with the tensors of a head. ``load_decoder`` loads a model
    with the engine's options. ``texts_between`` takes the path and the decoder of a draft model and
    returns two `TokenText` objects, for the target and for the draft model, or None if both have
    the same tokens. It raises `ModelLoadError` for a draft model that does not suit the target or
    is not supported.
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
        """Whether quantised matrices keep their stored format, like the target's."""
        return self.config.dtype == "auto" and self.config.quantize == "none"


class LeftOutError(Exception):
    """An optional drafter is unavailable, or drafting with it would be slower than without it.

    The message is the reason, phrased as a predicate without its subject.
    """


class Pooled(Protocol):
    """A model with a KV pool: a decoder or a head."""

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype) -> KVPool:
        """Make a pool of ``num_pages`` pages for the model's KV."""

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype) -> int:
        """Return the bytes of one page."""


class LoadedDrafter(NamedTuple):
    """A drafter with its weights.

    ``make_proposer`` makes the proposer on a KV pool. The pool is made by ``pooled`` and has as
    many pages as the target's; without ``pooled`` it is the target's own pool.
    """

    make_proposer: Callable[[KVPool], Proposer]
    pooled: Pooled | None = None


def accept_all(config: EngineConfig) -> None:
    """Accept every option: do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerKind:
    """One kind of drafter with weights.

    A kind without ``recognises`` is selected by ``name`` in `--draft`. Other kinds are selected by
    a path: ``recognises`` returns whether the folder or file holds this kind, and raises
    `ModelLoadError` for an unsupported drafter. ``load`` raises `ModelLoadError`, `InvalidRequest`,
    or `LeftOutError` for an optional drafter. ``check`` raises `InvalidRequest` for options that
    the kind does not support.
    """

    name: str
    load: Callable[[DrafterContext], LoadedDrafter]
    recognises: Callable[[Path], bool] | None = None
    check: Callable[[EngineConfig], None] = accept_all
