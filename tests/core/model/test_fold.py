"""What families fold into their weights; each difference taken away changes the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import KINDS, ModelDriver, make_checkpoint, make_reference, save
from foretoken.core.errors import ModelLoadError
from foretoken.core.model import load_decoder
from foretoken.core.model.config import FAMILIES
from foretoken.core.model.fields import Fields
from foretoken.core.model.fold import Fold, head_order, scaled
from greedy_streams import random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

# A difference of a family, and the config without it.
TAKEN_AWAY: dict[tuple[str, str], Any] = {
    ("granite", "embed_scale"): lambda c: replace(c, fold=replace(c.fold, embed_scale=1.0)),
    ("granite", "residual_scale"): lambda c: replace(c, fold=replace(c.fold, residual_scale=1.0)),
    ("granite", "logit_scale"): lambda c: replace(c, fold=replace(c.fold, logit_scale=1.0)),
    ("granite", "attention_scale"): lambda c: replace(c, attention_scale=None),
    ("glm", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("helium", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("ernie4_5", "interleaved"): lambda c: replace(c, fold=replace(c.fold, interleaved=False)),
    ("glm", "partial"): lambda c: replace(c, rope=replace(c.rope, partial=1.0)),
    ("phi3_partial", "partial"): lambda c: replace(c, rope=replace(c.rope, partial=1.0)),
    ("phi3", "window"): lambda c: replace(c, windows=(None,) * c.num_layers),
    ("phi3_longrope", "divisors"): lambda c: replace(c, rope=replace(c.rope, divisors=())),
    ("phi3_longrope", "factor"): lambda c: replace(c, rope=replace(c.rope, attention_factor=1.0)),
}


@pytest.mark.parametrize(("kind", "difference"), TAKEN_AWAY, ids="-".join)
def test_a_difference_taken_away_changes_the_logits(
    kind: str, difference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, kind)
    model_type, ids = KINDS[kind][0], random_ids(100)
    declared = FAMILIES[model_type]
    expected = _logits(folder, ids)

    def without(fields: Fields) -> Any:
        return TAKEN_AWAY[kind, difference](declared(fields))

    monkeypatch.setitem(FAMILIES, model_type, without)
    off = (_logits(folder, ids) - expected).abs().max() / expected.std()
    assert off > 0.05


@pytest.mark.parametrize("name", ["fused_qkv", "fused_gate_up"])
def test_fused_tensors_that_are_not_declared_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "phi3")
    declared = FAMILIES["phi3"]

    def without(fields: Fields) -> Any:
        config = declared(fields)
        return replace(config, fold=replace(config.fold, **{name: False}))

    monkeypatch.setitem(FAMILIES, "phi3", without)
    with pytest.raises(ModelLoadError, match="lacks tensors"):
        load_decoder(folder)


def _logits(folder: Path, ids: list[int]) -> torch.Tensor:
    driver = ModelDriver(load_decoder(folder, impl="own"))
    return driver.prefill(driver.add(ids), len(ids))


def test_longrope_ends_where_its_second_table_begins(tmp_path: Path) -> None:
    assert load_decoder(make_checkpoint(tmp_path, "phi3_longrope")).config.max_model_len == 256


def test_a_tied_output_is_scaled_apart_from_the_embedding(tmp_path: Path) -> None:
    """Both factors are rounded once, and the embedding that both come from stays as it is."""
    reference = make_reference("granite_tied").to(torch.bfloat16)
    decoder = load_decoder(save(reference, tmp_path))
    table = reference.model.embed_tokens.weight
    assert torch.equal(decoder.weights.embedding, table * 3.0)


def test_scaling_leaves_the_weight_itself_alone() -> None:
    weight = torch.ones(2, 2)
    assert torch.equal(scaled(weight, 2.0), weight + 1)
    assert torch.equal(weight, torch.ones(2, 2))
    assert Fold() == Fold(embed_scale=1.0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("turning", [4, 8])
def test_turning_halves_in_the_new_order_turns_what_the_family_turns(
    turning: int, interleaved: bool
) -> None:
    head = torch.arange(1.0, 9.0)
    angles = torch.arange(1.0, 1 + turning / 2)
    cos, sin = angles.cos(), angles.sin()
    expected = head.clone()
    part = head[:turning]
    first, second = (part[0::2], part[1::2]) if interleaved else part.chunk(2)
    turned = first * cos - second * sin, second * cos + first * sin
    expected[:turning] = torch.stack(turned, 1).flatten() if interleaved else torch.cat(turned)
    order = head_order(8, turning, interleaved=interleaved)
    pad = (0, 4 - turning // 2)
    cos, sin = torch.nn.functional.pad(cos, pad, value=1.0), torch.nn.functional.pad(sin, pad)
    first, second = head[order].chunk(2)
    found = torch.cat((first * cos - second * sin, second * cos + first * sin))
    torch.testing.assert_close(found, expected[order])
