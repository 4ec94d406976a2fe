"""Built: an engine, and the facts about its model that the API needs.

This module does not import torch, since a process that reaches its engine over a socket uses it
too.
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
    from .updates.rollouts import Rollouts

EngineT = TypeVar("EngineT", covariant=True)


class ModelFacts(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Facts about a model that are the same in every process that serves it."""

    name: str
    aliases: frozenset[str] = frozenset()  # other names accepted in requests
    vocab_size: Positive
    max_model_len: Positive  # maximum number of tokens of prompt and answer together
    eos_token_ids: frozenset[TokenId]
    exact: bool = True  # whether a request's output has the same bits in any batch
    drafters: tuple[str, ...] = ()  # names of the drafters in answers and metrics
    no_self_draft: str = ""  # why `auto` does not use the self-draft, if it does not
    model_path: str = "own"  # implementation of the layers: own or transformers
    # defaults for fields that a request leaves out
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    pooling: PoolingSpec = NO_POOLING  # whether the model can return embeddings or scores
    takes_branches: bool = True  # whether prompts may have `Branches`
    takes_images: bool = False  # whether prompts may contain images
    fingerprint: bytes | None = None  # digest of everything that determines the KV, if requested
    kernels: str = ""  # identifier of the kernels, if requested; other kernels may give other bits


class Built(ModelFacts, Generic[EngineT], frozen=True, kw_only=True):
    """An engine that is ready to start, and facts about its model."""

    engine: EngineT
    path: Path  # folder or GGUF file of the target, with tokenizer and chat template
    settings: Mapping[str, object] = {}  # options, with the values chosen for automatic ones
    keys: PageKeys | None = None  # keys of cached pages, if requested
    # Sets the token ids with which answers open, at the end of prompts; None for a model without
    # recurrent states.
    set_openings: Callable[[Sequence[array[int]]], None] | None = None
    adapters: AdapterLoader | None = None  # None if adapters are not supported
    events: KVEventPublisher | None = None  # closed after the engine, by their common owner
    transfers: TransferParams | None = None  # KV transfers between engines, if enabled
    rollouts: Rollouts | None = None  # control of weight updates, if they are allowed
