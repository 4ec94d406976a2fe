"""HeadKind: a kind of head, with functions to recognise, load, pack and save such heads.

Each kind of head is a file with one `HeadKind`, and a line in the table of kinds.py. No other code
depends on the set of kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from ....core.model.decoder import OwnDecoder
from ....core.model.description.config import DecoderConfig
from ....core.model.description.fields import Fields
from ....core.ops.batch import Taps
from ....core.ops.kv_pool import KVPool
from .layers import Head, TapConfig
from .proposer import HeadProposer
from .training import Recipe

Tensors: TypeAlias = dict[str, Tensor]
ConfigT = TypeVar("ConfigT", bound=TapConfig)
HeadT = TypeVar("HeadT", bound=Head)
MakeProposer: TypeAlias = Callable[[KVPool, OwnDecoder], HeadProposer]
"""Makes the proposer of a packed head, from the pool of the KV that it reads and the target."""


class ParsedHead(NamedTuple):
    """The config of a head.

    ``shifted_taps``: the other possible taps, for a config whose tap ids may count either layers or
    the boundaries between layers; None if the config is unambiguous.
    """

    config: TapConfig
    shifted_taps: Taps | None = None


def no_spare_pages(page_size: int) -> int:  # noqa: ARG001
    """Return 0, because the head needs no other pages than a request's."""
    return 0


class PackedHead(NamedTuple):
    """A head whose matrices are packed for its target's kernels.

    ``num_spare_pages``: returns, for a page size in tokens, the number of pages that passes need in
    addition to the target's. ``reads_target``: whether the head has no KV and its proposers read
    the target's pool.
    """

    make_proposer: MakeProposer
    num_spare_pages: Callable[[int], int] = no_spare_pages
    reads_target: bool = False


def by_words_alone(values: Mapping[str, Any], folder: Path) -> bool:  # noqa: ARG001
    """Return False: configs of this kind are recognised by `HeadKind.words` only."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind(Generic[ConfigT, HeadT]):
    """One kind of head.

    - ``name``: equals `TapConfig.kind`. A config.json stores it in the object "foretoken".
    - ``words``: lower-case words that identify the kind if ``architectures`` or
      ``speculators_model_type`` of a config.json contains one of them.
    - ``recognises``: returns whether a config that contains no such word is of this kind, from its
      values and its folder.
    - ``parse``: returns the head's config for a target, from a config.json and the names of the
      tensors. Raises `ModelLoadError`, which names the wrong key.
    - ``load``: returns the module with its weights. Its arguments are the folder (for error
      messages), the config, and the tensors by their names in docs/heads.md.
    - ``to_json``: returns the config.json without the object "foretoken"; None if heads of this
      kind cannot be saved.
    - ``pack``: packs a head for its target's kernels, after the head has borrowed its missing
      weights. The module may be freed afterwards.
    - ``guess``: returns the token ids [b, T - 1] that the head predicts from [b, T] token ids and
      their taps; the first prediction follows the second token. Required if `parse` may return
      ``shifted_taps``.
    - ``recipe``: makes and trains heads; None if heads of this kind cannot be trained.
    """

    name: str
    words: tuple[str, ...]
    recognises: Callable[[Mapping[str, Any], Path], bool] = by_words_alone
    parse: Callable[[Fields, DecoderConfig, set[str]], ParsedHead]
    load: Callable[[Path, ConfigT, Tensors], HeadT]
    to_json: Callable[[ConfigT], dict[str, object]] | None = None
    pack: Callable[[HeadT, OwnDecoder], PackedHead]
    guess: Callable[[HeadT, Tensor, Tensor], Tensor] | None = None
    recipe: Recipe | None = None
