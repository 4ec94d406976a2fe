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
from ...core.model.decoder import Decoder
from ...draft.control.controller import Controller
from ...draft.control.cost_model import CostModel
from ...draft.control.estimators import AcceptanceModel
from ...draft.heads.assistant import ASSISTANT
from ...draft.heads.joined import HEAD
from ...draft.heads.mtp import MTP
from ...draft.proposers.kind import ProposerKind
from ...draft.proposers.lm_proposer import LM
from ...draft.proposers.self_draft import SELF
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
# The kinds of drafters with weights. The first kind that recognises the files is used: LM comes
# last, since it recognises any model.
PROPOSERS = (MTP, SELF, ASSISTANT, HEAD, LM)
# kinds that are selected by name, since they have no files of their own
NAMED = {kind.name: kind for kind in PROPOSERS if kind.recognises is None}
AUTO = ("radix", "suffix")  # without "ngram": the suffix index also has the request's own tokens


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """Parsed ``--draft``: model-free sources by name, and the path or hub id of a draft model.

    ``may_lack_model``: continue without the model if it is unavailable or does not pay off.
    """

    sources: tuple[str, ...] = ()
    model: str | None = None
    may_lack_model: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there are no drafters."""
        return not self.sources and self.model is None


def parse_draft(config: EngineConfig, *, own_draft: Path | None) -> DraftSpec:
    """Parse ``--draft``.

    "auto" selects all model-free sources, and a model: ``own_draft``, else `MTP` if the checkpoint
    has it (`has_mtp`), else `SELF` if it pays off. In a list, "auto" stands for all model-free
    sources only. Raises `InvalidRequest` for an empty name, a source named twice, or two models.
    """
    if config.draft == "none" or config.speculation in ("off", 0):
        return DraftSpec()
    if config.draft == "auto":
        if own_draft is not None:
            return DraftSpec(AUTO, str(own_draft))
        has_prices = config.speculation == "auto"
        is_plain = config.quantize == "none"
        return DraftSpec(AUTO, SELF.name if has_prices and is_plain else None, may_lack_model=True)
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
    for name in models:
        if name in NAMED:
            NAMED[name].check(config)
    return DraftSpec(sources, models[0] if models else None)


def find_draft(name: str | None) -> Path | None:
    """Return the folder or file of a draft model; None for a drafter that does not need one.

    Raises `ModelLoadError`, which lists the names of drafters.
    """
    if name is None or name in NAMED:
        return None
    try:
        return find_model(name).path
    except ModelLoadError as error:
        named = ", ".join(("auto", *FREE, *NAMED))
        raise ModelLoadError(f"draft: {error}; drafters by name: {named}") from None


def proposer_kind(name: str, found: Path | None) -> ProposerKind:
    """Return the kind of a drafter with weights.

    ``found``: the drafter's folder or file; None for a name in `NAMED`. Raises `ModelLoadError` for
    a head that is not supported.
    """
    if found is None:
        return NAMED[name]
    return next(k for k in PROPOSERS if k.recognises is not None and k.recognises(found))


def _sources(name: str) -> tuple[str, ...]:
    """Return the model-free sources that a name stands for; empty for the path of a model."""
    if name == "auto":
        return AUTO
    return (name,) if name in FREE else ()


def make_sources(spec: DraftSpec) -> list[Source]:
    """Return the grammar and prediction sources, and the model-free sources of ``spec``.

    The list is empty if ``spec`` has no drafters.
    """
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
    """Return the speculator and its cost model, which `KeptCosts` fills.

    ``proposer``: the draft model, if there is one. ``overlaps``: steps without drafts are launched
    before the previous step's result is read.
    """
    costs = CostModel()
    if spec.is_empty:
        if config.speculation not in ("auto", "off", 0):
            logger.warning(
                "--speculation %s has no effect: --draft none disables all drafters",
                config.speculation,
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
    """Return the token texts of a target and its draft model; None if their tokens are equal.

    Raises `ModelLoadError` for different tokens, unless ``draft_vocab`` is "any" and both have a
    tokenizer, and for a draft model with recurrent states, which rejected drafts would corrupt.
    """
    if draft.states:
        raise ModelLoadError(f"{path}: a draft model with recurrent states is not supported")
    ours, theirs = draft.config, target.config
    try:
        if ours.vocab_size != theirs.vocab_size:
            raise OtherTokensError(
                f"{path}: the draft model has {ours.vocab_size} tokens in its vocabulary, and the "
                f"target has {theirs.vocab_size}"
            )
        check_same_tokens(path, target_path, read=tokenizer_json)
    except OtherTokensError as difference:
        if config.draft_vocab != "any":
            raise ModelLoadError(
                f"{difference}; use --draft-vocab any to draft through text"
            ) from None
        for each in (path, target_path):
            if tokenizer_json(each) is None:
                message = f"{each}: tokenizer.json is missing, which is needed to translate drafts"
                raise ModelLoadError(message) from None
        longest = max(ours.max_model_len, theirs.max_model_len)
        return texts_of_both(target_path, path, max_model_len=longest)
    return None


def tokenizer_json(path: Path) -> str | None:
    """Return the tokenizer.json of a model, converted for a GGUF file; None if it is missing."""
    if path.suffix.lower() == ".gguf":
        return str(load_tokenizer(path).backend_tokenizer.to_str())
    file = path / "tokenizer.json"
    return file.read_text(encoding="utf-8") if file.is_file() else None
