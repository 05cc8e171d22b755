"""The flows in a real Prefect: what Prefect refuses, what the flows refuse, and how they end."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from vitline.flows.nights.night_record import read_night
from vitline.flows.on_prefect.deployments import DEMO as DEMO_REQUEST
from vitline.flows.on_prefect.worker import refusal
from vitline.infra.night import night_at
from vitline.infra.ray_jobs import RayJobs
from vitline.infra.storage import open_store

DEMO = "pretrain-then-transfer/demo"
OURS = ("runs/", "pipelines/", "leases/", "corpora/", "models/")


@pytest.mark.parametrize(
    ("deployment", "request_", "says"),
    [
        (DEMO, {"seed": "three"}, "'request.seed'. Failure reason: 'three' is not of type 'integer'"),
        (DEMO, {"seed": -1}, "'request.seed'. Failure reason: -1 is less than the minimum of 0"),
        (DEMO, {"train_images": -5}, "'request.train_images'. Failure reason: -5 is less than the minimum of 1"),
        (DEMO, {"train_images": 1.5}, "'request.train_images'. Failure reason: 1.5 is not valid"),
        (DEMO, {"recipe": "vit-g"}, "'request.recipe'. Failure reason: 'vit-g' is not one of ['icons', 'digits'"),
        (DEMO, {"tasks": []}, "'request.tasks'. Failure reason: [] should be non-empty"),
        (DEMO, {"name": "Big Name"}, "'request.name'. Failure reason: 'Big Name' does not match"),
        (DEMO, {"name": 41 * "x"}, "'request.name'. Failure reason: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' is too long"),
        (DEMO, {"overrides": 3}, "'request.overrides'. Failure reason: 3 is not of type 'object'"),
        (DEMO, {"seeed": 1}, "'request'. Failure reason: Additional properties are not allowed ('seeed' was unexpected)"),
        ("prepare-corpus/default", {"kind": "folder"}, "'request.kind'. Failure reason: 'folder' is not one of ['class_folders'"),
        ("prepare-corpus/default", {"val_fraction": 1}, "'request.val_fraction'. Failure reason: 1 is greater than or equal"),
        ("reconcile/default", {"quiet_minutes": -1}, "'request.quiet_minutes'. Failure reason: -1 is less than the minimum of 0"),
        ("pretrain/default", {"seed": 1}, "'request'. Failure reason: 'corpus' is a required property"),
    ],
)  # fmt: skip
def test_prefect_refuses_what_the_form_rules_out(flows, deployment, request_, says):
    answer = flows.post(deployment, {"request": request_})
    assert answer.status_code == 409
    assert says in answer.json()["detail"]


def test_the_page_explains_errors_of_optional_fields(flows):
    found = flows.api.get(f"/deployments/name/{DEMO}").raise_for_status().json()

    def shown(**changes):
        """The errors that the page shows below the fields of the form."""
        values = {"request": found["parameters"]["request"] | changes}
        body = {"schema": found["parameter_openapi_schema"], "values": values}
        (answer,) = flows.api.post("/ui/schemas/validate", json=body).raise_for_status().json()["errors"] or [None]
        return answer and {field["property"]: field["errors"] for field in answer["errors"]}

    assert shown(train_images=None, deadline_hours=None) is None
    assert shown(train_images=-5, num_workers=0) == {
        "train_images": ["-5 is less than the minimum of 1"],
        "num_workers": ["0 is less than the minimum of 1"],
    }
    assert "`recipe.input.global_batch_size`" in found["description"]
    properties = found["parameter_openapi_schema"]["definitions"]["PipelineRequest"]["properties"]
    assert "lower case letters, digits and '-'" in properties["name"]["description"]


def test_prefect_refuses_a_misspelt_request(flows):
    answer = flows.post(DEMO, {"reqest": {}})
    assert answer.status_code == 409
    assert "'reqest' was unexpected" in answer.json()["detail"]


def left_in(settings):
    """The keys of the store and the jobs of Ray, to which a refused flow must not add."""
    keys = [key for prefix in OURS for key in open_store(settings.root).list(prefix)]
    return keys, {job.id for job in RayJobs(settings.ray_address).list()}


REFUSED = [
    ("pretrain_then_transfer_flow", {"overrides": {"recipe.optim.peak_lrr": 1}}, "Did you mean 'recipe.optim.peak_lr'?"),
    ("pretrain_then_transfer_flow", {"overrides": {"recipe.input.globl_batch_size": 1}}, "Did you mean 'recipe.input.global_batch_size'?"),
    ("pretrain_then_transfer_flow", {"overrides": {"protocol.totl_steps": 1}}, "Did you mean 'protocol.total_steps'?"),
    ("pretrain_then_transfer_flow", {"overrides": {"recipe.total_steps": "many"}}, "not 'many'"),
    ("pretrain_then_transfer_flow", {"overrides": {"recipe.optim.warmup_steps": 9999}}, "must be less than total_steps"),
    ("pretrain_then_transfer_flow", {"num_workers": 1000}, "num_workers=1000 is more than recipe.input.num_lanes"),
    ("pretrain_then_transfer_flow", {"train_images": 5}, "train_images=5 is less than one batch of 128 images"),
    ("pretrain_then_transfer_flow", {"corpus": "brids"}, "There is no corpus 'brids' below s3://vitline; available: "),
    ("pretrain_then_transfer_flow", {"sed": 1}, "sed: there is no such field; available: "),
    ("pretrain_then_transfer_flow", {"seed": -5}, "seed: must be at least 0, not -5"),
    ("pretrain_then_transfer_flow", {"tasks": ["s3://vitline/no"]}, "There is no corpus at s3://vitline/no"),
    ("prepare_corpus", {"preset": "digits", "source": "/tmp"}, "Both a preset, digits, and a source, /tmp, were given"),
    ("prepare_corpus", {"preset": None, "source": "/not/there", "name": "x"}, "The source /not/there does not exist"),
    ("prepare_corpus", {"preset": "digits", "decontaminate": ["pets"]}, "decontaminate is a field for a source of your own"),
    ("prepare_corpus", {"preset": "digits", "overrides": {"recipe.decontaminate": ["pets"]}}, "There is no corpus 'pets' below"),
    ("pretrain_flow", {"corpus": "brids", "overrides": {"recipe": "os:abort"}}, "Python code of 'os', which forms may not import"),
    ("pretrain_then_transfer_flow", {"overrides": {"recipe": "/no/birds.yaml"}}, "There is no recipe '/no/birds.yaml'"),
    ("pretrain_flow", {"corpus": "brids"}, "There is no corpus 'brids'"),
    ("finetune", {"model": "no-such", "corpus": "digits-0-to-4"}, "'no-such' is not a published model"),
    ("evaluate", {"model": "m", "overrides": {"protocol": "os:abort"}}, "The protocol 'os:abort' is Python code of 'os', which forms may"),
    ("evaluate", {"model": "no-such", "tasks": ["digits-5-to-9"]}, "'no-such' is not a published model"),
]  # fmt: skip


def test_a_flow_refuses_other_errors_in_one_sentence_before_it_starts_anything(in_stack):
    from vitline.flows.on_prefect import flows

    before = left_in(in_stack)
    for flow, request_, says in REFUSED:
        state = getattr(flows, flow)(request_, return_state=True)
        assert (state.type, state.name) == ("FAILED", "Failed")
        assert says in state.message
        assert "\n" not in state.message
        assert len(state.message) < 400
        early = refusal(getattr(flows, flow).name, {"request": request_}, {})
        assert early.message == state.message  # the worker gives the same message as the flow
    assert left_in(in_stack) == before


def test_a_refused_run_of_a_deployment_gives_the_reason_without_a_traceback(flows):
    run = flows.start("pretrain-then-transfer/tiny", seed=3, overrides={"recipe.optim.peak_lrr": 1})
    ended = flows.wait(run)
    assert ended["state_name"] == "Failed"
    assert re.fullmatch(r"pretrain-then-transfer-s3-\d{4}-\d{6}", ended["name"])
    assert ended["infrastructure_pid"] is None  # no process was started for it
    assert "no field 'recipe.optim.peak_lrr'" in ended["state"]["message"]
    assert not [line for line in flows.lines(run) if "Traceback" in line or "exception" in line]
    assert flows.parts(run) == []


def test_a_run_with_its_own_store_is_checked_by_the_flow_itself(flows, tmp_path):
    """Its job variables name another store than that of the worker, so the worker must not refuse it."""
    found = flows.api.get("/deployments/name/pretrain/default").json()
    body = {"parameters": {"request": {"corpus": "brids"}}, "job_variables": {"env": {"VITLINE_ROOT": str(tmp_path)}}}
    run = flows.api.post(f"/deployments/{found['id']}/create_flow_run", json=body).raise_for_status().json()["id"]
    ended = flows.wait(run)
    assert f"There is no corpus 'brids' below {tmp_path}" in ended["state"]["message"]
    assert ended["infrastructure_pid"]


def test_the_form_of_the_demo_is_filled_in_and_the_nightly_schedule_is_paused_in_utc(flows):
    demo = flows.api.get(f"/deployments/name/{DEMO}").json()
    assert demo["parameters"] == {"request": DEMO_REQUEST}
    nightly = flows.api.get("/deployments/name/pretrain-then-transfer/nightly").json()
    (schedule,) = nightly["schedules"]
    assert schedule["schedule"] | {"cron": "0 2 * * *", "timezone": "UTC"} == schedule["schedule"]
    assert schedule["active"] is False
    request = nightly["parameters"]["request"]
    assert request["train_images"] > 0
    assert request["deadline_hours"] + request["max_late_hours"] < 24


class TestNights:
    """Runs that a schedule has started. A test cannot start these in Prefect, so it patches the flow run."""

    @pytest.fixture
    def scheduled(self, monkeypatch, flows):
        """scheduled(due): the flow of this process is a nightly run that was due then."""
        from vitline.flows.on_prefect import flow_run

        find = flow_run.FlowRun.current

        def make(due):
            def current():
                this = find()
                return flow_run.FlowRun(this.id, "pretrain-then-transfer/nightly", True, due, {})

            monkeypatch.setattr(flow_run.FlowRun, "current", staticmethod(current))

        return make

    def run(self, **request):
        from vitline.flows.on_prefect import flows

        return flows.pretrain_then_transfer_flow(request, return_state=True)

    def test_a_late_one_is_skipped_with_the_reason(self, in_stack, scheduled):
        due = datetime.now(UTC) - timedelta(hours=5)
        scheduled(due)
        before = left_in(in_stack)
        state = self.run(max_late_hours=3)
        assert (state.type, state.name) == ("COMPLETED", "Skipped")
        assert " 5 h ago; max_late_hours is 3." in state.message
        assert left_in(in_stack) == before
        night = read_night(open_store(in_stack.root), "icons", night_at(due))
        assert (night.outcome, night.pipeline) == ("late", None)
        assert night.sentence.startswith("Not compared: the night was late. due ")

    def test_a_schedule_chooses_no_night_of_its_own(self, in_stack, scheduled):
        scheduled(datetime.now(UTC))
        state = self.run(corpus="digits-0-to-4", recipe="digits", overrides={"nights.night": "now"})
        assert state.type == "FAILED"
        assert "nights.night='now' is for runs that a person starts" in state.message

    def test_one_never_overlaps_another_or_its_jobs(self, in_stack, scheduled):
        from vitline.flows.on_prefect.flow_run import FlowRun
        from vitline.flows.on_prefect.flows import one_at_a_time
        from vitline.flows.runs.services import open_services
        from vitline.flows.runs.stage import Skipped

        now = datetime.now(UTC)
        night = FlowRun(None, "pretrain-then-transfer/nightly", True, now, {})
        by_hand = FlowRun(None, "pretrain-then-transfer/nightly", False, now, {})
        scheduled(now)
        with open_services(in_stack) as services:
            with one_at_a_time(services, night), one_at_a_time(services, by_hand):
                state = self.run(corpus="digits-0-to-4", tasks=["digits-5-to-9"], recipe="digits")
                assert (state.type, state.name) == ("COMPLETED", "Skipped")
                assert re.fullmatch(r"the night that began at \d\d:\d\d is still running: \S+", state.message)
                skipped = read_night(open_store(in_stack.root), "icons", night_at(now))
                assert skipped.sentence == f"Skipped: {state.message}"
            job = f"sleep-{now:%H%M%S%f}"
            jobs = services.cluster.jobs
            jobs.submit(job, ["sleep", "600"], env={}, metadata={"deployment": "pretrain-then-transfer/nightly"})
            try:
                with pytest.raises(Skipped, match=f"job {job} of a night that began at .* is still running: http"):  # noqa: SIM117
                    with one_at_a_time(services, night):
                        pass
            finally:
                jobs.stop(job, wait_s=240)
            with one_at_a_time(services, night):
                pass
