"""Images by every API and the SDK: transformers' prompts and tokens, the cache, bad input."""

from __future__ import annotations

import base64
import builtins
import json
import logging
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch

from foretoken import LLM, InvalidRequest, SamplingParams
from foretoken.api.build.built import Built
from foretoken.api.build.engine_builder import build
from foretoken.api.media.placeholders import ImageTokens
from foretoken.api.media.reader import ImageReader
from foretoken.api.runtime.conversation.seen_images import _num_beyond
from foretoken.core.config import EngineConfig
from foretoken.core.engine.engine import Engine
from foretoken.core.model.images.vision import count_tower, load_vision
from foretoken.core.model.loader import load_decoder
from support.embedders import write_embedder
from support.image_folders import (
    IMAGE,
    PROCESSORS,
    ROW,
    answer,
    data_url,
    image_part,
    picture,
    text_part,
    tiny_config,
    write_image_folder,
)
from support.image_models import save_image_model

NUM_NEW = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
FIRST, SECOND = picture(1), picture(2, 100, 90)
ASK = [text_part("what is"), image_part(FIRST), text_part("and"), image_part(SECOND),
       text_part("?")]  # fmt: skip
RENDERED = f"<|im_start|>User: what is{IMAGE}and{IMAGE}?<end_of_utterance>\nAssistant: "


class Seeing(NamedTuple):
    folder: Path
    kind: str
    model: Any
    tokenizer: Any

    def answer(self, text: str, images: list[Any], **options: Any) -> tuple[list[int], list[int]]:
        return answer(
            self.folder, self.kind, self.model, self.tokenizer, text, images, NUM_NEW, **options
        )


def made(folder: Path, kind: str) -> Seeing:
    torch.set_num_threads(1)
    return Seeing(folder, kind, *write_image_folder(folder, kind))


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return made(tmp_path_factory.mktemp("smolvlm"), "smolvlm")


@pytest.fixture
def built(smolvlm: Seeing) -> Built[Engine]:
    """The engine of the fixtures `llm` and `server`."""
    return build(smolvlm.folder, tiny_config(page_size=4))


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


# -- prompts and tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(PROCESSORS))
def test_prompts_and_tokens_are_transformers_own(tmp_path: Path, kind: str) -> None:
    seeing = made(tmp_path, kind)
    ids, expected = seeing.answer(RENDERED, [FIRST, SECOND])
    page_size = 16 if kind == "qwen3_5" else 4
    options: dict[str, Any] = {"kv_tokens": 4096, "page_size": page_size, "max_batch_tokens": 7}
    with LLM(seeing.folder, threads=1, **options) as llm:
        for _ in range(2):
            found = llm.chat(user(*ASK), GREEDY)
            assert list(found.prompt_token_ids) == ids
            assert found.token_ids == expected
        assert found.usage.cached_tokens == (len(ids) - 1) // page_size * page_size
        row = seeing.tokenizer.convert_tokens_to_ids(ROW.get(kind, IMAGE))
        assert found.usage.image_tokens == ids.count(row)
        text = llm.chat([{"role": "user", "content": "what is"}], GREEDY)
    plain = "<|im_start|>User: what is<end_of_utterance>\nAssistant: "
    assert (list(text.prompt_token_ids), text.token_ids) == seeing.answer(plain, [])


def test_the_config_is_read_once_for_all_requests(smolvlm: Seeing, tmp_path: Path) -> None:
    folder = shutil.copytree(smolvlm.folder, tmp_path / "model")
    reader = ImageReader(folder, tiny_config())
    first = reader.tokens(str), reader.token_id
    (folder / "config.json").unlink()
    assert (reader.tokens(str), reader.token_id) == first
    assert first[1] == smolvlm.tokenizer.convert_tokens_to_ids(IMAGE)


def test_detail_low_takes_one_tile(llm: LLM, smolvlm: Seeing) -> None:
    low = llm.chat(user(image_part(SECOND, detail="low"), text_part("x")), GREEDY)
    high = llm.chat(user(image_part(SECOND, detail="high"), text_part("x")), GREEDY)
    assert (low.usage.image_tokens, high.usage.image_tokens) == (4, 20)
    text = f"<|im_start|>User:{IMAGE}x<end_of_utterance>\nAssistant: "
    ids, expected = smolvlm.answer(text, [SECOND], do_image_splitting=False)
    assert (list(low.prompt_token_ids), low.token_ids) == (ids, expected)


