"""The bench beside other engines: jobs, figures, table, and engines that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from foretoken.bench.common.roofline import Limits
from foretoken.bench.lab.peers import driver, engines, environments
from foretoken.bench.lab.peers.checkpoints import Shape
from foretoken.bench.lab.peers.driver import Run
from foretoken.bench.lab.peers.engines import ENGINES, Engine
from foretoken.bench.lab.peers.limits import roofline
from foretoken.bench.lab.peers.measure import Prompts, WrongAnswerError, measure, warm_up
from foretoken.bench.lab.peers.rows import ROWS, Row, Setting, shrunk
from foretoken.bench.lab.peers.table import (
    Figures,
    agreement,
    best_other,
    line,
    notes,
    ratio,
    record,
)
from foretoken.bench.lab.peers.wire import Answer, Call, Job, read_job, write
from foretoken.bench.lab.peers.worker import Worker, WorkerError

FAKE = Path(__file__).parents[1] / "support" / "fake_peer.py"
LIMITS = Limits(read=1e9, matrix=1e12, drift=0.0, dtype="bfloat16", how="by hand")
ROW = Row(
    name="decode",
    title="decode",
    setting=Setting("none"),
    kind="decode",
    prompt_len=6,
    batch=2,
    num_new=9,
    must=1.0,
    stretch=1.5,
)
TEXT = replace(ROW, name="text", kind="text", task="edit", prompt_len=6, num_calls=2)
BURST = replace(ROW, name="burst", kind="burst", batch=4, num_shared=4)


def shape_of(**sizes: int) -> Shape:
    return Shape("none", partial(PretrainedConfig, **sizes))


# -- jobs and answers ---------------------------------------------------------------------------


def test_a_job_survives_its_way_through_json():
    job = Job("somewhere", "int8", 2, depth=4, calls=[Call([[1, 2], [3]], 5, 1)])
    assert read_job(write(job)) == job
    assert job.draft == Path("somewhere/draft")


def test_a_job_with_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="thread_count"):
        read_job('{"checkpoint": "x", "dtype": "bf16", "threads": 1, "thread_count": 2}')


def test_a_worker_answers_the_calls_of_its_job_and_nothing_else_on_standard_output(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(write(Job("x", "bf16", 1, calls=[Call([[1, 2], [3, 4]], 2)])))
    ended = subprocess.run(
        [sys.executable, FAKE, "--job", path], capture_output=True, text=True, check=True
    )
    ready, answer = map(json.loads, ended.stdout.splitlines())
    assert ready["versions"] == {}
    assert answer["tokens"] == [[3, 4], [7, 8]]
    assert answer["seconds"] >= 0
    assert "loading, says the engine" in ended.stderr


@pytest.mark.parametrize("path", sorted(engines.HERE.glob("run_*.py")), ids=lambda path: path.name)
def test_workers_of_other_engines_import_nothing_of_ours_but_the_wire(path):
    source = path.read_text()
    if path.name == "run_foretoken.py":
        return
    assert "import foretoken" not in source
    assert "from foretoken" not in source
    assert [line for line in source.splitlines() if "from .." in line] == []


# -- one figure ---------------------------------------------------------------------------------


class Clocked:
    """Claims 1 s for a call, 0.1 s for each new token and 0.01 s for a prompt token not seen."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> Answer:
        seen = any(call.prompts == earlier.prompts for earlier in self.calls)
        self.calls.append(call)
        prompt = 0 if seen else sum(map(len, call.prompts))
        seconds = 1 + 0.01 * prompt + 0.1 * call.num_new
        return Answer(seconds, [[0] * call.num_new for _ in call.prompts])


TASKS = [[task] * 6 for task in range(14)]


def prompts(row: Row, turn: int = 0) -> Prompts:
    return Prompts(row, 1000, turn, tasks=TASKS)


