"""Files of tasks: order, seeds, and lines that are refused by their number."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from foretoken.api.compare.tasks import MAX_SEED, Task, read_tasks, seeds_of
from foretoken.core.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def written(tmp_path: Path, *lines: object) -> Path:
    file = tmp_path / "tasks.jsonl"
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    file.write_text("\n".join(texts))
    return file


def test_tasks_are_shuffled_by_the_seed_and_named_by_their_line(tmp_path: Path) -> None:
    file = written(tmp_path, "", *({"prompt": f"{at}", "expected": at} for at in range(30)))
    first, again, other = (read_tasks(file, seed).tasks for seed in (1, 1, 2))
    assert [each.id for each in first] == [each.id for each in again]
    assert [each.id for each in first] != [each.id for each in other]
    assert sorted(each.id for each in first) == [*range(2, 32)]  # type: ignore[type-var]
    assert all(each.expected == int(each.prompt or "") == each.id - 2 for each in first)  # type: ignore[operator]


def test_seeds_depend_on_the_task_and_not_on_its_place() -> None:
    task, same, other = (Task(id=name, prompt="x") for name in ("a", "a", "b"))
    seeds = seeds_of(7, task, 4)
    assert seeds == seeds_of(7, same, 4)
    assert seeds[:2] == seeds_of(7, task, 2)
    assert len({*seeds, *seeds_of(7, other, 4), *seeds_of(8, task, 4)}) == 12
    assert all(0 <= each <= MAX_SEED for each in seeds)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "a", "expected"', "is not a task: .*truncated"),
        ("[1]", "is not a task: Expected `object`"),
        ({"prompt": "a", "expects": 1}, "unknown field `expects`"),
        ({"prompt": "a", "messages": MESSAGES}, "has either messages or a prompt"),
        ({"expected": 1}, "has either messages or a prompt"),
        ({"messages": []}, "has either messages or a prompt"),
        ({"messages": [], "prompt": "a"}, "has either messages or a prompt"),
        ({"messages": MESSAGES, "prompt": ""}, "has either messages or a prompt"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]"),
        ({"prompt": "a", "id": "one"}, "a task before has the id 'one'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, why: str) -> None:
    file = written(tmp_path, {"id": "one", "prompt": "a"}, line)
    with pytest.raises(InvalidRequest, match=f"tasks.jsonl, line 2.*{why}"):
        read_tasks(file, 0)


def test_a_byte_order_mark_is_part_of_the_file_that_is_hashed(tmp_path: Path) -> None:
    file = written(tmp_path, '\ufeff{"prompt": "a"}')
    found = read_tasks(file, 0)
    assert [each.prompt for each in found.tasks] == ["a"]
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_without_tasks_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no tasks"):
        read_tasks(written(tmp_path, "", " "), 0)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_tasks(tmp_path / "absent", 0)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_task(tmp_path: Path) -> None:
    """Editors of Windows write it."""
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "a", "expected": 1}).encode())
    assert [each.prompt for each in read_tasks(file, 0).tasks] == ["a"]
