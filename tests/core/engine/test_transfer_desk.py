"""TransferDesk: notes of readers end transfers on the engine's loop, and waiting requests wake."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.errors import DeadlineExceeded
from foretoken.core.interface.extras.request_extras import Transfer
from foretoken.core.interface.extras.transfers import PageServer, PoolMemory
from foretoken.radix_cache import HeldPages
from foretoken.radix_cache.transfers import SECONDS
from support.fake_model import FakeRunner, answer, make_request, make_scheduler

PROMPT = list(range(1, 6)) * 8


class Notes(PageServer):
    """A server without memory, whose readers' notes a test writes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.fails = self.is_closed = False
        self._looked = asyncio.Event()

    @property
    def memory(self) -> PoolMemory:
        raise AssertionError("nobody asks")

    def notes(self) -> Sequence[bytes]:
        self._looked.set()
        if self.fails:
            raise OSError("injected")
        found, self.sent = self.sent, []
        return found

    def close(self) -> None:
        self.is_closed = True

    async def look(self) -> None:
        """Wait until the engine has looked once more."""
        self._looked.clear()
        await asyncio.wait_for(self._looked.wait(), 10)


class Serving:
    """An engine that computes prompts for others. Its clock stands still unless it is moved."""

    def __init__(self, num_pages: int = 64) -> None:
        self.now, self.notes = 0.0, Notes()
        scheduler = make_scheduler(num_pages=num_pages)
        self.cache = scheduler.cache
        self.engine = Engine(
            scheduler, FakeRunner(4), page_server=self.notes, clock=lambda: self.now
        )

    async def __aenter__(self) -> Serving:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def hold(self, name: str = "a") -> HeldPages:
        """Compute a prompt for another engine."""
        request = make_request(name, PROMPT, max_tokens=1)
        request.transfer = Transfer(hands_over=True)
        async for _ in self.engine.submit(request):
            pass
        assert request.transfer.handed is not None
        return request.transfer.handed

    async def wait_for_end(self) -> None:
        while len(self.cache.transfers):
            await self.notes.look()
        await self.engine.audit()


async def test_a_note_ends_a_transfer_and_others_are_ignored() -> None:
    async with Serving() as serving:
        held = await serving.hold()
        serving.notes.sent = [b"", b"\xff\xfe", b"done ", b"done x", b"done \xff", b"renew x"]
        await serving.notes.look()
        assert len(serving.cache.transfers) == 1
        serving.notes.sent = [b"done " + held.name.encode()]
        await serving.wait_for_end()
        await serving.hold("b")
        assert len(serving.cache.transfers) == 1
    assert len(serving.cache.transfers) == 0
    assert serving.notes.is_closed


async def test_time_ends_a_transfer_while_the_engine_is_idle_unless_it_is_renewed() -> None:
    async with Serving() as serving:
        held = await serving.hold()
        serving.notes.fails = True
        serving.now = SECONDS - 1
        await serving.notes.look()
        serving.notes.sent, serving.notes.fails = [b"renew " + held.name.encode()], False
        await serving.notes.look()
        serving.now = SECONDS + 1
        await serving.notes.look()
        assert len(serving.cache.transfers) == 1
        serving.now = 2 * SECONDS
        await serving.wait_for_end()
        assert serving.cache.transfers.ended == {"done": 0, "expired": 1}


async def test_readers_are_answered_until_no_parameters_are_good_any_more() -> None:
    """One that came a second time, when nothing was held, got no answer and shunned the engine."""
    async with Serving() as serving:
        desk = serving.engine._transfer_desk
        assert desk is not None
        assert desk._timer is None, "nothing was held yet"
        held = await serving.hold()
        serving.now = 20.0
        serving.notes.sent = [b"done " + held.name.encode()]
        await serving.wait_for_end()
        serving.now += SECONDS - 1
        await serving.notes.look()  # the reader that comes again
        await serving.notes.look()
        again = await serving.hold("b")
        serving.notes.sent = [b"done " + again.name.encode()]
        await serving.wait_for_end()
        serving.now += SECONDS
        await serving.notes.look()
        assert desk._timer is None, "nobody can come any more"


async def test_a_request_that_waits_for_held_pages_runs_when_they_are_free() -> None:
    async with Serving(num_pages=16) as serving:
        held = await serving.hold()
        assert len(held.page_ids) == 9
        prompt = [6, *PROMPT]
        stream = serving.engine.submit(make_request("b", prompt, max_tokens=2))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not serving.engine.scheduler.running, "it does not fit beside them"
        serving.notes.sent = [b"done " + held.name.encode()]
        served = [each for delta in [d async for d in stream] for each in delta.token_ids]
        assert served == answer(array("q", prompt), 2)
        await serving.engine.audit()


async def test_a_deadline_is_kept_while_transfers_hold_the_room_and_no_step_runs() -> None:
    async with Serving(num_pages=13) as serving:
        serving.engine._clock = time.monotonic  # the loop's own, by which it waits
        await serving.hold()
        late = serving.engine.submit(make_request("late", PROMPT[::-1], deadline=0.05))
        with pytest.raises(DeadlineExceeded):
            async for _ in late:
                pass
        await serving.engine.audit()
        assert len(serving.cache.transfers) == 1