def test_decoding_is_what_all_tokens_took_less_what_the_first_took():
    ask = Clocked()
    assert measure(ROW, ask, prompts(ROW)) == pytest.approx(2 * 8 / 0.8)
    assert [call.num_new for call in ask.calls] == [1, 9]
    assert ask.calls[0].prompts != ask.calls[1].prompts  # a cache must find nothing


def test_prefill_is_counted_in_prompt_tokens():
    row = replace(ROW, kind="prefill", batch=1, num_new=1, prompt_len=100)
    assert measure(row, Clocked(), prompts(row)) == pytest.approx(100 / 2.1)


def test_a_warm_first_token_is_that_of_the_second_time():
    cold = replace(ROW, kind="cold", batch=1, num_new=1, prompt_len=100)
    warm = replace(cold, kind="warm")
    assert measure(cold, Clocked(), prompts(cold)) == pytest.approx(2.1)
    assert measure(warm, Clocked(), prompts(warm)) == pytest.approx(1.1)


def test_a_second_turn_has_the_first_and_half_of_its_answer():
    """The other half was thinking; as many tokens are the user's."""
    row = replace(ROW, kind="turn", batch=1, num_new=8, prompt_len=1000)
    ask = Clocked()
    assert measure(row, ask, prompts(row)) == pytest.approx(1 + 0.01 * 1008 + 0.1)
    (first,), (second,) = (call.prompts for call in ask.calls)
    assert [call.num_new for call in ask.calls] == [8, 1]
    assert second[:1004] == [*first, 0, 0, 0, 0]
    assert len(second) == 1008
    assert row.max_len == 1009
    warm_up(row, ask, prompts(row, -1))
    assert len(ask.calls[-1].prompts[0]) < 1000


def test_text_is_counted_in_new_tokens_from_call_to_answer():
    ask = Clocked()
    assert measure(TEXT, ask, prompts(TEXT)) == pytest.approx(2 * 2 * 9 / (2 * 2.02))
    assert [call.prompts for call in ask.calls] == [TASKS[0:2], TASKS[2:4]]


def test_no_text_is_asked_twice():
    asks = [Clocked() for _ in range(4)]
    warm_up(TEXT, asks[0], prompts(TEXT, -1))
    for turn, ask in enumerate(asks[1:]):
        measure(TEXT, ask, prompts(TEXT, turn))
    asked = [tuple(p) for ask in asks for call in ask.calls for p in call.prompts]
    assert len(asked) == len(set(asked)) == len(TASKS)
    with pytest.raises(WrongAnswerError, match="never asked"):
        measure(TEXT, Clocked(), prompts(TEXT, 3))


def test_requests_of_a_burst_share_their_head_alone():
    ask = Clocked()
    measure(BURST, ask, prompts(BURST))
    (call,) = ask.calls
    assert call.num_shared == 4
    assert len({tuple(prompt[:4]) for prompt in call.prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in call.prompts}) == 4


def test_every_engine_gets_the_same_prompts_and_no_turn_gets_those_of_another():
    assert prompts(ROW).next() == prompts(ROW).next()
    assert prompts(ROW).next() != prompts(ROW, turn=1).next()
    assert prompts(ROW).next() != prompts(BURST).next(2)


def test_warming_up_is_the_row_in_small():
    ask = Clocked()
    warm_up(BURST, ask, prompts(BURST, -1))
    assert [(len(call.prompts), call.num_new) for call in ask.calls] == [(2, 4)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(1.0, [[0] * 8, [0] * 9]), "wanted .* tokens each, got"),
        (Answer(1.0, [[0]]), "wanted 1 tokens each, got fewer"),
        (Answer(0.0, [], "cannot: batches"), "cannot: batches"),
    ],
)
def test_a_wrong_number_of_tokens_is_no_result(answer, message):
    with pytest.raises(WrongAnswerError, match=message):
        measure(ROW, lambda call: answer, prompts(ROW))


