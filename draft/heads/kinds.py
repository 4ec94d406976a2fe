"""The table of kinds of heads, and the loading and saving of folders with a head.

docs/contributing.md describes how to add a kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file

from ...core.errors import ModelLoadError
from ...core.model.description.config import DecoderConfig
from ...core.model.description.fields import Fields, read_json
from ...core.ops.batch import Taps
from ..proposers.gap_model import GapNumbers
from .block import BLOCK
from .common.base import HeadKind
from .common.files import (
    CONFIG,
    OWN_KEY,
    WEIGHTS,
    flattened,
    normalised,
    own_gaps,
    read_tensors,
    vocabulary_tensors,
    words_of,
)
from .common.layers import Head, TapConfig
from .eagle import EAGLE
from .medusa import MEDUSA

AnyKind: TypeAlias = HeadKind[Any, Any]
# A config that names no kind belongs to the first kind that recognises it.
KINDS: dict[str, AnyKind] = {kind.name: kind for kind in (BLOCK, MEDUSA, EAGLE)}
_UNSUPPORTED = ("dflash2", "domino", "lilicorr", "peagle", "mtp")


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A folder with a head: its kind and its config.

    ``shifted_taps``: the other possible taps, if the tap ids are ambiguous. ``gaps``: the
    parameters of `GapModel` that training fitted, for greedy (False) and sampled (True) requests;
    empty if the head was trained with another program.
    """

    path: Path
    kind: AnyKind
    config: TapConfig
    shifted_taps: Taps | None = None
    gaps: Mapping[bool, GapNumbers] = field(default_factory=dict)

    def load(self) -> Head:
        """Return the module with its weights, in their stored dtype.

        Raises `ModelLoadError` if the weights cannot be read or do not match the config.
        """
        head: Head = self.kind.load(self.path, self.config, normalised(read_tensors(self.path)))
        return head


def kind_of(head: Head) -> AnyKind:
    """Return the kind of a head."""
    return KINDS[head.config.kind]


def head_kind(path: Path) -> AnyKind | None:
    """Return the kind of the head in a folder, or None if the folder holds no head.

    Raises `ModelLoadError` for a head that is not supported.
    """
    if not (path / CONFIG).is_file():
        return None
    values = read_json(path / CONFIG)
    words = words_of(values)
    for word in _UNSUPPORTED:
        if any(word in each for each in words):
            raise ModelLoadError(f"{path / CONFIG}: heads of kind {word} are not supported")
    own = values.get(OWN_KEY)
    if isinstance(own, dict) and own.get("kind") in KINDS:
        return KINDS[own["kind"]]
    kinds = list(KINDS.values())
    named = [k for k in kinds if any(word in each for word in k.words for each in words)]
    return next(iter(named or [kind for kind in kinds if kind.recognises(values, path)]), None)


def open_head(path: Path, target: DecoderConfig) -> HeadFolder:
    """Read the config of a head for a target.

    Raises `ModelLoadError`, which names the wrong key.
    """
    kind = head_kind(path)
    if kind is None:
        raise ModelLoadError(f"{path / CONFIG} is not the config of a supported kind of head")
    fields = flattened(Fields(read_json(path / CONFIG), str(path / CONFIG)))
    config, shifted = kind.parse(fields, target, set(normalised(read_tensors(path))))
    return HeadFolder(path, kind, config, shifted, own_gaps(fields))


def save_head(head: Head, folder: Path, *, extra: Mapping[str, object] | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors`` as docs/heads.md describes them.

    ``extra``: more keys for the object "foretoken" of the config. Raises ValueError for a kind that
    cannot be saved.
    """
    kind, config = kind_of(head), head.config
    if kind.to_json is None:
        raise ValueError(f"saving heads of kind {kind.name} is not supported")
    own = {"kind": kind.name, "version": 1, "taps": list(config.taps), **(extra or {})}
    tensors = {name: each.detach().cpu().contiguous() for name, each in head.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | vocabulary_tensors(head), folder / WEIGHTS, metadata={"format": "pt"})
    values = kind.to_json(config) | {OWN_KEY: own}
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
