"""Reports of a server on its requests: metrics, log lines, traces; with the built-in pair."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from array import array
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from foretoken.api.cli import commands
from foretoken.api.runtime.generation import Answer, Generation
from foretoken.api.server.observation.logs import (
    JsonFormatter,
    TextFormatter,
    announcement,
    log_request,
)
from foretoken.api.server.observation.observability import _Recording, make_observing
from foretoken.api.server.observation.tracing import MAX_CHUNKS, Telemetry
from foretoken.api.serving.errors import ApiError
from foretoken.api.serving.metrics import ServerMetrics
from foretoken.api.serving.settings import Listen, ObservingOptions
from foretoken.api.types.request_context import CONTEXT, RequestContext
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.request import Usage
from foretoken.core.scheduling.shares import schedule_request
from support.fake_model import make_request
from support.observed_app import KEY, MODEL, Observed

ROOT = Path(__file__).parents[2]
SECRET = "zebra"  # in a prompt: it must be told nowhere
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def shared() -> Iterator[Observed]:
    server = Observed(step_rate=0.0)
    yield server
    server.close()


@pytest.fixture
def server(shared: Observed) -> Observed:
    shared.spans()
    return shared


def grown(server: Observed, before: dict[str, float]) -> dict[str, float]:
    """Return the metrics that have grown since ``before``, less those of the scrape itself."""
    after = server.samples()
    return {
        name.removeprefix("foretoken:"): value - before.get(name, 0)
        for name, value in after.items()
        if value != before.get(name, 0) and "/metrics" not in name
    }


# -- metrics --------------------------------------------------------------------------------------


def test_requests_are_counted_by_route_method_and_status_and_never_by_path(
    server: Observed,
) -> None:
    before = server.samples()
    assert server.complete().status_code == 200
    assert server.complete(max_tokens=-1).status_code == 400
    assert server.ask("GET", f"/v1/models/{MODEL}").status_code == 200
    assert server.ask("GET", f"/{SECRET}").status_code == 404
    assert server.ask("BREW", "/v1/models").status_code == 405
    found = grown(server, before)
    requests = {name: count for name, count in found.items() if "http_requests_total" in name}
    assert requests == {
        "http_requests_total POST /v1/completions 200": 1,
        "http_requests_total POST /v1/completions 400": 1,
        "http_requests_total GET /v1/models/{name:path} 200": 1,
        "http_requests_total GET unknown 404": 1,
        "http_requests_total other /v1/models 405": 1,
    }
    assert found["http_request_duration_seconds_count /v1/completions"] == 2
    assert SECRET not in server.ask("GET", "/metrics").text


def test_refusals_are_counted_by_their_reason(server: Observed) -> None:
    before = server.samples()
    server.complete("x " * 400)
    server.complete(temperature=-1)
    server.ask("GET", "/v1/models", authorization="Bearer wrong")
    found = grown(server, before)
    assert {name: count for name, count in found.items() if "refusals" in name} == {
        "request_refusals_total too_long": 1,
        "request_refusals_total invalid": 1,
        "request_refusals_total unauthorized": 1,
    }


@pytest.mark.parametrize(
    ("error", "draining", "reason"),
    [
        (ApiError(429, "", code="queue_full"), False, "queue_full"),
        (ApiError(503, "", code="deadline_exceeded"), False, "deadline"),
        (ApiError(503, "", code="unavailable"), True, "draining"),
        (ApiError(503, "", code="unavailable"), False, "not_ready"),
        (ApiError(503, "", code="too_many_connections"), False, "connections"),
        (ApiError(413, "", code="body_too_large"), False, "too_large"),
        (ApiError(500, ""), False, None),
        (None, False, None),
    ],
)  # fmt: skip
def test_a_refusal_is_no_failure(error: ApiError | None, draining: bool, reason: str) -> None:
    metrics = ServerMetrics()
    metrics.is_draining = lambda: draining
    visit = RequestContext({"type": "http", "method": "GET", "path": "/"}, error=error)
    metrics.began()
    metrics.ended(visit, 0.1)
    text = metrics.render().decode()
    counted = re.findall(r'refusals_total\{reason="(\w+)"\} 1\.0', text)
    assert counted == ([reason] if reason else [])


def test_a_stream_is_open_from_its_header_to_its_end() -> None:
    metrics = ServerMetrics()
    visit = RequestContext({"type": "http", "method": "GET", "path": "/"}, streams=True)
    told = []
    metrics.began()
    told.append(open_now(metrics))
    metrics.responded(visit)
    told.append(open_now(metrics))
    metrics.ended(visit, 0.1)
    told.append(open_now(metrics))
    assert told == [("1.0", "0.0"), ("1.0", "1.0"), ("0.0", "0.0")]


def open_now(metrics: ServerMetrics) -> tuple[str, ...]:
    text = metrics.render().decode()
    names = ("http_requests_in_flight", "http_streams")
    return tuple(re.findall(rf"^foretoken:{name} (\S+)$", text, re.MULTILINE)[0] for name in names)


def test_a_probe_that_is_refused_is_no_refusal_of_a_request() -> None:
    metrics = ServerMetrics()
    refused = ApiError(503, "", code="unavailable")
    visit = RequestContext({"type": "http", "method": "GET", "path": "/ready"}, error=refused)
    metrics.ended(visit, 0.1)
    assert 'reason="not_ready"} 0.0' in metrics.render().decode()


@pytest.mark.parametrize("path", ["/ready", "/metrics"])
def test_who_guesses_keys_is_seen_wherever_he_tries(
    server: Observed, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    caplog.set_level(logging.INFO)
    before = server.samples()
    assert server.ask("GET", path, authorization="Bearer wrong").status_code == 401
    assert grown(server, before)["request_refusals_total unauthorized"] == 1
    [line] = lines(caplog)
    assert (line["status"], line["error"]) == (401, "invalid_api_key")


def test_readiness_is_a_gauge(server: Observed) -> None:
    assert server.samples()["foretoken:ready"] == 1
    assert server.samples()["foretoken:engine_alive"] == 1


def test_the_lag_of_the_servers_loop_is_measured(server: Observed) -> None:
    deadline = time.monotonic() + 10  # ten timers a second
    while not server.samples()["foretoken:event_loop_lag_seconds_count"]:
        assert time.monotonic() < deadline


# -- the log --------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The access log, as JSON."""
    records = [record for record in caplog.records if record.name == "foretoken.access"]
    return [json.loads(JsonFormatter().format(record)) for record in records]