def test_many_tokens_that_take_no_longer_than_one_are_no_result():
    answers = (Answer(1.0, [[0] * n] * 2) for n in (1, 9))
    with pytest.raises(WrongAnswerError, match="no longer than one"):
        measure(ROW, lambda call: next(answers), prompts(ROW))


# -- rows and engines ---------------------------------------------------------------------------


def test_rows_have_names_of_their_own_and_aims_that_rise():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.must < row.stretch for row in ROWS if row.must and row.stretch)


def test_rows_of_one_setting_stand_together_so_that_models_load_once():
    settings = [row.setting for row in ROWS]
    changes = sum(left != right for left, right in pairwise(settings))
    assert changes == len(set(settings)) - 1


def test_a_shrunk_row_has_a_shorter_prompt_and_the_other_shape():
    burst = next(row for row in ROWS if row.kind == "burst")
    small = shrunk(burst, "tiny")
    assert small.setting.shape == "tiny"
    assert (small.prompt_len, small.num_shared) == (130, 128)


def test_engines_are_asked_only_what_they_have():
    by_name = {engine.name: engine for engine in ENGINES}
    taking = {row.name: {e.name for e in ENGINES if e.takes(row)} for row in ROWS}
    assert taking["decode-1-int4"] == {"foretoken", "llama.cpp", "openvino"}
    assert taking["builtin"] == {"foretoken", "transformers"}
    assert "transformers-cb" in taking["burst-16"]
    assert "transformers-cb" not in taking["decode-1-bf16"] | taking["draft-8"]
    assert by_name["foretoken"].is_installed
    assert {"foretoken", "openvino", "openvino-lookup", "vllm-suffix"} < taking["edit-4"]
    assert all(row.kind == "text" for row in ROWS if "vllm-ngram" in taking[row.name])


# -- the table ----------------------------------------------------------------------------------


def test_ours_is_compared_with_the_best_median_of_the_others():
    found = {
        "foretoken": Figures([30.0, 33.0, 90.0]),
        "a": Figures([20.0, 22.0, 80.0]),
        "b": Figures([99.0], error="no answer in 4 s"),
    }
    assert best_other(ROW, found) == ("a", 22.0)
    assert ratio(ROW, found) == pytest.approx(1.5)
    assert line(ROW, found, ["foretoken", "a", "b", "c"], 40.0) == {
        "workload": "decode (tok/s)",
        "foretoken": "33 [30 .. 90]",
        "a": "22 [20 .. 80]",
        "b": "failed",
        "c": "-",
        "roofline": "40",
        "best other": "a",
        "ours over it": "1.50",
        "aim, must / stretch": "1 / 1.5: stretch",
    }


def test_where_seconds_count_the_quicker_is_the_best():
    found = {"foretoken": Figures([4.0]), "a": Figures([2.0]), "b": Figures([8.0])}
    assert best_other(BURST, found) == ("a", 2.0)
    assert ratio(BURST, found) == pytest.approx(0.5)
    assert line(BURST, found, [])["aim, must / stretch"] == "1 / 1.5: missed"


def test_without_ours_or_without_others_there_is_no_ratio():
    assert ratio(ROW, {"a": Figures([1.0])}) is None
    assert ratio(ROW, {"foretoken": Figures([1.0])}) is None
    assert line(ROW, {"foretoken": Figures([1.0])}, [])["best other"] == "-"


def test_agreement_counts_tokens_before_the_first_difference():
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert agreement([], []) is None


def test_notes_tell_failures_and_engines_that_run_another_model():
    found = {
        "foretoken": Figures([1.0], [[1, 2]]),
        "a": Figures([1.0], [[3, 2]]),
        "b": Figures(error="ended: killed"),
    }
    assert notes(ROW, found) == [
        "decode: b: ended: killed",
        "decode: tokens before the first that differs from ours: a 0.00",
    ]
    assert record(ROW, found)["engines"]["a"]["agreement"] == 0.0


