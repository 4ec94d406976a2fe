"""The command line: flags, errors, and what the terminal shows."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import foretoken
from foretoken.api.cli import commands
from foretoken.api.cli.flags import engine_options
from foretoken.api.cli.terminal import terminal
from foretoken.api.cli.terminal.terminal import wants_colour
from foretoken.core.config import EngineConfig
from support.given import listening, parser


def parse(*args):
    return parser().parse_args(args)


def test_version_and_help_are_instant_and_torch_free():
    code = (
        "import sys\nfrom foretoken.api.cli.commands import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main(command.split())\n"
        "    except SystemExit as e: assert not e.code\n"
        "    print(end='\\0')\n"
        "assert not {'torch', 'transformers', 'uvicorn', 'zmq'} & set(sys.modules)"
    )
    names = ("serve", "replica", "run", "chat", "bench", "certify", "launch", "pull")
    asked = ["--version", "--help", *(f"{name} --help" for name in names)]
    shown = subprocess.run(
        [sys.executable, "-c", code, *asked], check=True, capture_output=True, text=True
    )
    version, *helps, rest = shown.stdout.split("\0")
    assert version == f"foretoken {foretoken.__version__}\n"
    assert (len(helps), rest) == (1 + len(names), "")
    assert all("usage: foretoken" in each for each in helps)


@pytest.mark.parametrize(
    "args",
    [
        [], ["sing"], ["serve", "--nonsense"], ["serve", "--port", "x"],
        ["serve", "--port", "70000"], ["serve", "--port", "-1"], ["serve", "--devic", "cpu"],
        ["serve", "--device", "tpu"], ["serve", "--speculation", "on"],
        ["serve", "--speculation", "-1"], ["serve", "--kv-memory", "much"],
        ["serve", "--kv-tokens", "5", "--kv-memory", "1GiB"], ["serve", "--page-size", "0"],
        ["serve", "--max-model-len", "1"], ["serve", "--threads", "0"],
        ["serve", "--threads", "100000"],
        ["serve", "--api-key", ""], ["serve", "--drain-seconds", "nan"],
        ["serve", "--quantize", "int3"], ["serve", "a", "b"],
        ["serve", "--generation-config", "auto"], ["serve", "--override-generation-config", "{"],
        ["run", "x", "--override-generation-config", '{"temp": 1}'],
        ["chat", "--override-generation-config", '{"top_p": 2}'],
        ["run", "x", "--top-p", "2"], ["run", "x", "--temperature", "warm"],
        ["run", "x", "--max-tokens", "-1"], ["chat", "--min-p", "-1"], ["bench"],
        ["bench", "nonsense"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_bad_flag_exits_2_with_one_line(args, capsys, here):
    try:
        code = commands.main(args)
    except SystemExit as exited:
        code = exited.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("foretoken")
    assert not here, "nothing was loaded"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["serve", "--prot", "80"], " serve: unknown flag --prot (did you mean --port?)"),
        (["chat", "--sistem=x"], " chat: unknown flag --sistem (did you mean --system?)"),
        (["serve", "-q"], " serve: unknown flag -q ("),
        (["--verson"], ": unknown flag --verson (did you mean --version?)"),
        (["run", "a", "b", "c"], " run: unexpected argument 'c'; quote a text with spaces"),
        (["run", "a", "--seed", "1", "b", "c"], " run: unexpected argument 'c'; quote a text with"),
        (["run", "a", "b", "--seed", "1", "c"], " run: unexpected argument 'c'; quote a text with"),
        (["run", "a", "b", "--", "c"], " run: unexpected argument 'c'; quote a text with"),
        (["run", "o/a", "b", "--model", "c"], " run: MODEL and --model name different models ("),
        (["run", "o/a", "--model", "c", "b"], " run: MODEL and --model name different models ("),
        (["serve", "--model", "c", "b"], " serve: MODEL and --model name different models ("),
        (["run", "hi", "builtin"], " run: the model comes before the prompt: foretoken run b"),
        (["run", "What is", "o/a"], " run: the model comes before the prompt: foretoken run o"),
        (["run", "what", "is"], " run: 'what' is not a model; quote a prompt with spaces"),
    ],
)  # fmt: skip
def test_an_unknown_flag_is_an_error_of_its_command_with_the_nearest_one(args, told, capsys):
    try:
        code = commands.main(args)
    except SystemExit as exited:
        code = exited.code
    assert code == 2
    assert capsys.readouterr().err.startswith(f"foretoken{told}")


@pytest.mark.parametrize(
    "args",
    [
        ["serve", "--model", "m"], ["run", "p", "--model", "m"], ["run", "--model", "m", "p"],
        ["chat", "--model", "m"], ["replica", "--model", "m"], ["certify", "m"],
        ["launch", "claude", "m"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_model_may_be_a_flag_before_or_behind_the_prompt(args):
    assert parse(*args).model == "m"
    assert (
        parse(*(each for each in args if each not in ("--model", "--model=m", "m"))).model is None
    )


def test_every_engine_option_is_a_flag_of_every_command():
    flags = {
        "draft": "none", "draft-vocab": "any", "speculation": "5",
        "exact": "off", "device": "cpu",
        "backend": "torch",
        "dtype": "float32", "quantize": "none", "kv-cache-dtype": "int8", "kv-tokens": "64",
        "page-size": "1", "pin-quota": "0.5", "cache-quota": "0.4", "max-model-len": "99",
        "session-ttl": "60", "state-memory": "64MiB", "state-interval": "512",
        "max-batch-tokens": "8", "aging-seconds": "3", "max-priority": "4",
        "max-slowdown": "3", "overlap": "on",
        "kv-host": "64MiB", "kv-disk": "d:1GiB", "kv-remote": "mooncake://h:1?lend=1GiB",
        "kv-transfer": "nixl", "role": "decode",
        "kv-events": "tcp://127.0.0.1:5557", "kv-events-replay": "tcp://127.0.0.1:5559",
        "kv-events-topic": "kv@", "kv-evict": "triattention:512", "kv-evict-stats": "s",
        "lora": "sql=d", "max-loras": "2", "max-lora-rank": "8",
        "max-running": "3", "max-queued": "0", "threads": "2", "tp": "1", "load-format": "random",
        "step-timeout": "60", "ready-step-seconds": "2.5", "dump-dir": "d", "model-impl": "own",
        "generation-config": "none", "override-generation-config": '{"top_k": 5}',
        "chat-template": "t.jinja", "default-chat-template-kwargs": '{"enable_thinking": false}',
        "max-images": "2", "max-image-pixels": "99", "image-cache": "64MiB", "media-dir": "m",
    }  # fmt: skip
    given = [part for name, value in flags.items() for part in (f"--{name}", value)]
    for command in ("serve", "run", "chat"):
        parsed = parse(command, *given)
        config = EngineConfig(**engine_options(parsed))
        assert (config.speculation, config.kv_tokens, config.max_queued) == (5, 64, 0)
        assert config.kv_cache_dtype == "int8"
        assert config.generation_config == "none"
        assert config.override_generation_config == {"top_k": 5}
    others = {"kv_memory", "no_images", "special_tokens_in_text", "allow_weight_updates"}
    assert {name.replace("-", "_") for name in flags} | others == set(EngineConfig.names())


def test_flags_that_are_not_given_leave_the_defaults_to_the_config():
    assert engine_options(parse("serve")) == {}
    assert EngineConfig(**engine_options(parse("serve", "--kv-memory", "2KiB"))).kv_memory == 2048


def test_keys_come_from_flags_or_else_from_the_environment(monkeypatch):
    monkeypatch.setenv("FORETOKEN_API_KEY", "env")
    assert listening().settings.api_keys == ("env",)
    assert listening("--api-key", "a", "--api-key", "b").settings.api_keys == (
        "a",
        "b",
    )
    monkeypatch.delenv("FORETOKEN_API_KEY")
    assert listening().settings.api_keys == ()


def test_serve_listens_as_its_flags_say(monkeypatch, here):
    served = []
    monkeypatch.setattr(
        "foretoken.api.server.process.run",
        lambda llm, listen, observing: served.append(listen) or 0,
    )
    args = [
        "serve",
        "--port",
        "0",
        "--host",
        "127.0.0.2",
        "--api-key",
        "k",
        "--served-model-name",
        "n",
    ]
    assert commands.main([*args, "--drain-seconds", "2", "--log-level", "error"]) == 0
    [listen] = served
    assert (listen.host, listen.port, listen.drain_seconds) == ("127.0.0.2", 0, 2.0)
    assert (listen.settings.api_keys, listen.settings.served_names) == (("k",), ("n",))
    served.clear()
    commands.main(["serve"])
    assert served[0].host == "127.0.0.1", "not to be reached from outside unless asked"


def test_chat_remembers_what_was_said_and_ends_with_its_input(
    here, say, engine, tokenizer, capsys, monkeypatch
):
    say("hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nagain"))
    assert commands.main(["chat", "--system", "be brief"]) == 0
    out, _ = capsys.readouterr()
    assert out == "hello\nhello\n"
    first, second = (
        tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
        for request in engine.requests
    )
    assert first.startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    )
    assert second.startswith(first + "hello<|im_end|>\n<|im_start|>user\nagain<|im_end|>")


def test_bench_runs_the_named_module_with_the_rest_of_the_line(monkeypatch):
    seen = []
    module = SimpleNamespace(main=lambda argv: seen.append(argv))
    monkeypatch.setitem(sys.modules, "foretoken.bench.serve", module)
    assert commands.main(["bench", "serve", "--deep", "5"]) == 0
    assert seen == [["--deep", "5"]]


def test_the_cost_line_is_honest_about_a_draw_of_nothing():
    usage = foretoken.Usage(prompt_tokens=3)
    assert terminal.cost_line(usage).startswith(
        "[0 tokens in 0 steps, 0.00 tokens/step, no drafts, 0 of 3 prompt tokens cached, "
    )


def test_the_cost_line_names_every_source():
    usage = foretoken.Usage(
        completion_tokens=9, verify_steps=6, proposed_tokens=12, accepted_tokens=3,
        proposed_by_source={"ngram": 8, "radix": 4}, accepted_by_source={"radix": 3},
        time_to_first_token=0.01, total_time=0.05,
    )  # fmt: skip
    assert terminal.cost_line(usage) == (
        "[9 tokens in 6 steps, 1.50 tokens/step, 3 of 12 draft tokens accepted (ngram 0 of 8, "
        "radix 3 of 4), 0 of 0 prompt tokens cached, first token 10 ms, "
        "then 200 tokens/s]"
    )


# -- --show-drafts ------------------------------------------------------------------------------


@pytest.fixture
def no_colour_variables(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "on_file", "on_terminal"),
    [
        ({}, False, True),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "", "NO_COLOR": ""}, False, True),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=str,
)
def test_colours_are_for_terminals_unless_the_environment_says_otherwise(
    no_colour_variables, monkeypatch, variables, on_file, on_terminal
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (wants_colour(io.StringIO()), wants_colour(Screen())) == (on_file, on_terminal)


def test_run_colours_drafts_by_source_and_ends_with_a_legend(
    no_colour_variables, here, say, engine, pipe, capsys, monkeypatch
):
    pipe("")
    say("hello world")
    engine.tokens_per_step, engine.sources = 3, ["ngram", "model"]
    assert commands.main(["run", "The quick"]) == 0
    plain, _ = capsys.readouterr()
    assert commands.main(["run", "The quick", "--show-drafts"]) == 0
    out, err = capsys.readouterr()
    assert out == plain, "no escapes in a file"
    counts = engine.requests[-1].usage.accepted_by_source
    legend, cost = err.splitlines()
    assert legend.startswith(f"[tokens by source: ngram: {counts['ngram']}, model: ")
    assert cost.startswith("[")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert commands.main(["run", "The quick", "--show-drafts"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b[32m" in out
    assert "\x1b[36m" in out
    assert re.sub(r"\x1b\[\d+m", "", out) == plain
    assert f"ngram = green: {counts['ngram']}" in err
    assert "the model itself = plain: " in err


def test_chat_with_colours_remembers_the_text_without_them(
    no_colour_variables, here, say, engine, tokenizer, capsys, monkeypatch
):
    say("hello")
    engine.tokens_per_step = 2
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nagain\n"))
    assert commands.main(["chat", "--show-drafts"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b[32m" in out
    assert err.count("fake = green") == 2
    prompt = engine.requests[1].tokens[: engine.requests[1].prompt_len]
    assert "assistant\nhello<" in tokenizer.decode(prompt, skip_special_tokens=False)


def test_chat_without_a_stdin_ends_at_once(here, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert commands.main(["chat"]) == 0


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_chat_that_waits_for_a_line(here, monkeypatch):
    typed = threading.Event()  # never, as long as chat runs

    class Terminal(io.StringIO):
        def readline(self, *args):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            typed.wait(10)
            return ""

    monkeypatch.setattr(sys, "stdin", Terminal())
    try:
        assert commands.main(["chat"]) == 130
        [reader] = [t for t in threading.enumerate() if t.name == "foretoken-stdin"]
        assert reader.daemon
    finally:
        typed.set()
    reader.join(10)


def test_chat_says_in_one_line_that_a_message_is_refused_and_goes_on(
    here, say, engine, capsys, monkeypatch
):
    say("hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 100_000 + "\nhi\n"))
    assert commands.main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    [refusal] = err.splitlines()
    assert refusal.startswith("foretoken: prompt is too long")
    assert engine.requests[0].prompt_len < 100, "the refused message is forgotten"
