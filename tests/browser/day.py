"""Acceptance test of a day of use: clicks in Prefect's pages, commands run as programs, real servers.

.venv/bin/python tests/browser/day.py [FOLDER [WORD ...]]

Needs Chromium. FOLDER (default: a temporary one) gets a stack, pictures of the pages, and `day.md`, the table that is
also printed. With words, only the steps whose names contain one of them are run. Exits with 1 if a step failed;
later steps are run in any case.
"""

import base64
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
from pages import FINAL, Prefect, chromium
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from sklearn.datasets import load_digits

from vitline.infra.local.processes import free_ports

BIN = Path(sys.executable).parent
OURS = ("AWS_", "RAY_", "VITLINE_", "MLFLOW_", "PREFECT_")
PIPELINE = "pretrain-then-transfer/default"
TINY = {
    "recipe.total_steps": 6,
    "recipe.optim.warmup_steps": 1,
    "execution.save_every_steps": 3,
    "execution.log_every_steps": 1,
    "protocol.total_steps": 3,
    "protocol.warmup_steps": 1,
    "protocol.learning_rates": [0.03, 0.1],
}
STEPS = 3000  # a training that lasts a minute or more
LONG = TINY | {"recipe.total_steps": STEPS, "execution.save_every_steps": STEPS}
DIGITS = {"Corpus": "digits-0-to-4", "Recipe": "digits"}
TASKS = ["digits-5-to-9", "digits"]


