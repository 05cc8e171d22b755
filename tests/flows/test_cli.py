"""The console command: help with examples, one sentence for every mistake, one object for `--json`."""

import json
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from vitline.flows.cli import main as cli
from vitline.flows.runs.services import ConsoleObserver
from vitline.infra.html.text import clock, field
from vitline.infra.runs.progress import progress_line
from vitline.infra.runs.run_state import write_state
from vitline.infra.settings import inherited_environment
from vitline.infra.storage import open_store
from vitline.vit.run.resolved import resolve

COMMANDS = """demo, train-folder, data prepare, data ls, data show, data verify, data diff, data subset,
data bench, pretrain run, pretrain branch, finetune run, evaluate run, evaluate report,
runs ls, runs show, runs compare, runs send, model ls, model show, model variants,
model convert, model predict, model verify, model inspect, model bench, ops doctor, ops reconcile,
ops collect-garbage, ops preempt, plan cluster, stack up, stack down, stack status, stack restart""".replace(
    "\n", " "
).split(", ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    result = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0
    text = re.sub(r"[\s`]+", " ", result.output)
    assert f"Example: vitline {command}" in text
    assert command in ("demo", "model variants", "model bench") or command.startswith("stack") or "--root" in text
    assert "--json" in text


HEAVY = (
    "torch",
    "ray",
    "prefect",
    "mlflow",
    "sqlalchemy",
    "pandas",
    "scipy",
    "sklearn",
    "matplotlib",
    "fsspec",
    "s3fs",
)
SETTINGS = ("pydantic", "rich", "psutil")
DATA = ("pyarrow", "numpy", "PIL")
LOADED = """
import contextlib, io, json, sys
from vitline.flows.cli.main import main
sys.argv[0] = "vitline"
with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
    main()
print(json.dumps([output.getvalue(), sorted(sys.modules)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "not_loaded"),
    [
        ("--help", (*HEAVY, *DATA, *SETTINGS)),
        ("--version", (*HEAVY, *DATA, "rich", "psutil")),
        ("flows ls", (*HEAVY, *DATA)),
        ("evaluate protocols", (*HEAVY, *DATA)),
        ("pretrain recipes", (*HEAVY, *DATA)),
        ("model variants", (*HEAVY, *DATA)),
        *((command, (*HEAVY, "psutil", "botocore")) for command in ("data ls", "runs ls", "model ls", "vtab files")),
        ("stack status", (*HEAVY, *DATA, "botocore")),
        ("ops doctor", tuple(name for name in HEAVY if name not in ("fsspec", "s3fs"))),
    ],
)
def test_listing_commands_do_not_import_slow_packages(command, not_loaded, tmp_path):
    """Commands spend their time on imports, so the imports are tested; tests/benchmarks measures the seconds."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    output, loaded = json.loads(done.stdout)
    assert output or done.stderr
    assert [name for name in not_loaded if name in loaded] == []


@pytest.mark.parametrize(
    ("commit", "printed"), [("abc1234" + 33 * "0", "vitline 0.1.0 (commit abc1234)\n"), (None, "vitline 0.1.0\n")]
)
def test_the_version_is_printed_with_the_commit_of_a_checkout(vitline, monkeypatch, commit, printed):
    monkeypatch.setattr("importlib.metadata.version", {"vitline": "0.1.0"}.__getitem__)
    monkeypatch.setattr("vitline.infra.provenance.checkout_commit", lambda folder: commit)
    assert vitline("--version") == (0, printed, "")


def test_the_list_of_deployments_describes_each(vitline):
    code, out, _ = vitline("flows", "ls")
    assert code == 0
    assert "\\n" not in out
    rows = {row["deployment"]: row for row in json.loads(vitline("flows", "ls", "--json")[1])["deployments"]}
    default, demo = (rows[f"pretrain-then-transfer/{name}"] for name in ("default", "demo"))
    assert demo["filled in"]["corpus"] == "icons"
    assert "What `make demo` runs" in demo["what"] != default["what"]


def test_the_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "vitline.flows.cli.main", "runs", "compare", "a"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: Comparing takes at least two runs, not 'a' alone; `vitline runs ls` lists them.\n"


def test_the_error_for_an_unknown_corpus_lists_the_corpora(refused, digits_root):
    plan = ("pretrain", "run", "--plan", "--recipe", "icons", "--root", digits_root, "--corpus")
    assert re.search(r"no corpus 'brids' .* available: digits\..*`vitline data prepare`", refused(*plan, "brids"))
    assert re.search(r"no corpus at file:///nowhere/x.*`vitline data prepare`", refused(*plan, "/nowhere/x"))


def test_the_error_for_an_unknown_recipe_lists_the_recipes(refused, digits_root):
    error = refused("pretrain", "run", "--plan", "--corpus", "digits", "--recipe", "vit-g", "--root", digits_root)
    assert "'vit-g'" in error
    assert "vit-b16-i21k" in error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("recipe.optim.peak_lrr=1", r"no field 'recipe\.optim\.peak_lrr'; available fields: .*peak_lr"),
        ("recipe.optimm.peak_lr=1", r"no group 'recipe\.optimm'"),
        ("recipe.optim.peak_lr=-1", r"recipe\.optim\.peak_lr: .*must be more than 0, not -1\. `--set recipe\.optim\.peak_lr=VALUE`"),
        ("recipe.optim.peak_lr=NaN", r"finite number, not nan"),
        ("recipe.loss=hinge", r"'softmax', 'sigmoid', or a user-defined function as PACKAGE.MODULE:NAME, not 'hinge'"),
        ("recipe.total_steps=10", r"recipe: optim\.warmup_steps=80 must be less than total_steps=10; .*`--set recipe\.FIELD=VALUE`"),
        ("recipe.input.num_lanes=7", r"num_lanes=7 must divide global_batch_size=128\. Set `--set recipe\.input\.num_lanes=4`"),
        ("execution.num_workers=0", r"execution\.num_workers: .*not 0"),
        ("execution.num_workers=17", r"num_workers=17 is more than recipe\.input\.num_lanes=16"),
        ("seed", r"'seed' does not have the form path\.to\.field=value"),
    ],
)  # fmt: skip
def test_an_invalid_override_is_refused(refused, digits_root, change, says):
    error = refused(
        "pretrain", "run", "--plan", "--corpus", "digits", "--recipe", "icons", "--root", digits_root, "--set", change
    )
    assert re.search(says, error), error


