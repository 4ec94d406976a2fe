"""Every import of the package is declared: nothing comes along with something else."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DISTRIBUTIONS = {  # of a module whose name is another
    "prometheus_client": "prometheus-client",
    "huggingface_hub": "huggingface-hub",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
    "PIL": "pillow",
    "python_multipart": "python-multipart",
}
OPTIONAL = {  # where an extra is needed, and imported for it alone
    "triton": "cuda",
    "opentelemetry": "otel",
    "matplotlib": "bench",
    "zmq": "events",
    "cryptography": "receipts",
    "PIL": "images",
    "mooncake": "mooncake",
    "nixl": "pd",
    "ray": "ray",
}


def declared(requirements: list[str]) -> set[str]:
    """Names of distributions, in lower case."""
    return {re.split(r"[^\w-]", each, maxsplit=1)[0].lower() for each in requirements}


def imported(package: str) -> set[str]:
    """Modules of others that the files of a package import, wherever they do."""
    return set().union(*(imported_by(path) for path in (ROOT / package).rglob("*.py")))


def imported_by(path: Path) -> set[str]:
    """Modules of others that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"foretoken"}


@pytest.mark.parametrize("package", ["radix_cache", "core", "draft", "api"])
def test_every_import_is_declared(package: str) -> None:
    names = declared(PROJECT["dependencies"])
    extras = {name: declared(each) for name, each in PROJECT["optional-dependencies"].items()}
    for module in sorted(imported(package)):
        if module in OPTIONAL:
            name = DISTRIBUTIONS.get(module, module)
            assert any(each.startswith(name) for each in extras[OPTIONAL[module]]), module
        else:
            assert DISTRIBUTIONS.get(module, module).lower() in names, module


SERVER_ROOMS = {"receipts", "replay", "serving", "dialects", "server", "cluster"}
SPEAK_HTTP = {"remote", "reference"}  # modules of the command line


BARE = """
import contextlib, importlib, io, sys

def check(names, absent):
    for each in absent:
        sys.modules[each] = None  # importing it fails, as where it is not installed
    for name in names:
        importlib.import_module(name)
    main = importlib.import_module("foretoken.api.cli").main
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main(["serve", "builtin"]) == 2
    [line] = said.getvalue().splitlines()
    assert "needs the extra server: pip install 'foretoken[server]'" in line, line
    from foretoken import LLM, SamplingParams
    with LLM("builtin", draft="none", device="cpu") as llm:
        assert llm.generate("def add", SamplingParams(max_tokens=4)).token_ids
"""


