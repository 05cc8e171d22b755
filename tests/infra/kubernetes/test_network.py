"""Who reaches whom under the network policies, worked out from the manifests. A cluster keeps to them only if its network plug-in does."""

import pytest

from .manifests import SETS, Pod, namespace_of, objects, of_kind, pods, selects

OUTSIDE = Pod("a service outside", "", {}, {"containers": []})
NAMES = Pod("kube-dns", "kube-system", {"k8s-app": "kube-dns"}, {"containers": []})
OPERATOR = Pod("operator", "kuberay-system", {"app.kubernetes.io/name": "kuberay-operator"}, {"containers": []})
PROMETHEUS = Pod("prometheus", "monitoring", {}, {"containers": []})
STRANGER = Pod("stranger", "elsewhere", {"vitline.prefect-client": "yes", "vitline.ray": "yes"}, {"containers": []})


class Network:
    """The policies and pods of one cluster."""

    def __init__(self, name):
        found = objects(name)
        self.policies, self.pods = of_kind(found, "NetworkPolicy"), pods(found)
        self.labels = {each["metadata"]["name"]: each["metadata"]["labels"] for each in of_kind(found, "Namespace")}

    def allows(self, source, target, port, protocol="TCP"):
        """Whether both ends allow a connection. Pods outside of vitline's namespaces have no policies."""
        return self._end("Egress", source, target, port, protocol) and self._end(
            "Ingress", target, source, port, protocol
        )

    def chosen(self, direction, pod):
        """The policies of one direction that apply to a pod."""
        return [
            policy["spec"]
            for policy in self.policies
            if namespace_of(policy) == pod.namespace
            and direction in policy["spec"]["policyTypes"]
            and selects(policy["spec"]["podSelector"], pod.labels)
        ]

    def _end(self, direction, here, there, port, protocol):
        policies = self.chosen(direction, here)
        rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
        peers = "to" if direction == "Egress" else "from"
        return not policies or any(
            ("ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"])
            and (peers not in rule or any(self.is_peer(peer, here, there) for peer in rule[peers]))
            for rule in rules
        )

    def is_peer(self, peer, here, there):
        if "ipBlock" in peer or there is OUTSIDE:
            return False
        labels = {**self.labels.get(there.namespace, {}), "kubernetes.io/metadata.name": there.namespace}
        near = (
            selects(peer["namespaceSelector"], labels)
            if "namespaceSelector" in peer
            else here.namespace == there.namespace
        )
        return near and selects(peer.get("podSelector", {}), there.labels)

    def named(self, name, namespace="vitline"):
        (pod,) = (pod for pod in self.pods if (pod.name, pod.namespace) == (name, namespace))
        return pod


@pytest.fixture(params=SETS)
def network(request):
    return Network(request.param)


def test_every_namespace_denies_what_no_rule_allows_and_every_rule_has_pods(network):
    for pod in network.pods:
        assert network.chosen("Ingress", pod)
        assert network.chosen("Egress", pod)
        assert network.allows(pod, NAMES, 53, "UDP")
        assert not network.allows(pod, OUTSIDE, 22)
        assert not network.allows(STRANGER, pod, next(iter(pod.ports.values()), 80))
    for policy in network.policies:
        assert any(
            policy["spec"] in network.chosen(way, pod) for way in policy["spec"]["policyTypes"] for pod in network.pods
        )
        for way, peers in (("ingress", "from"), ("egress", "to")):
            for peer in [peer for rule in policy["spec"].get(way, []) for peer in rule.get(peers, [])]:
                here = Pod("", namespace_of(policy), {}, {"containers": []})
                assert any(
                    network.is_peer(peer, here, there) for there in [*network.pods, NAMES, OPERATOR, PROMETHEUS]
                ), peer


def team(network):
    return "vitline" if "birds" not in network.labels else "birds"


def test_what_has_to_connect_can(network):
    here = team(network)
    prefect, mlflow = network.named("prefect"), network.named("mlflow")
    head, cpu = network.named("vitline head", here), network.named("vitline cpu", here)
    worker, run, sender = (network.named(name, here) for name in ("prefect-worker", "flow-run", "sender"))
    for source, target, port in (
        (worker, prefect, 4200),
        (run, prefect, 4200),
        (run, mlflow, 5000),
        (sender, mlflow, 5000),
        (PROMETHEUS, network.named("metrics", here), 9464),
        (PROMETHEUS, prefect, 4200),
        (PROMETHEUS, mlflow, 5000),
        (PROMETHEUS, cpu, 8080),
        (run, head, 8265),
        (OPERATOR, head, 8265),
        (head, cpu, 10005),
        (cpu, head, 6379),
        (cpu, cpu, 29500),
        (head, OUTSIDE, 443),
        (cpu, OUTSIDE, 443),
        (run, OUTSIDE, 443),
        (sender, OUTSIDE, 443),
        (mlflow, OUTSIDE, 443),
        (worker, OUTSIDE, 6443),
        (head, OUTSIDE, 6443),
    ):
        assert network.allows(source, target, port), f"{source.name} -> {target.name}:{port}"


def test_what_must_not_connect_cannot(network):
    here = team(network)
    prefect, mlflow = network.named("prefect"), network.named("mlflow")
    head, cpu = network.named("vitline head", here), network.named("vitline cpu", here)
    worker, run, sender = (network.named(name, here) for name in ("prefect-worker", "flow-run", "sender"))
    for source, target, port in (
        (PROMETHEUS, head, 8265),
        (cpu, prefect, 4200),
        (cpu, mlflow, 5000),
        (sender, prefect, 4200),
        (sender, head, 8265),
        (worker, head, 8265),
        (run, head, 6379),
        (run, cpu, 10005),
        (run, OUTSIDE, 6443),
        (cpu, OUTSIDE, 6443),
        (prefect, head, 8265),
        (prefect, OUTSIDE, 443),
    ):
        assert not network.allows(source, target, port), f"{source.name} -> {target.name}:{port}"


def test_databases_of_the_try_out_are_open_to_their_clients_only():
    network = Network("small")
    own = {"postgres": (5432, {"prefect", "mlflow"}), "redis": (6379, {"vitline head", "vitline redis-cleanup"})}
    ray = {"vitline head", "vitline redis-cleanup", "vitline cpu"}
    own["store"] = (8333, ray | {"mlflow", "flow-run", "sender", "metrics"})
    for name, (port, clients) in own.items():
        target = network.named(name)
        assert {pod.name for pod in network.pods if network.allows(pod, target, port)} - {name} == clients


def test_databases_elsewhere_are_reached_where_they_are_not_in_the_cluster():
    network = Network("gpu")
    assert network.allows(network.named("prefect"), OUTSIDE, 5432)
    assert network.allows(network.named("mlflow"), OUTSIDE, 5432)
    assert network.allows(network.named("vitline head"), OUTSIDE, 6379)


def test_teams_reach_the_shared_servers_and_not_each_other():
    network = Network("shared")
    for pod in network.pods:
        for other in network.pods:
            if {pod.namespace, other.namespace} == {"birds", "plants"}:
                assert not any(network.allows(pod, other, port) for port in (6379, 8265, 10005))
    assert network.allows(network.named("flow-run", "plants"), network.named("prefect"), 4200)
