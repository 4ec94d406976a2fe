"""A conversation as token ids: one line of recorded traffic, and of regenerated answers alike."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ...core.errors import InvalidRequest

VERSION = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt and its answer, without text, keys or names.

    ``model`` and ``tokenizer`` say whose token ids these are, ``namespace`` is a hash of the tenant
    and the cache salt that they belong to.
    """

    v: int
    tokens: list[int]
    prompt_len: int
    temperature: float = 0.0
    finish: str = ""  # why the answer ended: stop, length
    model: str = ""
    tokenizer: str = ""
    namespace: str = ""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens behind the prompt."""
        return len(self.tokens) - self.prompt_len


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def write_line(record: Record) -> bytes:
    """The record as a line of JSON."""
    return _encoder.encode(record) + b"\n"


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, one a line.

    A last line without its end is one that was being written when its writer stopped: it is left
    out. Raises `InvalidRequest` for any other line that is no record.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                yield _parse(line, f"{path}, line {number}")


def _parse(line: bytes, where: str) -> Record:
    try:
        record = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{where}: not recorded traffic: {error}", param="data") from error
    if record.v != VERSION:
        raise InvalidRequest(f"{where}: version {record.v}, not {VERSION}", param="data")
    if not 0 <= record.prompt_len <= len(record.tokens) or min(record.tokens, default=0) < 0:
        raise InvalidRequest(f"{where}: prompt_len or a token id out of range", param="data")
    return record


def digest(token_ids: Iterable[int]) -> bytes:
    """A hash of token ids, the same on every machine."""
    return hashlib.sha256(array("q", token_ids).tobytes()).digest()