@pytest.mark.slow
def test_without_extras_and_the_server_all_else_is_imported_and_the_sdk_answers() -> None:
    """Without its packages a command of the server says so in one line."""
    extras = {*OPTIONAL, "uvicorn", "starlette", "uvloop"}
    extras |= {"httpx", "openai", "jsonschema", "pytest", "hypothesis", "schemathesis"}
    names = []
    for package in ("radix_cache", "core", "draft", "api"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = path.relative_to(ROOT).with_suffix("")
            of_server = SERVER_ROOMS & set(module.parts[:2]) or module.name in SPEAK_HTTP
            needs_extra = of_server or "triton" in module.parts or imported_by(path) & extras
            if not needs_extra and module.name != "__main__":
                names.append(".".join(("foretoken", *module.parts)).removesuffix(".__init__"))
    assert "foretoken.api.cli.flags" in names
    code = f"{BARE}\ncheck({names!r}, {sorted(extras)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def pins() -> dict[str, str]:
    """Versions of constraints.txt, by the names of distributions as pip compares them."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def brought(requirements: list[str]) -> set[str]:
    """Distributions that are installed because of these requirements, and theirs, and so on."""
    found: set[str] = set()
    todo = [(Requirement(each), "") for each in requirements]
    seen = set()
    while todo:
        each, extra = todo.pop()
        if (str(each), extra) in seen or (
            each.marker and not each.marker.evaluate({"extra": extra})
        ):
            continue
        seen.add((str(each), extra))
        with contextlib.suppress(metadata.PackageNotFoundError):
            needs = [Requirement(need) for need in metadata.requires(each.name) or ()]
            found.add(canonicalize_name(each.name))
            todo += [(need, of) for need in needs for of in ("", *each.extras)]
    return found


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_everything_that_is_installed_is_pinned(extra: str) -> None:
    """Two machines have the same versions of what our requirements bring along as well."""
    extras = PROJECT["optional-dependencies"]
    names = brought(extras[extra] if extra else PROJECT["dependencies"])
    bare = {"nvidia", "cuda", "triton", "setuptools"}  # of torch for CUDA, which pins them itself
    assert {name for name in names - pins().keys() if name.partition("-")[0] not in bare} == set()


def test_what_the_server_uses_of_private_parts_is_there() -> None:
    """The extra's ranges are as wide as versions have these: api/server/guards/connection.py."""
    import h11
    from h11._writers import ChunkedWriter, ContentLengthWriter
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
    from uvicorn.server import Server

    for owner, names in {
        H11Protocol: {
            "connection_made", "connection_lost", "data_received", "handle_events",
            "pause_writing", "resume_writing", "send_400_response", "timeout_keep_alive_handler",
            "_should_upgrade",
        },
        WebSocketsSansIOProtocol: {
            "keepalive_timeout", "send_receive_event_to_app", "handle_parser_exception", "send",
        },
        RequestResponseCycle: {"run_asgi", "send", "receive"},
        Server: {"capture_signals", "startup", "shutdown"},
        h11.Connection: {"send", "trailing_data", "our_state", "their_state"},
    }.items():  # fmt: skip
        assert names <= set(dir(owner)), owner
    source = inspect.getsource(H11Protocol)
    fields = ("conn", "logger", "timeout_keep_alive", "timeout_keep_alive_task", "flow", "cycle",
              "connections", "app", "scope", "transport", "loop", "config")  # fmt: skip
    assert [name for name in fields if f"self.{name}" not in source] == []
    cycle = inspect.getsource(RequestResponseCycle)
    fields = ("disconnected", "message_event", "more_body", "response_complete")
    assert [name for name in fields if f"self.{name}" not in cycle] == []
    connection = h11.Connection(h11.SERVER)
    connection._receive_buffer += b"GET"
    assert len(connection._receive_buffer) == 3
    response = h11.Response(status_code=200, headers=[("content-length", "0")])
    client = h11.Connection(h11.CLIENT)
    connection.receive_data(
        client.send(h11.Request(method="GET", target="/", headers=[("host", "")]))[3:]
    )
    assert isinstance(connection.next_event(), h11.Request)
    connection.send(response)
    assert isinstance(connection._writer, ContentLengthWriter)
    assert issubclass(ChunkedWriter, object)


def test_a_plain_installation_serves_and_leaves_newer_versions_to_its_user() -> None:
    base = {Requirement(each).name: each for each in PROJECT["dependencies"]}
    for bounded in map(Requirement, PROJECT["optional-dependencies"]["server"]):
        plain = Requirement(base[bounded.name])
        lower = [each for each in bounded.specifier if each.operator == ">="]
        assert list(plain.specifier) == lower, bounded.name
        assert plain.marker == bounded.marker


def test_every_folder_of_code_is_packed() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = {
        path.parent.relative_to(ROOT)
        for name in ("radix_cache", "core", "draft", "api")
        for path in (ROOT / name).rglob("__init__.py")
    }
    assert {".".join(("foretoken", *each.parts)) for each in folders} <= set(tool["packages"])


def test_every_extra_is_explained_where_it_is_installed() -> None:
    page = (ROOT / "docs/install.md").read_text("utf-8")
    extras = PROJECT["optional-dependencies"].keys() - {"test", "test-rest"}
    assert [name for name in extras if f"\n| `{name}` |" not in page] == []


def test_nothing_is_declared_that_is_not_imported() -> None:
    used = set().union(*(imported(each) for each in ("radix_cache", "core", "draft", "api")))
    names = {DISTRIBUTIONS.get(module, module).lower() for module in used}
    by_name, of_bench, of_uvicorn = "uvloop", "httptools", "websockets"
    assert declared(PROJECT["dependencies"]) - names <= {by_name, of_bench, of_uvicorn}