def test_the_roofline_of_decoding_is_one_read_of_all_weights_a_step():
    limits, shape = LIMITS, shape_of(vocab_size=100, hidden_size=1000)
    params = 10**9
    assert roofline(ROW, shape, params, limits) == pytest.approx(2 * 1e9 / 2e9)
    int8 = replace(ROW, setting=Setting("none", "int8"))
    assert roofline(int8, shape, params, limits) == pytest.approx(2 * 1e9 / 1e9)
    drafted = replace(ROW, setting=Setting("none", depth=4))
    assert roofline(drafted, shape, params, limits) is None
    assert roofline(ROW, shape, 10**6, limits) is None  # caches hold it


def test_the_roofline_of_prefill_is_arithmetic_without_the_vocabulary():
    limits, shape = LIMITS, shape_of(vocab_size=100, hidden_size=1000)
    prefill = replace(ROW, kind="prefill", batch=1, prompt_len=100)
    inner = 10**9 - 100 * 1000
    assert roofline(prefill, shape, 10**9, limits) == pytest.approx(1e12 / (2 * inner))
    cold = replace(prefill, kind="cold")
    assert roofline(cold, shape, 10**9, limits) == pytest.approx(100 * 2 * inner / 1e12)


def test_of_experts_those_count_that_rows_are_expected_to_choose():
    """8 of 32 for one row; half of 32 for two rows that choose 16 each would be 24."""
    sizes = {"num_experts": 32, "moe_intermediate_size": 1000, "num_hidden_layers": 10}
    shape = shape_of(vocab_size=100, hidden_size=1000, num_experts_per_tok=16, **sizes)
    experts, params = 3 * 32 * 10 * 10**6, 10**9
    limits, two = LIMITS, replace(ROW, batch=2)
    read = params - experts + experts * 24 / 32
    assert roofline(two, shape, params, limits) == pytest.approx(2 * 1e9 / (2 * read))
    prefill = replace(ROW, kind="prefill", batch=1, prompt_len=100)
    inner = params - experts / 2 - 100 * 1000
    assert roofline(prefill, shape, params, limits) == pytest.approx(1e12 / (2 * inner))


# -- the driver ---------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Environments below a folder of the test; a shape that needs no checkpoint."""
    for module in (engines, environments):
        monkeypatch.setattr(module, "HOME", tmp_path)
    python = tmp_path / "fake" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "fake" / ".done").write_text("")
    monkeypatch.setattr(Shape, "write", lambda shape: tmp_path)
    monkeypatch.setitem(driver.SHAPES, "none", shape_of(vocab_size=1000))
    return tmp_path


def fake(name: str, mode: str = "") -> Engine:
    return Engine(name=name, script=str(FAKE), environment="fake", mode=mode)


def run(home: Path, *others: Engine, budget: float = 20.0) -> Run:
    made = Run([fake("foretoken"), *others], 1, 2, 60.0, budget, home / "logs")
    made.setting(ROW.setting, [replace(ROW, kind="cold"), replace(BURST, num_new=3)])
    return made


def test_all_engines_are_measured_in_every_row(home):
    found = run(home, fake("other")).found
    for row in ("decode", "burst"):
        assert [len(found[row][name].values) for name in ("foretoken", "other")] == [2, 2]
        assert found[row]["foretoken"].tokens == found[row]["other"].tokens != []


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("cannot", "cannot: nothing of the kind"),
        ("breaks", "ended: OSError: no such library"),
        ("short", "wanted 4 tokens each, got"),
    ],
)
def test_an_engine_that_fails_is_a_line_and_the_others_go_on(home, mode, message):
    found = run(home, fake("other", mode)).found
    assert message in found["decode"]["other"].error
    assert len(found["burst"]["foretoken"].values) == 2


def test_an_engine_that_dies_in_a_row_is_out_of_the_rows_that_follow(home):
    found = run(home, fake("other", "dies")).found
    assert found["decode"]["other"].error == "ended: out of memory"
    assert "earlier row" in found["burst"]["other"].error
    assert len(found["burst"]["foretoken"].values) == 2


