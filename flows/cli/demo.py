"""`make demo`: the whole pipeline on real images, on one machine, with the same servers and API as in production.

Triggers `pretrain-then-transfer/demo` by the Prefect API, as the UI does, follows it, and prints tables from its record in the
store.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from vitline.data_prep.examples import presets
from vitline.data_prep.sources.raw import FetchUnavailable
from vitline.flows import console
from vitline.flows.catalog.lists import list_corpora
from vitline.flows.catalog.records import PipelineRecord, read_pipeline
from vitline.flows.cli.tables import show_table
from vitline.flows.forms.forms import PipelineRequest
from vitline.flows.forms.pipeline_plan import resolve_pipeline
from vitline.flows.on_prefect.home.address import home_url
from vitline.flows.reports.report import SCORE_COLUMNS, score_rows, stage_time, standard_error
from vitline.flows.runs.prepare_corpus import fetch_sources
from vitline.flows.runs.stage import run_store
from vitline.infra.html.text import clock
from vitline.infra.local.paths import local_dir
from vitline.infra.local.running_stack import stack_dir
from vitline.infra.runs.run_state import NO_STATE, read_state
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store
from vitline.vit.evaluation.evaluate import Score
from vitline.vit.evaluation.reference.report import coverage

Profile = Literal["full", "smoke"]
DEPLOYMENT = "pretrain-then-transfer/demo"
# Seconds on 2 cores that do nothing else.
BUDGETS_S = {"prepare": 75.0, "pretrain": 150.0, "evaluate": 180.0}
# The same pipeline with a few steps, to check that everything works.
SMOKE = {
    "recipe.total_steps": 20,
    "recipe.optim.warmup_steps": 2,
    "execution.save_every_steps": 10,
    "execution.log_every_steps": 5,
    "protocol.total_steps": 5,
    "protocol.warmup_steps": 1,
}


def demo_request(settings: Settings, profile: Profile, seed: int) -> tuple[dict[str, Any], str]:
    """The request, and a note if it differs from the README: without npm, digits replace icons and letters."""
    changes: dict[str, Any] = {"seed": seed}
    note = ""
    try:
        root = open_store(settings.root)
        fetch_sources([presets.icons(), presets.new_icons(), presets.letters()], root, console.say)
    except FetchUnavailable as error:
        note = f"The icons and letters could not be fetched ({error}). The digits that come with scikit-learn replace them."
        console.say(note)
        changes |= {"name": "digits", "corpus": "digits-0-to-4", "recipe": "digits", "tasks": ["digits-5-to-9"]}
    if profile == "smoke":
        name = changes.get("name", PipelineRequest().name)
        changes |= {"name": f"{name}-smoke", "overrides": SMOKE}
    return changes, note


def run_demo(settings: Settings, *, profile: Profile, seed: int, as_json: bool) -> None:
    """Runs the demo and prints its result. Raises RuntimeError with the URL of the flow run if it failed."""
    started = time.monotonic()
    from vitline.flows.cli.trigger import follow, trigger

    changes, note = demo_request(settings, profile, seed)
    run, page = trigger(settings, DEPLOYMENT, changes)
    console.say(f"triggered {DEPLOYMENT} in Prefect: {page}")
    ended = follow(run.id)
    if ended.state is None or not ended.state.is_completed():
        name, message = (ended.state.name, ended.state.message) if ended.state else ("unknown", "")
        raise RuntimeError(f"{DEPLOYMENT} ended as {name}: {message} See {page}.")
    if ended.state.name == "Skipped":
        console.say(f"skipped: {ended.state.message}")
        return
    request = PipelineRequest.model_validate(ended.parameters["request"])
    record = read_pipeline(open_store(settings.root), resolve_pipeline(settings.root, request).key)
    scores = pipeline_scores(settings.root, record)
    if as_json:
        console.emit({**record.model_dump(mode="json"), "scores": [score.model_dump(mode="json") for score in scores]})
    else:
        show(settings, record, scores, page, note, time.monotonic() - started)


def pipeline_scores(root: str, record: PipelineRecord) -> list[Score]:
    """The scores of a finished pipeline, in the order of its tasks."""
    state = read_state(run_store(root, str(record.first_stages["evaluate"].run_key))) or NO_STATE
    return [Score.model_validate(score) for score in state["scores"]]


def preamble(settings: Settings, profile: Profile, say: Callable[[str], None] = console.say) -> None:
    """Says what the demo will download, store and need, before it starts."""
    npm = (
        "28 MB of icons and fonts by npm, kept by checksum"
        if shutil.which("npm")
        else "nothing (npm is missing: digits instead of icons and letters)"
    )
    minutes = "about 7 minutes on 2 cores" if profile == "full" else "about 2 minutes"
    say(f"vitline demo: downloads {npm}; 0.3 GB of disk below {local_dir(settings)}; 5 GB of memory; {minutes}.")
    say("Finished stages are reused: after Ctrl-C, the same command resumes where it stopped.")


def show(settings: Settings, record: PipelineRecord, scores: list[Score], page: str, note: str, wall_s: float) -> None:
    """Prints the result: stages with their budgets, scores with control and chance, and links."""
    rows = [
        [s.stage, s.what, s.where, stage_time(s) + ("" if s.reused else f" of {clock(BUDGETS_S[s.stage])}")]
        for s in record.stages
    ]
    show_table("Stages", ["stage", "what", "where", "time"], rows)
    show_table("Scores: top-1 on test, read once", list(SCORE_COLUMNS), score_rows(scores))
    if note:
        console.print_result(note)
    errors = max(standard_error(score) for score in scores)
    console.print_result(
        f"One run: a score's standard error is up to {100 * errors:.1f} points; further seeds are in the README."
    )
    names = [row["name"] for row in list_corpora(settings.root)]
    console.print_result(
        f"{coverage(names)}: `vitline evaluate report` shows the published rows; any corpus with a test split is a task."
    )
    reused = [s.stage for s in record.stages if s.reused]
    if reused:
        console.print_result(f"Reused from an earlier run: {', '.join(reused)}.")
    console.print_result(f"Model: {record.model}")
    console.print_result(f"Report: {local_copy(settings, record)}")
    console.print_result(f"Prefect: {page}")
    if home := home_url(settings):
        console.print_result(f"Home: {home}")
    if settings.mlflow_tracking_uri:
        console.print_result(f"MLflow: {settings.mlflow_tracking_uri}")
    if (login := stack_dir(settings) / "login").exists():
        console.print_result(f"Login of both pages: user:password in {login}; Prefect asks for the whole line.")
    console.print_result(f"Whole run: {clock(wall_s)}. The stack stays up; `make down` stops it.")


def local_copy(settings: Settings, record: PipelineRecord) -> Path:
    """The report as a local file, which any browser opens."""
    path = local_dir(settings) / "reports" / f"{record.key}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(open_store(settings.root).read(f"reports/{record.key}.html"))
    return path
