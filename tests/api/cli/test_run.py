"""``foretoken run``: which word is the model, what is asked, and what stands where."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys

import pytest

import foretoken
from foretoken.api.cli import commands
from foretoken.api.cli.terminal import run as run_command
from foretoken.api.cli.terminal import terminal
from foretoken.api.types.sampling_params import SamplingDefaults

BEGIN, END = "<|im_start|>", "<|im_end|>\n"


def asked_of(*turns: tuple[str, str]) -> str:
    """The prompt of these roles and texts by the template of the fake model."""
    return "".join(f"{BEGIN}{role}\n{text}{END}" for role, text in turns) + f"{BEGIN}assistant\n"


@pytest.fixture(autouse=True)
def _nothing_is_piped(pipe) -> None:
    pipe("")


@pytest.fixture
def prompt(engine, tokenizer):
    """The text that the engine was given last."""

    def text() -> str:
        request = engine.requests[-1]
        return tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)

    return text


def refused(capsys, *args: str) -> str:
    """The one line by which a command exits with code 2."""
    try:
        code: object = commands.main(["run", *args])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


# -- words ----------------------------------------------------------------------------------------


def test_one_word_that_can_only_be_a_model_is_the_model(tmp_path) -> None:
    words = [
        str(tmp_path), "x.gguf", "~/none.gguf", "smollm2", "builtin", "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-0.6B@main", "./nowhere", "../nowhere", "/no/such",
    ]  # fmt: skip
    for word in words:
        parsed = commands.parse(["run", word])
        assert run_command.read_words(parsed) == (word, None)


def test_any_other_word_is_the_prompt() -> None:
    words = [
        "hi", "What is 1/2?", "What is in model.gguf", "-5 + 3 = ?", "Smollm2", "smollm", "a/b/c",
        "https://example.org/x", "--help me", "x" * 5000, "~nobody", "nul\0", "", "/help", "a / b",
    ]  # fmt: skip
    for word in words:
        parsed = commands.parse(["run", word])
        assert run_command.read_words(parsed) == (None, word)


def test_a_file_with_blanks_in_its_name_is_a_model_if_it_is_there(tmp_path) -> None:
    file = tmp_path / "my model.gguf"
    assert run_command.read_words(commands.parse(["run", str(file)])) == (None, str(file))
    file.touch()
    assert run_command.read_words(commands.parse(["run", str(file)])) == (str(file), None)


@pytest.mark.parametrize(
    "line",
    [
        ["o/m", "hi"], ["o/m", "hi", "--seed", "1"], ["o/m", "--seed", "1", "hi"],
        ["--seed", "1", "o/m", "hi"], ["--seed", "1", "o/m", "--stats", "hi", "--top-k", "3"],
        ["o/m", "--", "hi"], ["--", "o/m", "hi"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_two_words_are_the_model_and_the_prompt_wherever_flags_are(line) -> None:
    assert run_command.read_words(commands.parse(["run", *line])) == ("o/m", "hi")


def test_behind_two_dashes_is_the_prompt_whatever_it_is() -> None:
    for text in ("-x", "--help", "smollm2", "--", "o/m"):
        assert run_command.read_words(commands.parse(["run", "--", text])) == (None, text)
        parsed = commands.parse(["run", "builtin", "--", text])
        assert run_command.read_words(parsed) == ("builtin", text)


def test_with_a_model_as_a_flag_the_word_is_the_prompt() -> None:
    parsed = commands.parse(["run", "--model", "o/m", "smollm2"])
    assert run_command.read_words(parsed) == (None, "smollm2")
    assert parsed.model == "o/m"


def test_a_word_that_is_the_model_goes_before_the_variable(here, say, pipe, monkeypatch) -> None:
    say("hello")
    monkeypatch.setenv("FORETOKEN_MODEL", "of/variable")
    pipe("hi")
    assert commands.main(["run", "of/word"]) == 0
    assert commands.main(["run", "hi there"]) == 0
    assert [model for model, _ in here] == ["of/word", "of/variable"]


# -- what is asked --------------------------------------------------------------------------------


def test_a_prompt_is_a_message_to_the_model(here, say, prompt, capsys) -> None:
    say("hello")
    assert commands.main(["run", "folder/m", "How are you?"]) == 0
    assert prompt() == asked_of(("user", "How are you?"))
    assert capsys.readouterr() == ("hello\n", ""), "stdout has the answer alone, stderr nothing"
    assert here[0][0] == "folder/m"


def test_a_system_message_stands_before_it(here, say, prompt) -> None:
    say("hello")
    assert commands.main(["run", "hi", "--system", "be brief"]) == 0
    assert prompt() == asked_of(("system", "be brief"), ("user", "hi"))


@pytest.mark.parametrize(
    ("piped", "words", "asked"),
    [
        ("a text\nof lines\n", ["summarise"], "a text\nof lines\n\nsummarise"),
        ("a text\r\n", ["x/m", "summarise"], "a text\n\nsummarise"),
        ("a question?\n", [], "a question?"),
        ("a question?", ["x/m"], "a question?"),
        ("  indented\n", ["go on"], "  indented\n\ngo on"),
        ("\n \n", ["hi"], "hi"),
        ("\ufeffof a file", [], "of a file"),
        ("naïve café, 東京 😀", [], "naïve café, 東京 😀"),
    ],
    ids=repr,
)
def test_standard_input_joins_the_prompt(here, say, pipe, prompt, piped, words, asked) -> None:
    say("hello")
    pipe(piped)
    assert commands.main(["run", *words]) == 0
    assert prompt() == asked_of(("user", asked))


def test_raw_continues_what_is_given_as_it_stands(here, say, pipe, prompt, capsys) -> None:
    say("hello")
    pipe("def f():\n")
    assert commands.main(["run", "--raw", "    return "]) == 0
    assert prompt() == "def f():\n    return "
    assert capsys.readouterr().out == "hello\n"
    pipe("def f():\n")
    assert commands.main(["run", "--raw"]) == 0
    assert prompt() == "def f():\n"


def test_a_model_without_a_chat_template_continues_the_text(
    here, say, prompt, capsys, monkeypatch, tokenizer
) -> None:
    say("hello")
    monkeypatch.setattr(type(tokenizer), "chat_template", "")
    assert commands.main(["run", "The quick"]) == 0
    assert prompt() == "The quick"
    capsys.readouterr()
    assert "has none" in refused(capsys, "The quick", "--system", "be brief")


def test_an_image_goes_before_the_prompt(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"a picture")
    (tmp_path / "plain").write_bytes(b"another")
    urls = [run_command.data_url(tmp_path / name) for name in ("a.png", "plain")]
    assert urls[0] == f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"
    asked = run_command.Question(prompt="what?", system=None, images=urls, is_raw=False)
    [message] = asked.messages
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]


def test_a_schema_is_a_file_or_the_text_itself(here, say, engine, tmp_path, capsys) -> None:
    say('"hello"')
    file = tmp_path / "schema.json"
    schema = {"type": "string"}
    file.write_text(json.dumps(schema))
    for given in (str(file), json.dumps(schema)):
        assert commands.main(["run", "hi", "--json-schema", given]) == 0
        assert engine.requests[-1].sampling.params.json_schema == schema
    assert len(engine.requests) == 2


@pytest.mark.parametrize("given", ["/no/such", "{", "{'a': 1}", "notes.txt", "."])
def test_a_bad_schema_is_told_before_anything_is_loaded(
    given, here, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("[1, 2]")
    assert "--json-schema: " in refused(capsys, "hi", "--json-schema", given)
    assert not here


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x7fELF\x02\xd0\x00", "not text in UTF-8: byte 5 is 0xd0"),
        (b"\x89PNG\r\n", "not text in UTF-8: byte 0 is 0x89"),
        ("hi".encode("utf-16-le"), "it contains NUL bytes"),
        (b"", "standard input is empty"),
        (b"\n\n ", "standard input is empty"),
    ],
    ids=repr,
)
def test_input_that_is_no_text_is_refused(here, pipe, capsys, data, told) -> None:
    pipe(data)
    assert told in refused(capsys)
    assert not here


def test_input_without_an_end_is_refused(here, pipe, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run_command, "MAX_INPUT_BYTES", 2 * 2**20)
    pipe("x" * (2 * 2**20 + 1))
    assert "standard input has more than 2 MiB" in refused(capsys)


def test_an_empty_prompt_is_refused(here, keyboard, capsys) -> None:
    for typed in ("", " \n"):
        keyboard("")
        assert "the prompt is empty" in refused(capsys, typed)
    assert not here


def test_a_prompt_that_is_too_long_tells_by_how_much(here, pipe, capsys) -> None:
    pipe("word " * 1000)
    shown = commands.main(["run", "summarise"])
    line = capsys.readouterr().err
    assert shown == 2
    found = re.search(
        r"prompt is too long: (\d+) tokens > (\d+) max.* Shorten the prompt by at least (.*) t",
        line,
    )
    assert found is not None, line
    assert int(found[3].replace(",", "")) == int(found[1]) - int(found[2])


@pytest.mark.parametrize("flag", [["--raw"], ["--image", __file__]])
def test_flags_of_one_answer_need_a_prompt(here, keyboard, capsys, flag) -> None:
    keyboard("")
    assert refused(capsys, *flag)


@pytest.mark.parametrize("args", [["--image", "/no/such.png"], ["--image", __file__]])
def test_what_is_no_image_is_refused(here, capsys, args) -> None:
    assert "--image: " in refused(capsys, "hi", *args)


def test_raw_text_has_no_system_message_and_no_images(here, capsys, tmp_path) -> None:
    (tmp_path / "a.png").touch()
    for args in (["--system", "x"], ["--image", str(tmp_path / "a.png")]):
        assert f"{args[0]} cannot be combined with --raw" in refused(capsys, "hi", "--raw", *args)


# -- a conversation -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["folder/m"]], ids=repr)
def test_without_a_prompt_it_is_a_conversation(
    here, say, keyboard, prompt, capsys, words, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    said = iter(["hi", "again"])
    monkeypatch.setattr("builtins.input", lambda _: next(said, None) or _end())
    say("hello")
    keyboard("")
    assert commands.main(["run", *words, "--system", "be brief"]) == 0
    out = capsys.readouterr().out
    assert "write a message, or /help" in out
    assert out.endswith("hello\nhello\n")
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "hello"), ("user", "again")]
    assert prompt() == asked_of(*turns)
    assert here[0][0] == (words[0] if words else None)


def _end() -> str:
    raise EOFError


# -- what stands where ----------------------------------------------------------------------------


def test_stats_are_on_stderr_where_they_are_wanted(here, say, engine, capsys) -> None:
    say("hello world")
    engine.tokens_per_step = 2
    args = ["run", "The quick", "--temperature", "0", "--stop", "world", "--stats"]
    assert commands.main(args) == 0
    out, err = capsys.readouterr()
    assert out == "hello \n"
    assert engine.requests[0].sampling.params.temperature == 0
    usage = engine.requests[0].usage
    assert f"[{usage.completion_tokens} tokens in {usage.verify_steps} steps, " in err
    drafts = r"tokens/step, (\d+) of (\d+) draft tokens accepted \(fake \1 of \2\), "
    assert re.search(drafts + r"0 of \d+ prompt tokens cached, first token \d+ ms", err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(("answer", "shown"), [("a\n", "a\n"), ("a\n\n", "a\n\n"), ("a", "a\n")])
def test_the_last_line_of_an_answer_is_ended(here, say, capsys, answer, shown) -> None:
    say(answer)
    assert commands.main(["run", "hi"]) == 0
    assert capsys.readouterr().out == shown


def test_where_no_text_comes_stdout_is_empty_and_stderr_says_why(here, say, capsys) -> None:
    say("")
    assert commands.main(["run", "What is 1 + 1?", "--raw"]) == 0
    assert capsys.readouterr() == ("", run_command.NOTHING_CAME + "\n")


def test_thoughts_are_no_part_of_the_answer(here, say, capsys, monkeypatch, tokenizer) -> None:
    """A terminal alone shows them."""
    template = tokenizer.chat_template + "{# <think> </think> #}"
    monkeypatch.setattr(type(tokenizer), "chat_template", template)
    say("<think>\nhm, 2\n</think>\n\nIt is 2.")
    assert commands.main(["run", "1 + 1?"]) == 0
    assert capsys.readouterr() == ("It is 2.\n", "")
    say("<think>\nhm, 2")
    assert commands.main(["run", "1 + 1?"]) == 0
    assert capsys.readouterr() == ("", run_command.ONLY_THOUGHTS + "\n")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_thoughts_in_grey_before_the_answer(monkeypatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    printer = terminal.Printer()
    printer.think("hm")
    printer.write("It is")
    printer.write(" 2.")
    printer.end()
    assert screen.getvalue() == f"{terminal.GREY}hm{terminal.RESET}\n\nIt is 2.\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], (0.25, 0.5)), (["--temperature", "1"], (1.0, 0.5)), (["--top-p", "1"], (0.25, 1.0))],
    ids=str,
)
@pytest.mark.parametrize("command", [["run", "hi"], ["chat"]], ids=str)
def test_sampling_flags_that_are_not_given_are_the_models(
    here, built, say, engine, pipe, command, flags, expected
) -> None:
    say("hello")
    pipe("hi\n")
    built.sampling_defaults = SamplingDefaults(temperature=0.25, top_p=0.5)
    assert commands.main([*command, *flags]) == 0
    params = engine.requests[0].sampling.params
    assert (params.temperature, params.top_p) == expected


@pytest.mark.parametrize(("may_pass", "code"), [(False, 2), (True, 1)])
def test_a_model_that_cannot_be_loaded_is_one_line_and_its_code_tells_whether_a_restart_may_help(
    may_pass, code, monkeypatch, capsys
) -> None:
    def fail(model, config):
        raise foretoken.ModelLoadError("nowhere: no such folder", may_pass=may_pass)

    monkeypatch.setattr("foretoken.api.runtime.engine_client._build", fail)
    assert commands.main(["run", "./nowhere", "x"]) == code
    assert commands.main(["serve", "nowhere", "--port", "0"]) == code
    assert capsys.readouterr().err == "foretoken: nowhere: no such folder\n" * 2


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_the_text_that_has_come(here, say, engine, capsys, monkeypatch) -> None:
    say("hello world")
    written = terminal.Printer.write

    def interrupted(printer, text, painted="") -> None:
        written(printer, text, painted)
        if text:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal.Printer, "write", interrupted)
    assert commands.main(["run", "hi"]) == 130
    out, err = capsys.readouterr()
    assert (out[:1], out[-1], err) == ("h", "\n", "")


def test_run_ends_quietly_when_the_reader_of_its_output_leaves(
    here, say, monkeypatch, capfd
) -> None:
    say("hello world")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert commands.main(["run", "The quick"]) == 141
        print("what is left in the buffer does not raise at exit", file=out, flush=True)
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is full")
def test_run_says_in_one_line_that_its_output_cannot_be_written(
    here, say, monkeypatch, capfd
) -> None:
    """Once, this was a traceback."""
    say("hello world")
    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert commands.main(["run", "The quick"]) == 1
        print("what is left in the buffer does not raise at exit", file=out, flush=True)
    [error] = capfd.readouterr().err.splitlines()
    assert error.startswith("foretoken: ")
    assert "No space left on device" in error