def test_a_worker_that_does_not_answer_in_time_is_given_up_and_can_be_ended(home):
    worker = Worker(fake("x").command, Job("x", "bf16", 1, mode="hangs"), home / "x", timeout=60)
    assert worker.ready().versions == {}
    assert worker.ask(Call([[1]], 2)).tokens == [[1, 2]]
    worker.timeout = 0.2
    with pytest.raises(WorkerError, match=r"no answer in 0\.2 s"):
        worker.ask(Call([[1]], 5))
    worker.close()


def test_an_engine_that_used_up_its_time_does_no_further_turn(home):
    found = run(home, fake("other"), budget=0.0).found
    assert [len(figures.values) for figures in found["decode"].values()] == [1, 1]


def test_what_is_not_installed_is_named_and_the_report_is_written(home, monkeypatch, capsys):
    absent = Engine(name="absent", script="x", environment="absent")
    monkeypatch.setattr(driver.known, "find", lambda names: [fake("foretoken"), absent])
    monkeypatch.setattr(driver, "ROWS", (BURST,))
    monkeypatch.setattr(driver, "native_library", lambda: None)
    out = home / "peers.json"
    assert driver.main(["--threads", "1", "--repeats", "1", "--out", str(out)]) == 0
    assert (
        "absent: skipped: run python -m foretoken.bench.lab.peers setup absent"
        in capsys.readouterr().out
    )
    report = json.loads(out.read_text())
    assert report["skipped"] == ["absent"]
    assert report["runs"][0]["rows"][0]["engines"]["foretoken"]["values"]


# -- environments -------------------------------------------------------------------------------


def test_an_environment_that_does_not_install_is_skipped_with_a_line(home, monkeypatch, capsys):
    def refuse(command, log):
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(environments, "_run", refuse)
    llama = next(engine for engine in ENGINES if engine.name == "llama.cpp")
    assert not environments.set_up([ENGINES[0], llama], [])
    assert "llama.cpp: skipped:" in capsys.readouterr().out
    assert not llama.is_installed


def test_an_environment_is_made_once_and_again_when_its_requirements_change(home, monkeypatch):
    commands = []
    monkeypatch.setattr(environments, "_run", lambda command, log: commands.append(command))
    vllm = next(engine for engine in ENGINES if engine.name == "vllm")
    (home / "vllm").mkdir()
    for _ in range(2):
        assert environments.set_up([vllm], [ROW])
    (home / "vllm" / ".done").write_text("something older")
    assert environments.set_up([vllm], [ROW])
    assert sum("install" in command for command in commands) == 2
    assert sum("uninstall" in command for command in commands) == 2


def test_an_engine_gets_the_forms_that_its_rows_want():
    by_name = {engine.name: engine for engine in ENGINES}
    drafted = replace(ROW, setting=Setting("450m", depth=4))
    int8 = replace(ROW, setting=Setting("0.6b", "int8"))
    rows = [ROW, drafted, int8]
    wanted = {"none": ["bf16"], "450m": ["bf16", "bf16-draft"], "0.6b": ["int8"]}
    assert environments.forms(by_name["llama.cpp"], rows) == wanted
    assert environments.forms(by_name["transformers"], rows) == {}


def test_every_engine_with_an_environment_has_pinned_requirements():
    for engine in (engine for engine in ENGINES if engine.environment):
        lines = engine.requirements.read_text().split()
        assert lines
        assert all("==" in pin for pin in lines)


def test_ready_answers_and_calls_are_plain_fields():
    plain = {"num_shared": 0, "task": "", "adapters": [], "image": ""}
    assert asdict(Call([[1]], 2)) == {"prompts": [[1]], "num_new": 2} | plain
    assert Answer(1.0, [[1, 2], [3]]).num_tokens == 3
