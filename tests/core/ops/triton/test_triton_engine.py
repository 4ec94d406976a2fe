"""An engine over the Triton kernels: what a request says depends on nothing but the request."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.api.build.engine_builder import build
from foretoken.core.config import EngineConfig
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.execution.proposer import Proposer
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, Speculator, ignore_kernels
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.drafting.rough_copy import rough_decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.draft.proposers.self_draft import SelfProposer
from foretoken.radix_cache import PrefixCache
from support.checkpoints import make_checkpoint, make_reference, save
from support.draft_trees import RandomTrees, TreeDepth, TreeRows, tree_of
from support.equality_harness import make_speculator
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.tiny_heads import join_random

pytest.importorskip("triton")

from foretoken.core.ops.triton.sampling.sampler import TritonSampler
from foretoken.core.ops.triton.triton_ops import TritonOps
from support.graph_fixture import Graphs

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]
# The interpreter takes a millisecond for each of a kernel's programs.
TINY = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
PAGE_SIZE, NUM_TOKENS = 4, 4
PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6], [5, 6, 7, 5, 6, 11, 12])
PARAMS = (
    TokenSamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    TokenSamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.2, logprobs=1, max_tokens=NUM_TOKENS
    ),
)

WILD = (
    TokenSamplingParams(temperature=6.0, max_tokens=NUM_TOKENS),
    TokenSamplingParams(temperature=4.0, top_p=0.95, max_tokens=NUM_TOKENS),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that often agrees with it: the target with a little noise."""
    generator = torch.Generator("cpu").manual_seed(1)
    with torch.device("cpu"), torch.no_grad():
        model = make_reference("qwen3", **TINY)
        target = save(model, tmp_path_factory.mktemp("target"))
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        return target, save(model, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def decoders(folders: tuple[Path, Path], device: torch.device) -> list[Decoder]:
    options = {"device": device, "dtype": "float32", "backend": "triton", "exact": "batch"}
    return [load_decoder(folder, **options) for folder in folders]  # type: ignore[arg-type]


def requests(params: Sequence[TokenSamplingParams] = PARAMS) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            tokens=array("q", prompt),
            sampling=SamplingMetadata(params=form, seed=7 + index, prompt_len=len(prompt)),
        )
        for index, (prompt, form) in enumerate(zip(PROMPTS, params, strict=True))
    ]


def make_driver(
    decoders: Sequence[Decoder],
    *,
    speculator: Speculator,
    with_lm: bool = False,
    with_self: bool = False,
    head: str | None = None,
    num_pages: int = 40,
    page_size: int = PAGE_SIZE,
    max_batch_tokens: int = 32,
) -> Driver:
    limits = SchedulerLimits(
        max_batch_tokens=max_batch_tokens,
        max_running=4,
        max_queued=9,
        max_model_len=40,
        vocab_size=TINY["vocab_size"],  # type: ignore[arg-type]
    )
    target, draft = decoders
    pools = [each.make_pool(num_pages, page_size=page_size) for each in decoders]
    for pool in pools:
        pool.data.fill_(torch.nan)
    proposer: Proposer | None = LmProposer(draft, pools[1], window=16) if with_lm else None
    if with_self:
        proposer = SelfProposer(rough_decoder(target), pools[0])
    if head is not None:
        joined = join_random(head, target)
        proposer = joined.proposer(joined.make_pool(num_pages, page_size=page_size))
    scheduler = Scheduler(PrefixCache(num_pages, page_size), limits, speculator)
    return Driver(scheduler, ModelRunner(target, pools[0], proposer))  # type: ignore[arg-type]


def serve(driver: Driver, asked: Sequence[Request]) -> dict[str, list[int]]:
    driver.ended.clear()
    driver.add(*asked)
    driver.run()
    assert set(driver.ended.values()) == {"length"}
    return dict(driver.served)


