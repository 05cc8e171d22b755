"""The bucket policies of infra/buckets on a SeaweedFS that enforces them: each role does its work and is refused what is not."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import boto3
import pytest

from vitline.data_prep.find_corpus import Corpora
from vitline.flows.forms.evaluation_plan import resolve_evaluate
from vitline.flows.forms.forms import EvaluateRequest
from vitline.flows.ops.garbage import FOLDERS
from vitline.flows.ops.service_checks import check_store
from vitline.flows.plans.evaluation_spec import evaluation_spec
from vitline.flows.to_mlflow import outbox
from vitline.flows.to_mlflow.outbox import OutboxEntry
from vitline.flows.to_mlflow.send import work
from vitline.infra.local import seaweed
from vitline.infra.local.processes import free_ports, tail
from vitline.infra.local.services import programs
from vitline.infra.local.stack_config import BUCKET, prepare_stack_config, seaweed_program
from vitline.infra.runs.run_state import read_state
from vitline.infra.settings import Settings
from vitline.infra.storage import StoreRefused, open_store
from vitline.infra.stores import s3_store
from vitline.vit.evaluation.evaluate import next_trials, plan_task_sweeps
from vitline.vit.evaluation.run_trial import ensure_trial
from vitline.vit.published.models import load_model

from ...eventually import eventually
from ...pictures import noise
from ...trainings import finish, tiny_config
from ...vit.unleased import Unleased

POLICIES = Path(__file__).parents[3] / "infra" / "buckets"
PREFIX = "teams/birds"
ROOT = f"s3://{BUCKET}/{PREFIX}"
ROLES = {name: ("reader", name) for name in ("preparation", "training", "flows")} | {"reader": ("reader",)}
SHORT = {"protocol.total_steps": [2], "protocol.warmup_steps": 1, "protocol.learning_rates": [0.1]}


def policy(name):
    """A file of infra/buckets with the bucket and prefix of this test."""
    return (POLICIES / f"{name}.json").read_text().replace("BUCKET", BUCKET).replace("PREFIX", PREFIX)


def test_policies_name_only_what_vitline_has_below_a_root():
    for name in ROLES:
        below = set(re.findall(r'/PREFIX/([^/"]+)', (POLICIES / f"{name}.json").read_text()))
        assert below <= {"*", "probe-*", *FOLDERS}, name


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A client of the S3 service as its administrator, and the keys of a user of each role."""
    if seaweed_program() is None:
        pytest.skip("SeaweedFS is not installed (its wheel is for Linux on x86-64)")
    folder = tmp_path_factory.mktemp("store")
    config, _ = prepare_stack_config(folder, {"s3": free_ports(1)[0]})
    program = programs()["s3"]
    program.before(config)
    config.folder.mkdir(mode=0o700)
    command, environment = program.command(config), program.full_environment(config)
    began = time.time()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([*command, "-s3.iam.readOnly=false"], env=environment, stdout=log, stderr=log)
    try:
        eventually(lambda: process.poll() is not None or not program.check(config, began), awaited="SeaweedFS")
        assert process.poll() is None, tail(folder / "log", 20)
        yield Administrator(config)
    finally:
        process.kill()  # its data end, too
        process.wait()
        seaweed.remove_sockets(config)
        shutil.rmtree(config.folder)