def test_a_recipe_too_large_for_its_corpus_is_refused_before_a_cluster_is_started(refused, digits_root):
    error = refused("pretrain", "run", "--corpus", "digits", "--recipe", "vit-b16-i21k", "--root", digits_root)
    assert "num_lanes=512 is more than" in error
    assert re.search(r"Set `--set recipe\.input\.num_lanes=\d+` \(in a form the override ", error)


def test_a_source_that_is_no_folder_and_a_bad_name_are_refused(refused, root, tmp_path):
    (tmp_path / "file.png").write_bytes(b"")
    for command in (("data", "prepare"), ("train-folder", "--yes")):
        for wrong, why in (("absent", "does not exist"), ("file.png", "with one folder of images per class")):
            error = refused(*command, "--source", tmp_path / wrong, "--name", "birds", "--root", root)
            assert str(tmp_path / wrong) in error
            assert why in error
        error = refused(*command, "--source", tmp_path, "--name", "My Birds", "--root", root)
        assert "'My Birds'" in error
        assert "as in 'birds-2026'" in error


def test_unknown_runs_models_protocols_and_stores_are_refused(refused, digits_root):
    at = ("--root", digits_root)
    assert "`vitline runs ls`" in refused("runs", "show", "nope", *at)
    assert "'nope' is not a published model" in refused("model", "show", "nope", *at)
    assert "`vitline model ls`" in refused("model", "show", "/nowhere/x", *at)
    assert "not a published model" in refused("evaluate", "run", "--model", "nope", "--task", "digits", *at)
    assert "not a published model" in refused("finetune", "run", "--model", "nope", "--corpus", "digits", *at)
    assert "s3://bucket/prefix" in refused("data", "ls", "--root", "ftp://host/x")


