"""Packed pages on the Triton kernels, under the interpreter, say what the oracle says."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.interface.extras import packing
from foretoken.core.model import loader
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from support.checkpoints import make_reference, save
from support.packing_harness import EVERY, PROMPT_LEN, prompt, request, serve

pytest.importorskip("triton")

from foretoken.core.ops.triton.triton_ops import TritonOps

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.slow,
]
BUDGET = 8
ANSWER_LEN = BUDGET + EVERY + 3  # a packing and two rows behind it


@pytest.fixture
def decoders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> tuple[Decoder, Decoder]:
    """The same weights over the oracle and over the kernels."""
    monkeypatch.setattr(packing, "EVERY", EVERY)
    device = torch.get_default_device()
    with torch.device("cpu"):
        folder = save(make_reference("qwen3"), tmp_path_factory.mktemp("qwen3"))
    oracle = load_decoder(folder, device=device)
    monkeypatch.setattr(loader, "choose_ops", lambda *_, **__: TritonOps(exact="batch"))
    return oracle, load_decoder(folder, device=device)


def test_packed_pages_give_the_oracles_logits_and_chunks_the_same_bits(decoders) -> None:
    """The interpreter is slow: it goes on with an answer, as an engine does with a moved one."""
    oracle, decoder = decoders
    expected = serve(oracle, request("a", prompt(1), answer_len=ANSWER_LEN), budget=BUDGET)
    said = expected.tokens["a"]
    found, again = (
        serve(
            decoder,
            request("a", prompt(1), answer_len=ANSWER_LEN, said=said[:num_said]),
            budget=BUDGET,
        )
        for num_said in (ANSWER_LEN - 1, ANSWER_LEN - 2)
    )
    assert found.scheduler.num_packed_away_tokens == again.scheduler.num_packed_away_tokens == EVERY
    assert (found.tokens["a"], again.tokens["a"]) == (said[-1:], said[-2:])
    last = PROMPT_LEN + ANSWER_LEN - 1
    torch.testing.assert_close(
        found.logits["a"][last], expected.logits["a"][last], atol=1e-4, rtol=0
    )
    assert torch.equal(found.logits["a"][last], again.logits["a"][last])
