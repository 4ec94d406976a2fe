"""Packet: one copy, fields where kernels may read them, and a host block that nobody overwrites."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.ops.triton import packet as packets
from foretoken.core.ops.triton.packet import Field, Packet, Reply

CPU = torch.device("cpu")
FIELDS = (
    Field("short", 5),
    Field("long", 2, torch.int64),
    Field("none", 0),
    Field("numbers", 5, torch.float32),
)


class FakeEvent:
    """An event of a device that is slow: a copy is over when somebody has waited for it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    """Those that are made, in turn."""
    made: list[FakeEvent] = []
    monkeypatch.setattr(packets, "make_event", lambda _: made.append(FakeEvent()) or made[-1])
    return made


def test_what_is_written_to_a_field_is_on_the_device_after_the_upload() -> None:
    packet = Packet(FIELDS, CPU)
    before = {name: view.data_ptr() for name, view in packet.device.items()}
    to = packet.open()
    to["short"][:] = 1, -2, 3, -4, 5
    to["long"][:] = 2**40, -5
    to["numbers"][:] = 0.5
    assert not packet.device["short"].any(), "not before"
    packet.upload()
    assert packet.device["short"].tolist() == [1, -2, 3, -4, 5]
    assert packet.device["long"].tolist() == [2**40, -5]
    assert packet.device["none"].tolist() == []
    assert packet.device["numbers"].tolist() == [0.5] * 5
    assert {name: view.data_ptr() for name, view in packet.device.items()} == before


def test_fields_are_as_aligned_as_kernels_assume() -> None:
    offsets = [
        view.storage_offset() * view.itemsize for view in Packet(FIELDS, CPU).device.values()
    ]
    assert offsets == [0, 32, 48, 48]


def test_of_the_last_field_only_what_is_used_is_copied() -> None:
    packet = Packet(FIELDS, CPU)
    to = packet.open()
    to["long"][:] = 7
    to["numbers"][:] = 1.0
    packet.upload(2)
    assert packet.device["long"].tolist() == [7, 7]
    assert packet.device["numbers"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_host_block_is_not_written_before_the_last_copy_of_it_is_over(events) -> None:
    packet = Packet(FIELDS, CPU)
    (event,) = events
    packet.open()
    assert event.log == [], "nothing was copied yet"
    packet.upload()
    assert event.log == ["record"], "an upload does not wait"
    packet.open()
    assert event.log == ["record", "synchronize"]
    packet.open()
    assert event.log == ["record", "synchronize"], "it was over already"


def test_of_two_host_blocks_one_is_written_while_the_copy_of_the_other_is_under_way(events) -> None:
    packet = Packet(FIELDS, CPU, num_hosts=2)
    for value in (1, 2):
        packet.open()["short"][:] = value
        packet.upload()
        assert packet.device["short"].tolist() == [value] * 5
    assert [event.log for event in events] == [["record"]] * 2, "nobody has waited"
    assert packet.open()["short"].tolist() == [1] * 5, "it is the first one's turn again"
    assert [event.log[1:] for event in events] == [["synchronize"], []]


def test_a_reply_is_read_behind_a_mark_of_its_own(events) -> None:
    numbers = torch.tensor([5, -7], device=CPU)
    first, second = Reply(numbers), Reply(numbers + 1)
    assert [event.log for event in events] == [["record"]] * 2
    numbers.zero_()
    assert first.read().tolist() == [5, -7]
    assert [event.log[1:] for event in events] == [["synchronize"], []]
    assert second.read().tolist() == [6, -6]


def test_the_mark_is_behind_the_copy(events) -> None:
    packet = Packet(FIELDS, CPU)
    (event,) = events
    seen: list[int] = []
    record = event.record
    event.record = lambda: (seen.extend(packet.device["short"].tolist()), record())[1]  # type: ignore[method-assign]
    packet.open()["short"][:] = 4
    packet.upload()
    assert seen == [4] * 5


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_packet_of_one_field_is_as_large_as_it(count: int) -> None:
    packet = Packet([Field("only", count)], CPU)
    packet.open()["only"][:] = range(count)
    packet.upload(count)
    assert packet.device["only"].tolist() == list(range(count))
