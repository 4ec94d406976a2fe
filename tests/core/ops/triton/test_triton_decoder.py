"""A whole decoder over the Triton kernels, under the interpreter, says what the oracle says."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.model import loader
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from support.checkpoints import ModelDriver, make_reference, save

pytest.importorskip("triton")

from foretoken.core.ops.triton.triton_ops import TritonOps

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]
PROMPT = [7, 9, 11, 200, 3, 4, 5, 100, 17, 18, 19]


@pytest.fixture(params=["qwen3", "llama_biased"])
def decoders(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Decoder, Decoder]:
    """The same weights over the oracle and over the kernels."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        folder = save(make_reference(request.param), tmp_path_factory.mktemp(request.param))
    oracle = load_decoder(folder, device=device)
    monkeypatch.setattr(loader, "choose_ops", lambda *_, **__: TritonOps(exact="batch"))
    return oracle, load_decoder(folder, device=device)


def test_a_prompt_in_chunks_gives_the_oracles_logits(decoders) -> None:
    with torch.inference_mode():
        expected, logits = (
            driver.prefill(driver.add(PROMPT), 8, len(PROMPT))
            for driver in map(ModelDriver, decoders)
        )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_rows_computed_together_have_the_bits_of_rows_computed_alone(decoders) -> None:
    with torch.inference_mode():
        together, alone = (
            driver.prefill(driver.add(PROMPT), *stops)
            for driver, stops in (
                (ModelDriver(decoders[1]), (8, len(PROMPT))),
                (ModelDriver(decoders[1]), (8, 9, 10, len(PROMPT))),
            )
        )
    assert torch.equal(together, alone)
