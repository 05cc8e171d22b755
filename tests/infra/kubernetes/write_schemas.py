"""Writes schemas.json.gz: the schemas of the kinds that infra/kubernetes uses, without descriptions.

    python tests/infra/kubernetes/write_schemas.py CRDS

CRDS is a folder with the custom resource definitions of KubeRay (ray-operator/config/crd/bases) and Kueue (config/components/crd/bases),
as they are or gzipped. The schemas of Kubernetes' own kinds come from the package `kubernetes-validate`, which must be installed.
All three are under Apache-2.0. Unknown fields are refused, which an API server does only where it is asked to.
"""

import gzip
import importlib.resources
import json
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("schemas.json.gz")
KUBERNETES = "1.37.0"
CORE = (
    "configmap-v1", "namespace-v1", "service-v1", "serviceaccount-v1", "deployment-apps-v1", "statefulset-apps-v1", "job-batch-v1",
    "networkpolicy-networking-v1", "poddisruptionbudget-policy-v1", "role-rbac-v1", "rolebinding-rbac-v1",
)  # fmt: skip
_PROSE = {"description", "example", "externalDocs"}
_REFERENCE = "#/$defs/"


def closed(schema: Any) -> Any:
    """A schema without prose that refuses fields which it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "$ref":
            kept[name] = f"{_REFERENCE}{value.rpartition(_REFERENCE)[2]}"
        elif name in ("properties", "$defs", "patternProperties"):
            kept[name] = {each: closed(of) for each, of in value.items()}
        elif name not in _PROSE and not name.startswith("x-kubernetes-"):
            kept[name] = closed(value)
    if "properties" in kept and not schema.get("x-kubernetes-preserve-unknown-fields"):
        kept.setdefault("additionalProperties", False)
    return kept


def references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    found = set().union(*map(references, schema.values()))
    return found | ({schema["$ref"].removeprefix(_REFERENCE)} if "$ref" in schema else set())


def custom(folder: Path) -> dict[str, Any]:
    """The schemas of the custom kinds in a folder, in the version that is stored."""
    kinds = {}
    for path in sorted(folder.glob("*.yaml*")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        definition = yaml.safe_load(text)["spec"]
        (version,) = (version for version in definition["versions"] if version["storage"])
        schema = closed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
        kinds[f"{definition['group']}/{version['name']} {definition['names']['kind']}"] = schema
    return kinds


def core() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of Kubernetes' own kinds, and all definitions."""
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{KUBERNETES}-local"
    kinds = {}
    for name in CORE:
        schema = json.loads((folder / f"{name}.json").read_text())
        version, kind = (schema["properties"][each]["enum"][0] for each in ("apiVersion", "kind"))
        kinds[f"{version} {kind}"] = closed(schema)
    return kinds, closed(json.loads((folder / "_definitions.json").read_text()))["$defs"]


def main() -> None:
    kinds, known = core()
    kinds |= custom(Path(sys.argv[1]))
    used, waiting = dict[str, Any](), references(kinds)
    while waiting:
        name = waiting.pop()
        if name not in used:
            used[name] = known[name]
            waiting |= references(known[name])
    text = json.dumps({"kinds": kinds, "$defs": used}, sort_keys=True, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
