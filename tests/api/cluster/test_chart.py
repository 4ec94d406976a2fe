"""The Helm chart, rendered by the few forms of Helm's templates that it uses, and no others."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import foretoken
from foretoken.api.cli.commands import _parser
from support.probes import KINDS, SECRET, outcomes, settings_of

CHART = Path(__file__).parents[3] / "docs/operations/chart"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
ACTION = re.compile(r"(\s*)\{\{(-?) (.*?) \}\}")
NAMED = re.compile(r"\.(Values|Release)\.([\w.]+)( \| quote)?")
BLOCK = re.compile(r"toYaml \.Values\.([\w.]+) \| nindent (\d+)")
CHANGED = {
    "args": ["--max-queued", "32"],
    "engines": 2,
    "engineArgs": ["--kv-memory", "4GiB"],
    "model": "/models/name",
    "modelsClaim": "models",
    "nodeSelector": {"gpu": "no"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
}


def value(path: str, values: dict[str, Any]) -> Any:
    found: Any = values
    for name in path.split("."):
        found = found[name]  # Helm renders a name that is missing as nothing
    return found


def render(text: str, values: dict[str, Any]) -> str:
    """Text of a template; an action of another form is an error."""
    out, end, shown = "", 0, [True]
    for action in ACTION.finditer(text):
        space, trims, what = action.groups()
        piece = text[end : action.start()] + ("" if trims else space)
        out += piece if all(shown) else ""
        end = action.end()
        if what == "end":
            shown.pop()
        elif what.startswith("if not .Values."):
            shown.append(not value(what.removeprefix("if not .Values."), values))
        elif what.startswith("if .Values."):
            shown.append(bool(value(what.removeprefix("if .Values."), values)))
        elif block := BLOCK.fullmatch(what):
            lines = yaml.safe_dump(value(block[1], values)).splitlines()
            out += "".join(f"\n{' ' * int(block[2])}{each}" for each in lines) if all(shown) else ""
        else:
            owner, path, quoted = NAMED.fullmatch(what).groups()
            found = value(path, values if owner == "Values" else {"Name": "mine"})
            out += (json.dumps(str(found)) if quoted else str(found)) if all(shown) else ""
    assert shown == [True]
    return out + text[end:]


def objects(**changed: Any) -> dict[str, Any]:
    templates = sorted((CHART / "templates").iterdir())
    texts = (render(each.read_text("utf-8"), VALUES | changed) for each in templates)
    found = [each for each in map(yaml.safe_load, texts) if each]
    return {each["kind"] + each["metadata"]["name"].removeprefix("mine"): each for each in found}


@pytest.mark.parametrize("changed", [{}, CHANGED], ids=["as it is", "all changed"])
def test_the_kinds_of_kubernetes_pass_its_schemas(changed: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the extra test has it").validate
    found = objects(**changed)
    for name in found.keys() - {"ServiceMonitor"}:
        validate(found[name], "1.37", strict=True)
    more = {"ServiceMonitor", "Service-front", "Deployment-engines"} if changed else set()
    assert found.keys() == {"Deployment", "Service"} | more


def test_its_values_pass_its_schema_and_others_do_not() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    check = jsonschema.Draft7Validator(schema)
    check.validate(VALUES)
    check.validate(VALUES | CHANGED)
    for wrong in ({"replicas": "2"}, {"replica": 2}, {"engines": 2, "replicas": 2}, {"model": ""}):
        assert not check.is_valid(VALUES | wrong), wrong
    assert schema["properties"].keys() - {"global"} == VALUES.keys()


def test_the_command_is_one_that_the_server_takes() -> None:
    [container] = objects(**CHANGED)["Deployment"]["spec"]["template"]["spec"]["containers"]
    parsed = _parser().parse_args(container["args"])
    assert (parsed.model, parsed.max_queued, parsed.drain_seconds) == ("/models/name", 32, 30)
    [alone] = objects()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert "--front" not in alone["args"]


def test_engines_dial_in_to_the_front_with_one_key() -> None:
    found = objects(**CHANGED)
    front, engines = found["Deployment"], found["Deployment-engines"]
    assert front["spec"]["strategy"] == {"type": "Recreate"}
    [server], [engine] = (
        each["spec"]["template"]["spec"]["containers"] for each in (front, engines)
    )
    assert server["args"][-6:-2] == ["--front", "tcp://0.0.0.0:5570", "--replicas", "2"]
    assert engines["spec"]["replicas"] == 2
    service = found["Service-front"]
    [port] = service["spec"]["ports"]
    parsed = _parser().parse_args(engine["args"])
    assert parsed.front == f"tcp://{service['metadata']['name']}:{port['port']}"
    assert (parsed.model, parsed.kv_memory) == ("/models/name", 4 * 2**30)
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = front["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert not labels.items() <= engines["spec"]["template"]["metadata"]["labels"].items()
    keys = [
        {each["name"]: each["valueFrom"] for each in container["env"]}["FORETOKEN_CLUSTER_KEY"]
        for container in (server, engine)
    ]
    assert keys[0] == keys[1]
    assert server["resources"] == VALUES["frontResources"]
    assert engine["resources"] == VALUES["resources"]
    assert engine["securityContext"] == server["securityContext"]


def test_the_service_and_its_monitor_find_the_pods() -> None:
    found = objects(**CHANGED)
    pods = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == pods
    monitor = found["ServiceMonitor"]
    labels = found["Service"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["endpoints"][0]["port"] == found["Service"]["spec"]["ports"][0]["name"]


def test_each_probe_succeeds_on_a_server_with_the_pods_own_key_while_it_is_ready(
    built: Any, engine: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    [container] = objects()["Deployment"]["spec"]["template"]["spec"]["containers"]
    settings = settings_of(container, monkeypatch)
    assert settings.api_keys == (SECRET,)
    server = serve(**{each.name: getattr(settings, each.name) for each in fields(settings)
                      if each.name != "limits"})  # fmt: skip
    assert outcomes(container, server.port) == dict.fromkeys(KINDS, True)
    engine.readiness = "a step takes very long"
    assert outcomes(container, server.port) == {**dict.fromkeys(KINDS, True), KINDS[-1]: False}


def test_a_pod_has_time_to_drain_and_mounts_what_it_names() -> None:
    spec = objects(**CHANGED)["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > before + VALUES["drainSeconds"]
    names = [each["name"] for each in spec["volumes"]]
    assert [each["name"] for each in container["volumeMounts"]] == names
    assert names[-1] == "models"


def test_the_chart_has_the_version_of_the_package() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    versions = {about["version"], about["appVersion"], VALUES["image"]["tag"]}
    assert versions == {foretoken.__version__}
