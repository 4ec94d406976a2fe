"""Copies of pages beside the steps of a GPU: in a queue of their own, and awaited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from foretoken.core.ops.machine.device import PageCopier, make_copier
from foretoken.core.tiers.page_records import PageRecords


class Queue:
    """Copies that are asked for in its context; done when they are waited for."""

    def __init__(self) -> None:
        self.is_current = False
        self.asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False

    def synchronize(self) -> None:
        asked, self.asked = self.asked, []
        for target, source in asked:
            target[:] = source


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A stream of a GPU that there is none of."""
    made = Queue()

    def copy_(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert made.is_current, "a copy waits for the steps of the model"
        assert non_blocking
        made.asked.append((target, source))

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream.current())
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return made


def test_copies_are_asked_for_in_their_own_queue_and_waited_for(queue: Queue) -> None:
    target, source = torch.zeros(2, 3), torch.arange(6.0).view(2, 3)
    PageCopier(queue).copy(zip(target, source, strict=True))
    assert target.equal(source)
    assert queue.asked == []


def test_records_of_several_parts_go_through_the_queue(queue: Queue) -> None:
    pages, marks = torch.arange(12, dtype=torch.uint8).view(3, 4), torch.tensor([7, 8, 9]).byte()
    records = PageRecords([pages, marks])
    records._copier = PageCopier(queue)
    assert bytes(records.read(1)) == bytes([4, 5, 6, 7, 8])
    records.target(2)[:] = bytes([1, 2, 3, 4, 5])
    records.write(2)
    assert pages[2].tolist() == [1, 2, 3, 4]
    assert marks.tolist() == [7, 8, 5]


def test_on_the_host_copies_are_made_at_once() -> None:
    target = torch.zeros(3)
    make_copier(torch.device("cpu")).copy([(target, torch.ones(3))])
    assert target.tolist() == [1, 1, 1]