class Administrator:
    def __init__(self, config):
        self.endpoint = config.url("s3")
        self.s3 = self._client("s3", config.credentials())
        iam = self._client("iam", config.credentials())
        arns = {
            name: iam.create_policy(PolicyName=name, PolicyDocument=policy(name))["Policy"]["Arn"] for name in ROLES
        }
        self.keys = {}
        for role, names in ROLES.items():
            iam.create_user(UserName=role)
            for name in names:
                iam.attach_user_policy(UserName=role, PolicyArn=arns[name])
            key = iam.create_access_key(UserName=role)["AccessKey"]
            self.keys[role] = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
        for role in ROLES:  # users and policies take effect a moment after they were made
            eventually(lambda role=role: self._may_list(role), awaited=f"the policies of {role}", every_s=0.1)

    def _client(self, service, keys):
        names = {"aws_access_key_id": keys["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": keys["AWS_SECRET_ACCESS_KEY"]}
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1", **names)

    def _may_list(self, role):
        client = self._client("s3", self.keys[role])
        with contextlib.suppress(client.exceptions.ClientError):
            return client.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/")


@pytest.fixture
def acting(store, monkeypatch):
    """acting(role): from now on this process and its children have the keys of the role."""
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("VITLINE_ROOT", ROOT)

    def act(role):
        for name, value in store.keys[role].items():
            monkeypatch.setenv(name, value)
        s3_store._filesystem.cache_clear()  # its clients keep their credentials
        return open_store(ROOT)

    yield act
    s3_store._filesystem.cache_clear()


@pytest.fixture
def pictures(tmp_path):
    for number in range(60):
        file = tmp_path / "pictures" / ("crow", "jay")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(noise(number, (16, 16)))
    return tmp_path / "pictures"


@pytest.mark.long
@pytest.mark.servers
def test_each_role_does_its_work(acting, vitline, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    acting("preparation")
    code, _, err = vitline("data", "prepare", "--source", pictures, "--name", "birds")
    assert code == 0, err

    root = acting("training")
    corpus = Corpora(root).find("birds").store.uri
    run = finish(tiny_config("tiny", corpus, steps=6, save_every_steps=1), ROOT)
    model = read_state(run)["model"]
    request = EvaluateRequest(model=model, tasks=(corpus,), overrides=SHORT, keep_models=True)
    (task_sweep,) = plan_task_sweeps(evaluation_spec("scores", resolve_evaluate(ROOT, request)[0], ROOT))
    trials = root.child("trials")
    for trial in next_trials(task_sweep, trials)[0]:
        ensure_trial(Unleased(trials, 1), trials, trial)
    assert next_trials(task_sweep, trials)[1].stored_first(root, task_sweep.score_key)

    acting("reader")
    code, out, err = vitline("runs", "ls", "--json")
    assert code == 0, err
    assert {"prepare-birds", "tiny"} == {row["run"].rpartition("-")[0] for row in json.loads(out)["runs"]}
    assert load_model(model).classes == ("crow", "jay")

    root = acting("flows")
    left = "doctor/1000000000000000000-killed"
    root.write(left, b"")
    code, _, err = vitline("ops", "collect-garbage", "--older-than-days", "1", "--delete")
    assert code == 0, err
    assert not root.exists(left)


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize("role", ["preparation", "training", "flows"])
def test_who_makes_runs_may_send_them(acting, role, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    root, entry = acting(role), OutboxEntry("run", role)
    outbox.put(root, entry)
    work(root, "http://127.0.0.1:9", once=True, has_parent=lambda: True, alive=lambda: None)
    mark = outbox.read(root, entry)
    assert "does not answer" in mark.why
    outbox.clear(root, entry, mark.nonce)
    assert outbox.read(root, entry) is None


@pytest.mark.slow
@pytest.mark.servers
def test_the_doctor_accepts_the_keys_of_roles_that_write(acting):
    for role in ("preparation", "training", "flows"):
        acting(role)
        assert check_store(Settings()).ok, role
    acting("reader")
    check = check_store(Settings())
    assert not check.ok
    assert "grant the key s3:PutObject" in check.advice


WRITES = {
    "reader": ("runs/tiny/stop.json", "doctor/1", "ops/records.json.gz"),
    "preparation": ("models/tiny/1/config.json", "scores/birds/a.json", "champions/nightly.json", "leases/nightly/lease.json"),
    "training": ("corpora/birds/1/manifest.json", "sources/icons", "nights/nightly/1.json", "pipelines/a.json"),
    "flows": (),
}  # fmt: skip
DELETIONS = {
    "reader": ("runs/tiny/stop.json",),
    "preparation": ("models/tiny/1/config.json", "corpora/birds/1/manifest.json", "runs/tiny/state.json"),
    "training": ("models/tiny/1/config.json", "corpora/birds/1/manifest.json", "runs/tiny/state.json", "trials/a.json"),
    "flows": (),
}


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_must_not_do_is_refused(acting, store, role):
    kept = {*WRITES[role], *DELETIONS[role], "corpora/birds/1/manifest.json"}
    for key in kept:
        store.s3.put_object(Bucket=BUCKET, Key=f"{PREFIX}/{key}", Body=b"kept")
    store.s3.put_object(Bucket=BUCKET, Key="teams/bats/runs/a", Body=b"theirs")
    root, theirs = acting(role), open_store(f"s3://{BUCKET}/teams/bats")

    def refused(act, *arguments):
        with pytest.raises(StoreRefused, match=r"Grant this key the policy of its role \(infra/buckets\)"):
            act(*arguments)

    for key in WRITES[role]:
        refused(root.write, key, b"changed")
        refused(root.create, key, b"changed")
        refused(root.compare_and_swap, key, b"changed", root.read_tagged(key)[1])
        with pytest.raises(StoreRefused), root.writer(key) as file:
            file.write(bytes(33 << 20))  # more than one part
    for key in DELETIONS[role]:
        refused(root.delete, key)
    refused(theirs.read, "runs/a")
    refused(theirs.list)
    refused(theirs.write, "runs/a", b"changed")
    assert {key: root.read(key) for key in kept} == dict.fromkeys(kept, b"kept")
    with pytest.raises(FileNotFoundError):  # and not StoreRefused
        root.read("runs/none")
    for key in kept:
        store.s3.delete_object(Bucket=BUCKET, Key=f"{PREFIX}/{key}")


@pytest.mark.slow
@pytest.mark.servers
def test_the_service_takes_the_lifecycle_rules(store):
    rules = json.loads(policy("lifecycle"))
    store.s3.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    assert store.s3.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"] == rules["Rules"]
