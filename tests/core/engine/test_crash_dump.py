"""Crash dumps: everything that helps, nothing that was said."""

from __future__ import annotations

import asyncio
import json
import os

from foretoken.core.engine.crash_dump import make_report, stacks, write_report
from foretoken.core.engine.engine import Engine
from foretoken.core.engine.model_thread import Supervision, Watchdog
from foretoken.core.errors import ForetokenError
from foretoken.core.interface.sampling import Pooling
from foretoken.core.telemetry.metrics import EngineMetrics
from foretoken.core.telemetry.overview import RecentRequest, describe_engine
from support.fake_model import Driver, FakeRunner, answer, make_request, make_scheduler


class Broken(FakeRunner):
    def step(self, plan):
        raise RuntimeError("a secret that the exception quotes")


def run_until_dead(folder, runner=None) -> Engine:
    async def scenario() -> Engine:
        supervision = Supervision(dump_dir=folder, about={"page_size": 4})
        engine = Engine(make_scheduler(max_running=1), runner or Broken(4), supervision=supervision)
        await engine.start()
        streams = [engine.submit(make_request(str(i), [1, 2, 3])) for i in range(4)]
        for stream in streams:
            try:
                async for _ in stream:
                    pass
            except ForetokenError:
                pass
        assert not engine.alive
        await engine.close()
        return engine

    return asyncio.run(scenario())


def test_an_engine_that_dies_leaves_a_dump_and_one_critical_line_names_it(tmp_path, caplog) -> None:
    engine = run_until_dead(tmp_path)
    (path,) = tmp_path.iterdir()
    assert engine.num_crash_dumps == 1
    assert sum(str(path) in record.message for record in caplog.records) == 1
    assert str(os.getpid()) in path.name
    assert path.stat().st_mode & 0o777 == 0o600
    dump = json.loads(path.read_text())
    assert dump["failure"]["kind"] == "RuntimeError"
    assert any("test_crash_dump.py" in place for place in dump["failure"]["places"])
    assert dump["audit"]["ok"]
    assert dump["audit"]["pages"]["total"] == 64
    assert dump["config"] == {"page_size": 4}
    assert [each["failure"] for each in dump["steps"]][-1] == "RuntimeError"
    assert {each["state"] for each in dump["requests"]} == {"running", "waiting"}
    assert "secret" not in path.read_text()


def test_a_dump_counts_tokens_and_does_not_tell_them() -> None:
    driver = Driver(make_scheduler(), FakeRunner(4))
    driver.add(make_request("a", [5] * 10, namespace="a salt", deadline=9.0))
    driver.step()
    driver.step()
    report = make_report("asked", driver.scheduler, Watchdog(0.0), 3.0)
    (request,) = report["requests"]  # type: ignore[misc]
    assert request["prompt_tokens"] == 10
    assert request["output_tokens"] == 2
    assert request["pages"] == 3
    assert (request["age_seconds"], request["deadline_in_seconds"]) == (3.0, 6.0)
    assert "salt" not in json.dumps(report)
    assert "[5, 5" not in json.dumps(report)


def test_a_recorded_answer_that_is_compared_counts_as_prompt() -> None:
    driver = Driver(make_scheduler(), FakeRunner(4))
    request = make_request("a", [5] * 10, pooling=Pooling(compare_from=0), depth=0)
    request.tokens.extend([1, 2, 3])
    driver.add(request)
    report = make_report("asked", driver.scheduler, Watchdog(0.0), 3.0)
    (told,) = report["requests"]  # type: ignore[misc]
    assert (told["prompt_tokens"], told["output_tokens"]) == (13, 0)
    finished = [RecentRequest.of(request)]
    shown = describe_engine(driver.scheduler, EngineMetrics(driver.scheduler), finished)["requests"]
    assert shown[0]["prompt_tokens"] == 13  # type: ignore[index]


def test_a_part_that_cannot_be_told_does_not_cost_the_others() -> None:
    scheduler = make_scheduler()
    scheduler.running = scheduler.request_table.running = None  # type: ignore[assignment]
    report = make_report("asked", scheduler, Watchdog(0.0), 0.0)
    assert report["requests"] == "cannot be described: AttributeError"
    assert report["audit"] == {"ok": False, "violation": "the audit itself failed: AttributeError"}
    assert report["threads"]


def test_a_dump_that_cannot_be_written_changes_nothing(tmp_path, caplog) -> None:
    file = tmp_path / "file"
    file.touch()
    engine = run_until_dead(file)
    assert engine.num_crash_dumps == 0
    assert "no crash dump could be written" in caplog.text


def test_a_dump_never_follows_a_link_that_lies_in_its_way(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("foretoken.core.engine.crash_dump._NUMBERS", iter([1, 1]))
    monkeypatch.setattr("foretoken.core.engine.crash_dump._now", lambda form: "now")
    first = write_report({"reason": "x"}, tmp_path)
    assert first is not None
    assert write_report({"reason": "x"}, tmp_path) is None


def test_the_stacks_name_each_thread() -> None:
    places = stacks()
    (main,) = [value for name, value in places.items() if name.startswith("MainThread")]
    assert any("test_the_stacks" in place for place in main)


def test_the_step_log_keeps_the_last_ones_and_knows_the_one_under_way() -> None:
    driver = Driver(make_scheduler(), FakeRunner(4))
    driver.add(make_request("a", [1, 2, 3]))
    plan, log = driver.scheduler.schedule(0.0), Watchdog(0.0)
    for number in range(100):
        log.watch(None, float(number))  # type: ignore[arg-type]
        assert log.seconds_under_way(number + 0.5) == 0.5
        log.end(plan, number + 0.75, MemoryError("7 bytes") if number % 2 else None)
    assert log.seconds_under_way(200.0) == 0.0
    assert len(log.records) == 64
    assert log.records[-1] == (99.0, 0.75, 1, 3, "MemoryError")
    driver.scheduler.abort_all(0.0)


def test_an_engine_that_does_not_die_writes_nothing(tmp_path) -> None:
    async def scenario() -> None:
        engine = Engine(make_scheduler(), FakeRunner(4), supervision=Supervision(dump_dir=tmp_path))
        await engine.start()
        stream = engine.submit(make_request("a", [1, 2, 3]))
        assert [t async for d in stream for t in d.token_ids] == answer([1, 2, 3], 8)
        await engine.close()

    asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


def test_an_engine_that_was_asked_dumps_and_goes_on(tmp_path) -> None:
    async def scenario() -> None:
        engine = Engine(make_scheduler(), FakeRunner(4), supervision=Supervision(dump_dir=tmp_path))
        await engine.start()
        stream = engine.submit(make_request("a", [1, 2, 3]))
        await anext(stream)
        engine.dump(engine.report("SIGUSR1"))
        assert engine.num_crash_dumps == 1
        assert engine.alive
        await engine.close()

    asyncio.run(scenario())
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["reason"] == "SIGUSR1"
    assert dump["failure"] is None
