"""``--draft``: the drafters that it names, and the speculator that uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest, ModelLoadError
from ...core.execution.proposer import Proposer
from ...core.interface.protocols import NO_SPECULATION, Speculator
from ...core.model.decoder import Decoder, OwnDecoder, sequence_pool
from ...core.model.drafting.mtp import count_mtp_layers
from ...core.model.drafting.rough_copy import NoRoughCopyError, rough_decoder
from ...core.model.formats.checkpoint import OnRead
from ...core.model.opening import open_model
from ...draft.control.controller import Controller
from ...draft.control.cost_model import CostModel, StepProfile, best_chain
from ...draft.control.estimators import AcceptanceModel
from ...draft.control.profiler import guess_pass, profile_draft
from ...draft.heads.joined import JoinedHead
from ...draft.heads.mtp import load_mtp
from ...draft.proposers.vocab_check import OtherTokensError, check_same_tokens
from ...draft.sources.grammar import GrammarSource
from ...draft.sources.prediction import PredictionSource
from ...draft.sources.prefix import PrefixSource
from ...draft.sources.source import Source
from ...draft.sources.suffix import SuffixSource
from ...draft.speculator import DraftSpeculator
from ..text.token_text import TokenText, texts_of_both
from ..text.tokenizer_cache import load_tokenizer
from .model_files import find_model

logger = logging.getLogger(__name__)
FREE: dict[str, Callable[[], Source]] = {
    "radix": PrefixSource,
    "suffix": SuffixSource,
    "ngram": partial(SuffixSource, own_only=True),
}
SELF = "self"  # the target in 4 bits
MTP = "mtp"  # its layer that predicts a further token
NAMED = (SELF, MTP)  # proposers without a path
LEAST_BYTES = 64 << 20  # of weights: fewer stay in caches, and 4 bits are read as fast as 16
MEMORY_SHARE = 0.2  # of the free memory, that `auto` may take for a rough copy
LIKELY = 0.7  # odds of its tokens: less than any model is known to have
LEAST_GAIN = 1.05  # over steps without drafts
NUM_TRIED_PAGES = 5
AUTO = ("radix", "suffix")  # the suffix index holds the request's own tokens too


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """``--draft`` parsed: model-free sources by name, and the folder or hub id of a draft model.

    ``may_lack_model``: the engine goes on without the model where it cannot be had or does not pay.
    """

    sources: tuple[str, ...] = ()
    model: str | None = None
    may_lack_model: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there are no drafters."""
        return not self.sources and self.model is None


def parse_draft(config: EngineConfig, *, own_draft: Path | None) -> DraftSpec:
    """Parse ``draft``; "auto": all model-free sources, and the draft model beside the target, else
    `MTP` where the checkpoint has it (`has_mtp`), else `SELF` where that pays.

    In a list "auto" means all model-free sources; the draft model is the one listed. Raises
    `InvalidRequest` for an empty name, a source named twice, or two draft models.
    """
    if config.draft == "none" or config.speculation in ("off", 0):
        return DraftSpec()
    if config.draft == "auto":
        if own_draft is not None:
            return DraftSpec(AUTO, str(own_draft))
        has_prices = config.speculation == "auto"
        is_plain = config.quantize == "none"
        return DraftSpec(AUTO, SELF if has_prices and is_plain else None, may_lack_model=True)
    names = [name.strip() for name in config.draft.split(",")]
    for name in names:
        if name in ("", "none"):
            message = (
                f"draft: '{name}' cannot be combined with other drafters"
                if name
                else "draft has an empty name"
            )
            raise InvalidRequest(message, param="draft")
        if names.count(name) > 1:
            raise InvalidRequest(f"draft lists '{name}' twice", param="draft")
    sources = tuple(dict.fromkeys(source for name in names for source in _sources(name)))
    models = [name for name in names if not _sources(name)]
    if len(models) > 1:
        raise InvalidRequest(
            f"draft takes one model, not {len(models)}: {', '.join(models)}", param="draft"
        )
    if models == [SELF] and config.quantize == "int4":
        message = "draft 'self' rounds weights of 8 bits or more, not int4 (--quantize)"
        raise InvalidRequest(message, param="draft")
    return DraftSpec(sources, models[0] if models else None)


def find_draft(name: str) -> Path:
    """The folder or file of a draft model. Raises `ModelLoadError`, with the names of drafters."""
    try:
        return find_model(name).path
    except ModelLoadError as error:
        named = ", ".join(("auto", *FREE, *NAMED))
        raise ModelLoadError(f"draft: {error}; drafters by name: {named}") from None


def _sources(name: str) -> tuple[str, ...]:
    """The model-free sources that a name stands for; none for a path of a model."""
    if name == "auto":
        return AUTO
    return (name,) if name in FREE else ()