@pytest.mark.parametrize(
    "arguments", [("data", "show"), ("data", "lss"), ("train-folder", "--steps", "0"), ("nope",), ("--nope",)]
)
def test_a_wrong_call_is_a_usage_error(vitline, arguments):
    code, out, err = vitline(*arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("what", ["data", "runs", "model"])
def test_an_empty_list_comes_with_the_next_command(vitline, root, what):
    code, out, err = vitline(what, "ls", "--root", root)
    assert (code, out) == (0, "")
    assert root in err
    assert "`vitline " in err
    code, out, err = vitline(what, "ls", "--root", root, "--json")
    assert list(json.loads(out).values()) == [[]]


def test_the_report_of_an_empty_root_shows_the_published_rows(vitline, root):
    code, out, _ = vitline("evaluate", "report", "--root", root)
    assert code == 0
    assert "VTAB: 0 of 19 tasks prepared" in out
    assert "77.63" in out


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("data", "ls"), {"corpora"}),
        (("data", "show", "digits"), {"uri", "digest", "splits", "classes", "counts"}),
        (("data", "diff", "digits", "digits"), {"differences", "examples"}),
        (("data", "verify", "digits"), {"num_shards", "num_rows", "problems"}),
        (("pretrain", "run", "--plan", "--corpus", "digits", "--recipe", "icons"), {"steps", "epochs", "reading", "config_digest"}),
        (("runs", "ls"), {"runs"}),
        (("model", "ls"), {"models"}),
        (("evaluate", "report"), {"tables", "published", "models", "self_check", "coverage"}),
        (("ops", "doctor"), {"checks"}),
    ],
)  # fmt: skip
def test_json_is_one_object_on_stdout(vitline, digits_root, arguments, keys):
    code, out, _ = vitline(*arguments, "--root", digits_root, "--json")
    assert code == 0 or arguments[0] == "ops"
    assert keys <= json.loads(out).keys()
    _, table, _ = vitline(*arguments, "--root", digits_root)
    assert table != out


@pytest.fixture
def two_runs(train_config, root):
    """Keys of two finished runs that differ in their steps."""
    keys = []
    for steps in (20, 40):
        spec = resolve(train_config("birds", steps=steps), root).spec()
        run = open_store(root).child(f"runs/{spec.run_key}")
        run.write_json("config.json", spec.model_dump(mode="json"))
        write_state(run, "finished", 1, step=steps)
        keys.append(spec.run_key)
    return keys


