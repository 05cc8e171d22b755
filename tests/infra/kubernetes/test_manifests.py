"""The manifests render, fit the schemas of their kinds, and keep the rules of infra/kubernetes/README.md. None of them is applied here."""

import gzip
import json
import os
import re
import shlex
import textwrap
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import yaml

from .manifests import FOLDER, SETS, flow_run_job, namespace_of, objects, of_kind, pods, rendered, selects

SCHEMAS = json.loads(gzip.decompress(Path(__file__).with_name("schemas.json.gz").read_bytes()))
TABLE = (FOLDER / "README.md").read_text().partition("## Secrets")[2].partition("## ")[0]
DOCUMENTED = {
    name: set(re.findall(r"`([^`]+)`", keys))
    for name, keys in re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", TABLE, re.MULTILINE)
}
"""The keys of each secret that the README asks for."""
GUIDE = (FOLDER.parents[1] / "docs" / "guides" / "kubernetes.md").read_text()
every_set = pytest.mark.parametrize("found", SETS, indirect=True)


@pytest.fixture
def found(request):
    return objects(request.param)


@every_set
def test_every_object_fits_the_schema_of_its_kind(found):
    jobs = [flow_run_job(each) for each in of_kind(found, "ConfigMap") if "flow-run.json" in each["data"]]
    assert jobs
    problems = []
    for each in [*found, *jobs]:
        schema = SCHEMAS["kinds"][f"{each['apiVersion']} {each['kind']}"]
        check = jsonschema.Draft202012Validator({**schema, "$defs": SCHEMAS["$defs"]})
        problems += [
            f"{each['kind']} {each['metadata']}: {error.json_path}: {error.message}"
            for error in check.iter_errors(each)
        ]
    assert not problems


def test_the_schemas_refuse_a_misspelt_field_and_a_wrong_type():
    (cluster,) = of_kind(objects("small"), "RayCluster")
    check = jsonschema.Draft202012Validator({**SCHEMAS["kinds"]["ray.io/v1 RayCluster"], "$defs": SCHEMAS["$defs"]})
    wrong = json.loads(json.dumps(cluster).replace("securityContext", "securityContxt"))
    assert not check.is_valid(wrong)
    assert not check.is_valid(cluster | {"spec": cluster["spec"] | {"enableInTreeAutoscaling": "yes"}})


@every_set
def test_every_pod_is_restricted(found):
    """As the Pod Security Standard `restricted` demands, with a root file system that is read-only, and with requests and limits."""
    problems = []
    for pod in pods(found):
        context = pod.spec["securityContext"]
        if not (
            context["runAsNonRoot"]
            and context["runAsUser"] > 0
            and context["seccompProfile"]["type"] == "RuntimeDefault"
        ):
            problems.append(f"{pod.name}: {context}")
        if pod.spec.get("automountServiceAccountToken") is not (pod.name == "prefect-worker"):
            problems.append(f"{pod.name} gets a token of the API of Kubernetes")
        if any({"hostPath"} & volume.keys() for volume in pod.spec["volumes"]) or pod.spec.get("hostNetwork"):
            problems.append(f"{pod.name} uses the host")
        for container in pod.containers:
            own, resources = container.get("securityContext", {}), container.get("resources", {})
            safe = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if own != safe:
                problems.append(f"{pod.name}/{container['name']}: {own}")
            if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get(
                "limits", {}
            ):
                problems.append(f"{pod.name}/{container['name']}: {resources}")
            if "/tmp" not in (mount["mountPath"] for mount in container["volumeMounts"]):
                problems.append(f"{pod.name}/{container['name']} cannot write to /tmp")
    assert not problems


@every_set
def test_every_image_has_a_registry_and_a_version(found):
    images = {container["image"] for pod in pods(found) for container in pod.containers}
    assert all(re.fullmatch(r"[\w.-]+\.\w+/[\w./-]+:\d[\w.-]*", image) for image in images), images


@every_set
def test_flow_runs_use_the_image_that_registers_the_deployments(found):
    for worker in [pod for pod in pods(found) if pod.name == "prefect-worker"]:
        _, deployments = worker.spec["initContainers"]
        given = {each["name"]: each.get("value") for each in deployments["env"]}
        assert given["FLOWS_IMAGE"] == deployments["image"]


