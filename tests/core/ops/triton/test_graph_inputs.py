"""GraphInputs: one copy, aligned fields, and host blocks that are not overwritten too early."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.ops.triton import graph_inputs as packets
from foretoken.core.ops.triton.graph_inputs import AsyncCopy, Field, GraphInputs
from foretoken.core.ops.triton.sampling import sampler as samplers
from support.sampling_rows import row_of

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
    """Fake events, in the order in which they are made."""
    made: list[FakeEvent] = []
    monkeypatch.setattr(packets, "make_event", lambda _: made.append(FakeEvent()) or made[-1])
    return made


def test_what_is_written_to_a_field_is_on_the_device_after_the_upload() -> None:
    graph_inputs = GraphInputs(FIELDS, CPU)
    before = {name: view.data_ptr() for name, view in graph_inputs.device.items()}
    to = graph_inputs.open()
    to["short"][:] = 1, -2, 3, -4, 5
    to["long"][:] = 2**40, -5
    to["numbers"][:] = 0.5
    assert not graph_inputs.device["short"].any(), "not before"
    graph_inputs.upload()
    assert graph_inputs.device["short"].tolist() == [1, -2, 3, -4, 5]
    assert graph_inputs.device["long"].tolist() == [2**40, -5]
    assert graph_inputs.device["none"].tolist() == []
    assert graph_inputs.device["numbers"].tolist() == [0.5] * 5
    assert {name: view.data_ptr() for name, view in graph_inputs.device.items()} == before


def test_fields_are_as_aligned_as_kernels_assume() -> None:
    offsets = [
        view.storage_offset() * view.itemsize for view in GraphInputs(FIELDS, CPU).device.values()
    ]
    assert offsets == [0, 32, 48, 48]


def test_of_the_last_field_only_what_is_used_is_copied() -> None:
    graph_inputs = GraphInputs(FIELDS, CPU)
    to = graph_inputs.open()
    to["long"][:] = 7
    to["numbers"][:] = 1.0
    graph_inputs.upload(2)
    assert graph_inputs.device["long"].tolist() == [7, 7]
    assert graph_inputs.device["numbers"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_host_block_is_not_written_before_the_last_copy_of_it_is_over(events) -> None:
    graph_inputs = GraphInputs(FIELDS, CPU)
    (event,) = events
    graph_inputs.open()
    assert event.log == [], "nothing was copied yet"
    graph_inputs.upload()
    assert event.log == ["record"], "an upload does not wait"
    graph_inputs.open()
    assert event.log == ["record", "synchronize"]
    graph_inputs.open()
    assert event.log == ["record", "synchronize"], "it was over already"


def test_of_two_host_blocks_one_is_written_while_the_copy_of_the_other_is_under_way(events) -> None:
    graph_inputs = GraphInputs(FIELDS, CPU, num_hosts=2)
    for value in (1, 2):
        graph_inputs.open()["short"][:] = value
        graph_inputs.upload()
        assert graph_inputs.device["short"].tolist() == [value] * 5
    assert [event.log for event in events] == [["record"]] * 2, "nobody has waited"
    assert graph_inputs.open()["short"].tolist() == [1] * 5, "it is the first one's turn again"
    assert [event.log[1:] for event in events] == [["synchronize"], []]


def test_a_reply_is_read_behind_a_mark_of_its_own(events) -> None:
    numbers = torch.tensor([5, -7], device=CPU)
    first, second = AsyncCopy(numbers), AsyncCopy(numbers + 1)
    assert [event.log for event in events] == [["record"]] * 2
    numbers.zero_()
    assert first.read().tolist() == [5, -7]
    assert [event.log[1:] for event in events] == [["synchronize"], []]
    assert second.read().tolist() == [6, -6]


def test_the_mark_is_behind_the_copy(events) -> None:
    graph_inputs = GraphInputs(FIELDS, CPU)
    (event,) = events
    seen: list[int] = []
    record = event.record
    event.record = lambda: (seen.extend(graph_inputs.device["short"].tolist()), record())[1]  # type: ignore[method-assign]
    graph_inputs.open()["short"][:] = 4
    graph_inputs.upload()
    assert seen == [4] * 5


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_packet_of_one_field_is_as_large_as_it(count: int) -> None:
    graph_inputs = GraphInputs([Field("only", count)], CPU)
    graph_inputs.open()["only"][:] = range(count)
    graph_inputs.upload(count)
    assert graph_inputs.device["only"].tolist() == list(range(count))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_launch_of_many_blocks_does_not_wait_for_the_launch_before_it(
    events, monkeypatch: pytest.MonkeyPatch, one_by_one: bool
) -> None:
    num_rows, vocab_size = 5, 8
    monkeypatch.setattr(samplers, "BLOCK", 2 * vocab_size)  # three blocks
    monkeypatch.setattr(samplers, "GumbelArgmax", Winners)
    sampler, logits = samplers.TritonSampler(), torch.zeros(num_rows, vocab_size)
    rows = [row_of() for _ in range(num_rows)]

    def launch() -> None:
        if one_by_one:
            sampler.begin(logits, rows)
        else:
            assert sampler.begin_runs(logits, rows, [1] * num_rows) is not None

    launch()
    launch()
    assert not [event for event in events if "synchronize" in event.log]
    launch()  # the first one's blocks again: that step is over when a third one is launched
    assert [event for event in events if "synchronize" in event.log]


class Winners:
    """A `GumbelArgmax` that chooses token 0 of each row."""

    def __init__(self, logits: torch.Tensor, columns: torch.Tensor, *_: object, **__: object):
        self._num_rows = len(columns)

    def run(self) -> torch.Tensor:
        return torch.zeros(self._num_rows, dtype=torch.int64)
