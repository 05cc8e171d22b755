"""How RayJobs handles replies of the job server: of a scripted server, and in the last tests of the stack's Ray; more tests
with a real Ray are in local/test_ray_node.py."""

import importlib.metadata
import socket
import threading
import time
import uuid

import httpx
import pytest

from vitline.infra import ray_jobs
from vitline.infra.ray_jobs import JobLost, JobServerAway, RayJobs, checked_env

AWAY = ConnectionError("connection refused")
ERROR_500 = RuntimeError("Request failed with status code 500: Traceback ... no agent")
UNKNOWN = RuntimeError("Request failed with status code 404: Job a does not exist")
EXISTS = RuntimeError("Request failed with status code 500: ValueError: Job with submission_id a already exists")


def info(status, exit_code=None):
    return {"status": status, "driver_exit_code": exit_code, "message": "m", "metadata": None, "start_time": 1_500}


def test_the_message_of_a_failed_job_is_without_its_log(jobs_of):
    log = "\x1b[36m(pid=7)\x1b[0m line\n" * 99
    said = f"Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n{log}"
    jobs, _ = jobs_of(info("FAILED", 1) | {"message": said})
    assert jobs.find("a").message == "Job entrypoint command failed with exit code 1"


def test_a_job_has_the_node_labels_of_its_variables(jobs_of):
    """Also one that others submitted, whose value no setting would take."""
    env = {"env_vars": {"VITLINE_NODE_LABELS": "pool=birds,zone=a"}}
    odd = {"env_vars": {"VITLINE_NODE_LABELS": "birds"}}
    jobs, _ = jobs_of(*(info("RUNNING") | {"runtime_env": runtime} for runtime in (env, odd, None)))
    assert [jobs.find("a").node_labels for _ in range(3)] == [{"pool": "birds", "zone": "a"}, {}, {}]


@pytest.fixture
def jobs_of(monkeypatch):
    monkeypatch.setattr(ray_jobs.time, "sleep", lambda seconds: None)

    def make(*answers, away_s=60, root=None):
        """Each request gets the next answer; an exception is raised."""
        left, requests = list(answers), []

        def request(path, body):
            requests.append((path, body))
            if isinstance(answer := left.pop(0), Exception):
                raise answer
            return answer

        jobs = RayJobs("http://ray", away_s=away_s, root=root)
        monkeypatch.setattr(jobs, "_request", request)
        return jobs, requests

    return make


def test_submit_requests_no_resources_and_execs_the_command(jobs_of):
    jobs, requests = jobs_of({"submission_id": "a"})
    jobs.submit("a", ["python", "-c", "print('x y')"], {"VITLINE_X": "1"}, {"corpus": "c"})
    assert requests == [
        (
            "/api/jobs/",
            {
                "entrypoint": """exec python -c 'print('"'"'x y'"'"')'""",
                "submission_id": "a",
                "runtime_env": {"env_vars": {"PYTHONSAFEPATH": "1", "VITLINE_X": "1"}},
                "metadata": {"corpus": "c"},
            },
        )
    ]


def test_submit_succeeds_if_its_reply_is_lost(jobs_of):
    jobs, requests = jobs_of(AWAY, EXISTS, info("RUNNING") | {"metadata": {"root": "s3://ours"}})
    jobs.submit("a", ["true"], {}, {"root": "s3://ours"})
    assert len(requests) == 3


def test_a_job_of_another_root_is_not_taken_for_ours(jobs_of):
    """It is neither found nor followed nor stopped, and a submit under its id is an error."""
    theirs = info("RUNNING") | {"metadata": {"root": "s3://theirs"}, "submission_id": "a"}
    jobs, requests = jobs_of(EXISTS, theirs, theirs, theirs, theirs, [theirs], [theirs], root="s3://ours")
    with pytest.raises(RuntimeError, match=r"already has another job a, of s3://theirs.* Run the same command again"):
        jobs.submit("a", ["true"], {}, {"root": "s3://ours"})
    assert jobs.find("a") is None
    with pytest.raises(JobLost):
        jobs.follow("a", lambda job: None)
    with pytest.raises(JobLost):
        jobs.stop("a", wait_s=0)
    assert jobs.list() == []
    assert [job.id for job in jobs.list(every_root=True)] == ["a"]
    assert not [path for path, _ in requests if path.endswith("/stop")]


def test_rejected_submit_is_an_error(jobs_of):
    jobs, _ = jobs_of(RuntimeError("Request failed with status code 400: bad runtime_env"))
    with pytest.raises(RuntimeError, match="bad runtime_env"):
        jobs.submit("a", ["true"], {}, {})


def test_unknown_job_is_not_taken_for_an_unreachable_server(jobs_of):
    jobs, _ = jobs_of(ERROR_500, UNKNOWN)
    assert jobs.find("a") is None
    for ask in (lambda j: j.logs("a"), lambda j: j.stop("a", 1), lambda j: j.follow("a", print)):
        with pytest.raises(JobLost, match="Ray at http://ray does not know job a"):
            ask(jobs_of(UNKNOWN)[0])


def test_follow_continues_after_an_outage_of_the_server(jobs_of):
    jobs, _ = jobs_of(info("PENDING"), AWAY, ERROR_500, AWAY, info("RUNNING"), info("FAILED", 75))
    seen = []
    job = jobs.follow("a", lambda job: seen.append(job.state))
    assert seen == ["pending", "running", "failed"]
    assert (job.exit_code, job.terminal, job.id) == (75, True, "a")
    assert (job.started_at, job.ended_at, job.metadata) == (1.5, None, {})


