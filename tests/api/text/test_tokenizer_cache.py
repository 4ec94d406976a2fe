"""Tokenizers kept between processes: the same ones, made anew for other files and for damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from foretoken.api.text import tokenizer_cache
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.text.tokenizer_cache import LoadedTokenizer, load_tokenizer

from .test_gguf_tokenizer import write

TEXT = "hehe It's 12345 x_y\n\n你好<end>"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", "llama", "qwen2")


def again(model: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedTokenizer:
    """Load a tokenizer as a later process does; the test fails if it is converted again."""
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_cache, "_convert", lambda _: pytest.fail("converted again"))
        return load_tokenizer(model)


def same(one: LoadedTokenizer, other: LoadedTokenizer) -> bool:
    ids = [each.backend_tokenizer.encode(TEXT).ids for each in (one, other)]
    return (
        ids[0] == ids[1]
        and one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
        and one.chat_template == other.chat_template
        and one.special_tokens_map == other.special_tokens_map
        and one.response_template == other.response_template
    )


def test_a_second_load_converts_nothing_and_is_the_same(model, monkeypatch):
    first = load_tokenizer(model)
    assert first.special_tokens_map["eos_token"] == "<end>"
    assert same(first, again(model, monkeypatch))


def test_the_tokenizer_of_a_folder_is_kept_too(byte_level_folder, monkeypatch):
    first = load_tokenizer(byte_level_folder)
    assert first.chat_template
    assert same(first, again(byte_level_folder, monkeypatch))


def test_the_response_template_of_a_folder_is_kept_and_a_chat_template_replaces_it(
    byte_level_folder, monkeypatch, tmp_path
):
    folder = tmp_path / "described"
    shutil.copytree(byte_level_folder, folder)
    config = folder / "tokenizer_config.json"
    given = {"fields": {"content": {}}}
    config.write_text(json.dumps({**json.loads(config.read_text()), "response_template": given}))
    first = load_tokenizer(folder)
    assert first.response_template == given
    assert same(first, again(folder, monkeypatch))
    tokenizer = Tokenizer(first, max_model_len=64)
    assert tokenizer.response_template == given
    tokenizer.use_template("{{ messages }}", {})
    assert tokenizer.response_template is None
    tokenizer.close()


def test_another_file_has_its_own_tokenizer(model, byte_level_folder, tmp_path):
    load_tokenizer(model)
    other = load_tokenizer(write(tmp_path / "other.gguf", "llama", "gpt-2"))
    assert "Split(" not in repr(other.backend_tokenizer.pre_tokenizer)
    load_tokenizer(byte_level_folder)
    changed = shutil.copytree(byte_level_folder, tmp_path / "changed")
    (changed / "chat_template.jinja").write_text("changed")
    assert load_tokenizer(changed).chat_template == "changed"


@pytest.mark.parametrize("damage", [b"", b"no checksum", None], ids=["empty", "text", "one byte"])
def test_a_damaged_file_is_told_and_written_again(model, folder, damage, monkeypatch, caplog):
    first = load_tokenizer(model)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-9] + b"?" + content[-8:] if damage is None else damage)
    assert same(first, load_tokenizer(model))
    assert "is damaged" in caplog.text
    assert same(first, again(model, monkeypatch))


def test_without_a_cache_it_is_converted_at_every_start(model, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file is in the folder's place")
    with caplog.at_level("INFO", "foretoken"):
        first, second = load_tokenizer(model), load_tokenizer(model)
    assert same(first, second)
    assert caplog.text.count("cannot cache the tokenizer") == 2


def test_the_warning_of_an_unknown_split_comes_at_every_start(tmp_path, folder, caplog):
    file = write(tmp_path / "odd.gguf", "llama", "of-tomorrow")
    load_tokenizer(file)
    load_tokenizer(file)
    assert caplog.text.count("unknown pre-tokenizer") == 2
    assert not folder.exists()


def test_the_oldest_files_go(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(tokenizer_cache, "_NUM_KEPT", 2)
    files = [write(tmp_path / f"{pre}.gguf", "llama", pre) for pre in ("qwen2", "glm4", "smollm")]
    for file in files:
        load_tokenizer(file)
    assert len(list(folder.iterdir())) == 2
    again(files[-1], monkeypatch)
