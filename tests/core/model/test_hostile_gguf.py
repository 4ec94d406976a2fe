"""Damaged and foreign GGUF files: one clear line each, and never a hang."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter

from foretoken.api.cli.commands import main
from foretoken.core.errors import ModelLoadError
from foretoken.core.model.formats.gguf import GgufFile
from foretoken.core.model.formats.gguf_reader import GgufReader
from support.checkpoints import make_checkpoint
from support.gguf_files import VOCABULARY, write_gguf

NUM_MUTATED = 2000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("model")
    return write_gguf(
        make_checkpoint(folder, "llama"), folder / "m.gguf", **VOCABULARY
    ).read_bytes()


@pytest.fixture
def file(whole: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    return path


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which the command refuses a file."""
    assert main(["show", str(path)]) == 2
    (_folder, line) = capsys.readouterr().out.splitlines()
    assert line.startswith("refused   ")
    return line


def head(num_tensors: int = 0, num_values: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: GGUFValueType, count: int) -> bytes:
    return text(b"a.b") + struct.pack("<IIQ", GGUFValueType.ARRAY, kind, count)


def test_changed_bytes_of_a_head_are_refused_or_change_a_value(
    whole: bytes, tmp_path: Path
) -> None:
    path, rng, messages = tmp_path / "m.gguf", random.Random(1), list[str]()
    path.write_bytes(whole)
    size = len(GgufReader(path).head)
    for _ in range(NUM_MUTATED):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(size)
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(changed[: rng.choice((len(changed), rng.randrange(size)))])
        try:
            GgufFile(path)
        except ModelLoadError as error:
            messages.append(str(error))
    assert len(messages) > NUM_MUTATED / 4
    assert not any("\n" in each for each in messages)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 is a zip file", "it is not a GGUF file: it begins with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
        (b"GGUF" + struct.pack("<I", 9) + bytes(99), "format version 9 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(99), "big-endian"),
        (head(2**60), "it declares 1,152,921,504,606,846,976 tensors"),
        (head(0, 2**60), "it declares 1,152,921,504,606,846,976 key/value pairs"),
        (head(0, 1, text(b"a.b") + struct.pack("<IQ", 8, 2**60)), "a.b takes"),
        (
            head(0, 1, array(GGUFValueType.STRING, 2**60)),
            "it declares 1,152,921,504,606,846,976 texts",
        ),
        (
            head(0, 1, array(GGUFValueType.UINT8, 2**60)),
            "it declares 1,152,921,504,606,846,976 items",
        ),
        (head(0, 1, array(GGUFValueType.ARRAY, 2)), "a.b has the unknown type 9"),
        (head(0, 1, struct.pack("<Q", 2**60) + bytes(9)), "the name of value 0 has"),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_gguf_or_lies_about_lengths(
    content: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert problem in refused(path, capsys)


def test_a_file_that_is_cut_off(
    file: Path, whole: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(whole[:-4000])
    line = refused(file, capsys)
    assert "ends at byte" in line
    assert "is it cut off?" in line


def with_type(whole: bytes, name: bytes, kind: int) -> bytes:
    """The file with another type of a matrix."""
    at = whole.index(text(name)) + 8 + len(name) + 4 + 2 * 8
    return whole[:at] + struct.pack("<I", kind) + whole[at + 4 :]


@pytest.mark.parametrize(
    ("kind", "called"), [(4, "Q4_2"), (99, "number 99"), (34, "TQ1_0"), (31, "Q4_0_4_4")]
)
def test_an_unknown_quantisation_is_named_with_its_tensors(
    kind: int, called: str, file: Path, whole: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(with_type(whole, b"blk.0.ffn_down.weight", kind))
    line = refused(file, capsys)
    if called != "TQ1_0":  # which has blocks of 256 numbers, more than a row of this model
        assert f"the quantisation {called} of blk.0.ffn_down.weight is not supported" in line


def foreign(kind: str) -> Callable[[GGUFWriter], Any]:
    return lambda writer: writer.add_type(kind)


def unmerged(writer: GGUFWriter) -> None:
    """Add a vocabulary without merges."""
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])


@pytest.mark.parametrize(
    ("architecture", "add", "problem"),
    [
        ("llama", foreign("adapter"), "is a LoRA adapter, not a model"),
        ("clip", foreign("mmproj"), "is the image part of a model (mmproj), not a model"),
        ("clip", lambda _: None, "is the image part of a model (mmproj), not a model"),
        ("llama", foreign("vocab"), "is a vocabulary, not a model"),
        ("llama", foreign("hologram"), "is not a model: its general.type is 'hologram'"),
        ("llama", lambda _: None, "has an incomplete vocabulary: tokenizer.ggml.model is missing"),
        ("llama", unmerged, "has an incomplete vocabulary: tokenizer.ggml.merges is missing"),
    ],
)
def test_another_kind_of_file_is_told_from_a_model(
    architecture: str,
    add: Callable[[GGUFWriter], Any],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", architecture)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert problem in refused(tmp_path / "m.gguf", capsys)


def test_a_split_file_lacks_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = {"split__no": ("add_uint16", 0), "split__count": ("add_uint16", 2)}
    path = tmp_path / "m-00001-of-00002.gguf"
    write_gguf(make_checkpoint(tmp_path, "llama"), path, **VOCABULARY, **split)
    assert "missing in its folder: m-00002-of-00002.gguf" in refused(path, capsys)


def test_two_readers_of_one_file_disturb_nobody(file: Path) -> None:
    first, second = GgufFile(file), GgufFile(file)
    first.release()
    name = "model.layers.0.mlp.down_proj.weight"
    assert first.shapes == second.shapes
    assert first.read(name).equal(second.read(name))