@pytest.fixture(scope="module")
def alone(decoders: Sequence[Decoder]) -> dict[str, list[int]]:
    """Tokens of each request when it runs by itself, token by token."""
    told = {}
    for request in requests():
        told |= serve(make_driver(decoders, speculator=FixedDepth(0)), [request])
    return told


@pytest.fixture(scope="module")
def wild(decoders: Sequence[Decoder]) -> dict[str, list[int]]:
    """The same of requests that may say anything: their drafts have branches."""
    return serve(make_driver(decoders, speculator=FixedDepth(0)), requests(WILD))


def test_neither_a_batch_nor_a_cached_prompt_nor_look_ups_change_a_token(decoders, alone) -> None:
    driver = make_driver(decoders, speculator=make_speculator("all"))
    assert serve(driver, requests()) == alone
    again = requests()
    assert serve(driver, again) == alone
    assert all(request.usage.cached_tokens >= PAGE_SIZE for request in again)
    assert sum(request.usage.accepted_tokens for request in again) > 0


def test_a_draft_model_changes_no_token_and_is_often_right(decoders, alone) -> None:
    driver = make_driver(decoders, speculator=FixedDepth(2), with_lm=True)
    asked = requests()
    assert serve(driver, asked) == alone
    assert sum(request.usage.accepted_tokens for request in asked) > 0


@pytest.mark.parametrize("speculator", [FixedDepth(2), TreeDepth(5)], ids=["chains", "trees"])
def test_a_model_that_drafts_for_itself_changes_no_token_and_is_often_right(
    decoders, alone, speculator
) -> None:
    """In 4 bits, over the pages of its own; a cached prompt is what it left there."""
    driver = make_driver(decoders, speculator=speculator, with_self=True, page_size=2)
    for _ in range(2):
        asked = requests()
        assert serve(driver, asked) == alone
        assert sum(request.usage.accepted_tokens for request in asked) > 2
    assert all(request.usage.cached_tokens for request in asked)


def test_draft_trees_change_no_token(decoders, alone) -> None:
    trees = RandomTrees(alone, depth=3, vocab_size=32)
    driver = make_driver(decoders, speculator=trees, page_size=2)
    asked = requests()
    assert serve(driver, asked) == alone
    beside = [r.usage.accepted_by_source.get(f"path {n}", 0) for r in asked for n in (1, 2, 3)]
    assert sum(beside) > 0


@pytest.mark.parametrize("drafter", ["lm", "reduced", "eagle3"])
def test_trees_that_grow_by_the_races_best_few_change_no_token(decoders, wild, drafter) -> None:
    """Trees grow in spare slots of a draft model's own pool, or from heads, one of fewer ids."""
    asked = requests(WILD)
    sources = {"lm": {"with_lm": True}}.get(drafter, {"head": drafter})
    driver = make_driver(decoders, speculator=TreeDepth(6), page_size=2, **sources)
    assert serve(driver, asked) == wild
    assert sum(request.usage.proposed_tokens for request in asked) > 0
    if drafter != "reduced":
        assert sum(request.usage.tree_steps for request in asked) > 0
    if drafter == "lm":
        assert sum(request.usage.accepted_tokens for request in asked) > 0


