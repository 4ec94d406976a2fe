"""``--draft auto`` lets the model draft for itself where that can be had and pays."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from foretoken.api.build.drafts import DraftSpec, parse_draft
from foretoken.api.build.engine_builder import LocalBuilt, build
from foretoken.core.config import EngineConfig
from foretoken.core.model.drafting import rough_copy
from foretoken.draft.proposers import self_draft
from support.tiny_pair import write_pair

LOOK_UPS = ("radix", "suffix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("self"), vocab_size=256)[0]


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch):
    """A model of any size is tried, at this price of a pass and gain."""

    def set_price(pass_s: float, gain: float) -> None:
        monkeypatch.setattr(self_draft, "LEAST_BYTES", 0)
        monkeypatch.setattr(self_draft, "self_draft_price", lambda *_: (pass_s, gain))

    return set_price


def built(folder: Path, **options: object) -> LocalBuilt:
    return build(folder, EngineConfig(device="cpu", **options))  # type: ignore[arg-type]


def test_auto_alone_tries_the_model_itself_and_only_where_drafts_have_prices() -> None:
    assert parse_draft(EngineConfig(), own_draft=None) == DraftSpec(LOOK_UPS, "self", True)
    own = parse_draft(EngineConfig(), own_draft=Path("own"))
    assert (own.model, own.may_lack_model) == ("own", False)
    for options in ({"speculation": 4}, {"quantize": "int8"}):
        assert parse_draft(EngineConfig(**options), own_draft=None).model is None
    assert parse_draft(EngineConfig(draft="auto,ngram"), own_draft=None).model is None


def test_a_model_that_drafts_well_for_itself_does(folder: Path, priced) -> None:
    priced(0.4, 1.2)
    found = built(folder)
    assert (found.drafters, found.no_self_draft) == ((*LOOK_UPS, "self"), "")


def test_one_that_does_not_pay_is_left_out_and_the_log_says_why(
    folder: Path, priced, caplog: pytest.LogCaptureFixture
) -> None:
    priced(0.9, 1.01)
    with caplog.at_level(logging.INFO):
        found = built(folder)
    assert (found.drafters, found.no_self_draft) == (
        LOOK_UPS, "would not be faster: its pass takes 0.90 of the time of a step",
    )  # fmt: skip
    assert f"draft auto does not use 'self': it {found.no_self_draft}" in caplog.text


def test_a_small_model_is_not_even_tried(folder: Path) -> None:
    assert "fit into CPU caches" in built(folder).no_self_draft


def test_the_copy_takes_a_part_of_the_free_memory_alone(
    folder: Path, priced, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced(0.4, 1.2)
    monkeypatch.setattr(rough_copy, "free_memory", lambda _: 50_000)
    assert "of which it may use 20%" in built(folder).no_self_draft


def test_what_cannot_be_copied_is_served_without(folder: Path) -> None:
    assert "needs the native kernels" in built(folder, backend="torch").no_self_draft
