"""Costs of steps between processes: guessed once, corrected by steps, read by the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.api.build import step_costs
from foretoken.api.build.step_costs import KeptCosts, Model
from foretoken.core.execution.proposer import Proposer
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.machine import cache_folder as folders
from foretoken.draft.control.cost_model import CostModel, StepProfile
from foretoken.draft.proposers.lm_proposer import LmProposer
from support.tiny_pair import write_pair


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    found = []
    for folder in write_pair(tmp_path_factory.mktemp("pair"), vocab_size=256):
        decoder = load_decoder(folder, dtype="float32")
        found.append((decoder, decoder.make_pool(200, page_size=4)))
    target, draft = found
    return target, draft


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    yield tmp_path
    folders._trusted.cache_clear()


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[StepProfile]:
    """The guesses that were made."""
    made: list[StepProfile] = []

    def guess(*models: object) -> StepProfile:
        made.append(StepProfile({1: 0.010, 4: 0.012}, {1: 0.002} if models[1] else {}, 1e-7))
        return made[-1]

    monkeypatch.setattr(step_costs, "guess_step", guess)
    return made


def prepared(target: Model, proposer: Proposer | None = None, *, num_threads: int = 2) -> KeptCosts:
    kept = KeptCosts(CostModel())
    kept.prepare(target, proposer, num_threads=num_threads)
    return kept


def observe(costs: CostModel, seconds: float, *, times: int) -> None:
    for _ in range(times):
        costs.observe(
            num_rows=1, num_requests=1, num_tokens=1, forward_s=seconds, draft_s=0.0,
            seconds=seconds, with_prompts=False,
        )  # fmt: skip


def test_the_second_start_reads_what_the_first_one_guessed(models, folder, guesses) -> None:
    first, second = prepared(models[0]), prepared(models[0])
    assert len(guesses) == 1
    assert second.costs.profile == first.costs.profile == guesses[0]


def test_what_steps_teach_is_kept_for_the_next_start(models, folder, guesses) -> None:
    first = prepared(models[0])
    observe(first.costs, 0.030, times=300)
    first.keep()
    assert prepared(models[0]).costs.step_seconds(1) == pytest.approx(0.030, rel=0.1)


def test_an_engine_that_computed_nothing_keeps_the_file_as_it_is(models, folder, guesses) -> None:
    first = prepared(models[0])
    (file,) = folder.glob("costs-*.json")
    before = file.read_bytes()
    first.keep()
    assert file.read_bytes() == before


def test_another_drafter_or_number_of_threads_has_costs_of_its_own(models, folder, guesses) -> None:
    prepared(models[0])
    prepared(models[0], num_threads=1)
    prepared(models[0], LmProposer(*models[1]))
    assert len(guesses) == 3
    assert len([*folder.glob("costs-*.json")]) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"forward": {}, "draft": {}, "key_s": 0.0}',
        b'{"forward": {"1": -1.0}, "draft": {}, "key_s": 0.0}',
        b'{"forward": {"1": 1e300}, "draft": {}, "key_s": 0.0}',
        b'{"forward": {"1": 0.01, "0": 0.01}, "draft": {}, "key_s": 0.0}',
        b'{"forward": {"1": 0.01}, "draft": {"1": 0.0}, "key_s": 0.0}',
        b'{"forward": {"1": 0.01}, "draft": {}, "key_s": "no"}',
    ],
)
def test_a_file_that_cannot_be_believed_is_guessed_anew(models, folder, guesses, content) -> None:
    prepared(models[0])
    (file,) = folder.glob("costs-*.json")
    file.write_bytes(content)
    assert prepared(models[0]).costs.profile == guesses[1]
    assert prepared(models[0]).costs.profile == guesses[1]
    assert len(guesses) == 2


def test_a_folder_that_cannot_be_written_costs_a_guess_at_each_start(
    models, folder, guesses, monkeypatch
) -> None:
    def refuse() -> Path:
        raise PermissionError("no folder")

    monkeypatch.setattr(step_costs, "cache_folder", refuse)
    prepared(models[0]).keep()
    prepared(models[0])
    assert len(guesses) == 2


def test_a_guess_grows_with_rows_and_has_prices_for_drafts(models, folder) -> None:
    profile = step_costs.guess_step(models[0], LmProposer(*models[1]))
    assert profile.forward[1] > 0
    assert profile.draft[1] > 0
    assert profile.key_s >= 0
    costs = CostModel(profile)
    assert costs.row_seconds(1, 16, 1)[-1] >= 0
