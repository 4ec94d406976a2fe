"""An engine over the Triton kernels that launches a step before the one ahead of it is over."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.api.build.engine_builder import build
from foretoken.core.config import EngineConfig
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from foretoken.core.interface.request import OnToken, Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from support.checkpoints import make_reference, save

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]
TINY = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
PARAMS = (
    TokenSamplingParams(temperature=0.8, top_p=0.9, max_tokens=5),
    TokenSamplingParams(temperature=0.0, max_tokens=6),
    TokenSamplingParams(temperature=0.7, repetition_penalty=1.2, max_tokens=2),
)
NUM_SERVED = (3, 6, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.device("cpu"), torch.no_grad():
        model = make_reference("qwen3", **TINY)
        for parameter in model.parameters():
            parameter *= 8 if parameter.ndim == 2 else 1  # or it would say one thing for ever
        return save(model, tmp_path_factory.mktemp("target"))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch went on from one that nobody had waited for, in their order."""
    made: list[bool] = []
    launch = ModelRunner.launch

    def noted(
        runner: ModelRunner,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        made.append(after is not None)
        return launch(runner, plan, after, on_kernels_started)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    return made


def requests() -> list[Request]:
    """The first one is ended by whoever reads its text."""
    return [
        Request(
            request_id=str(index),
            tokens=array("q", [5, 6, 7 + index, 19 - 6 * index]),
            sampling=SamplingMetadata(params=params, seed=7 + index, prompt_len=4),
            on_token=_stop_at(3) if index == 0 else None,
        )
        for index, params in enumerate(PARAMS)
    ]


def _stop_at(count: int) -> OnToken:
    seen: list[int] = []

    def on_token(token_id: int) -> str | None:
        seen.append(token_id)
        return "enough" if len(seen) == count else None

    return on_token


def serve(folder: Path, device: torch.device, overlap: Any) -> list[list[int]]:
    config = EngineConfig(
        device=device.type,  # type: ignore[arg-type]
        backend="triton",
        dtype="float32",
        speculation="off",
        kv_tokens=160,
        max_model_len=40,
        max_batch_tokens=16,
        max_running=3,
        overlap=overlap,
    )

    async def scenario() -> list[list[int]]:
        engine = build(folder, config).engine
        await engine.start()
        streams = [engine.submit(each) for each in requests()]
        told = [[token async for delta in each for token in delta.token_ids] for each in streams]
        assert (await engine.audit())["ok"]
        await engine.close()
        return told

    return asyncio.run(scenario())


def test_launches_that_overlap_say_the_same_and_are_the_rule_where_a_device_launches(
    folder: Path, device: torch.device, launches: list[bool]
) -> None:
    expected = serve(folder, device, "off")
    assert not any(launches)
    assert expected[0][2] != expected[1][2], "who goes on from the other's token is noticed"
    assert [len(tokens) for tokens in expected] == list(NUM_SERVED)
    assert serve(folder, device, "auto") == expected
    assert sum(launches) >= 2
