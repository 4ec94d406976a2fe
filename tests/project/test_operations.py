"""Files of docs/operations and their pages name what is there: metrics, flags, runbooks."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import foretoken
from foretoken.api.build.adapter_loader import OwnAdapters
from foretoken.api.cli.config import REPLICA, Given
from foretoken.api.cluster.front.front_metrics import FrontMetrics
from foretoken.api.runtime.adapters import Adapters
from foretoken.api.serving.limits import Limits
from foretoken.api.serving.metrics import ServerMetrics
from foretoken.api.serving.settings import FrontOptions, Joining, Listen
from foretoken.core.config import EngineConfig
from foretoken.core.interface.extras.adapter import Adapter, LoadedAdapter
from foretoken.core.ops.native import recipe
from foretoken.core.telemetry.readers import read_states, read_transfers
from foretoken.radix_cache import PrefixCache, StateSlots
from support import address_families
from support.address_families import UNSUPPORTED
from support.given import given, listening, parser
from support.observed_app import Observed

ROOT = Path(__file__).parents[2]
GUIDE, METRICS, RUNBOOKS, REPLICAS, KUBERNETES = (
    (ROOT / f"docs/{page}.md").read_text()
    for page in ("operations", "metrics", "alerts", "replicas", "kubernetes")
)
PAGES = "\n".join((GUIDE, METRICS, RUNBOOKS, REPLICAS, KUBERNETES))
FOLDER = ROOT / "docs/operations"
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
PARTS = ("_bucket", "_sum", "_count")
_NAME = re.compile(r"\b(?:foretoken:|process_)\w+")
_OURS = re.compile(r"`([a-z0-9_]+)(?:\{[\w, ]+\})?`")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all samples of a server that has answered something."""
    server = Observed(kv_disk=f"{tmp_path_factory.mktemp('kv')}:16MiB")
    server.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    server.complete("abab abab abab abab", max_tokens=40, speculation=4)
    names = {name.partition(" ")[0] for name in server.samples()}
    server.close()
    return names | of_a_front() | of_states() | of_transfers() | of_adapters()


def of_adapters() -> set[str]:
    """Names of the samples of a server with an adapter."""
    metrics, loaded = ServerMetrics(), LoadedAdapter(Adapter(), 1, 1, b"")
    adapters = Adapters(OwnAdapters(lambda _: loaded), most=1)
    asyncio.run(adapters.load("sql", Path()))
    metrics.adapters = lambda: adapters
    return {sample.name for each in metrics.collect() for sample in each.samples}


def of_states() -> set[str]:
    """Names of the samples of a model with recurrent states."""
    return {sample.name for each in read_states(StateSlots(2, 1)) for sample in each.samples}


def of_transfers() -> set[str]:
    """Names of the samples of a server whose KV others read."""
    found = read_transfers(PrefixCache(4, 4), None)
    return {sample.name for each in found for sample in each.samples}


def of_a_front() -> set[str]:
    """Names of the samples that a front adds."""

    async def fetch() -> Mapping[str, bytes]:
        return {}

    families = FrontMetrics(lambda: {"1": (0, 0)}, fetch).registry.collect()
    return {sample.name for family in families for sample in family.samples}