def test_runs_are_compared_by_their_differences(vitline, refused, root, two_runs):
    code, out, _ = vitline("runs", "compare", *two_runs, "--root", root, "--json")
    assert code == 0
    assert json.loads(out)["differences"] == {"recipe.total_steps": [20, 40]}
    _, out, _ = vitline("runs", "compare", *two_runs, "--root", root)
    assert "recipe.total_steps" in out
    error = refused("runs", "show", "birds", "--root", root)
    assert all(key in error for key in two_runs)
    _, out, _ = vitline("runs", "show", two_runs[0][:10], "--root", root, "--json")
    assert json.loads(out)["run"] == two_runs[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_in_order_and_it_says_how_to_resume(vitline, monkeypatch, request, number):
    # A shell makes background programs ignore Ctrl-C, and nohup the end of the terminal, for this test run as well.
    for ignored, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        request.addfinalizer(partial(signal.signal, ignored, signal.signal(ignored, usual)))
    stopped = []

    def interrupted(root):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            signal.raise_signal(signal.SIGHUP)  # as when the window is closed meanwhile
            stopped.append(ConsoleObserver().stop(error))
            raise

    monkeypatch.setattr("vitline.flows.catalog.lists.list_runs_and_pipelines", interrupted)
    code, _, err = vitline("runs", "ls")
    assert (code, stopped[0].reason) == (128 + number, "preempted")
    assert "the same command resumes" in err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Answer(BaseHTTPRequestHandler):
    """Prefect without any deployment."""

    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"detail": "Deployment not found"}')

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_this_machine_is_reached_without_the_proxy_and_other_addresses_name_it(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        proxies = {
            "HTTP_PROXY": "http://127.0.0.1:9",
            "ALL_PROXY": "socks5://127.0.0.1:9",
            "VITLINE_ROOT": str(tmp_path),
        }
        here = f"http://127.0.0.1:{server.server_port}/api"
        for address, without, says in [
            (here, (), "has no deployment 'reconcile/default'; `vitline flows deploy` registers it."),
            (
                "http://p.example/api",
                ("ALL_PROXY",),
                "p.example/api does not answer (through the proxy http://127.0.0.1:9 of HTTP_PROXY:",
            ),
            ("http://p.example/api", (), "needs the package socksio for the proxy socks5://127.0.0.1:9"),
        ]:
            changes = {"PREFECT_API_URL": address, **{k: v for k, v in proxies.items() if k not in without}}
            command = [sys.executable, "-P", "-m", "vitline.flows.cli.main", "flows", "trigger", "reconcile/default"]
            done = subprocess.run(command, env=inherited_environment((), **changes), capture_output=True, text=True)
            assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
            assert says in done.stderr
        server.shutdown()


def test_an_address_that_cannot_be_right_is_refused_at_once(refused, monkeypatch, tmp_path):
    for name, value, says in [
        ("RAY_ADDRESS", "ray://head:10001", "the http URL of Ray's job server, such as http://HOST:8265"),
        ("RAY_ADDRESS", "auto", "the http URL of Ray's job server"),
        ("MLFLOW_TRACKING_URI", "mlflow.example:5000", "begins with http:// or https://, as in http://HOST:5000"),
        ("AWS_ENDPOINT_URL", "s3.example:9000", "begins with http:// or https://, as in http://HOST:9000"),
        ("PREFECT_API_URL", "127.0.0.1:4200/api", "as in http://HOST:4200/api"),
        ("PREFECT_API_URL", "http://127.0.0.1:4200/", "Its API is at http://127.0.0.1:4200/api."),
    ]:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            error = refused("ops", "reconcile", "--root", str(tmp_path))
        assert f"{name} is {value}, " in error
        assert says in error


def test_a_damaged_corpus_fails_with_exit_code_1_and_a_sentence(vitline, root):
    open_store(root).write("corpora/x/1/manifest.json", b'{"schema_version": 99}')
    code, _, err = vitline("data", "ls", "--root", root)
    assert code == 1
    assert re.search(r"error: .*manifest\.json has schema version 99", err)


def test_a_damaged_record_is_an_error_after_the_list_of_the_others(vitline, root):
    store, model = open_store(root), {"digest": "d", "num_classes": 2, "model": {"image_size_px": 28}, "provenance": {}}
    store.write_json("models/birds/0123/config.json", model)
    store.write_json("models/birds/4567/config.json", {})
    code, out, err = vitline("model", "ls", "--json", "--root", root)
    assert (code, [row["version"] for row in json.loads(out)["models"]]) == (1, ["0123"])
    assert re.search(r"error: .*birds/4567/config\.json is not a record that this version", err)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("val_top1", 0.8409, "84.1 %"),
        ("metrics.val/top1", 0.06844, "6.8 %"),
        ("tasks/pets/top1_from_scratch", 0.007197, "0.7 %"),
        ("time/data_wait_fraction", 0.5, "50.0 %"),
        ("night/champion/difference", -0.012, "-1.2 points"),
        ("val/loss", 0.8409, "0.8409"),
        ("recipe.input.augment.min_area_fraction", 0.05, "0.05"),
        ("val_top1", None, "-"),
    ],
)
def test_scores_and_shares_are_shown_in_percent_and_settings_as_set_takes_them(name, value, shown):
    assert field(name, value) == shown


def test_progress_is_shown_as_one_line():
    assert [clock(s) for s in (0.4, 90, 8000)] == ["0:00", "1:30", "2:13:20"]
    now = {"step": 120, "total_steps": 1200, "images_per_s": 640.4, "loss": 2.3061, "remaining_s": 70}
    assert progress_line("pretrain", now, 3) == "pretrain: 120/1,200 steps, 640 images/s, loss 2.306, 1:10 left"
    assert "waiting for the job to start (0:03)" in progress_line("pretrain", None, 3)
    slow = progress_line(
        "pretrain", {"step": 1, "total_steps": 9, "input_wait": "waits 43 % of the time for data: decoding is slow"}, 3
    )
    assert slow == "pretrain: 1/9 steps, waits 43 % of the time for data: decoding is slow"
    behind = progress_line(
        "pretrain", {"step": 1, "total_steps": 9, "slow_rank": "waits 18 % of the time for rank 3"}, 3
    )
    assert behind == "pretrain: 1/9 steps, waits 18 % of the time for rank 3"
    now = {"step": 3, "total_steps": 9, "unit": "parts (examine)", "bytes_per_s": 12_345_678, "refused": 2}
    assert progress_line("prepare", now, 3) == "prepare: 3/9 parts (examine), 12.3 MB/s, 2 refused"
