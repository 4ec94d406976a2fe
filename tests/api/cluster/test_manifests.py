"""The example manifests of docs/operations pass schemas, and their parts fit each other.

The references of the kinds without a schema in a package, with the version that was read:
RayService: KubeRay 1.7, ray-operator/config/crd/bases/ray.io_rayservices.yaml (v1);
InferencePool: Gateway API's inference extension 1.6, config/crd/bases (v1);
EndpointPickerConfig: llm-d's router 0.10, the README of each plugin.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import foretoken
from foretoken.core.config import EngineConfig
from support.given import given, listening
from support.probes import KINDS, SECRET, outcomes, settings_of

FOLDER = Path(__file__).parents[3] / "docs/operations"
KUBERNETES = ("kuberay", "llm-d")
CUSTOM = {"RayService", "InferencePool"}
OF_THE_FRONT = ("--front", "--replicas", "--route")
"""Flags that `foretoken serve` has where it is a front; left out until it has them."""


def objects(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text("utf-8"))]


def only(kind: str, found: list[dict[str, Any]], name: str = "") -> dict[str, Any]:
    [one] = [e for e in found if e["kind"] == kind and e["metadata"]["name"].endswith(name)]
    return one


def pods(found: list[dict[str, Any]]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Labels and specs of all pods, those of Ray as well."""
    for each in found:
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]
            yield template["metadata"]["labels"], template["spec"]
        if each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                yield {}, group["template"]["spec"]


def containers(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for _, spec in pods(found) for each in spec["containers"]}


