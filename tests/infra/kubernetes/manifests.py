"""The manifests of infra/kubernetes as kustomize renders them, and the pods that come of them."""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "infra" / "kubernetes"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SETS = {
    "small": ("overlays/small",),
    "gpu": ("overlays/gpu", "jobs/on-the-cluster", "jobs/own-cluster"),
    "shared": ("overlays/shared",),
}
"""What stands in one cluster together."""


@functools.cache
def rendered(folder: str) -> list[dict[str, Any]]:
    """The objects of a kustomization. Skips where neither kubectl nor kustomize is installed."""
    for program in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(program[0]):
            done = subprocess.run([*program, str(FOLDER / folder)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert not done.stderr, done.stderr  # such as warnings of deprecated fields
            return [found for found in yaml.load_all(done.stdout, LOADER) if found]
    pytest.skip("neither kubectl nor kustomize is installed")


def objects(name: str) -> list[dict[str, Any]]:
    return [found for folder in SETS[name] for found in rendered(folder)]


def of_kind(found: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] in kinds]


def namespace_of(found: dict[str, Any]) -> str:
    return str(found["metadata"].get("namespace", ""))


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes matches."""
    wanted = selector.get("matchLabels", {})
    return wanted.items() <= labels.items() and all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", [])
    )


@dataclass
class Pod:
    """A pod that a controller makes of an object."""

    name: str
    namespace: str
    labels: dict[str, str]
    spec: dict[str, Any]
    extra: list[dict[str, Any]] = field(default_factory=list)
    """Containers that an operator adds."""

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"], *self.extra]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}


def pods(found: list[dict[str, Any]]) -> list[Pod]:
    """All pods, with the labels that KubeRay, Prefect and Kubernetes give them."""
    return [pod for each in found for pod in _pods_of(each)]


def _pods_of(each: dict[str, Any]) -> Iterator[Pod]:
    name, namespace, spec = each["metadata"]["name"], namespace_of(each), each.get("spec", {})
    if each["kind"] in ("Deployment", "StatefulSet"):
        yield _pod(name, namespace, spec["template"])
    elif each["kind"] == "RayCluster":
        yield from _ray_pods(name, namespace, spec)
    elif each["kind"] == "RayJob":
        if "submitterPodTemplate" in spec:
            yield _pod(f"{name} submitter", namespace, spec["submitterPodTemplate"])
        if "rayClusterSpec" in spec:
            yield from _ray_pods(f"{name}-cluster", namespace, spec["rayClusterSpec"])
    elif each["kind"] == "ConfigMap" and "flow-run.json" in each["data"]:
        job = flow_run_job(each)
        yield _pod("flow-run", namespace, job["spec"]["template"])


def _pod(name: str, namespace: str, template: dict[str, Any], **labels: str) -> Pod:
    return Pod(name, namespace, {**template.get("metadata", {}).get("labels", {}), **labels}, template["spec"])


def _ray_pods(name: str, namespace: str, spec: dict[str, Any]) -> Iterator[Pod]:
    cluster = {"ray.io/cluster": name, "ray.io/is-ray-node": "yes"}
    head = _pod(f"{name} head", namespace, spec["headGroupSpec"]["template"], **cluster, **{"ray.io/node-type": "head"})
    if spec.get("enableInTreeAutoscaling"):
        head.extra.append(
            {"name": "autoscaler", "image": head.spec["containers"][0]["image"], **spec["autoscalerOptions"]}
        )
    yield head
    if "gcsFaultToleranceOptions" in spec:
        labels = {**cluster, "ray.io/node-type": "redis-cleanup"}
        yield _pod(f"{name} redis-cleanup", namespace, spec["headGroupSpec"]["template"], **labels)
    for group in spec["workerGroupSpecs"]:
        labels = {**cluster, "ray.io/node-type": "worker", "ray.io/group": group["groupName"]}
        yield _pod(f"{name} {group['groupName']}", namespace, group["template"], **labels)


def flow_run_job(config_map: dict[str, Any]) -> dict[str, Any]:
    """The job that Prefect's worker creates for a flow run, with the default values of the pool."""
    template = json.loads(config_map["data"]["flow-run.json"])
    values = {name: of["default"] for name, of in template["variables"]["properties"].items() if "default" in of}
    values |= {"image": "registry.example.org/vitline-flows:0.1.0", "namespace": namespace_of(config_map)}
    values |= {"name": "night", "labels": {}, "command": ["prefect", "flow-run", "execute"]}
    job: dict[str, Any] = filled(template["job_configuration"]["job_manifest"], values)
    inner = job["spec"]["template"]["spec"]
    del inner["parallelism"], inner["completions"]  # Prefect demands them there, where Kubernetes ignores them
    return job


def filled(template: Any, values: dict[str, Any]) -> Any:
    """A template of Prefect with its variables replaced."""
    if isinstance(template, dict):
        return {name: filled(each, values) for name, each in template.items()}
    if isinstance(template, list):
        return [filled(each, values) for each in template]
    if isinstance(template, str) and (whole := re.fullmatch(r"{{ (\w+) }}", template)):
        return values[whole[1]]
    return (
        re.sub(r"{{ (\w+) }}", lambda found: str(values[found[1]]), template) if isinstance(template, str) else template
    )
