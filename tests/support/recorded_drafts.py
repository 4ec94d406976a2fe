"""A proposer whose drafts are kept, in an engine without its loop."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.heads.common.proposer import HeadProposer
from foretoken.radix_cache import PrefixCache
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.tiny_models import VOCAB


def prompt_of(length: int) -> list[int]:
    """Random token ids, by their number."""
    generator = torch.Generator().manual_seed(length)
    ids: list[int] = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
    return ids


class Recorded:
    """A proposer whose drafts are kept, with the tokens behind which they were made."""

    def __init__(self, proposer: HeadProposer) -> None:
        self.observe, self.forget = proposer.observe, proposer.forget
        self.traits, self.taps, self._propose = proposer.traits, proposer.taps, proposer.propose
        self.found: list[tuple[list[int], list[int]]] = []

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        drafts = self._propose(rows)
        pairs = zip(rows, drafts, strict=True)
        self.found += [(list(row.tokens), list(draft.token_ids)) for row, draft in pairs]
        return drafts


def serve(
    target: OwnDecoder,
    pool: KVPool,
    proposer: Recorded | None,
    temperature: float,
    num_requests: int,
) -> list[Request]:
    """Serve prompts of several chunks, some of which share a beginning, twice."""
    limits = SchedulerLimits(
        max_batch_tokens=32,
        max_running=4,
        max_queued=20,
        max_model_len=300,
        vocab_size=target.config.vocab_size,
    )
    runner = ModelRunner(target, pool, proposer)  # type: ignore[arg-type]
    cache = PrefixCache(pool.num_pages, pool.page_size)
    speculator = FixedDepth(0 if proposer is None else 3)
    driver = Driver(Scheduler(cache, limits, speculator), runner)  # type: ignore[arg-type]
    made = []
    for turn in range(2):
        for index in range(num_requests):
            prompt = [*prompt_of(21), *prompt_of(3 + index)] if index % 2 else prompt_of(5 + index)
            params = TokenSamplingParams(temperature=temperature, max_tokens=16)
            sampling = SamplingMetadata(params=params, seed=index, prompt_len=len(prompt))
            name = f"{turn} {index}"
            made.append(Request(request_id=name, tokens=array("q", prompt), sampling=sampling))
            driver.add(made[-1])
        driver.run()
    return made
