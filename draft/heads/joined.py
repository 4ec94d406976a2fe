"""JoinedHead: a trained head with all its weights, packed for the kernels of its target."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import ModelLoadError
from ...core.interface.kv_codec import KvDtype
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.model.decoder import Decoder, OwnDecoder, sequence_pool
from ...core.model.description.tensors import LM_HEAD
from ...core.model.formats.checkpoint import OnRead
from ...core.model.opening import open_model
from ...core.ops.batch import Segment, Taps, Wanted
from ...core.ops.kv_pool import KVPool, bytes_per_page
from ...core.ops.row_extras import RowExtras, SegmentState, fresh_state
from ...core.ops.weights import table_rows
from ...core.sampling.drafted_row import DraftedRow
from ..proposers.gap_model import GapNumbers
from ..proposers.kind import DrafterContext, LoadedDrafter, ProposerKind
from .common.base import PackedHead
from .common.layers import Head, TapConfig
from .common.packing import LentOutput
from .common.proposer import HeadProposer
from .kinds import HeadFolder, head_kind, kind_of, open_head

logger = logging.getLogger(__name__)
# numbers of sampled tokens and of greedy tokens after them; the latter decide ambiguous tap ids
NUM_DRAWN, NUM_SCORED = 32, 64


class JoinedHead:
    """A head that is packed for its target; it makes KV pools and proposers.

    Only the parts of the module that are not packed are kept. ``gaps``: initial parameters of
    each proposer's `GapModel`, which estimates from the scores whether a candidate is accepted, for
    greedy (False) and sampled (True) requests.
    """

    def __init__(
        self,
        config: TapConfig,
        target: OwnDecoder,
        packed: PackedHead,
        gaps: Mapping[bool, GapNumbers] | None = None,
    ) -> None:
        self.config, self.target = config, target
        self._gaps = {} if gaps is None else gaps
        self._packed = packed
        self.device = target.device

    @property
    def loaded(self) -> LoadedDrafter:
        """The drafter, with a KV pool of its own unless the head reads the target's pool."""
        return LoadedDrafter(self.proposer, None if self._packed.reads_target else self)

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype = "auto") -> KVPool:
        """Make a pool for the head's KV: ``num_pages`` pages, and the spare pages that it needs.

        The pool has the target's dtype, whatever ``kv_dtype`` is, because head KV is small.
        """
        del kv_dtype
        return KVPool(
            num_pages + self._packed.num_spare_pages(page_size),
            **self.config.kv_shape._asdict(),
            page_size=page_size,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Return the bytes of a page, including the feature that may be kept for it."""
        del kv_dtype
        config, dtype = self.config, self.target.dtype
        feature = config.hidden_size * dtype.itemsize if config.keeps_page_features else 0
        shape = config.kv_shape._asdict()
        return bytes_per_page(**shape, page_size=page_size, dtype=dtype) + feature

    def proposer(self, pool: KVPool) -> HeadProposer:
        """Make a proposer; ``pool``: the KV pool that the head reads."""
        made = self._packed.make_proposer(pool, self.target)
        made.begin_with(self._gaps)
        return made


def join(
    head: Head, target: OwnDecoder, gaps: Mapping[bool, GapNumbers] | None = None
) -> JoinedHead:
    """Pack a head whose weights `lend` has completed. It can no longer be trained."""
    return JoinedHead(head.config, target, kind_of(head).pack(head, target), gaps)


def lend(head: Head, target: OwnDecoder, read_output: Callable[[], Tensor]) -> None:
    """Move a head to its target's device and dtype, and lend it the weights that it lacks.

    ``read_output`` reads the target's output matrix [vocab, hidden], from which a reduced head
    takes its rows; it is called only if the output is not tied to the embedding.
    """
    head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    weights, ops = target.weights, target.ops
    packed = weights.lm_head
    if head.draft_ids is not None and head.lacks_output:
        draft_ids = head.draft_ids.to(target.device)
        if target.config.tie_embeddings:
            rows = table_rows(weights.embedding, draft_ids)
        else:
            matrix = read_output()
            rows = matrix[draft_ids.to(matrix.device)]
        packed = ops.pack_linear(rows.to(target.device, target.dtype).contiguous())
    head.borrow(weights.embedding, LentOutput(ops, packed, weights.logit_cap))


def load_head(
    path: Path,
    target: Decoder,
    read_output: Callable[[], Tensor],
    on_read: OnRead | None = None,
) -> JoinedHead:
    """Load the head in a folder and pack it for its target.

    ``read_output`` reads the target's output matrix [vocab, hidden]. ``on_read`` is called with
    every tensor of the head. If the tap ids of the config are ambiguous, both possible taps are
    tried on a text that the target generates; the better ones are used, and a warning names them.
    Raises `ModelLoadError` for a head that is not supported or does not fit the target.
    """
    if not isinstance(target, OwnDecoder):
        raise ModelLoadError(
            f"{path}: a trained head needs foretoken's own decoder, but "
            f"{target.config.model_type} is computed by transformers' modules; use --draft auto or "
            "a draft model"
        )
    folder = open_head(path, target.config)
    head = folder.load()
    if on_read is not None:
        for name, tensor in head.state_dict().items():
            on_read(name, tensor)
    lend(head, target, read_output)
    if folder.shifted_taps is not None:
        _choose_taps(folder, head, folder.shifted_taps, target)
    config = head.config
    logger.info(
        "head %s: %s, reads the target at layer boundaries %s, drafts %d of %d token ids",
        path, type(head).__name__, list(config.taps), config.draft_vocab_size, config.vocab_size,
    )  # fmt: skip
    return join(head, target, folder.gaps)


def _choose_taps(folder: HeadFolder, head: Head, others: Taps, target: OwnDecoder) -> None:
    """Set the taps with which the head predicts more of the target's own tokens."""
    readings = (head.config.taps, others)
    scores = [score_taps(head, taps, target) for taps in readings]
    best = readings[1] if scores[1] > scores[0] else readings[0]
    logger.warning(
        "%s: eagle_aux_hidden_state_layer_ids is ambiguous, it may name layer boundaries %s or %s; "
        "of %d test tokens the head predicts %d and %d, so boundaries %s are used",
        folder.path, list(readings[0]), list(readings[1]), NUM_SCORED, *scores, list(best),
    )  # fmt: skip
    head.config = replace(head.config, taps=best)


@torch.inference_mode()
def score_taps(head: Head, taps: Taps, target: OwnDecoder) -> int:
    """Return how many of the target's greedy tokens the head predicts with these taps.

    There are `NUM_SCORED` tokens, after a text that the target samples at temperature 1. The head
    must have borrowed its missing weights and must not be packed.
    """
    guess = kind_of(head).guess
    assert guess is not None  # Each kind with ambiguous taps has this function.
    ids, tapped = _own_text(target, taps)
    guessed = guess(head, ids[:, :-1], tapped)
    return int((guessed[0, -NUM_SCORED:] == ids[0, -NUM_SCORED:]).sum())


def _own_text(target: OwnDecoder, taps: Taps) -> tuple[Tensor, Tensor]:
    """Generate token ids ``[1, T + 1]`` with the target; return them and their taps ``[1, T, ..]``.

    There are no taps for the last token.
    """
    tokens = array("q", target.config.eos_token_ids[:1] or (0,))
    num_tokens, page_size = NUM_DRAWN + NUM_SCORED, 16
    pages = array("q", range(-(-num_tokens // page_size)))
    pool = sequence_pool(target, len(pages), 1, page_size=page_size)
    fresh_state(pool.states, 0, 1)
    once = tuple(dict.fromkeys(taps))
    found: list[Tensor] = []
    for index in range(num_tokens):
        params = TokenSamplingParams(temperature=1.0 if index < NUM_DRAWN else 0.0)
        sampling = SamplingMetadata(params=params, seed=0, prompt_len=1)
        state = None if pool.states is None else SegmentState(0, 0, index + 1)
        segment = Segment(tokens[-1:], index, pages, 1, extras=RowExtras(state=state))
        batch = target.batch([segment], page_size=page_size)
        output = target.forward(batch, pool, Wanted(taps=once))
        assert output.taps is not None
        parts = output.taps[:1].chunk(len(once), dim=-1)
        found.append(torch.cat([parts[once.index(boundary)] for boundary in taps], dim=-1))
        (choice,) = target.sampler.sample(output.logits, [DraftedRow(tokens, sampling)])
        tokens.append(max(0, choice.token_id))
    ids = torch.tensor([tokens.tolist()], device=target.device)
    return ids, torch.cat(found).unsqueeze(0)


def _is_head(found: Path) -> bool:
    return head_kind(found) is not None


def _load(context: DrafterContext) -> LoadedDrafter:
    assert context.found is not None
    read_output = partial(_output_matrix, context.path)
    return load_head(context.found, context.target, read_output, context.on_read).loaded


def _output_matrix(path: Path) -> Tensor:
    """Return the output matrix of a checkpoint, [vocab, hidden]."""
    found = open_model(path).checkpoint.read(LM_HEAD)
    return found if isinstance(found, Tensor) else found.dequantize()


HEAD = ProposerKind(name="head", recognises=_is_head, load=_load)