def test_a_request_is_one_line_with_what_it_cost_and_nothing_of_what_it_said(
    server: Observed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.complete(f"{SECRET} {SECRET}", cache_salt="of-a-tenant")
    [line] = lines(caplog)
    assert line["message"] == "request"
    assert line["level"] == "info"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["completion_tokens"] == 12
    assert line["prompt_tokens"] > line["cached_tokens"] == 0
    assert line["proposed_tokens"] >= line["accepted_tokens"] >= 0
    assert line["finish_reason"] == "length"
    assert line["answer_id"].startswith("cmpl-")
    assert 0 < line["queue_ms"] < line["ttft_ms"] < line["total_ms"] < line["duration_ms"]
    told = "".join(record.getMessage() + str(vars(record)) for record in caplog.records)
    assert not [word for word in (SECRET, KEY, "of-a-tenant") if word in told]


def test_a_line_of_several_prompts_adds_them_up(
    server: Observed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.complete("one")
    server.complete(["one", "one"], n=2, max_tokens=3)
    one, many = lines(caplog)
    assert many["prompt_tokens"] == 2 * one["prompt_tokens"]
    assert many["completion_tokens"] == 12


def test_a_refused_request_is_a_line_with_its_error(
    server: Observed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.complete("x " * 400)
    [line] = lines(caplog)
    assert line["error"] == "context_length_exceeded"
    assert "completion_tokens" not in line


def test_times_that_nobody_knows_yet_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answer = Answer("cmpl-1", SamplingParams())
    usage = Usage(prompt_tokens=7, queue_time=0.002)
    sampling = SimpleNamespace(constraint=None, params=SamplingParams())
    request: Any = SimpleNamespace(usage=usage, sampling=sampling, prediction=None)
    stream: Any = SimpleNamespace(ended=False)
    answer.generations = [Generation(request, Any, stream, lambda _: None)]  # type: ignore[arg-type]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    log_request(
        RequestContext(scope, answers=[answer]), 0.5
    )  # its caller left; the engine has yet to notice
    [line] = lines(caplog)
    assert (line["queue_ms"], line["prompt_tokens"], line["finish_reason"]) == (2, 7, "abort")
    assert "ttft_ms" not in line
    assert "total_ms" not in line


def test_probes_are_told_at_debug_alone(server: Observed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for path in ("/health", "/ready", "/metrics"):
        server.ask("GET", path)
    assert lines(caplog) == []
    caplog.set_level(logging.DEBUG)
    server.ask("GET", "/health")
    assert [line["route"] for line in lines(caplog)] == ["/health"]


class Written(logging.Handler):
    """Handler that keeps the text that a formatter makes of each record."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def written() -> Iterator[Written]:
    handler = Written(JsonFormatter())
    logger = logging.getLogger("foretoken")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_every_line_of_a_request_has_the_id_that_its_caller_gave_it(
    server: Observed, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.llm.tokenizer, "check_ids", fail)
    answer = server.complete([5, 6, 7], headers={"x_request_id": "mine-7"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine-7"
    failed, access = map(json.loads, written.lines)
    assert failed["level"] == "error"
    assert "a bug" in failed["exception"]
    assert failed["request_id"] == access["request_id"] == "mine-7"
    assert access["status"] == 500
    assert access["trace_id"] == failed["trace_id"]


def test_text_lines_name_the_request_too() -> None:
    record = logging.LogRecord("foretoken.x", logging.INFO, "x.py", 1, "hot: %s", ("yes",), None)
    local = datetime.fromtimestamp(record.created)
    time = local.strftime("%Y-%m-%d %H:%M:%S")
    assert TextFormatter().format(record) == f"{time} INFO foretoken.x hot: yes"
    token = CONTEXT.set(RequestContext({"type": "http"}, request_id="mine"))
    try:
        assert TextFormatter().format(record).endswith(" INFO foretoken.x hot: yes request_id=mine")
    finally:
        CONTEXT.reset(token)


def test_the_first_line_is_as_all_others_are() -> None:
    assert announcement("it serves", "text") == "it serves"
    line = json.loads(announcement("it serves", "json"))
    assert (line["level"], line["logger"], line["message"]) == ("info", "foretoken", "it serves")


# -- traces ---------------------------------------------------------------------------------------


def tree(spans: list[ReadableSpan]) -> dict[str, Any]:
    """Names by parent, each level in order of its beginnings."""
    ids = {span.context.span_id for span in spans}

    def below(parent: int | None) -> list[Any]:
        found = [
            span
            for span in sorted(spans, key=lambda span: span.start_time)
            if (span.parent.span_id if span.parent and span.parent.span_id in ids else None)
            == parent
        ]
        return [(span.name, below(span.context.span_id)) for span in found]

    return dict(below(None))


def by_name(spans: list[ReadableSpan]) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans}


def test_a_request_is_a_span_below_its_callers_with_its_parts(server: Observed) -> None:
    prompt = [5 + i for i in range(40)]
    answer = server.complete(prompt, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    spans = server.spans()
    parts = [("queue", []), ("prefill", []), ("decode", [])]
    expected = [(f"text_completion {MODEL}", parts), ("emit", [])]
    assert tree(spans) == {"POST /v1/completions": expected}
    found = by_name(spans)
    http, engine = found["POST /v1/completions"], found[f"text_completion {MODEL}"]
    assert f"{http.context.trace_id:032x}" == TRACE
    assert http.parent is not None
    assert f"{http.parent.span_id:016x}" == PARENT
    assert http.attributes is not None
    assert http.attributes["http.response.status_code"] == 200
    assert engine.attributes is not None
    told = {name.removeprefix("gen_ai."): value for name, value in engine.attributes.items()}
    assert told["response.id"] == answer.json()["id"]
    assert (told["usage.input_tokens"], told["usage.output_tokens"]) == (40, 12)
    assert told["response.finish_reasons"] == ("length",)
    assert told["request.temperature"] == 0
    chunk, decode = found["prefill"].attributes, found["decode"].attributes
    assert chunk == {"foretoken.chunk.start": 0, "foretoken.chunk.stop": 40}
    assert decode is not None
    usage = answer.json()["usage"]["speculation"]
    assert decode["foretoken.decode.steps"] == usage["verify_steps"]
    assert decode["foretoken.decode.proposed_tokens"] == usage["proposed_tokens"]
    assert decode["foretoken.decode.accepted_tokens"] == usage["accepted_tokens"]
    assert decode["foretoken.decode.forward_seconds"] > 0


def test_parts_of_a_request_follow_each_other_within_it(server: Observed) -> None:
    server.complete([5 + i for i in range(40)])
    found = by_name(server.spans())
    engine, queue, chunk = (found[n] for n in (f"text_completion {MODEL}", "queue", "prefill"))
    decode, emit, http = (found[n] for n in ("decode", "emit", "POST /v1/completions"))
    assert engine.start_time == queue.start_time
    assert queue.end_time <= chunk.start_time < decode.start_time
    assert decode.end_time == engine.end_time == emit.start_time
    assert emit.end_time <= http.end_time


def test_each_choice_is_a_span_of_its_own(server: Observed) -> None:
    server.complete(n=2)
    names = [name for name, _ in tree(server.spans())["POST /v1/completions"]]
    assert names == [f"text_completion {MODEL}"] * 2 + ["emit"]


def test_chat_is_called_so(server: Observed) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    server.ask("POST", "/v1/chat/completions", body)
    assert f"chat {MODEL}" in by_name(server.spans())


def test_no_span_has_a_text_of_anybodys(server: Observed) -> None:
    server.complete(f"{SECRET} {SECRET}", stop=[SECRET], cache_salt=SECRET, seed=2**64 - 1)
    server.ask("GET", f"/{SECRET}")
    assert SECRET not in "".join(span.to_json() for span in server.spans())


def test_probes_have_no_span(server: Observed) -> None:
    for path in ("/health", "/ready", "/metrics"):
        server.ask("GET", path)
    assert server.spans() == []


def test_a_vector_is_an_operation_of_its_own_without_a_token(server: Observed) -> None:
    answer = server.ask("POST", "/v1/embeddings", {"input": [5, 6, 7]})
    assert answer.status_code == 200
    engine = by_name(server.spans())[f"embeddings {MODEL}"]
    assert engine.attributes["gen_ai.usage.input_tokens"] == 3
    assert engine.attributes["gen_ai.usage.output_tokens"] == 0
    assert engine.attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_failed_request_is_an_error(server: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.llm.engine.runner, "launch", fail)
    assert server.complete().status_code == 500
    found = by_name(server.spans())
    engine = found[f"text_completion {MODEL}"]
    assert engine.attributes is not None
    assert engine.attributes["error.type"] == "ForetokenError"
    assert engine.status.status_code.name == "ERROR"
    assert found["POST /v1/completions"].status.status_code.name == "ERROR"


def test_a_trace_that_fails_costs_the_trace_alone(
    server: Observed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Telemetry, "_tell_parts", fail)
    before = server.samples()["foretoken:observer_failures_total"]
    assert [server.complete().status_code for _ in range(2)] == [200, 200]
    assert server.samples()["foretoken:observer_failures_total"] == before + 2
    raised = "observer Telemetry.observe_delta raised"
    logged = [text for text in caplog.messages if text.startswith(raised)]
    assert len(logged) == 1
    assert server.observing.telemetry is not None
    assert server.observing.telemetry._live == {}


def test_a_step_is_traced_at_the_rate_that_was_asked_for(
    server: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry = server.observing.telemetry
    monkeypatch.setattr(telemetry, "_step_rate", 0.5)
    steps = server.samples()["foretoken:step_seconds_count"]
    server.complete()
    server.complete()
    num_steps = server.samples()["foretoken:step_seconds_count"] - steps
    spans = server.spans()
    traced = [span for span in spans if span.name == "step"]
    assert len(traced) == num_steps // 2
    roots = [below for name, below in tree(spans).items() if name == "step"]
    assert [name for name, _ in roots[0]] == ["draft", "forward", "verify", "host"]
    assert traced[0].attributes is not None
    assert traced[0].attributes["foretoken.step.num_requests"] == 1


def test_a_long_prompt_has_a_bounded_number_of_spans(
    server: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = server.llm.engine.scheduler
    narrow = type(scheduler.limits)(
        **{name: getattr(scheduler.limits, name) for name in scheduler.limits.__slots__}
        | {"max_batch_tokens": 4}
    )
    monkeypatch.setattr(scheduler, "limits", narrow)
    server.complete([7 + i % 50 for i in range(4 * MAX_CHUNKS + 20)], max_tokens=1)
    chunks = [span.attributes for span in server.spans() if span.name == "prefill"]
    assert len(chunks) == MAX_CHUNKS
    assert chunks[-1] is not None
    assert chunks[-1]["foretoken.chunk.stop"] == 4 * MAX_CHUNKS + 20


def test_a_step_that_began_before_a_request_came_is_not_its_own_though_the_id_is() -> None:
    telemetry = Telemetry(TracerProvider())
    request = make_request("a", [1, 2])
    telemetry.begin(request, 5.0)
    row = schedule_request(request, 2)
    plan = StepPlan(requests=[row], newly_allocated_pages=array("q"))
    output = StepOutput(requests=[RequestOutput(request_id="a")])
    telemetry.observe_step(plan, output, began=4.0, ended=6.0)  # of who had that id before
    assert not telemetry._live["a"].chunks
    telemetry.observe_step(plan, output, began=6.0, ended=7.0)
    assert len(telemetry._live["a"].chunks) == 1


# -- flags ----------------------------------------------------------------------------------------


def test_nothing_but_one_file_knows_opentelemetry() -> None:
    knowing = [
        path.relative_to(ROOT).as_posix()
        for room in ("api", "core", "draft", "radix_cache", "bench")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"^\s*(from|import) opentelemetry", path.read_text(), re.MULTILINE)
    ]
    assert knowing == ["api/server/observation/tracing.py"]


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "foretoken.api.server.observation.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'foretoken\[otel\]'"):
        make_observing(ObservingOptions(otlp_endpoint="http://127.0.0.1:1"), Listen())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tracing"], "OTEL_EXPORTER_OTLP_ENDPOINT"),
        (["--trace-steps", "0.1"], "--trace-steps needs"),
        (["--otlp-endpoint", "collector:4318"], "must be a URL"),
        (["--trace-steps", "nan"], "trace_steps must be at least 0"),
        (["--log-format", "xml"], "must be one of text, json"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    try:
        code = commands.main(["serve", *args])
    except SystemExit as exited:
        code = exited.code
    assert code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_prompt_without_an_answer_is_not_recorded() -> None:
    expected: list[str] = []
    recorder = SimpleNamespace(expect=lambda request, _: expected.append(request.request_id))
    for is_alone in (True, False):
        request = make_request(f"alone: {is_alone}", [1, 2], prompt_only=is_alone)
        _Recording(recorder).begin(request, 0.0)  # type: ignore[arg-type]
    assert expected == ["alone: False"]