def rough_copy(target: Decoder, spec: DraftSpec) -> Decoder | str:
    """The target in 4 bits, which drafts for it; or why `auto` goes on without.

    Raises `ModelLoadError` where ``spec`` names it and it cannot be had.
    """
    if not spec.may_lack_model:
        try:
            return rough_decoder(target)
        except NoRoughCopyError as reason:
            raise ModelLoadError(
                f"draft '{SELF}' {reason}: leave it out, and look-ups draft, a draft model or a "
                "trained head"
            ) from None
    try:
        copy = rough_decoder(
            target, least_item=2, least_bytes=LEAST_BYTES, memory_share=MEMORY_SHARE
        )
    except NoRoughCopyError as reason:
        return str(reason)
    pass_s, gain = self_draft_price(target, copy)
    return copy if gain >= LEAST_GAIN else f"would not pay: a pass takes {pass_s:.2f} of a step"


def self_draft_price(target: Decoder, copy: Decoder) -> tuple[float, float]:
    """Price of a pass of a rough copy as a share of a step; and gain of chains at `LIKELY` odds.

    Measured for one request, with few tokens behind it.
    """
    page_size = EngineConfig().sizes(target.device.type).page_size  # has kernels of its own
    pool = sequence_pool(target, NUM_TRIED_PAGES, 1, page_size=page_size)
    forward, _ = guess_pass(target, pool)
    draft = profile_draft(copy, pool, (1,))
    return draft[1] / forward[1], best_chain(StepProfile(forward, draft), LIKELY)


def has_mtp(path: Path, target: Decoder) -> bool:
    """Whether `auto` can draft with an MTP layer of the target's checkpoint.

    A layer that is not whole is named in the log.
    """
    if not isinstance(target, OwnDecoder) or target.config.mtp is None:
        return False
    try:
        return count_mtp_layers(*open_model(path)) > 0
    except ModelLoadError as problem:
        logger.warning("auto drafts without '%s': %s", MTP, problem)
        return False


def mtp_head(
    path: Path, target: Decoder, config: EngineConfig, on_read: OnRead | None
) -> JoinedHead:
    """The MTP layer of a target's checkpoint. Raises `InvalidRequest` where it has none."""
    try:
        return load_mtp(path, target, keeps_packed=keeps_packed(config), on_read=on_read)
    except ModelLoadError as problem:
        raise InvalidRequest(f"draft '{MTP}': {problem}", param="draft") from None


def keeps_packed(config: EngineConfig) -> bool:
    """Whether quantised matrices of a head stay as they are stored, as the target's do."""
    return config.dtype == "auto" and config.quantize == "none"


def make_sources(spec: DraftSpec) -> list[Source]:
    """The model-free sources: forced tokens of a grammar, the caller's prediction, others."""
    if spec.is_empty:
        return []
    return [GrammarSource(), PredictionSource(), *(FREE[name]() for name in spec.sources)]


def make_speculator(
    config: EngineConfig,
    spec: DraftSpec,
    *,
    overlaps: bool,
    proposer: Proposer | None = None,
) -> tuple[Speculator, CostModel]:
    """The speculator and its cost model, which `KeptCosts` fills.

    ``proposer``: the model that drafts, if there is one. ``overlaps``: steps without drafts are
    launched before the one ahead of them is read.
    """
    costs = CostModel()
    if spec.is_empty:
        if config.speculation not in ("auto", "off", 0):
            logger.warning(
                "--speculation %s drafts nothing: --draft none names no drafter", config.speculation
            )
        return NO_SPECULATION, costs
    depth: Literal["auto"] | int = "auto"
    if isinstance(config.speculation, int):
        depth = config.speculation
    speculator = DraftSpeculator(
        make_sources(spec),
        Controller(costs),
        AcceptanceModel(),
        depth=depth,
        proposer=None if proposer is None else proposer.traits,
        overlaps=overlaps,
    )
    return speculator, costs


def texts_between(
    path: Path, draft: Decoder, target_path: Path, target: Decoder, config: EngineConfig
) -> tuple[TokenText, TokenText] | None:
    """The texts of the tokens of a target and of its draft model; None where these are the same.

    Raises `ModelLoadError` for other tokens, unless ``draft_vocab`` is "any" and both have a
    tokenizer. Also for a draft model with recurrent states, which drafts that fail would move on.
    """
    if draft.states:
        raise ModelLoadError(f"{path}: a draft model with recurrent states is not supported")
    ours, theirs = draft.config, target.config
    try:
        if ours.vocab_size != theirs.vocab_size:
            raise OtherTokensError(
                f"{path}: the draft model has {ours.vocab_size} tokens in its vocabulary, its "
                f"target {theirs.vocab_size}"
            )
        check_same_tokens(path, target_path, read=tokenizer_json)
    except OtherTokensError as difference:
        if config.draft_vocab != "any":
            raise ModelLoadError(f"{difference}; --draft-vocab any drafts by text") from None
        for each in (path, target_path):
            if tokenizer_json(each) is None:
                message = f"{each}: no tokenizer.json, by which drafts would be translated"
                raise ModelLoadError(message) from None
        longest = max(ours.max_model_len, theirs.max_model_len)
        return texts_of_both(target_path, path, max_model_len=longest)
    return None


def tokenizer_json(path: Path) -> str | None:
    """The text of a model's tokenizer.json; for a GGUF file, of the tokenizer made from it."""
    if path.suffix.lower() == ".gguf":
        return str(load_tokenizer(path).backend_tokenizer.to_str())
    file = path / "tokenizer.json"
    return file.read_text(encoding="utf-8") if file.is_file() else None
