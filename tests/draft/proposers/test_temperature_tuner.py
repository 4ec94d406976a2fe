"""The tuner finds how far a draft is to be sharpened, and leaves a good one alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.sampling.logits_processors import SampleRow
from foretoken.core.sampling.sampler import TorchSampler
from foretoken.core.sampling.verifier import SampledToken, sample
from foretoken.draft.proposers.temperature_tuner import GRID, TemperatureTuner

VOCAB = 30
GENERATOR = torch.Generator().manual_seed(4)
TARGET = torch.randn(500, VOCAB, generator=GENERATOR) * 2.5
BLUR = 0.4 * torch.randn(500, VOCAB, generator=GENERATOR)


def row_of(tokens: array[int], temperature: float = 1.0, **form: float) -> ScheduledRequest:
    params = TokenSamplingParams(temperature=temperature, **form)  # type: ignore[arg-type]
    return ScheduledRequest(
        request_id="a",
        tokens=tokens,
        start=len(tokens) - 1,
        stop=len(tokens),
        page_ids=array("q"),
        sampling=SamplingMetadata(params=params, seed=9, prompt_len=1),
    )


def drawn(logits: torch.Tensor, row: ScheduledRequest, temperature_scale: float = 1.0) -> int:
    return sample(
        logits[None], [SampleRow(row.tokens, row.sampling)], temperature_scale=temperature_scale
    )[0].token_id


def hits(
    tuner: TemperatureTuner, scale: float, num_steps: int, temperature: float = 1.0, **form: float
) -> Iterator[bool]:
    """A request whose draft model's logits are ``scale`` times too sharp; each draft's fate."""
    row = row_of(array("q", [0]), temperature, **form)
    for step in range(num_steps):
        tuner.settle(row)
        logits = (TARGET[step % 500] + BLUR[step % 500]) * scale
        tuner.keep(row, logits)
        guess, truth = drawn(logits, row, tuner.temperature_scale), drawn(TARGET[step % 500], row)
        row.tokens.append(truth)  # in place, as the scheduler does
        yield guess == truth


def rate(tuner: TemperatureTuner, scale: float, num_steps: int = 1500) -> float:
    fates = list(hits(tuner, scale, num_steps))
    return sum(fates) / num_steps


def test_an_under_confident_draft_is_sharpened_and_accepted_more_often() -> None:
    tuner = TemperatureTuner()
    before = rate(TemperatureTuner(), 0.5, 100)
    list(hits(tuner, 0.5, 1000))
    assert tuner.temperature_scale <= 0.6
    assert rate(tuner, 0.5) > before + 0.1


def test_a_draft_that_is_a_little_under_confident_is_sharpened_too() -> None:
    tuner = TemperatureTuner()
    list(hits(tuner, 0.7, 3000))
    assert 0.5 <= tuner.temperature_scale <= 0.8


def test_an_over_confident_draft_is_softened() -> None:
    tuner = TemperatureTuner()
    list(hits(tuner, 1.7, 6000))
    assert tuner.temperature_scale > 1.0


def test_a_draft_that_is_right_about_itself_is_left_alone() -> None:
    tuner = TemperatureTuner()
    for _ in hits(tuner, 1.0, 6000):
        assert tuner.temperature_scale in (0.9, 1.0)


def test_a_draft_that_changes_is_followed() -> None:
    tuner = TemperatureTuner()
    list(hits(tuner, 0.5, 1000))
    assert tuner.temperature_scale < 1.0
    for _ in range(2000):
        tuner.judge([temperature_scale >= 1.0 for temperature_scale in GRID])
    assert tuner.temperature_scale >= 1.0


@pytest.mark.parametrize("form", [{"top_p": 0.9}, {"repetition_penalty": 1.2}], ids=str)
def test_other_parameters_do_not_stand_in_the_way(form: dict[str, float]) -> None:
    tuner = TemperatureTuner()
    list(hits(tuner, 0.5, 1000, 0.8, **form))
    assert tuner.temperature_scale < 1.0


def test_greedy_requests_say_nothing() -> None:
    tuner = TemperatureTuner()
    list(hits(tuner, 0.5, 200, temperature=0.0))
    assert tuner._num_drafts == 0
    assert tuner.temperature_scale == 1.0


def test_the_same_drafts_give_the_same_tau() -> None:
    taus = []
    for _ in range(2):
        tuner = TemperatureTuner()
        taus.append([tuner.temperature_scale for _ in hits(tuner, 0.5, 600)])
    assert taus[0] == taus[1]
    assert len(set(taus[0])) > 1


def test_each_tau_is_judged_by_what_it_would_have_drawn() -> None:
    tuner, judged = TemperatureTuner(), list[list[bool]]()
    tuner.judge = judged.append  # type: ignore[assignment,method-assign]
    row, rights = row_of(array("q", [0])), list[list[bool]]()
    for step in range(400):
        tuner.settle(row)
        logits, truth = TARGET[step] * 0.5, drawn(TARGET[step], row)
        tuner.keep(row, logits)
        if "a" in tuner._kept:
            rights.append(
                [drawn(logits, row, temperature_scale) == truth for temperature_scale in GRID]
            )
        row.tokens.append(truth)
    tuner.settle(row)
    assert judged == rights
    assert len(judged) == 400 // 8


def test_few_drafts_are_judged_and_fewer_when_much_is_known() -> None:
    tuner, count = TemperatureTuner(), list[int]()
    judge = tuner.judge
    tuner.judge = lambda hits: (count.append(1), judge(hits))[1]  # type: ignore[assignment,func-returns-value]
    list(hits(tuner, 1.0, 800))
    assert len(count) == 99
    list(hits(tuner, 1.0, 6400))
    assert 256 + 70 < len(count) < 256 + 90


def test_taus_between_two_that_agree_are_not_asked() -> None:
    count = list[int]()

    class Counting(TorchSampler):
        def sample(
            self, logits: torch.Tensor, rows: Sequence[SampleRow], *, temperature_scale: float = 1.0
        ) -> list[SampledToken]:
            count.append(1)
            return sample(logits, rows, temperature_scale=temperature_scale)

    tuner = TemperatureTuner(Counting())
    list(hits(tuner, 0.7, 200))
    assert 2.0 < len(count) / tuner._num_answers < 4.5


def test_logits_that_change_later_do_not_matter() -> None:
    tuner, row = TemperatureTuner(), row_of(array("q", [0]))
    logits = TARGET[0].clone()
    for _ in range(8):
        tuner.keep(row, logits)
    logits.fill_(torch.nan)
    assert not torch.isnan(tuner._kept["a"][1]).any()


def test_nothing_is_kept_of_requests_that_left_or_have_no_answer() -> None:
    tuner = TemperatureTuner()
    row = row_of(array("q", [0]))
    for name in "abc":
        for _ in range(8):
            tuner.keep(replace(row, request_id=name), TARGET[0])
    tuner.settle(row)  # no token came
    tuner.forget(["b", "unknown"])
    assert set(tuner._kept) == {"c"}
    assert tuner._num_answers == 0
