"""Every example is run against a real server."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from support.forked import code as run_code
from support.forked import run_forked, script
from support.server_process import Server, running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "web_page" / "index.html"
CLIENTS = sorted((ROOT / ".venv-clients").glob("*/bin/python"))  # made by `make test-rest`
PACKAGES = {"langchain_chat": "langchain_openai", "openai_agents": "agents"}
SECONDS = 120
SCRIPTED = ROOT / "tests" / "support" / "scripted_server.py"
FILES = ("a.txt", "b.txt")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(["--cors-origin", "*", "--resume-seconds", "60"]) as server:
        yield server


def run(python: str | Path, name: str, server: Server) -> str:
    path = str(EXAMPLES / f"{name}.py")
    if python == sys.executable:
        done = run_forked(script, path, server.url, cwd=ROOT, timeout=SECONDS)
    else:
        done = subprocess.run(
            [python, path, server.url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_test_here() -> None:
    ours = {"agent_loop", "best_of_n", "early_calls", "shared_system_prompt"}
    evals = {"inspect_seeds", "lm_eval_seeds"}  # in tests/clients/test_evals.py
    trained = {"grpo", "trl_grpo"}  # in tests/project/test_grpo.py and tests/clients/test_trl.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PACKAGES, *ours, *evals, *trained}


def test_the_agent_calls_its_tools_and_its_conversation_is_cached(server: Server) -> None:
    out = run(sys.executable, "agent_loop", server)
    assert "list_files({}) -> 'todo.txt\\nnotes.txt'" in out
    assert re.search(r'read_file\({"name": "\w+\.txt"}\) -> ', out)
    counts = [tuple(map(int, found)) for found in re.findall(r"\[(\d+) \D+ (\d+) of", out)]
    assert len(counts) == 3
    for (prompt, _), (_, cached) in pairwise(counts):
        assert cached > prompt - 16, "a turn computes its new tokens alone, to the page"


def test_the_best_of_n_share_their_prompt(server: Server) -> None:
    out = run(sys.executable, "best_of_n", server)
    rounds = re.findall(r"round \d: .* (\d+) of (\d+) prompt tokens cached", out)
    assert len(rounds) == 3
    assert all(int(cached) > int(prompt) - 40 for cached, prompt in rounds[1:])


def test_a_shared_system_prompt_is_computed_once(server: Server) -> None:
    out = run(sys.executable, "shared_system_prompt", server)
    rate = re.search(r"hit rate: (\d+)%", out)
    assert rate is not None
    assert int(rate[1]) >= 90


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_an_example_with_a_package_of_others_runs(name: str, server: Server) -> None:
    for python in CLIENTS:
        if list(python.parent.parent.glob(f"lib/*/site-packages/{PACKAGES[name]}")):
            out = run(python, name, server)
            assert "look_outside" in out or "rain, seen to the" in out
            return
    pytest.skip(f"{PACKAGES[name]} is not installed in .venv-clients; `make test-rest` does that")


# -- the web page -------------------------------------------------------------------------------

PARSER_TEST = r"""
const sent = ': ping\n\ndata: {"a":1}\r\n\r\ndata: two\ndata: lines\n\nevent: x\ndata:last\r\r';
const wanted = JSON.stringify(['{"a":1}', "two\nlines", "last"]);
for (let size = 1; size <= sent.length; size++) {
  const feed = makeParser(), found = [];
  for (let i = 0; i < sent.length; i += size) found.push(...feed(sent.slice(i, i + size)));
  found.push(...feed("\n"));  // the last \r could have had one
  if (JSON.stringify(found) !== wanted) throw new Error(size + ": " + JSON.stringify(found));
}
(async () => {
  let text = "";
  const body = { messages: [{ role: "user", content: "hi" }], max_tokens: 8 };
  for await (const chunk of stream_(body)) text += chunk.choices[0]?.delta.content ?? "";
  if (!text) throw new Error("nothing was said");
  try {
    for await (const _ of stream_({ ...body, top_p: 7 })) ;
    throw new Error("a bad field was taken");
  } catch (error) { if (!error.message.includes("top_p")) throw error; }
  console.log("fine");
})();
"""


def test_the_pages_script_reads_streams_and_errors(server: Server) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here")
    (script,) = re.findall(r"<script>(.*?)</script>", PAGE.read_text("utf-8"), re.DOTALL)
    bound = f"const stream_ = (body) => stream('{server.url}', body);"
    done = subprocess.run(
        [node, "-e", f"{script}\n{bound}\n{PARSER_TEST}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr


class Site(http.server.BaseHTTPRequestHandler):
    """The page, held from being loaded until it has its answer: only then is it printed."""

    answered: threading.Event

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/answered":
            self.answered.set()
        elif path == "/wait":
            self.answered.wait(SECONDS)
        self.send_response(200 if path == "/" else 404)
        self.end_headers()
        if path == "/":
            self.wfile.write(PAGE.read_bytes() + HOLD.encode())

    def log_message(self, *_: object) -> None: ...


HOLD = """<img src="/wait"><script>
setInterval(() => document.body.dataset.done && fetch("/answered"), 20);
</script>"""


@contextlib.contextmanager
def page() -> Iterator[str]:
    """The page on an origin of its own."""
    handler = type("Held", (Site,), {"answered": threading.Event()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{site.server_port}/"
        site.shutdown()
        thread.join()


def test_the_page_answers_in_a_browser(server: Server, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium here")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    with page() as url:
        done = subprocess.run(
            [browser, *flags, "--dump-dom", f"{url}?url={server.url}&say=hi"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert 'data-done="yes"' in done.stdout, done.stderr
    assert re.search(r'<p class="assistant">[^<]', done.stdout)
    assert re.search(r"\d+ prompt tokens, \d+ cached", done.stdout)
    assert 'class="error"' not in done.stdout


# -- the docs -----------------------------------------------------------------------------------


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["quickstart.md", "cookbook.md"])
def test_the_code_of_the_docs_runs(page: str, server: Server) -> None:
    code = "\n".join(blocks(page)).replace("http://127.0.0.1:8000", server.url)
    # That no name means SmolLM2 is proven by the README's code.
    code = code.replace('"smollm2"', '"foretoken-builtin"').replace("LLM()", 'LLM("builtin")')
    done = run_forked(run_code, code, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 0


@pytest.fixture
def early_calls() -> ModuleType:
    spec = importlib.util.spec_from_file_location("early", EXAMPLES / "early_calls.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tools_run_while_the_answer_goes_on(early_calls: ModuleType, capsys, monkeypatch) -> None:
    started: list[str] = []

    def read_file(path: str) -> str:
        started.append(path)
        return f"the text of {path}"

    monkeypatch.setattr(early_calls, "read_file", read_file)
    calls = [json.dumps({"name": "read_file", "arguments": {"path": name}}) for name in FILES]
    said = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    flags = ["--tool-parser", "hermes", "--idle-prefill", "off"]
    with running(started_by=[sys.executable, str(SCRIPTED), "--port", "0", *flags]) as server:
        question = f"Read both. [[{said}]]"
        found = early_calls.ready_calls(server.url, question)
        assert json.loads(next(found)["function"]["arguments"]) == {"path": "a.txt"}
        assert len([*found]) == 1
        for is_early in (False, True):
            started.clear()
            assert early_calls.run(server.url, question, is_early=is_early) > 0
            assert sorted(started) == sorted(FILES)
    assert capsys.readouterr().out.count("the text of b.txt") == 2