def expressions() -> list[str]:
    """Everything that Prometheus is asked."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"][1:]]
    return [*variables, *(each["expr"] for each in targets), *(rule["expr"] for rule in RULES)]


def families(names: set[str]) -> set[str]:
    """Histograms by their own names as well."""
    return names | {name.removesuffix(part) for name in names for part in PARTS}


def test_everything_that_is_asked_for_is_exposed(exposed: set[str]) -> None:
    asked = {name for each in expressions() for name in _NAME.findall(each)}
    assert len(asked) > 40
    assert asked - exposed == set()


def test_the_guide_has_every_metric_and_no_other(exposed: set[str]) -> None:
    cells = [row.split(" | ")[0] for row in METRICS.splitlines() if row.startswith("| `")]
    told = {name for cell in cells for name in _OURS.findall(cell)}
    there = {
        re.sub("_(bucket|sum|count)$", "", name).removeprefix("foretoken:")
        for name in exposed
        if not name.endswith("_created")
    }
    others = {"process_virtual_memory_bytes"}
    assert told == there - others


def test_every_name_in_the_text_is_a_metric(exposed: set[str]) -> None:
    known = families(exposed)
    named = {name for name in _NAME.findall(PAGES) if not name.startswith("foretoken:_")}
    assert named - known == set()
    begin = (
        "kv_cache|num_requests|max_requests|step|requests?|event_loop|http|replicas?|route|prefix"
    )
    pattern = rf"`((?:{begin})_\w+)`"
    loose = set(re.findall(pattern, PAGES)) - {"request_id"}
    assert {f"foretoken:{name}" for name in loose} - known == set()


def test_labels_that_rules_choose_by_have_those_values(exposed: set[str]) -> None:
    server_side = (ROOT / "api/serving/metrics.py").read_text()
    chosen = {
        word
        for each in expressions()
        for words in re.findall(r'reason=~?"([^"]+)"', each)
        for word in words.split("|")
    }
    assert chosen
    assert [word for word in chosen if f'"{word}"' not in server_side] == []


# -- alerts ---------------------------------------------------------------------------------------


def anchors() -> set[str]:
    return {
        re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
        for line in RUNBOOKS.splitlines()
        if line.startswith("#")
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_its_runbook(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == "docs/alerts.md"
    assert anchor == rule["alert"].lower()
    assert anchor in anchors()
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_runbook_has_its_alert_and_every_alert_its_test() -> None:
    names = {rule["alert"] for rule in RULES}
    assert set(re.findall(r"^## (Foretoken\w+)$", RUNBOOKS, re.MULTILINE)) == names
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    assert {test["alertname"] for test in tests[0]["alert_rule_test"]} == names
    [firing, _] = tests[2]["promql_expr_test"]
    assert firing["exp_samples"][0]["value"] == len(names)


def test_the_dashboard_can_be_imported() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert DASHBOARD["uid"] == "foretoken"
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert "$instance" in target["expr"]


# -- how it is started ----------------------------------------------------------------------------


def flags(args: list[str]) -> Any:
    """Parse the arguments as `foretoken` does; exits where one is unknown."""
    return parser().parse_args(args)


def listening_by(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Listen:
    """Return where and how a server listens with these variables; all of them must be known."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warned: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning", lambda _, *args: warned.append(str(args)))
    given().warn_of_unknown_variables()
    assert warned == []
    return listening()


def files_of_the_guide() -> list[tuple[str, dict[str, str]]]:
    """Names of the files in /etc/foretoken that it writes, and their settings, in order."""
    pattern = r"^cat >+ /etc/foretoken/(\w+) <<'EOF'\n(.*?)^EOF$"
    blocks = re.findall(pattern, GUIDE + REPLICAS, re.M | re.S)
    return [(name, dict(line.split("=", 1) for line in text.splitlines())) for name, text in blocks]


def test_the_variables_of_the_guide_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    (name, found), (same, of_front), _ = files_of_the_guide()
    assert name == same == "env"
    assert len(found) == 4
    listen = listening_by(found, monkeypatch)
    assert listen.settings.api_keys == ("a-long-random-text",)
    assert given().options(EngineConfig) == {"kv_memory": 8 * 2**30}
    listening_by(of_front, monkeypatch)
    front = given().make(FrontOptions)
    assert (front.front, front.replicas) == (of_front["FORETOKEN_FRONT"], 2)


def test_the_replicas_of_the_guide_dial_its_front(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, of_front), (name, found) = files_of_the_guide()
    for shared in ("FORETOKEN_FRONT", "FORETOKEN_CLUSTER_KEY"):
        assert found[shared] == of_front[shared]
    for variable, value in found.items():
        monkeypatch.setenv(variable, value)
    replica = Given(flags(["replica"]), REPLICA)
    assert replica.make(Joining).front == found["FORETOKEN_FRONT"]
    assert replica.options(EngineConfig) == {"kv_memory": 8 * 2**30, "threads": 4}
    service = unit("foretoken-replica@.service")
    assert service["ExecStart"].endswith("/foretoken replica")
    assert service["EnvironmentFile"] == f"/etc/foretoken/{name}"
    assert float(service["TimeoutStopSec"]) > 30 + 10  # to write pages to tiers
    assert service["Restart"] == "always"  # it ends by exit 0 with its front
    server = unit("foretoken.service")
    hardening = {key: value for key, value in server.items() if key.startswith(("Protect", "Re"))}
    assert hardening.items() - service.items() == {("Restart", "on-failure")}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_the_container_starts_a_server_that_hears_its_signals(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"\\\n\s*", " ", (ROOT / name).read_text())
    lines = dict(re.findall(r"^(ENTRYPOINT|USER|HEALTHCHECK|STOPSIGNAL) (.*)$", text, re.MULTILINE))
    assert json.loads(lines["ENTRYPOINT"]) == ["foretoken", "serve"]  # exec form: no shell between
    settings = dict(re.findall(r"\b(FORETOKEN_\w+)=(\S+)", text))
    listen = listening_by(settings, monkeypatch)
    assert (listen.host, listen.port, listen.log_format) == ("0.0.0.0", 8000, "json")
    assert lines["STOPSIGNAL"] == "SIGTERM"
    assert int(lines["USER"]) > 0
    probe = json.loads(lines["HEALTHCHECK"].partition(" CMD ")[2])
    assert "http://127.0.0.1:8000/health" in probe[-1]
    compile(probe[-1], "HEALTHCHECK", "exec")
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "server" in extras.split(",")
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert settings.get("FORETOKEN_DEVICE", "cpu") == ("cuda" if "cuda" in name else "cpu")
    # Where a read-only container writes.
    (volumes,) = re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)
    # A folder of its own: Kubernetes lets every user write a volume itself.
    assert str(Path(settings["FORETOKEN_CACHE"]).parent) in json.loads(volumes)
    assert any(settings["FORETOKEN_DUMP_DIR"].startswith(each) for each in json.loads(volumes))


