"""Settings come from flags, variables and a file, and are refused by the name of their source."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path

import pytest

import foretoken
from foretoken.api.cli import commands
from foretoken.api.cli.config import SERVE, TERMINAL, Chosen, Given
from foretoken.api.cli.flags import help_of
from foretoken.api.serving.limits import Limits
from foretoken.api.serving.settings import Listen, ObservingOptions, Settings
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.options.settings import Setting, settings_of
from support.given import given, listening, parser

EXAMPLE = Path(foretoken.__file__).parent / "docs" / "operations" / "foretoken.toml"
ALL = [each for kind in SERVE for each in settings_of(kind).values() if each.name != "config"]
KEYS = ("api_key", "admin_key", "record_key")


def file(folder: Path, text: str) -> str:
    path = folder / "foretoken.toml"
    path.write_text(text, "utf-8")
    return str(path)


def make_all(*args: str) -> None:
    for kind in (Chosen, EngineConfig, ObservingOptions):
        given(*args).make(kind)
    listening(*args)


def refused(*args: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        make_all(*args)
    return str(caught.value)


def sample(each: Setting) -> str:
    """A text that means another value than the default."""
    if each.is_switch:
        return "1"
    if each.choices:
        return next(text for text in each.choices if text != each.default)
    if dict in each.kinds:
        return '{"top_k": 5}'
    if each.metavar == "URL":
        return "http://collector:4318"
    is_text = not each.kinds & {int, float}
    number = max(each.least, 1) if each.most > 1 else 0.125
    return "/x" if is_text else f"{number + (number == each.default):g}"


# -- every setting ------------------------------------------------------------------------------


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_every_setting_is_the_same_by_flag_variable_and_file(each, monkeypatch, tmp_path) -> None:
    [kind] = [kind for kind in SERVE if each in settings_of(kind).values()]
    text = sample(each)
    switch = [each.flag] if each.is_switch else [each.flag, text]
    by_flag = given(*([text] if each.name == "model" else switch)).options(kind)
    assert by_flag[each.field] != each.default
    quoted = "true" if each.is_switch else text if each.kinds & {int, float} else f"'{text}'"
    for key in (each.name, each.name.replace("_", "-")):
        value = f"'{text}'" if each.choices else quoted
        path = file(tmp_path, f"{key} = {value}")
        by_file = given("--config", path).options(kind)
        assert by_file[each.field] == by_flag[each.field]
    monkeypatch.setenv(f"FORETOKEN_{each.name.upper()}", text)
    assert given().options(kind) == by_flag


def test_no_two_settings_share_a_name() -> None:
    names = [each.name for each in ALL] + list(settings_of(SamplingParams))
    assert len(set(names)) == len(names)


def test_a_flag_goes_before_a_variable_and_a_variable_before_the_file(
    monkeypatch, tmp_path
) -> None:
    path = file(tmp_path, "port = 1\nmax-running = 2\nmax_n = 3\nstrict = true\nmodel = 'a'")
    monkeypatch.setenv("FORETOKEN_CONFIG", path)
    assert (given().make(Listen).port, given().make(Chosen).model) == (1, "a")
    monkeypatch.setenv("FORETOKEN_PORT", "11")
    monkeypatch.setenv("FORETOKEN_STRICT", "false")
    monkeypatch.setenv("FORETOKEN_MODEL", "b")
    listen = listening("--max-n", "5")
    assert (listen.port, listen.settings.strict, listen.settings.limits.max_n) == (11, False, 5)
    assert given("--port", "12").make(Listen).port == 12
    assert given("c").make(Chosen).model == "c"
    assert given().make(EngineConfig).max_running == 2
    other = file(tmp_path, "port = 4")
    monkeypatch.delenv("FORETOKEN_PORT")
    assert given("--config", other).make(Listen).port == 4


def test_what_nobody_sets_is_the_default() -> None:
    assert [given().options(kind) for kind in SERVE] == [{}] * len(SERVE)
    assert listening().settings == Settings(loopback_only=True, limits=Limits())


def test_lists_are_repeated_flags_parted_variables_and_arrays(monkeypatch, tmp_path) -> None:
    name = "--served-model-name"
    expected = ("a", "b", "c")
    assert listening(name, "a", name, "b, c").settings.served_names == expected
    path = file(tmp_path, "served-model-name = ['a', 'b', 'c']\napi-key = ['k,1', 'l']")
    assert listening("--config", path).settings.served_names == expected
    assert listening("--config", path).settings.api_keys == ("k,1", "l")
    monkeypatch.setenv("FORETOKEN_SERVED_MODEL_NAME", "a,b,,c ")
    assert listening().settings.served_names == expected
    monkeypatch.setenv("FORETOKEN_API_KEY", "k,1")
    assert listening().settings.api_keys == ("k,1",), "a comma may be part of a key"


def test_tables_of_a_file_are_json_objects(tmp_path) -> None:
    path = file(tmp_path, "[override-generation-config]\ntemperature = 0.5\n")
    config = given("--config", path).make(EngineConfig)
    assert config.override_generation_config == {"temperature": 0.5}


def test_the_example_of_the_docs_is_read() -> None:
    listen = listening("--config", str(EXAMPLE))
    assert listen.settings.served_names == ("smollm2", "assistant")
    assert listen.settings.limits.max_body_bytes == 2**20
    config = given("--config", str(EXAMPLE)).make(EngineConfig)
    assert (config.max_model_len, config.kv_memory) == (4096, 2**30)
    assert config.override_generation_config == {"temperature": 0.2, "top_p": 0.9}


def test_the_example_in_the_text_of_the_docs_is_read(tmp_path) -> None:
    page = EXAMPLE.parents[1].joinpath("server.md").read_text("utf-8")
    [text] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = file(tmp_path, text)
    assert listening("--config", path).settings.served_names == ("smollm2", "assistant")
    assert given("--config", path).make(EngineConfig).max_running == 32


# -- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max-runing = 4", "unknown key max-runing (did you mean max-running?)"),
        ("ui = false", "unknown key ui"),
        ("config = 'x'", "unknown key config"),
        ("temperature = 0.5", "unknown key temperature"),
        ("[serve]\nport = 1", "unknown key serve"),
        ("max-running = 4\nmax_running = 4", "duplicate key max_running"),
        ("max-running = 'x'", "max-running must be an integer, not 'x'"),
        ("max-running = 1.5", "max-running must be an integer, not 1.5"),
        ("max-running = true", "max-running must be an integer, not True"),
        ("max-running = 0", "max_running must be at least 1, not 0"),
        ("port = 70000", "port must be at most 65535, not 70000"),
        ("strict = 1", "strict must be true or false, not 1"),
        ("host = 1", "host must be a string, not 1"),
        ("cors-origin = [1]", "cors-origin must be a list of strings, not a value of type list"),
        ("idle-seconds = nan", "idle_seconds must be at least 0.001, not nan"),
        ("kv-memory = 'much'", "kv-memory must be a size such as 4GiB, not 'much'"),
        ("kv-memory = 0", "kv_memory must be at least 1, not 0"),
        ("dtype = 'int3'", "dtype must be one of auto, float32, bfloat16, float16, not 'int3'"),
        ("speculation = 'on'", "speculation must be auto, off or an integer, not 'on'"),
        ("override-generation-config = 5", "must be a JSON object, not 5"),
        ("otlp-endpoint = 'x'", "otlp_endpoint must be a URL"),
        ("ssl-keyfile = 'x'", "ssl_keyfile needs ssl_certfile"),
        ("root-path = 'x/'", "root_path must begin with a slash"),
        ("port = x", "Invalid value (at line 1, column 8)"),
        ("\udcff", "can't decode byte"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_its_name_and_the_key(text, problem, tmp_path) -> None:
    path = tmp_path / "foretoken.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    message = refused("--config", str(path))
    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert problem in message


def test_a_file_that_is_not_there_is_one_line_and_status_2(capsys, tmp_path) -> None:
    for command in (["serve"], ["run", "x"], ["chat"]):
        assert commands.main([*command, "--config", str(tmp_path / "x.toml")]) == 2
        error = capsys.readouterr().err
        assert f"foretoken {command[0]}: {tmp_path}/x.toml: No such file" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("PORT", "x", "FORETOKEN_PORT must be an integer, not 'x'"),
        ("PORT", "70000", "FORETOKEN_PORT: port must be at most 65535, not 70000"),
        ("STRICT", "yes", "FORETOKEN_STRICT must be 1, 0, true or false, not 'yes'"),
        ("DEVICE", "tpu", "FORETOKEN_DEVICE must be one of auto, cpu, cuda, not 'tpu'"),
        ("MAX_BODY_BYTES", "big", "FORETOKEN_MAX_BODY_BYTES must be a size such as 4GiB"),
        ("MAX_RUNNING", "0", "FORETOKEN_MAX_RUNNING: max_running must be at least 1, not 0"),
        ("CONFIG", "/no/such", "/no/such: No such file or directory"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(name, text, problem, monkeypatch) -> None:
    monkeypatch.setenv(f"FORETOKEN_{name}", text)
    assert refused().startswith(problem)


def test_a_variable_that_a_flag_replaces_is_not_read(monkeypatch) -> None:
    monkeypatch.setenv("FORETOKEN_PORT", "x")
    assert given("--port", "1").make(Listen).port == 1


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_in_no_error_and_no_repr(name, monkeypatch, tmp_path) -> None:
    path = file(tmp_path, f"{name} = [5, 'se cret']")
    assert refused("--config", path).endswith("must be a list of strings")
    more = "\nrecord-traffic = 'x'" if name == "record_key" else ""
    path = file(tmp_path, f"{name} = 'se cret'{more}")
    kind = ObservingOptions if more else Settings
    assert "cret" not in repr(given("--config", path).make(kind))
    if not more:
        monkeypatch.setenv(f"FORETOKEN_{name.upper()}", " se cret")
        message = refused()
        assert message.startswith(f"FORETOKEN_{name.upper()}: {name} must not")
        assert "cret" not in message


def test_an_empty_key_is_an_error_and_not_a_server_for_everyone(monkeypatch) -> None:
    monkeypatch.setenv("FORETOKEN_API_KEY", "")
    assert "must not be empty" in refused()


# -- variables that are no settings -------------------------------------------------------------


def test_unknown_variables_are_named_once_in_the_log(monkeypatch, caplog) -> None:
    monkeypatch.setenv("FORETOKEN_MAX_RUNING", "secret")
    monkeypatch.setenv("FORETOKEN_TEMPERATURE", "0.5")
    monkeypatch.setenv("FORETOKEN_CACHE", "/x")
    monkeypatch.setenv("FORETOKEN_MAX_N", "2")
    with caplog.at_level(logging.WARNING):
        given().warn_of_unknown_variables()
    [line] = caplog.messages
    assert "FORETOKEN_MAX_RUNING (did you mean FORETOKEN_MAX_RUNNING?)" in line
    assert "FORETOKEN_TEMPERATURE" in line
    assert not any(word in line for word in ("secret", "CACHE", "MAX_N"))


def test_the_port_that_kubernetes_sets_for_a_service_is_none(monkeypatch, caplog) -> None:
    monkeypatch.setenv("FORETOKEN_PORT", "tcp://10.0.0.7:8000")
    assert given().make(Listen).port == 8000
    given().warn_of_unknown_variables()
    assert "FORETOKEN_PORT" in caplog.text


def test_serve_warns_after_its_log_is_configured(monkeypatch) -> None:
    monkeypatch.setenv("FORETOKEN_LOG_FORMAT", "json")
    did = []
    monkeypatch.setattr(
        "foretoken.api.server.observation.logs.configure", lambda *args: did.append(args)
    )
    monkeypatch.setattr(Given, "warn_of_unknown_variables", lambda _: did.append("warned"))
    monkeypatch.setattr("foretoken.api.server.process.run", lambda *_: did.append("ran") or 0)
    assert commands.main(["serve"]) == 0
    assert did == [("info", "json"), "warned", "ran"]


# -- the terminal -------------------------------------------------------------------------------


def terminal(*args: str) -> Given:
    return Given(parser().parse_args([*args]), TERMINAL)


@pytest.mark.parametrize("command", [("run", "x"), ("chat",)], ids=str)
def test_run_and_chat_read_the_engines_and_the_sampling_settings(
    command, monkeypatch, tmp_path
) -> None:
    path = file(tmp_path, "max-running = 3\ntemperature = 0.25\nport = 80\nstop = ['a,b', 'c']")
    monkeypatch.setenv("FORETOKEN_TOP_K", "7")
    monkeypatch.setenv("FORETOKEN_MAX_QUEUED", "9")
    found = terminal(*command, "--config", path, "--top-p", "0.5")
    params, config = found.make(SamplingParams), found.make(EngineConfig)
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 7, 0.5)
    assert params.stop == ("a,b", "c")
    assert (config.max_running, config.max_queued) == (3, 9)


def test_a_wrong_value_for_the_server_does_not_concern_run(monkeypatch) -> None:
    monkeypatch.setenv("FORETOKEN_PORT", "x")
    assert terminal("run", "x").make(EngineConfig) == EngineConfig()


# -- help ---------------------------------------------------------------------------------------


def shown(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as exited:
        commands.main([*args])
    assert exited.value.code == 0
    return capsys.readouterr().out


def test_every_command_flag_and_argument_has_a_help_text() -> None:
    [group] = [a for a in commands._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    actions = {f"{name} {a.dest}": a for name, of in group.choices.items() for a in of._actions}
    actions |= {each.dest: each for each in group._choices_actions}
    assert [name for name, action in actions.items() if not action.help] == []


@pytest.mark.parametrize("command", ["serve", "run", "chat"])
def test_help_shows_what_users_need_and_help_all_everything(command, capsys) -> None:
    kinds = SERVE if command == "serve" else TERMINAL
    every = {each.flag for kind in kinds for each in settings_of(kind).values()}
    brief, whole = shown(capsys, command, "--help"), shown(capsys, command, "--help-all")
    in_brief = {flag for flag in every if f"  {flag} " in brief or f"  {flag}\n" in brief}
    missing = {flag for flag in every - {"--model"} if f"  {flag} " not in whole.replace("\n", " ")}
    assert missing == set()
    assert 12 <= len(in_brief) <= 20
    assert "--help-all" in brief
    assert "--page-size" not in brief
    assert brief.startswith(f"usage: foretoken {command} ")


@pytest.mark.parametrize(
    ("kind", "flag", "end"),
    [
        (EngineConfig, "tp", " (1)"),
        (EngineConfig, "aging_seconds", " (10 s)"),
        (Limits, "resume_seconds", "; 0: off (0 s)"),
        (Limits, "max_body_bytes", " (4 MiB)"),
        (ObservingOptions, "access_log", " tokens and times"),
        (SamplingParams, "top_p", " (the model's, else 1)"),
    ],
)
def test_help_ends_with_the_default_and_its_unit(kind: type, flag: str, end: str) -> None:
    assert help_of(settings_of(kind)[flag]).endswith(end)
