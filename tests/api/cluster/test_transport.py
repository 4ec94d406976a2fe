"""The sockets between a front and its replicas: addresses, keys, ends of connections, sizes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import pytest
import zmq

from foretoken.api.cluster.wire import transport
from foretoken.api.cluster.wire.forms import WireError, ids_form
from foretoken.api.cluster.wire.messages import (
    Answer,
    Beat,
    FromFront,
    FromReplica,
    Leaving,
    Submit,
    encode,
)
from foretoken.api.cluster.wire.transport import (
    CLUSTER_KEY,
    FrontSocket,
    ReplicaSocket,
    check_address,
    cluster_key,
)
from foretoken.core.errors import InvalidRequest
from support.wire_samples import of_front, of_replica, submit

ANY_PORT = "tcp://127.0.0.1:0"
KEY, OTHER_KEY = "a secret", "another one"
SECONDS = 20.0


@asynccontextmanager
async def front_of(key: str | None = None) -> AsyncIterator[FrontSocket]:
    front = FrontSocket(ANY_PORT, key)
    with closing(front):
        yield front


@asynccontextmanager
async def connected(
    front: FrontSocket, key: str | None = None
) -> AsyncIterator[tuple[ReplicaSocket, bytes]]:
    """A replica that the front has heard, and its name there."""
    with closing(ReplicaSocket(front.address, key)) as replica:
        yield replica, await introduced(front, replica)


async def introduced(front: FrontSocket, replica: ReplicaSocket) -> bytes:
    assert replica.send(Beat())
    peer, message = await front.receive()
    assert message == Beat()
    return peer


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "127.0.0.1:5555", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://:5555",
     "tcp://127.0.0.1:", "tcp://127.0.0.1:*", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1",
     "tcp://127.0.0.1:5 5", "tcp://127.0.0.1:٥", "tcp:127.0.0.1:5555", "://127.0.0.1:5555"],
)  # fmt: skip
@pytest.mark.parametrize("key", [None, KEY])
def test_what_is_no_address_is_refused(address: str, key: str | None) -> None:
    with pytest.raises(InvalidRequest, match=r"tcp://HOST:PORT") as caught:
        check_address(address, key, param="where")
    assert caught.value.param == "where"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    check_address(f"tcp://{host}:65535", None)
    check_address(f"tcp://{host}:0", KEY)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "[::]", "[fe80::1]", "front.example"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    address = f"tcp://{host}:5555"
    check_address(address, KEY)
    with pytest.raises(InvalidRequest, match=f"open to other machines: set {CLUSTER_KEY}"):
        check_address(address, None)


async def test_both_ends_check_their_address() -> None:
    for make in (FrontSocket, ReplicaSocket):
        with pytest.raises(InvalidRequest, match="HOST:PORT"):
            make("http://127.0.0.1:1", None)
        with pytest.raises(InvalidRequest, match="open to other machines"):
            make("tcp://0.0.0.0:0", None)


async def test_an_address_that_is_in_use_is_named_and_nothing_stays_open() -> None:
    async with front_of() as front:
        before = open_files()
        with pytest.raises(InvalidRequest, match=f"cannot listen on {front.address}: ."):
            FrontSocket(front.address, None)
        assert open_files() == before


def test_the_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_KEY, raising=False)
    assert cluster_key() is None
    monkeypatch.setenv(CLUSTER_KEY, "")
    assert cluster_key() is None
    monkeypatch.setenv(CLUSTER_KEY, KEY)
    assert cluster_key() == KEY


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "encrypted"])
async def test_all_messages_pass_in_their_order(key: str | None) -> None:
    async with front_of(key) as front, connected(front, key) as (replica, peer):
        for message in of_replica():
            assert replica.send(message)
        for message in of_replica():
            sender, heard = await front.receive()
            assert isinstance(heard, FromReplica)
            assert (sender, encode(heard)) == (peer, encode(message))
        for order in of_front():
            assert front.send(peer, order)
        for order in of_front():
            taken = await replica.receive()
            assert isinstance(taken, FromFront)
            assert encode(taken) == encode(order)


async def test_a_prompt_of_a_million_tokens_passes_in_both_directions() -> None:
    token_ids = ids_form(range(1_000_000))
    long = msgspec.structs.replace(submit(), prompt=token_ids)
    async with front_of(KEY) as front, connected(front, KEY) as (replica, peer):
        assert front.send(peer, long)
        taken = await replica.receive()
        assert isinstance(taken, Submit)
        assert taken.prompt == token_ids
        answer = Answer(call_id=1, result=token_ids)
        assert replica.send(answer)
        assert await front.receive() == (peer, answer)


async def test_many_replicas_are_told_apart() -> None:
    async with front_of() as front:
        replicas = [ReplicaSocket(front.address, None) for _ in range(40)]
        try:
            for number, each in enumerate(replicas):
                assert each.send(Leaving(reason=str(number)))
            peers = [await front.receive() for _ in replicas]
            assert len({peer for peer, _ in peers}) == len(replicas)
            for peer, message in peers:
                assert isinstance(message, Leaving)
                assert front.send(peer, message)
            for number, each in enumerate(replicas):
                assert await each.receive() == Leaving(reason=str(number))
        finally:
            for each in replicas:
                each.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x81\xa4type\xa4beta"])
async def test_bytes_that_are_no_message_are_an_error_and_the_next_one_is_heard(
    garbage: bytes,
) -> None:
    async with front_of() as front, connected(front) as (replica, peer):
        assert replica._link.send((garbage,))
        sender, message = await front.receive()
        assert (sender, type(message)) == (peer, WireError)
        assert replica.send(Beat())
        assert await front.receive() == (peer, Beat())
        assert front._link.send((peer, garbage))
        assert isinstance(await replica.receive(), WireError)
        assert front.send(peer, Beat())
        assert await replica.receive() == Beat()


async def test_a_message_that_is_too_large_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE", 1000)
    async with front_of() as front, connected(front) as (replica, peer):
        assert replica.send(Leaving(reason="x" * 900))
        assert (await front.receive())[1] == Leaving(reason="x" * 900)
        assert replica.send(Leaving(reason="x" * 1000))
        assert await front.receive() == (peer, None)


async def test_who_gives_up_waiting_loses_no_message() -> None:
    async with front_of() as front, connected(front) as (replica, peer):
        for _ in range(3):
            await given_up(replica.receive())
            await given_up(front.receive())
        assert front.send(peer, Leaving(reason="a"))
        assert replica.send(Leaving(reason="b"))
        assert await replica.receive() == Leaving(reason="a")
        assert await front.receive() == (peer, Leaving(reason="b"))


async def given_up(waiting: Coroutine[Any, Any, object]) -> None:
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def test_a_replica_that_reads_much_leaves_turns_to_others() -> None:
    async with front_of() as front, connected(front) as (replica, peer):
        for _ in range(100):
            assert front.send(peer, Beat())
        await let_come(replica._link.socket)
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        for _ in range(100):
            assert await replica.receive() == Beat()
        task.cancel()
        assert turns >= 100


# -- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"), [(KEY, OTHER_KEY), (KEY, None)], ids=["another", "none"]
)
async def test_a_replica_without_the_key_of_the_front_is_not_heard(
    ours: str, theirs: str | None
) -> None:
    async with front_of(ours) as front:
        with closing(ReplicaSocket(front.address, theirs)) as stranger:
            stranger.send(Leaving(reason="let me in"))  # false if it is refused already
            assert await stranger.receive() is None  # the front has closed the connection
            async with connected(front, ours):
                pass


async def test_a_replica_with_a_key_does_not_talk_to_a_front_without_one() -> None:
    async with front_of(None) as front:
        with closing(ReplicaSocket(front.address, KEY)) as replica:
            replica.send(Leaving(reason="secret"))  # false if it is refused already
            assert await replica.receive() is None
            async with connected(front):
                pass


# -- the end of a connection ----------------------------------------------------------------------


async def test_a_replica_that_is_gone_is_noticed_behind_all_that_it_sent() -> None:
    async with front_of() as front, connected(front) as (other, _):
        async with connected(front) as (replica, peer):
            said: list[FromReplica] = [Leaving(reason=str(number)) for number in range(50)]
            for message in said:
                assert replica.send(message)
        assert [await front.receive() for _ in said] == [(peer, each) for each in said]
        assert await front.receive() == (peer, None)
        assert not front.send(peer, Beat())
        await introduced(front, other)  # the others are there


async def test_a_front_that_is_gone_is_noticed_behind_all_that_it_sent() -> None:
    async with front_of() as front:
        replica = ReplicaSocket(front.address, None)
        peer = await introduced(front, replica)
        said: list[FromFront] = [Leaving(reason=str(number)) for number in range(50)]
        for message in said:
            assert front.send(peer, message)
    with closing(replica):
        assert [await replica.receive() for _ in said] == said
        assert await replica.receive() is None


async def test_a_replica_that_dials_anew_is_not_taken_for_the_one_that_was_closed() -> None:
    """The system gives a new connection the number of a closed one, maybe before that is read."""
    async with front_of() as front:
        for _ in range(20):
            first = ReplicaSocket(front.address, None)
            old = await introduced(front, first)
            first.close()
            with closing(ReplicaSocket(front.address, None)) as second:
                assert second.send(Beat())
                await let_come(front._link.socket)
                seen = [await front.receive() for _ in range(2)]
                [new] = [peer for peer, message in seen if message is not None]
                assert sorted(seen, key=repr) == sorted([(old, None), (new, Beat())], key=repr)
                assert front.send(new, Beat())
                assert await second.receive() == Beat()
            assert await front.receive() == (new, None)


async def let_come(*sockets: zmq.Socket[bytes]) -> None:
    """Wait until a message is there to be read in each; the loop is held up meanwhile."""
    for each in sockets:
        each.poll(SECONDS * 1000)


async def test_news_of_a_close_that_comes_with_the_last_message_is_read_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with front_of() as front:
        replica = ReplicaSocket(front.address, None)
        peer = await introduced(front, replica)
        socket, monitor = front._link.socket, front._link._monitor
        receive, has_closed = zmq.Socket.recv_multipart, False

        def receive_late(self: zmq.Socket[bytes], flags: int = 0, copy: bool = True) -> Any:
            """Say that nothing is there; then the last message and the close come at once."""
            nonlocal has_closed
            if self is not socket or has_closed:
                return receive(self, flags, copy)
            has_closed = True
            assert replica.send(Leaving(reason="the last word"))
            replica.close()
            socket.poll(SECONDS * 1000)
            monitor.poll(SECONDS * 1000)
            raise zmq.Again

        monkeypatch.setattr(zmq.Socket, "recv_multipart", receive_late)
        assert await front.receive() == (peer, Leaving(reason="the last word"))
        assert await front.receive() == (peer, None)
        assert not front._peers


async def test_a_message_that_comes_behind_the_end_of_its_connection_is_dropped() -> None:
    """The descriptor may be that of another connection by now, which would be closed for it."""
    async with front_of() as front:
        replica = ReplicaSocket(front.address, None)
        assert replica.send(Beat())
        await let_come(front._link.socket)
        frames = front._link.read()
        assert isinstance(frames, list)
        heard = front._heard(frames)
        assert heard is not None
        replica.close()
        assert await front.receive() == (heard[0], None)
        assert front._heard(frames) is None
        assert not front._peers


async def test_what_cannot_be_sent_at_once_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_UNSENT", 4)
    async with front_of() as front:
        address = front.address
    with closing(ReplicaSocket(address, None)) as replica:  # nothing listens there
        assert [replica.send(Beat()) for _ in range(5)] == [True] * 4 + [False]
    async with front_of() as front, connected(front) as (_, peer):
        assert not front.send(b"unknown", Beat())
        large = Leaving(reason="x" * 2**20)
        assert not all(front.send(peer, large) for _ in range(100))  # it does not read


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "encrypted"])
async def test_nothing_stays_open(key: str | None) -> None:
    await connect_once(key)  # libraries open files once
    before, tasks = open_files(), asyncio.all_tasks()
    async with front_of(key) as front, connected(front, key) as (replica, _):
        waiting = [
            asyncio.create_task(front.receive()), asyncio.create_task(replica.receive())
        ]  # fmt: skip
        await asyncio.sleep(0)
        assert open_files() > before
        for each in waiting:
            each.cancel()
    await asyncio.wait(asyncio.all_tasks() - tasks)  # those that were cancelled: they end
    assert open_files() == before, "nor do they wait for what collects garbage"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(front.address.rpartition(":")[2])))


async def connect_once(key: str | None) -> None:
    async with front_of(key) as front, connected(front, key):
        pass


def open_files() -> int:
    """Descriptors of this process, where the system shows them."""
    return len(os.listdir("/dev/fd"))