# -- schemas --------------------------------------------------------------------------------------


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray imports the policy of a config that it checks; the real one sets up Ray."""
    module = ModuleType("foretoken.api.cluster.ray_app")
    module.Scaling = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.slow  # needs Ray
@pytest.mark.filterwarnings("ignore")  # of Ray
@pytest.mark.parametrize("target", ["ray-serve", "kuberay"])
def test_serve_configs_pass_rays_own_schema(target: str, policy: None) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="the extra ray is not installed")
    found = objects(target)
    config = found[0] if target == "ray-serve" else serve_config(found)
    [application] = schema.ServeDeploySchema.model_validate(config).applications
    [deployment] = application.deployments
    unknown = set(config["applications"][0]["deployments"][0]) - set(type(deployment).model_fields)
    assert unknown == set()  # the schema itself ignores what it does not know


def serve_config(found: list[dict[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(only("RayService", found)["spec"]["serveConfigV2"])
    return config


@pytest.mark.parametrize("target", KUBERNETES)
def test_core_kinds_pass_the_schemas_of_kubernetes(target: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the extra test has it").validate
    found = objects(target)
    for each in found:
        if each["kind"] not in CUSTOM:
            validate(each, "1.37", strict=True)
    for _, spec in pods(found):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
        validate(pod, "1.37", strict=True)


def test_a_ray_service_has_what_its_reference_requires() -> None:
    service = only("RayService", objects("kuberay"))
    assert service["apiVersion"] == "ray.io/v1"
    assert service["spec"].keys() == {
        "serveConfigV2", "excludeHeadPodFromServeSvc", "rayClusterConfig",
    }  # fmt: skip
    assert isinstance(service["spec"]["serveConfigV2"], str)
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster.keys() == {
        "rayVersion", "authOptions", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs",
    }  # fmt: skip
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    [group] = cluster["workerGroupSpecs"]
    assert group.keys() == {
        "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template",
    }  # fmt: skip
    assert 1 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for each in (cluster["headGroupSpec"], group):
        assert all(isinstance(value, str) for value in each["rayStartParams"].values())
        assert each["template"]["spec"]["containers"][0]["image"]


def test_an_inference_pool_has_what_its_reference_requires() -> None:
    found = objects("llm-d")
    pool = only("InferencePool", found)
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert spec.keys() == {"selector", "targetPorts", "endpointPickerRef"}
    assert len(spec["targetPorts"]) == 1
    assert spec["endpointPickerRef"].keys() == {"name", "port", "failureMode"}
    # its pods are the servers', and its picker is a Service that is there
    [(labels, server)] = [
        each for each in pods(found) if each[1]["containers"][0]["name"] == "server"
    ]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    numbers = {port["containerPort"] for port in server["containers"][0]["ports"]}
    assert spec["targetPorts"][0]["number"] in numbers
    picker = only("Service", found, spec["endpointPickerRef"]["name"])
    assert spec["endpointPickerRef"]["port"]["number"] == picker["spec"]["ports"][0]["port"]


# -- parts that fit each other ------------------------------------------------------------------


@pytest.mark.parametrize("target", KUBERNETES)
def test_services_lead_to_ports_of_pods(target: str) -> None:
    found = objects(target)
    services = [each for each in found if each["kind"] == "Service"]
    assert len(services) == 2
    for each in services:
        selector = each["spec"]["selector"]
        [chosen] = [spec for labels, spec in pods(found) if selector.items() <= labels.items()]
        ports = {port["containerPort"] for port in chosen["containers"][0]["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports


@pytest.mark.parametrize("target", KUBERNETES)
def test_flags_of_the_containers_are_known_to_foretoken(target: str) -> None:
    ours = [c for c in containers(objects(target)).values() if "command" in c]
    assert len(ours) == 1
    [container] = ours
    assert container["command"] == ["foretoken"]
    command, *args = [each.replace("$(POD_IP)", "10.0.0.1") for each in container["args"]]
    assert command == "serve"
    for flag in OF_THE_FRONT:
        if flag in args:
            at = args.index(flag)
            del args[at : at + 2]
    EngineConfig(**given(*args).options(EngineConfig))
    listen = listening(*args)
    assert listen.host == "0.0.0.0"
    assert listen.port in {port["containerPort"] for port in container["ports"]}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe")]
    assert probes == [{"path": "/health", "port": listen.port}] * 2


def test_the_front_is_reached_before_it_is_ready_and_is_one() -> None:
    found = objects("kuberay")
    service = only("Service", found, "-front")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in only("Service", found, "foretoken")["spec"]
    [port] = service["spec"]["ports"]
    args = serve_config(found)["applications"][0]["args"]
    assert args["front"] == f"tcp://{service['metadata']['name']}:{port['port']}"
    front = only("Deployment", found)
    assert front["spec"]["replicas"] == 1
    assert front["spec"]["strategy"] == {"type": "Recreate"}
    text = " ".join(containers(found)["front"]["args"])
    assert f"--front tcp://0.0.0.0:{port['port']} --replicas 2" in text


def test_pods_of_ray_have_room_for_one_replica_each() -> None:
    found = objects("kuberay")
    [deployment] = serve_config(found)["applications"][0]["deployments"]
    worker = containers(found)["ray-worker"]
    assert deployment["max_replicas_per_node"] == 1
    assert deployment["ray_actor_options"] == {"num_cpus": 4.0, "num_gpus": 0}
    assert worker["resources"] == {
        "requests": {"cpu": "4", "memory": "8192Mi"},
        "limits": {"memory": "8192Mi"},
    }
    cluster = only("RayService", found)["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    [group] = cluster["workerGroupSpecs"]
    assert deployment["num_replicas"] == group["replicas"] == 2


@pytest.mark.parametrize("target", KUBERNETES)
def test_pods_have_no_rights_and_time_to_drain(target: str) -> None:
    drain = 30.0  # where nothing else is said
    for _, spec in pods(objects(target)):
        [container] = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} == container["resources"].keys()
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert spec["terminationGracePeriodSeconds"] >= drain + sleep + 5


def test_keys_come_from_the_secret_alone() -> None:
    found = objects("kuberay")
    secrets = {
        (name, each["name"]): each["valueFrom"]["secretKeyRef"]
        for name, container in containers(found).items()
        for each in container.get("env", [])
        if each["name"].startswith("FORETOKEN_")
    }
    assert {key[1] for key in secrets} == {
        "FORETOKEN_API_KEY", "FORETOKEN_ADMIN_KEY", "FORETOKEN_CLUSTER_KEY",
    }  # fmt: skip
    assert {each["name"] for each in secrets.values()} == {"foretoken"}
    assert (
        secrets["front", "FORETOKEN_CLUSTER_KEY"] == secrets["ray-worker", "FORETOKEN_CLUSTER_KEY"]
    )
    assert secrets["front", "FORETOKEN_ADMIN_KEY"]["optional"] is True
    assert "optional" not in secrets["front", "FORETOKEN_API_KEY"]


@pytest.mark.parametrize(("target", "name"), [("kuberay", "front"), ("llm-d", "server")])
def test_each_probe_succeeds_on_a_server_with_the_containers_own_keys_while_it_is_ready(
    target: str,
    name: str,
    engine: Any,
    serve: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    container = containers(objects(target))[name]
    settings = settings_of(container, monkeypatch)
    assert settings.api_keys == ((SECRET,) if target == "kuberay" else ())
    server = serve(**{each.name: getattr(settings, each.name) for each in fields(settings)
                      if each.name != "limits"})  # fmt: skip
    assert outcomes(container, server.port) == dict.fromkeys(KINDS, True)
    engine.readiness = "waiting for replicas: 0 of 2 are connected"
    assert outcomes(container, server.port) == {**dict.fromkeys(KINDS, True), KINDS[-1]: False}


# -- llm-d --------------------------------------------------------------------------------------


def picker_config(found: list[dict[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(only("ConfigMap", found)["data"]["picker.yaml"])
    return config


def test_the_picker_reads_what_the_servers_publish() -> None:
    found = objects("llm-d")
    config = picker_config(found)
    server = containers(found)["server"]
    args = server["args"]
    parameters = {each["type"]: each.get("parameters", {}) for each in config["plugins"]}
    events = parameters["precise-prefix-cache-producer"]["kvEventsConfig"]
    sockets = events["podDiscoveryConfig"]
    address = args[args.index("--kv-events") + 1]
    assert EngineConfig(kv_events=address).events_addresses == tuple(
        f"tcp://0.0.0.0:{sockets[name]}" for name in ("socketPort", "replaySocketPort")
    )
    name = args[args.index("--served-model-name") + 1]
    port = args[args.index("--port") + 1]
    topic = args[args.index("--kv-events-topic") + 1]
    assert topic == f"kv@$(POD_IP):{port}@{name}"
    assert topic.startswith(events["topicFilter"])
    assert {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in server["env"]} == {
        "POD_IP": "status.podIP"
    }
    service = only("Service", found, only("InferencePool", found)["metadata"]["name"])
    assert parameters["token-producer"] == {
        "modelName": name,
        "vllm": {"url": f"http://{service['metadata']['name']}:{port}"},
    }
    assert args[args.index("--metric-names") + 1] == "vllm"
    [labels] = [labels for labels, spec in pods(found) if spec["containers"][0]["name"] == "server"]
    assert labels["llm-d.ai/engine-type"] == "vllm"


def test_plugins_that_the_picker_uses_are_declared() -> None:
    config = picker_config(objects("llm-d"))
    declared = {each["type"] for each in config["plugins"]}
    used = [each for profile in config["schedulingProfiles"] for each in profile["plugins"]]
    for source in config["dataLayer"]["sources"]:
        used += [source, *source["extractors"]]
    assert {each["pluginRef"] for each in used} <= declared
    assert config["kind"] == "EndpointPickerConfig"


def test_the_picker_hashes_pages_of_the_servers_size() -> None:
    [parameters] = [
        each["parameters"]
        for each in picker_config(objects("llm-d"))["plugins"]
        if each["type"] == "precise-prefix-cache-producer"
    ]
    size = parameters["tokenProcessorConfig"]["blockSizeTokens"]
    assert size == EngineConfig().sizes("cpu").page_size


def test_servers_without_keys_admit_the_namespace_alone() -> None:
    found = objects("llm-d")
    policy = only("NetworkPolicy", found)["spec"]
    [(labels, server)] = [
        each for each in pods(found) if each[1]["containers"][0]["name"] == "server"
    ]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    [rule] = policy["ingress"]
    assert rule["from"] == [{"podSelector": {}}]
    listening_on = {port["containerPort"] for port in server["containers"][0]["ports"]}
    assert {port["port"] for port in rule["ports"]} == listening_on


@pytest.mark.parametrize("name", ["ray-serve", *KUBERNETES])
def test_an_example_says_that_it_was_never_run(name: str) -> None:
    head = (FOLDER / f"{name}.yaml").read_text("utf-8").partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    text = " ".join(head.replace("#", " ").split())
    assert re.search(r"[Nn]ever (applied to a cluster|deployed)", text)


def test_the_serve_config_names_what_there_is() -> None:
    source = Path(foretoken.__file__).with_name("api") / "cluster/ray_app.py"
    [config] = objects("ray-serve")
    [application] = config["applications"]
    [deployment] = application["deployments"]
    module, _, function = application["import_path"].partition(":")
    assert module == "foretoken.api.cluster.ray_app"
    text = source.read_text("utf-8")
    assert re.search(rf"^(class|def) {function}\b", text, re.MULTILINE)
    assert f'"{deployment["name"]}"' in text
    EngineConfig(**application["args"]["options"])
