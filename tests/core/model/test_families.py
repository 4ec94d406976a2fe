"""Every family and every RoPE kind computes what transformers computes."""

from __future__ import annotations

import pytest
import torch

from checkpoints import KINDS, ORIGINAL_LEN, VOCAB_SIZE, ModelDriver, make_reference, save
from foretoken.core.model import Decoder, load_decoder
from foretoken.core.ops.native import native_library
from greedy_streams import generate, greedy, random_ids

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["torch", "native"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[object, Decoder]]:
    """Reference and decoder of every kind, from one set of checkpoints."""
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    pairs = {}
    for kind in KINDS:
        reference = make_reference(kind)
        folder = save(reference, tmp_path_factory.mktemp(kind))
        pairs[kind] = (reference, load_decoder(folder, backend=request.param))
    return pairs


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_over_200_positions(kind: str, loaded: dict) -> None:
    """Chunks of 37, 1, 8 and 154 rows, far beyond the original length of stretched RoPE."""
    reference, decoder = loaded[kind]
    ids = random_ids(200)
    assert len(ids) > 3 * ORIGINAL_LEN
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    driver = ModelDriver(decoder)
    logits = driver.prefill(driver.add(ids), 37, 38, 46, 200)
    assert logits.shape == (200, VOCAB_SIZE)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_generate_in_ragged_batches(kind: str, loaded: dict) -> None:
    """Prefill chunks, decode rows and verify rows share steps; two prompts share a prefix."""
    reference, decoder = loaded[kind]
    shared = random_ids(70, seed=1)
    prompts = [random_ids(n, seed=n) for n in (1, 9, 100)]
    prompts += [[*shared, *random_ids(20, seed=2)], [*shared, *random_ids(45, seed=3)], shared]
    expected = [generate(reference, prompt) for prompt in prompts]
    assert len({tuple(e) for e in expected}) == len(expected)
    assert greedy(decoder, prompts, expected) == expected


def test_draft_rows_without_kv_of_rejected_tokens_do_not_leak(loaded: dict) -> None:
    """A rejected draft's KV is overwritten, not attended to."""
    _, decoder = loaded["qwen3"]
    ids = random_ids(40)
    driver = ModelDriver(decoder)
    clean, dirty = driver.add(ids), driver.add(ids)
    expected = driver.prefill(clean, 30, 40)[30:]
    driver.prefill(dirty, 30)
    driver.step([(dirty, [5, 6, 7, 8], 0)])
    assert torch.equal(driver.prefill(dirty, 40), expected)


def test_pages_shared_with_another_sequence_give_the_same_logits(loaded: dict) -> None:
    _, decoder = loaded["mistral_window"]
    ids = random_ids(130)
    driver = ModelDriver(decoder)
    first = driver.add(ids)
    expected = driver.prefill(first, 130)
    second = driver.add(ids, prefix=first)
    assert second.num_computed == 128
    assert torch.equal(driver.prefill(second, 130), expected[128:])
