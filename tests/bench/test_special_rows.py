"""Rows of vectors, scores, adapters and images: calls, figures, and what they are compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from foretoken.bench.common.roofline import Limits
from foretoken.bench.common.shapes import tiny_qwen3
from foretoken.bench.lab.peers.adapters import NUM_ADAPTERS, RANK, write_adapters
from foretoken.bench.lab.peers.checkpoints import SHAPES, Shape
from foretoken.bench.lab.peers.engines import ENGINES
from foretoken.bench.lab.peers.limits import roofline
from foretoken.bench.lab.peers.measure import Prompts, WrongAnswerError, measure, warm_up
from foretoken.bench.lab.peers.pictures import SIDE, smolvlm_256m, write_picture
from foretoken.bench.lab.peers.rows import IMAGE_ROWS, Row
from foretoken.bench.lab.peers.special_rows import ROWS, SPECIAL_ROWS
from foretoken.bench.lab.peers.table import Figures, best_other, closeness, notes, ratio, record
from foretoken.bench.lab.peers.wire import IMAGE_TOKEN, Answer, Call, with_image

BY_NAME = {row.name: row for row in SPECIAL_ROWS}
EMBED, RERANK = BY_NAME["embed-0.6b-32"], BY_NAME["rerank-0.6b-32"]
LORA_1, LORA_8 = BY_NAME["lora-0.6b-1"], BY_NAME["lora-0.6b-8x4"]
IMAGE, AGAIN = BY_NAME["image-smolvlm-1"], BY_NAME["image-smolvlm-again"]


class Noted:
    """Claims 2 s for each call, and 1 s more for each new token."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Answer:
        self.calls.append(call)
        if call.task:
            return Answer(2.0, [], numbers=[[1.0]] * len(call.prompts))
        return Answer(2.0 + call.num_new, [[7] * call.num_new for _ in call.prompts])


def prompts(row: Row, pictures: Path = Path()) -> Prompts:
    return Prompts(row, 1000, 0, pictures=pictures)


def test_rows_have_names_of_their_own_and_those_of_one_setting_stand_together() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    settings = [row.setting for row in ROWS]
    assert sum(a != b for a, b in pairwise(settings)) == len(set(settings)) - 1
    assert all(row.setting.shape in SHAPES for row in ROWS)


def test_vectors_are_counted_in_tokens_of_texts() -> None:
    ask = Noted()
    assert measure(EMBED, ask, prompts(EMBED)) == pytest.approx(32 * 128 / 2)
    assert [(call.task, len(call.prompts)) for call in ask.calls] == [("embed", 32)]
    assert len({tuple(prompt) for prompt in ask.calls[0].prompts}) == 32


def test_scores_are_seconds_and_documents_share_the_query() -> None:
    ask = Noted()
    assert measure(RERANK, ask, prompts(RERANK)) == pytest.approx(2.0)
    (call,) = ask.calls
    assert call.task == "score"
    assert len({tuple(prompt[: call.num_shared]) for prompt in call.prompts}) == 1
    assert len({tuple(prompt) for prompt in call.prompts}) == 32


def test_a_missing_number_is_no_result() -> None:
    short = Answer(1.0, [], numbers=[[1.0]])
    with pytest.raises(WrongAnswerError, match="wanted 32 results, got 1"):
        measure(EMBED, lambda call: short, prompts(EMBED))


def test_every_call_of_an_adapter_row_names_the_adapters() -> None:
    ask = Noted()
    warm_up(LORA_8, ask, prompts(LORA_8))
    measure(LORA_8, ask, prompts(LORA_8))
    assert [call.adapters for call in ask.calls] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3


def test_a_picture_stands_before_the_prompt_and_is_seen_once_alone(tmp_path: Path) -> None:
    ask = Noted()
    assert measure(IMAGE, ask, prompts(IMAGE, tmp_path)) == pytest.approx(3.0)
    (call,) = ask.calls
    with Image.open(call.image) as picture:
        assert picture.size == (SIDE, SIDE)
    assert call.num_new == 1
    ids = with_image(call.prompts[0])
    assert len(ids) == IMAGE.prompt_len + IMAGE_ROWS == IMAGE.max_len - IMAGE.num_new
    assert ids.count(IMAGE_TOKEN) == 64


