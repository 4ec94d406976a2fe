"""HeadKind: what the files of a head say about its kind, and what drafts with it.

Each kind of head is a file with one `HeadKind`, and a line in the table of kinds.py. No other code
knows which kinds there are.
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
"""Makes what drafts with a packed head, from the pool of the KV that it reads and the target."""


class ParsedHead(NamedTuple):
    """The config of a head.

    ``shifted_taps``: what the boundaries are if the engine that the head was trained with counts
    layers; None where the config leaves no doubt.
    """

    config: TapConfig
    shifted_taps: Taps | None = None


def no_spare_pages(page_size: int) -> int:  # noqa: ARG001
    """Return 0: a pass keeps its KV in the pages of its requests, or has none."""
    return 0


class PackedHead(NamedTuple):
    """A head whose matrices are laid out for its target's kernels.

    ``num_spare_pages``: how many pages, of so many positions each, passes want behind those of the
    target's ids. ``reads_target``: it has no KV of its own, and proposers get the target's pool.
    """

    make_proposer: MakeProposer
    num_spare_pages: Callable[[int], int] = no_spare_pages
    reads_target: bool = False


def by_words_alone(values: Mapping[str, Any], folder: Path) -> bool:  # noqa: ARG001
    """Return False: a config that does not name the kind is of another one."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind(Generic[ConfigT, HeadT]):
    """One kind of head.

    - ``name``: as `TapConfig.kind`, and in the part of a config.json that is ours.
    - ``words``: parts of ``architectures`` or ``speculators_model_type`` that give it away, lower
      case.
    - ``recognises``: whether a config without such a word is of this kind, by its values; and its
      folder, which may contain weights. By default none is.
    - ``parse``: the config for a target, from a config.json and the names of the tensors. Raises
      `ModelLoadError` naming the key that is wrong.
    - ``load``: the module with its weights, from the folder (for errors), the config and the
      tensors by the names of docs/heads.md.
    - ``to_json``: what a config.json holds of this kind alone; None: heads are loaded only.
    - ``pack``: lays out a head that was lent what it lacks; the module may be let go then.
    - ``guess``: the token ids that the head expects behind each of ``[b, T]`` token ids with their
      taps, ``[b, T - 1]``, the first behind the second one. For kinds of which `parse` may leave
      the taps open.
    - ``recipe``: how heads are made and trained; None: heads are loaded only.
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
