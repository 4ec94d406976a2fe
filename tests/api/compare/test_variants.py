"""Variants as the command line writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.api.compare.variants import Variant, read_variant
from foretoken.core.errors import ForetokenError, InvalidRequest

GIVEN = Variant(model="m", engine={"threads": 1}, sampling={"temperature": 1.0})


def test_settings_change_the_base() -> None:
    read = read_variant("temperature=0.2 max-tokens=7 quantize=int8 stop=a stop=b lora=dir", GIVEN)
    assert (read.model, read.lora) == ("m", "dir")
    assert read.engine == {"threads": 1, "quantize": "int8"}
    assert read.sampling == {"temperature": 0.2, "max_tokens": 7, "stop": ("b",)}
    assert GIVEN.sampling == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("text", "model"), [("base", "m"), ("other.gguf", "other.gguf"), ("base model=x", "x")]
)
def test_the_first_word_may_be_a_model(text: str, model: str) -> None:
    read = read_variant(text, GIVEN)
    assert (read.model, read.url, read.engine) == (model, None, {"threads": 1})


def test_an_address_is_a_server_with_its_own_model_and_engine() -> None:
    read = read_variant("http://h:1/v1 temperature=0.5 model=x", GIVEN)
    assert (read.url, read.model, read.engine) == ("http://h:1", "x", {})
    assert read.sampling == {"temperature": 0.5}
    assert read_variant("http://h:1", GIVEN).model is None


def test_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a prompt.txt").write_text(" Be brief. \n")
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    text = f"system='{tmp_path}/a prompt.txt' tools={tmp_path}/tools.json"
    read = read_variant(text, GIVEN)
    assert (read.system, read.tools) == ("Be brief.", [{"type": "function"}])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must not be empty"),
        ("system='x", "No closing quotation"),
        ("base other", "other must be KEY=VALUE"),
        ("temprature=1", "unknown setting temprature"),
        ("seed=1", "unknown setting seed"),
        ("temperature=warm", "temperature must be a number, not 'warm'"),
        ("quantize=int3", "quantize must be one of"),
        ("system=/absent", "system: /absent: No such file"),
        ("tools=/dev/null", "tools: /dev/null is not a JSON list"),
        ("http://h:1 quantize=int8", "quantize is a setting of an engine"),
        ("http://h:1 lora=x", "lora is a setting of an engine"),
    ],
)
def test_what_is_no_variant_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_variant(text, GIVEN)


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ForetokenError, match="is not the address of a server"):
        read_variant("ftp://x", GIVEN)