class Day:
    """One folder with one stack; each method of STEPS_OF_THE_DAY returns a sentence with what it observed."""

    def __init__(self, folder: Path, browser):
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        self.vitline("stack", "up")
        status = json.loads(self.vitline("stack", "status", "--json"))
        self.links = status["links"]
        self.login = Path(status["login_file"])
        self.prefect = Prefect(browser, self.links["Prefect UI"], self.login, folder)
        self.browser = browser

    def command(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(list(map(str, words)), cwd=self.folder, env=self.env, capture_output=True, text=True)
        assert not check or done.returncode == 0, (
            f"{words} ended with {done.returncode}: {(done.stderr or done.stdout)[-600:]}"
        )
        return done

    def mlflow_page(self) -> Page:
        user, _, password = self.login.read_text().strip().partition(":")
        return self.browser.new_page(
            viewport={"width": 1400, "height": 900}, http_credentials={"username": user, "password": password}
        )

    def vitline(self, *words: str | Path) -> str:
        return self.command(BIN / "vitline", *words).stdout

    # The steps.

    def form_starts_a_run(self) -> str:
        run = self.prefect.submit(PIPELINE, name="My first try", Name="day", Tasks=TASKS, Overrides=TINY, **DIGITS)
        assert run, self.prefect.refusal
        ended = self.prefect.wait(run, "Completed")
        assert ended["name"] == "My first try"
        self.prefect.open_run(run)
        self.prefect.picture("run")
        lines = self.prefect.lines(run)
        assert any("pretrain day: " in line for line in lines), lines
        assert not any("Traceback" in line or "Running()" in line for line in lines), lines
        return f"{ended['name']}: {ended['state']['message']}"

    def invalid_requests_are_refused(self) -> str:
        assert self.prefect.submit(PIPELINE, Train_Images=-5) is None
        refusal = self.prefect.refusal
        assert "-5 is less than the minimum of 1" in refusal, refusal
        began = time.monotonic()
        run = self.prefect.submit(PIPELINE, Corpus="no-such-corpus")
        assert run
        ended = self.prefect.wait(run, "Failed")
        seconds = time.monotonic() - began
        assert "no-such-corpus" in ended["state"]["message"]
        assert "Traceback" not in "\n".join(self.prefect.lines(run))
        return (
            f"page: {refusal.partition('reason: ')[2]}; flow after {seconds:.0f} s: {ended['state']['message'][:140]}"
        )

    def cancelled_run_resumes_when_submitted_again(self) -> str:
        form = {"Name": "cancelled", "Tasks": TASKS, "Overrides": LONG, **DIGITS}
        run = self.prefect.submit(PIPELINE, **form)
        assert run
        self.prefect.wait_for_line(run, r"pretrain cancelled: \d+/")
        began = time.monotonic()
        self.prefect.press(run, "Cancel")
        self.prefect.wait(run, "Cancelled")
        seconds = time.monotonic() - began
        again = self.prefect.submit(PIPELINE, **form)
        assert again
        step = int(
            self.prefect.wait_for_line(again, r"pretrain cancelled: \d+/").split(": ")[1].split("/")[0].replace(",", "")
        )
        assert step > 1, step
        self.prefect.press(again, "Cancel")
        self.prefect.wait(again, "Cancelled")
        return f"cancelled {seconds:.0f} s after the click; the same form goes on, first seen at step {step:,}"

    def suspended_run_is_resumed(self) -> str:
        """While it trains by the buttons of the first pages, while it evaluates by the menu of the new ones, which say Pause."""
        overrides = TINY | {"recipe.total_steps": 400, "execution.save_every_steps": 400, "protocol.total_steps": 60}
        run = self.prefect.submit(PIPELINE, Name="suspended", Tasks=TASKS, Overrides=overrides, **DIGITS)
        assert run
        self.prefect.wait_for_line(run, r"pretrain suspended: \d+/")
        self.prefect.press(run, "Suspend")
        self.is_suspended(run, "training")
        self.prefect.press(run, "Resume")
        self.prefect.wait_for_line(run, r"evaluate suspended\S*: \d+/")
        self.prefect.choose(run, "Pause")
        self.is_suspended(run, "evaluation")
        self.prefect.choose(run, "Resume")
        ended = self.prefect.wait(run, "Completed")
        assert [part["state_name"] for part in self.prefect.parts(run)] == ["Completed"] * 3
        return f"Suspended twice for 15 s, resumed by its buttons: {ended['state']['message'][:60]}"

    def is_suspended(self, run: str, what: str) -> None:
        self.prefect.wait(run, "Suspended")
        time.sleep(15)  # it must stay so
        assert self.prefect.run(run)["state_name"] == "Suspended"
        self.prefect.open_run(run)
        self.prefect.picture(f"suspended-{what}")

    def edits_of_a_schedule_survive_a_deploy(self) -> str:
        """A schedule with a slug, added in the dialog, and a value in the form."""
        nightly = "pretrain-then-transfer/nightly"
        self.prefect.add_schedule(nightly, "mine", "30 4 * * *")
        self.prefect.open_deployment(nightly, "/edit")
        self.prefect.fill("Name", "my-night")
        self.prefect.page.get_by_role("button", name="Save", exact=True).click()
        self.prefect.page.get_by_text("Deployment updated").first.wait_for()

        def edits() -> tuple[list, dict]:
            found = self.prefect.deployment(nightly)
            return sorted((s["slug"] or "", s["schedule"]["cron"], s["active"]) for s in found["schedules"]), found[
                "parameters"
            ]

        before = edits()
        assert ("mine", "30 4 * * *", True) in before[0], before
        assert before[1]["request"]["name"] == "my-night"
        output = self.vitline("flows", "deploy")
        assert edits() == before
        assert "kept as edited" in output, output
        self.prefect.open_deployment(nightly)
        self.prefect.picture("schedules")
        return next(line for line in output.splitlines() if "nightly: kept" in line)[:160]

    def scheduled_night_starts_on_time(self) -> str:
        """The schedule is moved to the next minutes by the API and turned on by the switch of the page."""
        found = self.prefect.deployment("pretrain-then-transfer/nightly")
        request = found["parameters"]["request"] | {"corpus": "digits-0-to-4", "recipe": "digits", "tasks": TASKS[:1]}
        request |= {"train_images": None, "overrides": TINY, "deadline_hours": 1.0}
        self.prefect.api.patch(
            f"/deployments/{found['id']}", json={"parameters": {"request": request}}
        ).raise_for_status()
        due = (datetime.now(UTC) + timedelta(minutes=2)).replace(second=0, microsecond=0)
        for schedule in found["schedules"]:
            path = f"/deployments/{found['id']}/schedules/{schedule['id']}"
            if schedule["slug"]:
                self.prefect.api.delete(path).raise_for_status()
            else:
                cron = {"cron": f"{due:%M} {due:%H} * * *", "timezone": "UTC"}
                self.prefect.api.patch(path, json={"schedule": cron, "active": False}).raise_for_status()
        self.prefect.open_deployment("pretrain-then-transfer/nightly")
        self.prefect.page.locator("[role=switch]").first.click()
        wanted = {
            "flow_runs": {"deployment_id": {"any_": [found["id"]]}, "state": {"type": {"not_any_": ["SCHEDULED"]}}}
        }
        deadline = time.monotonic() + 400
        while not (runs := self.prefect.api.post("/flow_runs/filter", json=wanted).json()):
            assert time.monotonic() < deadline, "no run started by itself"
            time.sleep(1)
        ended = self.prefect.wait(runs[0]["id"], "Completed")
        assert ended["auto_scheduled"]
        late = datetime.fromisoformat(ended["start_time"]) - due
        return (
            f"due {due:%H:%M}, started within {max(1, round(late.total_seconds()))} s: {ended['state']['message'][:60]}"
        )

    def compare_runs_shows_the_night(self) -> str:
        shown = self.vitline("runs", "compare")
        assert re.search(r"my-night-\w+", shown), shown[-500:]
        return next(line.strip() for line in shown.splitlines() if "digits-5-to-9/top1" in line)[:160]

    def mlflow_registry_serves_the_candidate(self) -> str:
        page = self.mlflow_page()
        page.goto(f"{self.links['MLflow UI'].partition('/#')[0]}/#/models/day", wait_until="networkidle")
        page.wait_for_timeout(2000)
        page.screenshot(path=self.folder / "registry.png")
        assert "candidate" in page.inner_text("body")
        page.close()
        (port,) = free_ports(1)
        words = [BIN / "mlflow", "models", "serve", "-m", "models:/day@candidate", "--env-manager", "local", "-p", port]
        exports = self.vitline("stack", "env").replace("export ", "").splitlines()
        env = self.env | dict(line.split("=", 1) for line in exports) | {"PATH": "/usr/bin:/bin"}
        with open(self.folder / "serve.log", "wb") as log:
            server = subprocess.Popen([*map(str, words)], cwd=self.folder, env=env, stdout=log, stderr=log)
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/ping").status_code == 200:
                        break
                assert time.monotonic() < deadline, (self.folder / "serve.log").read_text()[-600:]
                time.sleep(1)
            picture = base64.b64encode(next((self.pictures() / "0").iterdir()).read_bytes()).decode()
            answer = httpx.post(f"{url}/invocations", json={"dataframe_records": [{"image": picture}]}, timeout=60)
            row = answer.raise_for_status().json()["predictions"][0]
        finally:
            server.terminate()
            server.wait()
        return f"classes {row['classes']}, probabilities {[round(p, 2) for p in row['probabilities']]}"

    def train_folder_trains(self) -> str:
        done = self.command(BIN / "vitline", "train-folder", "--source", self.pictures(), "--name", "own")
        text = done.stdout + done.stderr
        lines = text[text.index("from vitline import load_model") :].splitlines()
        code = "\n".join(line for line in lines[: 1 + next(i for i, line in enumerate(lines) if "predict" in line)])
        pasted = self.command(BIN / "python", "-c", code)
        again = self.command(BIN / "vitline", "train-folder", "--source", self.pictures(), "--name", "own")
        scored = [line.strip() for line in (again.stdout + again.stderr).splitlines() if "%" in line]
        assert scored, again.stdout + again.stderr
        return f"pasted: {pasted.stdout.strip()[:70]}; a second time: {scored[0][:80]}"

    def stack_restart_during_a_run_is_reconciled(self) -> str:
        form = {"Name": "interrupted", "Tasks": TASKS, "Overrides": LONG, **DIGITS}
        run = self.prefect.submit(PIPELINE, **form)
        assert run
        self.prefect.wait_for_line(run, r"pretrain interrupted: \d+/")
        self.vitline("stack", "down")
        self.vitline("stack", "up")
        self.vitline("ops", "reconcile", "--quiet-minutes", "0.2")
        deadline = time.monotonic() + 120
        while living := [
            p["state_name"] for p in [self.prefect.run(run), *self.prefect.parts(run)] if p["state_type"] not in FINAL
        ]:
            assert time.monotonic() < deadline, living
            self.vitline("ops", "reconcile", "--quiet-minutes", "0.2")
        states = [p["state_name"] for p in [self.prefect.run(run), *self.prefect.parts(run)]]
        again = self.prefect.submit(PIPELINE, **form)
        assert again
        line = self.prefect.wait_for_line(again, r"pretrain interrupted: \d+/")
        self.prefect.press(again, "Cancel")
        self.prefect.wait(again, "Cancelled")
        return f"ended as {', '.join(states)}; the same form runs again: {line[:60]}"

    def no_server_logged_a_traceback(self) -> str:
        check = Path(__file__).parents[1] / "end_to_end" / "check_server_logs.py"
        logs = self.folder / ".vitline" / "logs"
        done = subprocess.run([sys.executable, check, logs], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return "none"

    def pictures(self) -> Path:
        """Digits as a folder of PNG files for each class."""
        folder = self.folder / "pictures"
        if not folder.exists():
            data = load_digits()
            for number, (pixels, label) in enumerate(zip(data.images[:600], data.target, strict=False)):
                (folder / str(label)).mkdir(parents=True, exist_ok=True)
                picture = Image.fromarray((pixels * 15).astype(np.uint8)).resize((32, 32)).convert("RGB")
                picture.save(folder / str(label) / f"{number}.png")
        return folder


STEPS_OF_THE_DAY: tuple[Callable[[Day], str], ...] = (
    Day.form_starts_a_run,
    Day.invalid_requests_are_refused,
    Day.cancelled_run_resumes_when_submitted_again,
    Day.suspended_run_is_resumed,
    Day.edits_of_a_schedule_survive_a_deploy,
    Day.scheduled_night_starts_on_time,
    Day.compare_runs_shows_the_night,
    Day.mlflow_registry_serves_the_candidate,
    Day.train_folder_trains,
    Day.stack_restart_during_a_run_is_reconciled,
    Day.no_server_logged_a_traceback,
)


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="vl-day-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rows, failed = ["| step | | seconds | observed |", "|---|---|---|---|"], False
    with sync_playwright() as playwright:
        browser = chromium(playwright)
        day = Day(folder, browser)
        try:
            for step in STEPS_OF_THE_DAY:
                if sys.argv[2:] and not any(word in step.__name__ for word in sys.argv[2:]):
                    continue
                began = time.monotonic()
                try:
                    mark, seen = "ok", step(day)
                except Exception as error:  # later steps are run in any case
                    mark, seen, failed = "FAILED", f"{type(error).__name__}: {error}"[:400], True
                    day.prefect.picture(f"failed-{step.__name__}")
                seen = " ".join(seen.replace("|", "/").split())
                rows.append(f"| {step.__name__.replace('_', ' ')} | {mark} | {time.monotonic() - began:.0f} | {seen} |")
                print(rows[-1], flush=True)
        finally:
            day.vitline("stack", "down")
            browser.close()
    (folder / "day.md").write_text("\n".join(rows) + "\n")
    print(f"Pictures of the pages and day.md: {folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