INSTRUCTIONS = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE"} | {
    "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"
}  # fmt: skip


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_every_line_of_an_image_is_an_instruction_and_every_run_is_shell(name: str) -> None:
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / name).read_text())
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        instruction, _, rest = line.partition(" ")
        assert not line or instruction in INSTRUCTIONS, line
        if instruction == "RUN":
            parsed = subprocess.run(["sh", "-n", "-c", rest], capture_output=True, check=False)
            assert parsed.returncode == 0, parsed.stderr


def test_the_image_for_cpus_compiles_its_kernels_when_it_is_built_and_has_no_compiler() -> None:
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    build, final = re.split(r"(?m)^FROM ", text)[1:]
    module = next(re.finditer(r"^RUN python -m (foretoken\.\S+)$", build, re.MULTILINE))[1]
    assert module == recipe.__name__
    assert build.index(" gcc ") < build.index("pip install -c") < build.index(module)
    assert "gcc" not in final
    assert "apt-get" not in final


def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return found


def test_the_services_beside_each_other_have_no_rights_and_listen_on_loopback() -> None:
    services, secrets = composed(), yaml.safe_load((ROOT / "compose.yaml").read_text())["secrets"]
    assert services.keys() == {"foretoken", "prometheus", "grafana"}
    for name, service in services.items():
        # Compose refuses to write a secret that is no file into a read-only file system.
        is_written = any("file" not in secrets[each] for each in service.get("secrets", ()))
        assert service.get("read_only", False) is not is_written, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        files = [each.split(":")[0] for each in service["volumes"] if each.startswith("./")]
        assert [each for each in files if not (ROOT / each).is_file()] == []
    server = services["foretoken"]
    assert server["image"] == f"foretoken:{foretoken.__version__}"
    assert float(server["stop_grace_period"].removesuffix("s")) > Listen().drain_seconds + 10
    assert (ROOT / server["build"]["dockerfile"].partition(":-")[2].rstrip("}")).is_file()


def test_prometheus_beside_it_scrapes_the_server_and_knows_the_alerts() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    ((job),) = config["scrape_configs"]
    assert job["job_name"] in (FOLDER / "alerts.yml").read_text()
    assert job["static_configs"] == [{"targets": ["foretoken:8000"]}]
    mounts = [each.split(":")[1] for each in composed()["prometheus"]["volumes"]]
    assert set(config["rule_files"]) <= set(mounts)
    assert job["authorization"]["credentials_file"] == "/run/secrets/api_key"
    assert composed()["prometheus"]["secrets"] == ["api_key"]