def test_a_private_authority_reaches_every_client_as_the_guide_has_it(tmp_path):
    text = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    (tmp_path / "authority.pem").write_text(text)
    (generator,) = re.findall(r" +configMapGenerator:\n.*VITLINE_CA=authority.pem\]\n", GUIDE, re.DOTALL)
    overlay = {"namespace": "vitline", "generatorOptions": {"disableNameSuffixHash": True}}
    overlay |= {"resources": [os.path.relpath(FOLDER / "overlays" / "small", tmp_path)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.dump(overlay) + textwrap.dedent(generator))
    found = rendered(str(tmp_path))
    (store,) = [each for each in of_kind(found, "ConfigMap") if each["metadata"]["name"] == "vitline-store"]
    assert store["data"].items() >= {"VITLINE_CA": text, "VITLINE_ROOT": "s3://vitline/store"}.items()
    without = {
        container["name"]
        for pod in pods(found)
        for container in pod.containers
        if "/vitline-" in container["image"]
        and {"configMapRef": {"name": "vitline-store"}} not in container.get("envFrom", [])
    }
    assert without == {
        "certificate",
        "autoscaler",
        "prefect",
        "mlflow",
    }  # servers, and what only makes or asks inside the cluster


@every_set
def test_what_pods_refer_to_exists_and_every_secret_is_documented(found):
    known = {(each["kind"], namespace_of(each), each["metadata"]["name"]) for each in found}
    missing, secrets = [], {}
    for pod in pods(found):
        if (
            "serviceAccountName" in pod.spec
            and ("ServiceAccount", pod.namespace, pod.spec["serviceAccountName"]) not in known
        ):
            missing.append(f"{pod.name}: {pod.spec['serviceAccountName']}")
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        volumes |= {"data": {}} if pod.name in ("postgres", "redis", "store") else {}  # of a claim
        configs = [volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume]
        for volume in volumes.values():
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"].get("items", [])}
                secrets.setdefault(volume["secret"]["secretName"], set()).update(keys)
        for container in pod.containers:
            missing += [
                f"{pod.name}: volume {mount['name']}"
                for mount in container["volumeMounts"]
                if mount["name"] not in volumes
            ]
            for source in container.get("envFrom", []):
                if "configMapRef" in source:
                    configs.append(source["configMapRef"]["name"])
                else:
                    secrets.setdefault(source["secretRef"]["name"], set())
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    secrets.setdefault(reference["name"], set()).add(reference["key"])
        missing += [f"{pod.name}: {name}" for name in configs if ("ConfigMap", pod.namespace, name) not in known]
    for ray in of_kind(found, "RayCluster"):
        secrets[ray["spec"]["authOptions"]["secretName"]].add("auth_token")
        reference = ray["spec"]["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
        secrets.setdefault(reference["name"], set()).add(reference["key"])
    assert not missing
    assert not {f"{name}/{key}" for name, keys in secrets.items() for key in keys - DOCUMENTED.get(name, set())}
    assert set(DOCUMENTED) - {"postgres"} <= set(secrets)  # which only the try-out has


@every_set
def test_selectors_of_services_and_budgets_match_pods_and_their_ports(found):
    for each in of_kind(found, "Service", "PodDisruptionBudget"):
        selector = each["spec"]["selector"]
        selector = selector if each["kind"] == "PodDisruptionBudget" else {"matchLabels": selector}
        chosen = [pod for pod in pods(found) if pod.namespace == namespace_of(each) and selects(selector, pod.labels)]
        assert len(chosen) == 1, each
        for port in each["spec"].get("ports", []):
            assert port["targetPort"] in chosen[0].ports, each


@every_set
def test_ports_of_probes_exist_and_servers_have_probes(found):
    for pod in pods(found):
        for container in pod.containers:
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [
                container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container
            ]
            assert probes or not ports, f"{pod.name}/{container['name']} has no probe"
            for probe in probes:
                assert {probe[how]["port"] for how in ("httpGet", "tcpSocket") if how in probe} <= ports


@pytest.mark.parametrize("name", ["gpu", "shared"])
def test_queues_flavors_and_priorities_exist(name):
    found = objects(name)
    names = {(each["kind"], namespace_of(each), each["metadata"]["name"]) for each in found}
    flavors = {each["metadata"]["name"] for each in of_kind(found, "ResourceFlavor")}
    for flavor in of_kind(found, "ResourceFlavor"):
        topology = flavor.get("spec", {}).get("topologyName")
        assert topology is None or ("Topology", "", topology) in names
    for queue in of_kind(found, "ClusterQueue"):
        assert not namespace_of(queue)
        groups = queue["spec"]["resourceGroups"]
        assert {flavor["name"] for group in groups for flavor in group["flavors"]} <= flavors
        for group in groups:
            assert all(
                [of["name"] for of in flavor["resources"]] == group["coveredResources"] for flavor in group["flavors"]
            )
    for queue in of_kind(found, "LocalQueue"):
        assert ("ClusterQueue", "", queue["spec"]["clusterQueue"]) in names
    queued = [each for each in found if "kueue.x-k8s.io/queue-name" in each["metadata"].get("labels", {})]
    assert queued
    for each in queued:
        labels = each["metadata"]["labels"]
        assert ("LocalQueue", namespace_of(each), labels["kueue.x-k8s.io/queue-name"]) in names
        assert ("WorkloadPriorityClass", "", labels["kueue.x-k8s.io/priority-class"]) in names
        scales = each["spec"].get("enableInTreeAutoscaling", False)
        assert scales == (each["metadata"].get("annotations", {}).get("kueue.x-k8s.io/elastic-job") == "true")


@pytest.mark.parametrize("name", ["gpu", "shared"])
def test_a_queue_admits_all_nodes_to_which_its_ray_scales(name):
    """With what its cohort may lend it, which is only of flavors that it has itself."""
    found = objects(name)
    queue_of = {
        (namespace_of(each), each["metadata"]["name"]): each["spec"]["clusterQueue"]
        for each in of_kind(found, "LocalQueue")
    }
    queues = {each["metadata"]["name"]: each["spec"] for each in of_kind(found, "ClusterQueue")}
    scaling = [each for each in of_kind(found, "RayCluster") if each["spec"].get("enableInTreeAutoscaling")]
    assert scaling
    for each in scaling:
        wanted = Counter()
        for group in ({"maxReplicas": 1, **each["spec"]["headGroupSpec"]}, *each["spec"]["workerGroupSpecs"]):
            for container in group["template"]["spec"]["containers"]:
                requests = container["resources"]["requests"]
                wanted.update({of: group["maxReplicas"] * number(text) for of, text in requests.items()})
        own = queues[queue_of[namespace_of(each), each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]]]
        known, quota = {flavor["name"] for flavor in flavors_of(own)}, Counter()
        for queue in (queue for queue in queues.values() if queue["cohortName"] == own["cohortName"]):
            for flavor in (flavor for flavor in flavors_of(queue) if flavor["name"] in known):
                quota.update({of["name"]: number(of["nominalQuota"]) for of in flavor["resources"]})
        assert {of: (wanted[of], quota[of]) for of in wanted if wanted[of] > quota[of]} == {}


def flavors_of(queue):
    return [flavor for group in queue["resourceGroups"] for flavor in group["flavors"]]


def number(quantity):
    """Gibibytes, and anything else as it is."""
    return float(str(quantity).removesuffix("Gi"))


def test_teams_share_no_project_root_namespace_or_queue():
    found = objects("shared")
    settings = [each["data"] for each in of_kind(found, "ConfigMap") if each["metadata"]["name"] == "vitline-store"]
    assert len(settings) == 2
    for name in ("VITLINE_PROJECT", "VITLINE_ROOT"):
        assert len({each[name] for each in settings}) == 2
    assert len({each["spec"]["clusterQueue"] for each in of_kind(found, "LocalQueue")}) == 2


def test_entry_points_of_ray_jobs_are_commands_of_vitline():
    from vitline.flows.cli.main import all_commands

    jobs = of_kind(objects("gpu"), "RayJob")
    assert len(jobs) == 2
    for job in jobs:
        env, address, program, group, command, *arguments = shlex.split(job["spec"]["entrypoint"])
        assert (env, address, program) == ("env", "RAY_ADDRESS=http://127.0.0.1:8265", "vitline")
        all_commands().commands[group].commands[command].make_context(command, arguments)


@pytest.mark.parametrize(
    ("component", "annotation"),
    [("aws-identity", "eks.amazonaws.com/role-arn"), ("gke-identity", "iam.gke.io/gcp-service-account")],
)
def test_an_identity_goes_to_the_accounts_that_use_the_store(component, annotation, tmp_path):
    whole = {"resources": ["overlays/small"], "components": [f"components/{component}"]}
    whole = {what: [os.path.relpath(FOLDER / each, tmp_path) for each in of] for what, of in whole.items()}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(whole))
    accounts = of_kind(rendered(str(tmp_path)), "ServiceAccount")
    with_it = {each["metadata"]["name"] for each in accounts if annotation in each["metadata"].get("annotations", {})}
    assert with_it == {"mlflow", "ray-head", "ray-worker", "flow-run"}
