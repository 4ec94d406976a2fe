"""Bytes of messages between front and replica, mutated: one error is raised, and no other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from foretoken.api.cluster.wire.forms import WireError, params_of, usage_of
from foretoken.api.cluster.wire.greeting import built_of
from foretoken.api.cluster.wire.messages import (
    Answer,
    Call,
    FlushPrefix,
    FromFront,
    FromReplica,
    Hello,
    Step,
    Submit,
    body_of,
    encode,
    from_front,
    from_replica,
    ids_of,
    page_keys,
    request_of,
)
from foretoken.core.errors import ForetokenError
from fuzz.conftest import Effort
from support.fake_engine import FakeEngine
from support.wire_samples import of_front, of_replica

TIMES = 60  # mutants of each message, for each input that the command line asks for
EDGES = bytes.fromhex("00 01 7f 80 90 a0 c0 c1 c4 c7 cb cf d3 d6 dc df ff")  # kinds of msgpack


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """One to four changes: bytes, cuts, repeats, and pieces of other messages."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        stop = min(len(found), at + rng.randint(0, 12))
        match rng.randrange(6):
            case 0 if at < len(found):
                found[at] = rng.randrange(256)
            case 1 if at < len(found):
                found[at] = rng.choice(EDGES)
            case 2:
                del found[at:stop]
            case 3:
                found[at:at] = found[at:stop]
            case 4:
                other = rng.choice(others)
                start = rng.randrange(len(other))
                found[at:stop] = other[start : start + rng.randint(0, 12)]
            case _:
                found[at:at] = rng.randbytes(rng.randint(0, 8))
    return bytes(found)


def read_reply(data: bytes) -> None:
    """Read what a replica sent, to the last field, as a front does."""
    message: FromReplica = from_replica(data)
    match message:
        case Hello():
            built_of(message, FakeEngine(), Path())
        case Step():
            assert all(isinstance(each.error, ForetokenError | None) for _, each in message.deltas)
            for usage in message.usages.values():
                usage_of(usage, 0.0)
            for news in message.pages:
                page_keys(news)
        case Answer():
            assert isinstance(message.error, ForetokenError | None)
            if message.error is None and isinstance(message.result, bytes):
                body_of(message.result)


def read_order(data: bytes) -> None:
    """Read what a front sent, to the last field, as a replica does."""
    message: FromFront = from_front(data)
    match message:
        case Submit():
            params = params_of(message.params)
            request_of(message, params, eos_token_ids=frozenset({1}), grammar=None, on_token=None)
        case Call(question=FlushPrefix(tokens=tokens)):
            ids_of(tokens)


@pytest.mark.parametrize("side", ["replica", "front"])
def test_mutated_bytes_raise_one_error_and_nothing_else(effort: Effort, side: str) -> None:
    read: Callable[[bytes], None] = read_reply if side == "replica" else read_order
    messages = [*map(encode, of_replica() if side == "replica" else of_front())]
    rng = random.Random(f"{side} {effort.seed}")
    num_read = num_refused = 0
    for data in messages:
        read(data)
        for _ in range(TIMES * effort.examples):
            mutant = mutated(data, rng, messages)
            try:
                read(mutant)
                num_read += 1
            except WireError:
                num_refused += 1
            except BaseException as error:
                pytest.fail(f"{mutant!r}: {error!r}")
    assert num_refused > num_read > 0


@pytest.mark.parametrize("read", [read_reply, read_order])
def test_random_bytes_are_refused(effort: Effort, read: Callable[[bytes], None]) -> None:
    rng = random.Random(effort.seed)
    for _ in range(TIMES * effort.examples):
        with pytest.raises(WireError):
            read(rng.randbytes(rng.randint(0, 64)))
