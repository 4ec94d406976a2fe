"""Start-up measurements, on pools of any size."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.draft.costs import CostModel
from foretoken.draft.profile import profile_step
from tiny_pair import write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    folders: tuple[Path, Path] = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=256)
    target, draft = (load_decoder(folder, dtype="float32") for folder in folders)
    return target, draft


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 1), (2, 1), (1, 16), (5, 4), (200, 4)])
def test_every_pool_can_be_measured(pair, num_pages, page_size) -> None:
    models = [(model, model.make_pool(num_pages, page_size=page_size)) for model in pair]
    profile = profile_step(models[0], models[1])
    assert profile.forward[1] > 0
    assert profile.draft[1] > 0
    assert max(profile.forward) < max(2, num_pages * page_size)
    costs = CostModel()
    costs.load(profile)
    assert costs.forward(1) > 0
    assert costs.is_ready


def test_without_a_draft_model_only_the_target_is_measured(pair) -> None:
    target = pair[0]
    profile = profile_step((target, target.make_pool(50, page_size=4)), None)
    assert profile.forward
    assert not profile.draft
