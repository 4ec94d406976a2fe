"""Log-probabilities: what they are, which alternatives come with them, the same on every device."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.core.sampling import logprobs
from foretoken.core.sampling.logprobs import token_logprobs

INF, NAN = float("inf"), float("nan")
BROKEN = ([NAN, 0.0, 0.0], [INF, 0.0, 0.0], [-INF, -INF, -INF], [NAN] * 3)


def test_they_equal_log_softmax_at_the_given_tokens() -> None:
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(9)) * 5
    ids = list(range(0, 3000, 150))
    entries = token_logprobs(logits, ids, 4)
    expected = logits.double().log_softmax(-1)
    for i, (entry, token_id) in enumerate(zip(entries, ids, strict=True)):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(expected[i, token_id]), abs=2e-6)
        best = expected[i].topk(4)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=2e-6)


@pytest.mark.parametrize("token_id", [-1, 5])
def test_tokens_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(IndexError, match="token id"):
        token_logprobs(torch.zeros(1, 5), [token_id], 0)


@pytest.mark.parametrize("broken", BROKEN)
def test_those_of_broken_logits_are_not_a_number(broken: list[float]) -> None:
    (entry,) = token_logprobs(torch.tensor([broken]), [0], 2)
    assert math.isnan(entry.logprob) or entry.logprob == -INF
    (entry,) = logprobs._of_rows(torch.tensor([broken]), [0], 2)
    assert math.isnan(entry.logprob) or entry.logprob == -INF


@pytest.mark.parametrize("num_top", [0, 1, 4, 20, 40])
@pytest.mark.parametrize("num_values", [2, 7, 10_000])
def test_a_gpus_way_gives_the_same_bits_ties_included(num_top: int, num_values: int) -> None:
    generator = torch.Generator().manual_seed(num_values)
    logits = torch.randint(num_values, (9, 33), generator=generator).float() / 3
    ids = list(range(0, 27, 3))
    assert logprobs._of_rows(logits, ids, num_top) == token_logprobs(logits, ids, num_top)


def test_a_gpu_takes_many_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 33, generator=torch.Generator().manual_seed(2))
    sizes = []

    def of_rows(values: torch.Tensor, token_ids: list[int], num_top: int) -> list[object]:
        sizes.append(len(values))
        return [(token_id, num_top) for token_id in token_ids]

    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    monkeypatch.setattr(logprobs, "_of_rows", of_rows)
    monkeypatch.setattr(logprobs, "_BLOCK", 4 * 33)
    found = token_logprobs(logits.as_subclass(OnGpu), range(9), 1)  # type: ignore[arg-type]
    assert found == [(token_id, 1) for token_id in range(9)]
    assert sizes == [4, 4, 1]