def test_grafana_beside_it_has_the_data_and_the_dashboard() -> None:
    source = yaml.safe_load((FOLDER / "grafana/datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((FOLDER / "grafana/dashboards.yml").read_text())["providers"][0]
    mounts = dict(each.rsplit(":", 2)[:2] for each in composed()["grafana"]["volumes"])
    shown = Path(mounts["./docs/operations/grafana-dashboard.json"])
    assert str(shown.parent) == folder["options"]["path"]
    settings = composed()["grafana"]["environment"]
    assert settings["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(shown)
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_a_release_is_published_by_its_tag_without_a_stored_token() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert list(jobs) == ["build", "try", "publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "tag" in jobs["publish"]["if"]
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text
    others = [used for used in re.findall(r"uses: (\S+)", text) if not used.startswith("actions/")]
    assert [used for used in others if not re.fullmatch(r"\S+@[0-9a-f]{40}", used)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = jobs["try"]["strategy"]["matrix"]["python-version"]
    named = [each.rpartition(" :: ")[2] for each in project["classifiers"] if ":: 3." in each]
    assert tried == named
    lines = [line for job in jobs.values() for step in job["steps"]
             if (line := step.get("run", ""))]  # fmt: skip
    known = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "bench/lab/release.py").read_text()))
    given = [line for line in lines if "release" in line]
    assert len(given) == 2
    assert set(re.findall(r"--[a-z-]+", " ".join(given))) <= known


def test_what_the_image_needs_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    packed = {"api", "core", "draft", "radix_cache", "bench", "README.md", "LICENSE",
              "pyproject.toml", "constraints.txt", "_version.py", "__init__.py"}  # fmt: skip
    assert packed & set(ignored) == set()
    assert all((ROOT / name).exists() for name in packed)


def unit(name: str) -> dict[str, str]:
    parser = RawConfigParser(strict=False, comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(FOLDER / name)
    return dict(parser["Service"])


def test_the_unit_starts_a_server_and_waits_for_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    service = unit("foretoken.service")
    assert service["ExecStart"].endswith("/foretoken serve")
    settings = dict(each.split("=") for each in service["Environment"].split())
    listen = listening_by(settings, monkeypatch)
    assert listen.log_format == "json"
    assert float(service["TimeoutStopSec"]) > listen.drain_seconds + 10
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"
    assert service["NoNewPrivileges"] == "yes"
    assert service["EnvironmentFile"].startswith("/")  # "-/" would serve all, were the file lost


UNITS = ["foretoken.service", "foretoken-replica@.service"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    text = (FOLDER / name).read_text().replace("/opt/foretoken/bin/foretoken", "/bin/true")
    (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / name)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_not_started_again_after_a_wrong_flag(name: str) -> None:
    assert unit(name)["RestartPreventExitStatus"] == "2"


MEET = """
import sys, tempfile
from pathlib import Path
from foretoken.core.errors import RankLost
from foretoken.core.ops.parallel import GlooComm
try:
    GlooComm(Path(tempfile.mkdtemp()), 0, 1)
except RankLost as failure:
    sys.exit(str(failure))
"""


def test_ranks_meet_with_the_sockets_that_the_units_allow_and_not_with_fewer() -> None:
    """Run gloo behind a filter of system calls as systemd sets one for a unit."""
    allowed = {unit(name)["RestrictAddressFamilies"] for name in UNITS}
    (families,) = (each.split() for each in allowed)
    enough = restricted(families)
    if enough.returncode == UNSUPPORTED:
        pytest.skip("no filter of system calls on this machine")
    assert (enough.returncode, enough.stderr) == (0, "")
    fewer = restricted([each for each in families if each != "AF_NETLINK"])
    assert fewer.returncode == 1
    assert fewer.stderr.startswith("gloo cannot list network interfaces")
    assert "Traceback" not in fewer.stderr


def restricted(families: Sequence[str]) -> subprocess.CompletedProcess[str]:
    filtered = [sys.executable, address_families.__file__, ",".join(families)]
    return subprocess.run(
        [*filtered, sys.executable, "-c", MEET], capture_output=True, text=True, check=False
    )


def test_the_proxy_waits_as_long_as_the_server() -> None:
    text = (FOLDER / "nginx.conf").read_text()
    found = dict(re.findall(r"^\s*(\w+) +(\S+);", text, re.MULTILINE))
    defaults = Limits()
    assert found["proxy_buffering"] == "off"
    # A POST meets the closed connection of a server that stops too rarely for a test to see it.
    assert "proxy_next_upstream error http_503 non_idempotent;" in text
    assert seconds(found["proxy_read_timeout"]) > defaults.max_request_seconds
    assert seconds(found["keepalive_timeout"]) < defaults.idle_seconds
    assert seconds(found["client_header_timeout"]) == defaults.header_seconds
    assert seconds(found["client_body_timeout"]) == defaults.body_seconds
    assert found["client_max_body_size"] == f"{defaults.max_body_bytes // 2**20}m"


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("name", ["ray-serve", "kuberay", "llm-d"])
def test_the_guide_links_to_the_example_manifests(name: str) -> None:
    assert f"operations/{name}.yaml" in KUBERNETES


def test_commands_of_the_guide_have_flags_that_exist() -> None:
    text = re.sub(r"\\\n\s*", " ", GUIDE)
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    given = [line.partition("foretoken serve ")[2] for line in lines if "foretoken serve" in line]
    given += [line.partition(" foretoken /models")[2].partition(" ")[2] for line in lines
              if line.startswith("docker run")]  # fmt: skip
    assert len(given) == 2
    for each in given:
        flags(["serve", *shlex.split(each)])
    commands_of_it = (["serve"], ["replica"])
    helps = [flags(args).parser.format_help(shows_all=True) for args in commands_of_it]
    known = set(re.findall(r"--[a-z-]+", " ".join(helps)))
    foreign = {
        "--build",
        "--build-arg",
        "--gpus",
        "--read-only",
        "--set",
        "--tmpfs",
        "--index-url",
        "--init",
        "--no-deps",
        "--now",
        "--stop-timeout",
    }
    named = set(re.findall(r"(?<!\w)--[a-z][a-z-]+", PAGES)) - foreign
    assert named - known == set()
