"""Built: an engine, and what the API needs of its model.

A module of its own, without torch: a process that reaches its engine over a socket has one, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from ...core.model.pooling import NO_POOLING, PoolingSpec
from ...core.options.checks import Positive, TokenId
from ..types.sampling_params import NO_DEFAULTS, SamplingDefaults
from .adapter_loader import AdapterLoader

if TYPE_CHECKING:
    from ...core.tiers.events import KVEventPublisher
    from ...core.tiers.keys import PageKeys
    from ...core.tiers.transfer_params import TransferParams

EngineT = TypeVar("EngineT", covariant=True)


class ModelFacts(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Facts about a model that are the same in every process that serves it."""

    name: str
    aliases: frozenset[str] = frozenset()  # other names that requests may call it by
    vocab_size: Positive
    max_model_len: Positive  # tokens, prompt and answer together
    eos_token_ids: frozenset[TokenId]
    exact: bool = True  # whether a request's bits are the same in any batch
    drafters: tuple[str, ...] = ()  # as answers and metrics name them
    no_self_draft: str = ""  # why `auto` drafts without the model itself, if it does
    model_path: str = "own"  # what computes the layers: own, or transformers' modules
    sampling_defaults: SamplingDefaults = NO_DEFAULTS  # of requests that leave these fields out
    pooling: PoolingSpec = NO_POOLING  # uses of its last row
    takes_images: bool = False  # in prompts
    fingerprint: bytes | None = None  # of what computes the KV, where it was asked for
    kernels: str = ""  # that compute it, where it was asked for: others may give other bits


class Built(ModelFacts, Generic[EngineT], frozen=True, kw_only=True):
    """An engine that is ready to start, and facts about its model."""

    engine: EngineT
    path: Path  # of the target, a folder or a GGUF file: tokenizer, chat template
    settings: Mapping[str, object] = {}  # options, resolved
    keys: PageKeys | None = None  # of cached pages, where they were asked for
    # Takes the token ids with which prompts end and answers open; of models with recurrent states.
    set_openings: Callable[[Sequence[array[int]]], None] | None = None
    adapters: AdapterLoader | None = None  # brings adapters to the model; None: it takes none
    events: KVEventPublisher | None = None  # closed behind the engine, by the owner of both
    transfers: TransferParams | None = None  # of prompts between engines, where asked for