def test_the_next_turn_has_the_first_ones_prompt_and_answer_and_its_picture(tmp_path: Path) -> None:
    ask = Noted()
    assert measure(AGAIN, ask, prompts(AGAIN, tmp_path)) == pytest.approx(3.0)
    first, second = ask.calls
    assert (first.image, first.num_new, second.num_new) == (second.image, AGAIN.num_new, 1)
    ((begun,), (whole,)) = first.prompts, second.prompts
    assert whole[: len(begun) + AGAIN.num_new] == begun + [7] * AGAIN.num_new
    assert len(with_image(whole)) == AGAIN.max_len


def test_no_two_turns_have_one_picture(tmp_path: Path) -> None:
    turns = [Prompts(IMAGE, 1000, turn, pictures=tmp_path).picture() for turn in (-1, 0)]
    one, other = (Image.open(path).tobytes() for path in turns)
    assert one != other


def test_an_adapter_row_is_compared_with_the_model_without() -> None:
    found = {
        "foretoken": Figures([19.0]),
        "foretoken-base": Figures([20.0]),
        "llama.cpp": Figures([40.0]),
    }
    assert best_other(LORA_1, found) == ("foretoken-base", 20.0)
    assert ratio(LORA_1, found) == pytest.approx(0.95)
    assert best_other(replace(LORA_1, against=""), found) == ("llama.cpp", 40.0)


def test_the_model_without_adapters_takes_the_rows_alone_that_name_it() -> None:
    (base,) = (engine for engine in ENGINES if engine.name == "foretoken-base")
    assert [row.name for row in ROWS if base.takes(row)] == ["lora-0.6b-0", "lora-0.6b-1"]


def test_numbers_are_compared_by_their_cosine() -> None:
    assert closeness([[3.0, 0.0], [0.0, 4.0]], [[6.0, 0.0], [0.0, 8.0]]) == pytest.approx(1.0)
    assert closeness([[1.0, 0.0]], [[0.0, 1.0]]) == pytest.approx(0.0)
    assert closeness([[1.0]], [[1.0], [2.0]]) is None
    found = {"foretoken": Figures([1.0], numbers=[[1.0, 0.0]]), "a": Figures([1.0])}
    found["a"].numbers = [[1.0, 1.0]]
    assert notes(EMBED, found) == [f"{EMBED.name}: cosine of all numbers with ours: a 0.7071"]
    engines = record(EMBED, found)["engines"]
    assert isinstance(engines, dict)
    assert engines["a"]["agreement"] == pytest.approx(0.5**0.5)


def test_the_roofline_of_scores_counts_the_shared_tokens_once() -> None:
    limits = Limits(read=1e9, matrix=1e12, drift=0.0, dtype="bfloat16", how="by hand")
    shape = Shape("none", lambda: tiny_qwen3(vocab_size=100, hidden_size=1000))
    inner, tokens = 10**9 - 100 * 1000, 84 + 32 * 210
    assert roofline(RERANK, shape, 10**9, limits) == pytest.approx(tokens * 2 * inner / 1e12)


def test_adapters_are_written_once_and_differ(tmp_path: Path) -> None:
    config = tiny_qwen3()
    write_adapters(tmp_path, config)
    files = sorted(tmp_path.glob("adapters/*/adapter_model.safetensors"))
    assert len(files) == NUM_ADAPTERS
    times = [path.stat().st_mtime_ns for path in files]
    write_adapters(tmp_path, config)
    assert [path.stat().st_mtime_ns for path in files] == times
    assert len({path.read_bytes() for path in files}) == NUM_ADAPTERS
    with safe_open(files[0], "pt") as opened:
        name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
        assert opened.get_tensor(name).shape == (RANK, config.intermediate_size)
        assert len(list(opened.keys())) == 2 * 7 * config.num_hidden_layers
    settings = json.loads(files[0].with_name("adapter_config.json").read_text())
    assert settings["r"] == RANK


def test_one_tile_of_the_tower_takes_as_many_rows_as_prompts_leave() -> None:
    config = smolvlm_256m()
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    assert patches // config.scale_factor**2 == IMAGE_ROWS - 3
    assert config.image_token_id == IMAGE_TOKEN


def test_a_picture_is_written_once(tmp_path: Path) -> None:
    path = write_picture(tmp_path / "new" / "a.png", 1)
    before = path.read_bytes()
    write_picture(path, 2)
    assert path.read_bytes() == before