def test_a_later_turn_goes_on_with_the_pages_of_the_first_one(llm: LLM) -> None:
    plain = replace(GREEDY, logit_bias=dict.fromkeys(range(15), -100.0))  # no special token
    first = llm.chat(user(*ASK), plain)
    turns = [*user(*ASK), first.message, {"role": "user", "content": "why?"}]
    later = llm.chat(turns, plain)
    known = len(first.prompt_token_ids) + NUM_NEW - 1  # the last token's KV was never computed
    assert later.usage.cached_tokens == known // 4 * 4
    assert later.usage.image_tokens == first.usage.image_tokens
    other = llm.chat([*user(*ASK[:3], image_part(picture(3, 100, 90)), ASK[4]), *turns[1:]], GREEDY)
    rows = [at for at, each in enumerate(first.prompt_token_ids) if each == _image_id(llm)]
    assert rows[20] - 4 < other.usage.cached_tokens <= rows[20]  # the second image's first row


def _image_id(llm: LLM) -> int:
    return int(llm._llm.tokenizer.vocab[IMAGE])


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_formats(llm: LLM, form: str) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(FIRST, form)}}
    assert llm.chat(user(part, text_part("x")), GREEDY).usage.image_tokens > 0


def test_the_same_pixels_in_another_file_hit_the_cache(llm: LLM) -> None:
    bmp = {"type": "image_url", "image_url": {"url": data_url(FIRST, "WEBP")}}
    held = data_url(FIRST)
    again = {"type": "image_url", "image_url": {"url": held.replace("image/png", "image/x")}}
    one = llm.chat(user(image_part(FIRST), text_part("x")), GREEDY)
    same = llm.chat(user(again, text_part("x")), GREEDY)
    lossy = llm.chat(user(bmp, text_part("x")), GREEDY)
    assert same.usage.cached_tokens == (one.usage.prompt_tokens - 1) // 4 * 4
    assert lossy.usage.cached_tokens < same.usage.cached_tokens


# -- the APIs --------------------------------------------------------------------------------------


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openai_s_client_sends_images_to_chat_and_to_responses(
    client: openai.OpenAI, smolvlm: Seeing
) -> None:
    ids, expected = smolvlm.answer(RENDERED, [FIRST, SECOND])
    options: Any = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    chat = client.chat.completions.create(
        model=smolvlm.folder.name, messages=user(*ASK), max_tokens=NUM_NEW, **options
    )
    assert chat.model_dump()["prompt_token_ids"] == ids
    assert chat.choices[0].model_dump()["token_ids"] == expected
    assert chat.usage is not None
    details = chat.usage.prompt_tokens_details
    assert details is not None
    assert details.model_dump()["image_tokens"] == 40
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in ASK
    ]
    response = client.responses.create(
        model=smolvlm.folder.name, input=[{"role": "user", "content": parts}], temperature=0,
        max_output_tokens=NUM_NEW, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert response.usage is not None
    assert response.usage.input_tokens == len(ids)
    assert response.usage.input_tokens_details.cached_tokens == (len(ids) - 1) // 4 * 4
    assert response.output_text == (chat.choices[0].message.content or "")
    later = client.responses.create(
        model=smolvlm.folder.name,
        input="why?",
        previous_response_id=response.id,
        max_output_tokens=2,
    )
    assert later.usage is not None
    assert later.usage.input_tokens_details.cached_tokens >= len(ids) // 4 * 4


def blocks() -> list[dict[str, Any]]:
    return [
        part
        if part["type"] == "text"
        else {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": part["image_url"]["url"].partition(",")[2],
            },
        }
        for part in ASK
    ]


def test_messages_take_images_and_pin_them(server: Any, smolvlm: Seeing) -> None:
    ids, _ = smolvlm.answer(RENDERED, [FIRST, SECOND])
    content = blocks()
    messages = [{"role": "user", "content": content}]
    body = {"model": smolvlm.folder.name, "max_tokens": 4, "messages": messages}
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(ids)}
    content[3]["cache_control"] = {"type": "ephemeral"}
    found = httpx.post(f"{server.url}/v1/messages", json=body).raise_for_status().json()["usage"]
    assert found["image_tokens"] == 40
    last_row = len(ids) - 1 - ids[::-1].index(smolvlm.tokenizer.convert_tokens_to_ids(IMAGE))
    assert found["cache_creation_input_tokens"] >= last_row // 4 * 4
    again = httpx.post(f"{server.url}/v1/messages", json=body).raise_for_status().json()["usage"]
    assert again["cache_read_input_tokens"] == (len(ids) - 1) // 4 * 4


