"""The sockets between a front and its replicas: who is heard."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("zmq", reason="the extra events is not installed")

from foretoken.api.cluster.transport import FrontSocket, ReplicaSocket
from support.wire_samples import hello

SECONDS = 20.0


@pytest.mark.parametrize(
    ("front_key", "other_key"), [("secret", "another"), ("secret", None), (None, "secret")]
)
def test_a_process_without_the_key_of_the_front_is_not_heard(
    front_key: str | None, other_key: str | None
) -> None:
    async def body() -> None:
        front = FrontSocket("tcp://127.0.0.1:0", front_key)
        stranger, replica = (ReplicaSocket(front.address, key) for key in (other_key, front_key))
        try:
            assert stranger.send(hello())
            # The connection ends before a message is read of it.
            assert await asyncio.wait_for(stranger.receive(), SECONDS) is None
            assert replica.send(hello())
            _, message = await asyncio.wait_for(front.receive(), SECONDS)
            assert message == hello()
            following = asyncio.create_task(front.receive())
            replica.close()
            assert (await asyncio.wait_for(following, SECONDS))[1] is None  # nothing in between
        finally:
            for each in (stranger, front):
                each.close()

    asyncio.run(body())
