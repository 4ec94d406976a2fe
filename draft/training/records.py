"""Record: a conversation as token ids, one line of recorded traffic or of generated answers."""

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

    ``model`` is the name of the model and ``tokenizer`` a hash of its tokenizer. ``namespace`` is a
    hash of the tenant and the cache salt of the request.
    """

    v: int
    tokens: list[int]
    prompt_len: int
    temperature: float = 0.0
    finish: str = ""  # finish reason of the answer: stop or length
    model: str = ""
    tokenizer: str = ""
    namespace: str = ""

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_len


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def write_line(record: Record) -> bytes:
    """Return the record as a line of JSON."""
    return _encoder.encode(record) + b"\n"


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, one per line.

    An incomplete last line is left out, because its writer was stopped. Raises `InvalidRequest` for
    any other line that is not a record.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                yield _parse(line, f"{path}, line {number}")


def _parse(line: bytes, where: str) -> Record:
    try:
        record = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{where} is not recorded traffic: {error}", param="data") from error
    if record.v != VERSION:
        raise InvalidRequest(
            f"{where}: records of version {record.v} are not supported; use version {VERSION}",
            param="data",
        )
    if not 0 <= record.prompt_len <= len(record.tokens) or min(record.tokens, default=0) < 0:
        raise InvalidRequest(f"{where}: prompt_len or a token id is out of range", param="data")
    return record


def digest(token_ids: Iterable[int]) -> bytes:
    """Return a hash of token ids that is the same on every machine."""
    return hashlib.sha256(array("q", token_ids).tobytes()).digest()