def test_ollamas_images_stand_before_the_text(server: Any, smolvlm: Seeing) -> None:
    text = f"<|im_start|>User:{IMAGE}{IMAGE}what?<end_of_utterance>\nAssistant: "
    ids, _ = smolvlm.answer(text, [FIRST, SECOND])
    images = [data_url(each).partition(",")[2] for each in (FIRST, SECOND)]
    body = {"stream": False, "options": {"num_predict": 3}}
    message = {"role": "user", "content": "what?", "images": images}
    for path, asked in (
        ("chat", {"messages": [message]}),
        ("generate", {"prompt": "what?", "images": images}),
    ):
        found = httpx.post(f"{server.url}/api/{path}", json=body | asked).raise_for_status().json()
        assert found["prompt_eval_count"] == len(ids)
    for path, asked, named in (
        ("chat", {"messages": [message | {"images": ["@"]}]}, "messages[0].images[0]"),
        ("generate", {"prompt": "a", "images": images, "raw": True}, "images"),
    ):
        refused = httpx.post(f"{server.url}/api/{path}", json=body | asked)
        assert refused.status_code == 400
        assert named in refused.json()["error"]
    shown = httpx.post(f"{server.url}/api/show", json={}).json()
    assert "vision" in shown["capabilities"]


def test_rendering_and_flushing_know_images(server: Any, smolvlm: Seeing) -> None:
    ids, _ = smolvlm.answer(RENDERED, [FIRST, SECOND])
    body = {"messages": user(*ASK), "max_tokens": 1}
    url = server.url
    found = httpx.post(f"{url}/v1/chat/completions/render", json=body).raise_for_status().json()
    assert found["token_ids"] == ids
    tokens = httpx.post(f"{url}/tokenize", json={"messages": user(*ASK)}).json()["tokens"]
    assert tokens == ids
    httpx.post(f"{url}/v1/chat/completions", json=body).raise_for_status()
    flushed = httpx.post(f"{url}/cache/flush", json={"prefix": user(*ASK)}).raise_for_status()
    assert flushed.json()["flushed_pages"] > 0
    usage = httpx.post(f"{url}/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_count_the_images_that_the_tower_computed(server: Any) -> None:
    body = {"messages": user(*ASK), "max_tokens": 1}
    for _ in range(2):
        httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()
    text = httpx.get(f"{server.url}/metrics").text
    assert "foretoken:images_computed_total 2.0" in text


# -- bad input -------------------------------------------------------------------------------------


def bomb(side: int) -> str:
    """A PNG whose header has so many pixels, which a few bytes are said to hold."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for chunk in (b"IHDR" + header, b"IDAT" + zlib.compress(bytes(1000)), b"IEND"):
        data += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def damaged() -> str:
    data = base64.b64decode(data_url(FIRST).partition(",")[2])
    return f"data:image/png;base64,{base64.b64encode(data[: len(data) // 2]).decode()}"


BAD = [
    ("http://example.com/a.png", "does not fetch images"),
    ("https://example.com/a.png", "does not fetch images"),
    ("ftp://example.com/a.png", "data URL"),
    ("", "data URL"),
    ("file:///etc/passwd", "--media-dir"),
    ("data:image/png;base64,@@@", "base64"),
    ("data:image/png,abc", "base64"),
    ("data:image/png;base64,AAAA", "unsupported format"),
    ("data:text/html;base64,AAAA", "text/html is not an image"),
    ("data:audio/wav;base64,AAAA", "audio/wav is not an image"),
    (bomb(3000), "3000 x 3000 pixels"),
    (bomb(60_000), "--max-image-pixels"),
    (damaged(), "damaged"),
    (data_url(picture(0, 1, 200)), "100 times"),
]


@pytest.mark.parametrize(("url", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_image_fails_its_request_alone_and_is_named(
    server: Any, smolvlm: Seeing, url: str, said: str
) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hi"},
        *user({"type": "image_url", "image_url": {"url": url}}, text_part("x")),
    ]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[2].content[0]")
    assert said in error["message"]
    seen = "[an image that this model cannot see]"
    messages[2] = {"role": "tool", "tool_call_id": "c1", "content": messages[2]["content"]}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages[1] = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = httpx.post(f"{server.url}/v1/chat/completions/render", json={"messages": messages})
    assert seen in smolvlm.tokenizer.decode(found.raise_for_status().json()["token_ids"])
    good = {"messages": user(*ASK), "max_tokens": 1}
    httpx.post(f"{server.url}/v1/chat/completions", json=good).raise_for_status()


def test_of_too_many_screenshots_of_tools_the_oldest_are_left_out(smolvlm: Seeing) -> None:
    options: dict[str, Any] = {"threads": 1, "kv_tokens": 4096, "page_size": 4, "max_images": 2}
    with LLM(smolvlm.folder, **options) as llm:
        used = [llm.chat(_shots(number), GREEDY).usage for number in range(1, 4)]
        assert [usage.image_tokens // 20 for usage in used] == [2, 2, 2]
        with pytest.raises(InvalidRequest, match="more than 2 images"):
            llm.chat(user(*[image_part(picture(each)) for each in range(3)]), GREEDY)


def test_images_are_left_out_by_halves_of_the_limit_so_that_turns_between_hit_the_cache() -> None:
    assert [_num_beyond(number, 8) for number in range(7, 18)] == [0, 0, *[4] * 4, *[8] * 4, 12]
    assert [_num_beyond(number, 1) for number in range(4)] == [0, 0, 1, 2]


def _shots(number: int) -> list[dict[str, Any]]:
    """A question with a picture, and so many results of tools with one each."""
    shots = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{at}", "type": "function",
         "function": {"name": "look", "arguments": "{}"}}]}
        if is_call
        else {"role": "tool", "tool_call_id": f"c{at}", "content": [image_part(picture(at))]}
        for at in range(number) for is_call in (True, False)
    ]  # fmt: skip
    return [*user(*ASK[:2]), *shots]


@pytest.mark.parametrize("kind", ["input_audio", "video_url", "file"])
def test_other_media_are_refused_by_name(server: Any, kind: str) -> None:
    body = {"messages": user({"type": kind, kind: {"data": "x", "url": "x"}})}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert kind in error["message"]


def test_an_image_token_that_a_text_spells_is_text(llm: LLM) -> None:
    found = llm.chat(user(text_part(f"a{IMAGE}"), image_part(FIRST), text_part("x")), GREEDY)
    assert found.usage.image_tokens == 20
    assert llm.chat(user(text_part(f"a{IMAGE}")), GREEDY).usage.image_tokens == 0


def test_a_mark_that_a_text_spells_is_text(llm: LLM) -> None:
    marked = f"\ue000image:{'a' * 64}\ue001"
    found = llm.chat(user(text_part(marked), image_part(FIRST), text_part("x")), GREEDY)
    assert found.usage.image_tokens == 20


def test_limits_of_images_and_pixels(smolvlm: Seeing) -> None:
    options: dict[str, Any] = {"draft": "none", "threads": 1, "kv_tokens": 4096}
    with LLM(smolvlm.folder, max_images=2, max_image_pixels=2400, **options) as llm:
        llm.chat(user(image_part(FIRST), image_part(FIRST), text_part("x")), GREEDY)
        with pytest.raises(InvalidRequest, match="--max-images") as caught:
            llm.chat(user(*[image_part(FIRST)] * 3, text_part("x")), GREEDY)
        assert caught.value.param == "messages[0].content[2]"
        with pytest.raises(InvalidRequest, match="100 x 90 pixels"):
            llm.chat(user(image_part(SECOND), text_part("x")), GREEDY)


def test_a_prompt_cannot_end_with_an_image_or_have_log_probabilities(server: Any) -> None:
    body = {"messages": user(image_part(FIRST), text_part("x")), "prompt_logprobs": 1}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "prompt_logprobs"


def test_of_an_animated_image_the_first_frame_is_read(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    from io import BytesIO

    held = BytesIO()
    FIRST.save(held, "GIF", save_all=True, append_images=[picture(7)])
    moving = f"data:image/gif;base64,{base64.b64encode(held.getvalue()).decode()}"
    with caplog.at_level(logging.INFO, "foretoken"):
        one = llm.chat(
            user({"type": "image_url", "image_url": {"url": moving}}, text_part("x")), GREEDY
        )
    assert "first frame" in caplog.text
    still = {"type": "image_url", "image_url": {"url": data_url(FIRST, "GIF")}}
    same = llm.chat(user(still, text_part("x")), GREEDY)
    assert same.token_ids == one.token_ids
    assert same.usage.cached_tokens > 0


def test_without_images_asked_for_or_to_be_had(
    smolvlm: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"draft": "none", "threads": 1, "kv_tokens": 4096}
    with (
        LLM(smolvlm.folder, no_images=True, **options) as llm,
        pytest.raises(InvalidRequest, match="does not support images"),
    ):
        llm.chat(user(*ASK), GREEDY)
    write_embedder(tmp_path)
    with (
        LLM(tmp_path, **options) as llm,
        pytest.raises(InvalidRequest, match="does not support images") as caught,
    ):
        llm.chat(user(*ASK), GREEDY)
    assert caught.value.param == "messages[0].content[1]"
    plain_import = builtins.__import__

    def without_pillow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "PIL":
            raise ImportError
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with (
        LLM(smolvlm.folder, **options) as llm,
        pytest.raises(InvalidRequest, match=r"foretoken\[images\]"),
    ):
        llm.chat(user(*ASK), GREEDY)


# -- files of a folder -----------------------------------------------------------------------------


def test_files_below_the_media_folder_and_no_others(smolvlm: Seeing, tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    FIRST.save(media / "a b.png")
    FIRST.save(tmp_path / "outside.png")
    (media / "link.png").symlink_to(tmp_path / "outside.png")
    (media / "inner").mkdir()
    options: dict[str, Any] = {"draft": "none", "threads": 1, "kv_tokens": 4096}

    def ask(llm: LLM, url: str) -> Any:
        return llm.chat(user({"type": "image_url", "image_url": {"url": url}}, ASK[0]), GREEDY)

    with LLM(smolvlm.folder, media_dir=str(media), **options) as llm:
        found = ask(llm, f"file://{media}/a%20b.png")
        same = llm.chat(user(image_part(FIRST), ASK[0]), GREEDY)
        assert found.token_ids == same.token_ids
        assert same.usage.cached_tokens > 0
        SECOND.save(media / "a b.png")
        anew = ask(llm, f"file://{media}/a%20b.png")
        assert anew.usage.cached_tokens < same.usage.cached_tokens, "the file was not read anew"
        for url in (
            f"file://{media}/../outside.png",
            f"file://{media}/%2e%2e/outside.png",
            f"file://{media}/link.png",
            f"file://{media}/inner",
            f"file://{media}/none.png",
            f"file://host{media}/a%20b.png",
            f"file://{media}/a%00.png",
            f"file://{tmp_path}/outside.png",
        ):
            with pytest.raises(InvalidRequest, match="no such file"):
                ask(llm, url)


# -- the reader ------------------------------------------------------------------------------------


def test_images_that_were_read_are_kept_within_their_memory(smolvlm: Seeing) -> None:
    from foretoken.api.media.sources import ImageSource

    reader = ImageReader(smolvlm.folder, EngineConfig(image_cache="1MB"))
    sources = [ImageSource(data_url(picture(seed)), "x") for seed in range(6)]
    tokens = ImageTokens(IMAGE, IMAGE)
    reads = [reader._read(source, tokens) for source in sources]
    assert 0 < reader._num_bytes <= 1_000_000
    assert reader._num_bytes == sum(each.num_bytes for each in reader._kept.values())
    assert reader._read(sources[-1], tokens) is reads[-1]
    assert reader._read(sources[0], tokens) is not reads[0]
    reader.close()


def test_crops_of_gemma_s_processor_are_images_of_their_own(tmp_path: Path) -> None:
    seeing = made(tmp_path, "gemma3")
    settings = tmp_path / "preprocessor_config.json"
    crops = {
        "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20,
        "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.2,
    }  # fmt: skip
    settings.write_text(json.dumps(json.loads(settings.read_text()) | crops))
    wide = picture(5, 120, 40)
    text = f"<|im_start|>User:{IMAGE}x<end_of_utterance>\nAssistant: "
    ids, expected = seeing.answer(text, [wide])
    with LLM(seeing.folder, threads=1, kv_tokens=4096) as llm:
        found = llm.chat(user(image_part(wide), text_part("x")), GREEDY)
        assert (list(found.prompt_token_ids), found.token_ids) == (ids, expected)
        low = llm.chat(user(image_part(wide, detail="low"), text_part("x")), GREEDY)
    assert (found.usage.image_tokens, low.usage.image_tokens) == (4 * 16, 16)


def test_an_audio_tower_beside_that_of_images_is_not_loaded(tmp_path: Path) -> None:
    audio = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4], "output_proj_dims": 32,
    }  # fmt: skip
    plain, _ = save_image_model(tmp_path / "plain", "gemma4")
    with_audio, _ = save_image_model(tmp_path / "audio", "gemma4", whole={"audio_config": audio})
    assert count_tower(with_audio) == count_tower(plain)
    decoder = load_decoder(with_audio)
    assert load_vision(with_audio, decoder, decoder.ops, cache_bytes=0) is not None