def test_follow_fails_if_the_server_stays_unreachable(jobs_of):
    jobs, _ = jobs_of(AWAY, AWAY, away_s=-1)
    with pytest.raises(JobServerAway, match=r"could not find a: http://ray has not answered .*connection refused"):
        jobs.follow("a", lambda job: None)


def test_an_outage_is_reported_once_and_a_stop_request_does_not_wait_for_its_end(monkeypatch):
    """Ray may be away for as long as the stack takes to start it again, which is longer than anybody wants to wait to stop."""
    now, said, stop = [0.0], [], []

    def stopped():
        if stop:
            raise KeyboardInterrupt

    jobs = RayJobs("http://ray", report=said.append, while_away=stopped)
    monkeypatch.setattr(ray_jobs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_jobs.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def request(path, body):
        if now[0] < 600:
            raise AWAY
        return info("RUNNING")

    monkeypatch.setattr(jobs, "_request", request)
    assert jobs.find("a").state == "running"
    away, again = said
    assert away == "Ray at http://ray does not answer (connection refused); waiting up to 15 minutes for it"
    assert again == "Ray at http://ray answers again"
    now[0] = 0.0
    stop.append("now")
    with pytest.raises(KeyboardInterrupt):
        jobs.find("a")
    assert now[0] == 0.0


def test_stop_waits_for_the_job_to_end_or_times_out(jobs_of):
    answers = (info("RUNNING"), {"stopped": True}, info("RUNNING"), info("STOPPED"))
    jobs, requests = jobs_of(*answers)
    assert jobs.stop("a", wait_s=60).state == "stopped"
    assert [request for request in requests if request[1] is not None] == [("/api/jobs/a/stop", {})]
    jobs, _ = jobs_of(info("PENDING"), {"stopped": True}, info("PENDING"))
    with pytest.raises(TimeoutError, match="job a at http://ray is still pending"):
        jobs.stop("a", wait_s=-1)


ANSWERS = {
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno": (RuntimeError, "status code 404: no"),
    b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno": (RuntimeError, r"401: no\. Set RAY_AUTH_TOKEN_PATH"),
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{": (JobServerAway, "IncompleteRead"),
    b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{": (JobServerAway, "JSONDecodeError"),
    b"not HTTP\r\n\r\n": (JobServerAway, "BadStatusLine"),
    b"": (JobServerAway, "closed connection without response"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_no_whole_answer_counts_as_away(answer):
    error, wanted = ANSWERS[answer]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(error, match=wanted):
            RayJobs(f"http://127.0.0.1:{server.getsockname()[1]}", away_s=-1).version()
        thread.join()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("VITLINE_TOKEN", "x"),
        ("VITLINE_DB_password", "x"),
        ("AWS_ENDPOINT_URL", "https://user:word@host:1/"),
    ],
)
def test_secrets_are_not_sent(name, value):
    with pytest.raises(ValueError, match=f"{name} looks like a secret"):
        checked_env({"OMP_NUM_THREADS": "1", name: value})


def test_only_listed_variables_are_sent():
    allowed = {"RAY_TRAIN_X": "1", "VITLINE_ROOT": "s3://b/v", "AWS_ENDPOINT_URL": "http://127.0.0.1:8333"}
    assert checked_env(allowed) == allowed
    with pytest.raises(ValueError, match=r"PYTHONPATH must not be sent to jobs\. .* allows AWS_DEFAULT_REGION"):
        checked_env({"PYTHONPATH": "/x"})


def test_jobs_are_listed_by_metadata_with_their_times(stack):
    jobs = RayJobs(stack.env["RAY_ADDRESS"], stack.env["RAY_AUTH_TOKEN_PATH"])
    mark, before = uuid.uuid4().hex, time.time()
    for number in "1", "2":
        jobs.submit(f"list-{mark}-{number}", ["sleep", "1000"], {}, {"mark": mark, "number": number})
    assert jobs.list({"mark": "another"}) == []
    assert {job.id for job in jobs.list({"mark": mark})} == {f"list-{mark}-1", f"list-{mark}-2"}
    (second,) = jobs.list({"mark": mark, "number": "2"})
    assert second.metadata == {"mark": mark, "number": "2"}
    assert before - 1 < second.started_at < time.time() + 1
    assert second.ended_at is None
    for number in "1", "2":
        jobs.stop(f"list-{mark}-{number}", wait_s=240)
    (ended,) = jobs.list({"mark": mark, "number": "2"})
    assert (ended.state, ended) == ("stopped", jobs.find(second.id))
    assert ended.ended_at >= ended.started_at
    assert {second.id, f"list-{mark}-1"} <= {job.id for job in jobs.list()}


def test_cluster_reports_version_and_cpus_and_job_pages_open_the_dashboard(stack):
    jobs = RayJobs(stack.env["RAY_ADDRESS"], stack.env["RAY_AUTH_TOKEN_PATH"])
    assert jobs.version() == importlib.metadata.version("ray")
    assert jobs.num_cpus() == 2
    assert jobs.page("a-a1") == f"{stack.env['RAY_ADDRESS']}/#/jobs/a-a1"
    page = httpx.get(jobs.page("a-a1"), auth=stack.mlflow_login, timeout=30)
    assert "Ray Dashboard" in page.text