@pytest.mark.parametrize("drafter", ["lm", "self", "eagle3", "reduced", "mtp", "block"])
def test_drafts_whose_passes_are_graphs_change_no_token(
    folders, wild, drafter, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels of trees, the race for the best few among them, and the model's own steps."""
    graphs = Graphs()
    monkeypatch.setattr(TritonOps, "_make_graph", lambda *_: graphs)
    options = {"device": device, "dtype": "float32", "backend": "triton", "exact": "batch"}
    decoders = [load_decoder(folder, **options) for folder in folders]
    own = {"lm": {"with_lm": True}, "self": {"with_self": True}}
    driver = make_driver(
        decoders, speculator=TreeDepth(6), page_size=2, **own.get(drafter, {"head": drafter})
    )
    asked = requests(WILD)
    behind = counted(monkeypatch)
    assert serve(driver, asked) == wild
    assert sum(request.usage.proposed_tokens for request in asked) > 0
    assert graphs.num_replayed > sum(request.usage.verify_steps for request in asked) / 2
    is_block = drafter in ("block", "reduced")  # whose levels have logits of their own
    assert bool(behind) == is_block


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls that choose the best few behind a pass."""
    calls: list[int] = []
    best = TritonSampler.best

    def noted(sampler: TritonSampler, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return best(sampler, *args, **options)

    monkeypatch.setattr(TritonSampler, "best", noted)
    return calls


@pytest.mark.parametrize(("page_size", "length"), [(1, 9), (4, 14)])
def test_rows_of_a_draft_tree_have_the_bits_of_plain_decoding(
    decoders, page_size: int, length: int
) -> None:
    draft = tree_of([[3, 4, 5], [3, 6, 5], [3, 6, 7], [8, 4]])
    TreeRows(decoders[0], page_size, length).check(draft)


def test_neither_chunks_nor_preemption_change_a_token(decoders, alone) -> None:
    few = {"num_pages": 7, "page_size": 2, "max_batch_tokens": 6}
    driver = make_driver(decoders, speculator=FixedDepth(0), **few)
    assert serve(driver, requests()) == alone
    assert driver.scheduler.num_preemptions > 0


def answers(
    folder: Path, device: torch.device, asked: Sequence[Request], **options: Any
) -> dict[str, list[int]]:
    """Return the tokens of each request, all of them served at once by an engine."""
    config = EngineConfig(
        device=device.type,  # type: ignore[arg-type]
        backend="triton",
        dtype="float32",
        exact="batch",
        kv_tokens=160,
        max_model_len=40,
        max_batch_tokens=32,
        max_running=4,
        **options,
    )

    async def scenario() -> dict[str, list[int]]:
        engine = build(folder, config).engine
        await engine.start()
        streams = {each.request_id: engine.submit(each) for each in asked}
        told = {}
        for name, stream in streams.items():
            told[name] = [token_id async for delta in stream for token_id in delta.token_ids]
        await engine.close()
        return told

    return asyncio.run(scenario())


def test_an_engine_built_over_them_says_the_same(folders, alone, device: torch.device) -> None:
    for draft in (f"ngram,{folders[1]}", "self"):
        drafting = {"draft": draft, "speculation": 2}
        assert answers(folders[0], device, requests(), **drafting) == alone


def test_a_model_with_states_drafts_for_itself_in_chains_of_its_device(
    tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pass writes the log of the request, whose tokens the device alone knows."""
    with torch.device("cpu"):
        folder = make_checkpoint(tmp_path, "qwen3_5")
    plain = answers(folder, device, requests(WILD), speculation="off")
    asked = requests(WILD)
    assert answers(folder, device, asked, draft="self", speculation=2) == plain
    assert sum(request.usage.accepted_tokens for request in asked) > 0
    assert "the proposer failed" not in caplog.text


def test_an_engine_that_launches_a_step_before_the_last_is_read_says_the_same(
    folders, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind: list[int] = []
    launch = ModelRunner.launch

    def counted(
        runner: ModelRunner,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        if after is not None:
            behind.append(len(plan.requests))
        return launch(runner, plan, after, on_kernels_started)

    monkeypatch.setattr(ModelRunner, "launch", counted)
    params = [
        TokenSamplingParams(temperature=0.0, max_tokens=3),
        TokenSamplingParams(temperature=1.5, top_p=0.9, max_tokens=5),
    ]
    off, auto = (
        answers(folders[0], device, requests(params), speculation="off", overlap=overlap)
        for overlap in ("off", "auto")
    )
    assert off == auto
    assert behind == [2, 1, 1], "every step but that of the prompts and the first behind it"
