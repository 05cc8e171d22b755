"""infra/compose/compose.yaml keeps the rules of its README. No container is started here."""

import json
import re
import subprocess

import pytest
import yaml
from compose_spec import PyCompose

from .services import FOLDER, read

ROOT = FOLDER.parents[1]
SETTINGS = {"VITLINE_HOST": "gpu1.example.org"}
COMPOSED = read(SETTINGS)
SERVICES = COMPOSED["services"]
KEYS = {
    "build", "cap_drop", "command", "depends_on", "entrypoint", "environment", "healthcheck", "image", "init", "logging", "networks",
    "ports", "profiles", "read_only", "restart", "secrets", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "ulimits", "user",
    "volumes", "working_dir",
}  # fmt: skip
"""Those of a service in the Compose Specification that the file uses."""


def test_the_file_fits_the_compose_specification():
    """By the package compose-spec, which reads files as Compose does and refuses unknown fields."""
    assert PyCompose.from_json(json.dumps(COMPOSED)).service_names() == list(SERVICES)
    wrong = json.dumps(COMPOSED).replace("depends_on", "depend_on")
    with pytest.raises(ValueError, match="depend_on"):
        PyCompose.from_json(wrong)


def test_a_host_must_be_named():
    with pytest.raises(KeyError, match="VITLINE_HOST"):
        read({})


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_closed_and_watched(name):
    service = SERVICES[name]
    assert service.keys() <= KEYS
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].split(":")[0]) > 0
    assert not service.keys() & {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}
    assert service["restart"] in ("unless-stopped", "on-failure")
    if name == "deploy":  # which ends
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    mounted = [each.partition(":")[0] for each in service.get("tmpfs", [])]
    mounted += [volume.split(":")[-1] for volume in service.get("volumes", []) if not volume.endswith(":ro")]
    assert "/tmp" in mounted
    assert not [volume for volume in service.get("volumes", []) if volume.startswith("./") and volume[-3:] != ":ro"]


def test_versions_of_images_are_those_of_the_manifests():
    """And each is built here, or named with a version."""
    pinned = yaml.safe_load((ROOT / "infra/kubernetes/images/kustomization.yaml").read_text())["images"]
    versions = {image["name"]: image["newTag"] for image in pinned}
    base = re.search(r"BASE=\S*seaweedfs:(\S+)", (FOLDER / "s3.Containerfile").read_text())
    assert base[1] == versions["seaweedfs"]
    versions |= {"vitline-s3": versions["seaweedfs"], "nginx": "1.28.0"}
    for service in SERVICES.values():
        name, _, version = service["image"].rpartition("/")[2].partition(":")
        assert version == versions[name]
    built = {service["image"] for service in SERVICES.values() if "build" in service}
    assert {service["image"] for service in SERVICES.values() if service["image"].startswith("vitline-")} == built
    for build in (service["build"] for service in SERVICES.values() if "build" in service):
        assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_only_the_proxy_publishes_ports():
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["proxy"]
    published = {port.split(":")[1] for port in SERVICES["proxy"]["ports"]}
    servers = re.findall(r"listen (\d+) ssl;\s+set \$server ([\w-]+):", (FOLDER / "nginx.conf").read_text())
    assert {port for port, _ in servers} == published
    assert {name for _, name in servers} <= SERVICES.keys()


def test_dependencies_exist_and_are_waited_for():
    for service in SERVICES.values():
        for name, how in service.get("depends_on", {}).items():
            ends = name == "deploy"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy")
            assert SERVICES[name]["healthcheck"].get("disable", False) is ends
            assert how.get("required", True) is (name != "s3")  # which is left out with a bucket of one's own


def test_networks_and_volumes_exist_and_only_two_services_reach_the_database():
    assert {each for service in SERVICES.values() for each in service["networks"]} == COMPOSED["networks"].keys()
    reached = {name for name, service in SERVICES.items() if "database" in service["networks"]}
    assert reached == {"postgres", "prefect", "mlflow"}
    mounts = [each for service in SERVICES.values() for each in service.get("volumes", [])]
    volumes = {each.split(":")[0] for each in mounts if ":" in each}
    assert {each for each in volumes if not each.startswith("./")} == COMPOSED["volumes"].keys()
    assert all((FOLDER / each).is_file() for each in volumes if each.startswith("./"))


def test_secrets_come_from_files_and_each_service_has_those_that_it_reads():
    text = (FOLDER / "compose.yaml").read_text()
    for name, service in SERVICES.items():
        words = [*service.get("entrypoint", []), *service["command"], *service.get("environment", {}).values()]
        read_here = {word.rpartition("=")[2] for word in words if re.fullmatch(r"[A-Z_]+=\w+", word)}
        read_here |= {word.removeprefix("/run/secrets/") for word in words if word.startswith("/run/secrets/")}
        if name == "proxy":
            read_here = set(re.findall(r"/run/secrets/(\w+)", (FOLDER / "nginx.conf").read_text())) | {"authority"}
        assert set(service.get("secrets", [])) == read_here, name
        for variable in service.get("environment", {}):
            assert variable.endswith("_FILE") or not re.search("PASSWORD|SECRET|AUTH_STRING", variable), name
    assert not re.search(r"://\w+:[^/]*@", text)


def test_secrets_are_made_once_and_kept_private(tmp_path):
    script = tmp_path / "make-secrets.sh"
    script.write_text((FOLDER / "make-secrets.sh").read_text())

    def made(*arguments):
        return subprocess.run(["sh", script, *arguments], capture_output=True, text=True)

    assert made().returncode == 2
    first = made("gpu1.example.org")
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "secrets"
    assert folder.stat().st_mode & 0o777 == 0o700
    given = {each["file"] for each in COMPOSED["secrets"].values()}
    assert {f"./secrets/{path.name}" for path in folder.iterdir()} == given | {"./secrets/authority.key"}
    # Containers run as other users, and Compose mounts the files with the rights that they have.
    assert all((tmp_path / file).stat().st_mode & 0o004 for file in given)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(set(before.values())) == len(before)
    assert "VITLINE_HOST=gpu1.example.org\n" in (tmp_path / ".env").read_text()

    (tmp_path / ".env").write_text((tmp_path / ".env").read_text() + "RAY_WORKER_CPUS=7\n")
    assert made("10.1.2.3").returncode == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"proxy.crt", "proxy.key"}
    settings = (tmp_path / ".env").read_text()
    assert "RAY_WORKER_CPUS=7\n" in settings
    assert settings.count("VITLINE_HOST=") == 1
    shown = subprocess.run(
        ["openssl", "verify", "-CAfile", folder / "authority.crt", "-verify_ip", "10.1.2.3", folder / "proxy.crt"],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr


def test_neither_git_nor_an_image_gets_the_secrets():
    assert "infra/compose/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "infra/compose" in (ROOT / ".dockerignore").read_text().splitlines()
