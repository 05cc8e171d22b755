"""Prefect's pages in headless Chromium: fills in forms and presses buttons."""

import json
import re
import shutil
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Locator, Page, Playwright

FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
_QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
_HEADLESS = ("--no-sandbox", "--disable-gpu", "--disable-quic")


def chromium(playwright: Playwright) -> Browser:
    """The Chromium of this machine. Raises RuntimeError where there is none."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise RuntimeError("No Chromium is installed. `apt-get install chromium` brings it.")
    return playwright.chromium.launch(executable_path=program, args=[*_HEADLESS, *_QUIET])


class Prefect:
    """The pages of a Prefect server in one browser window; waiting and reading state use its API. With `authority` only the API's client
    checks the server's certificate."""

    def __init__(self, browser: Browser, url: str, login: Path, pictures: Path, authority: Path | None = None):
        self.url, self.pictures = url, pictures
        self.refusal = ""  # the last error that the page showed for a form
        self.page: Page = browser.new_page(
            viewport={"width": 1400, "height": 1100}, ignore_https_errors=authority is not None
        )
        self.page.set_default_timeout(20_000)
        text = login.read_text().strip()
        trusted = ssl.create_default_context(cafile=authority)
        self.api = httpx.Client(base_url=f"{url}/api", auth=tuple(text.split(":")), timeout=60, verify=trusted)
        self._log_in(text)

    # Pages.

    def deployment(self, name: str) -> dict[str, Any]:
        return self.api.get(f"/deployments/name/{name}").raise_for_status().json()

    def open_deployment(self, name: str, part: str = "") -> None:
        self._open(f"/deployments/deployment/{self.deployment(name)['id']}{part}")

    def open_run(self, run: str) -> None:
        self._open(f"/runs/flow-run/{run}")

    def picture(self, name: str) -> None:
        self.page.screenshot(path=self.pictures / f"{name}.png", full_page=True)

    # The form of a run.

    def field(self, title: str) -> Locator:
        """A field of a form, by its title."""
        label = self.page.locator(
            "span.schema-form-property__label", has_text=re.compile(rf"^{title}( \(Optional\))?$")
        )
        return label.locator("xpath=ancestor::div[contains(concat(' ', @class, ' '), ' schema-form-property ')][1]")

    def fill(self, title: str, value: Any) -> None:
        if isinstance(value, list):
            rows = self.field(title).locator(".schema-form-property-array-item")
            for extra in range(rows.count() - 1, len(value) - 1, -1):
                rows.nth(extra).locator("button").first.click()
                rows.nth(extra).wait_for(state="detached")
            for box, text in zip(self.field(title).locator("textarea").all(), value, strict=True):
                box.fill(text)
        elif isinstance(value, dict):
            self.field(title).locator("textarea").fill(json.dumps(value))
        else:
            self.field(title).locator("input, textarea").first.fill(str(value))

    def select(self, title: str, value: str) -> None:
        """Selects a value of a field with fixed choices."""
        self.field(title).locator("button.p-select-button__control").press("ArrowDown")
        self.page.locator(".p-select-option", has_text=re.compile(rf"^\s*{value}\s*$")).click()

    def submit(self, deployment: str, name: str | None = None, **values: Any) -> str | None:
        """Custom run: fills in the form and presses Submit. Returns the flow run, or None if the page refuses it."""
        self.open_deployment(deployment, "/run")
        if name is not None:
            self.page.locator("input[type=text]").first.fill(name)
        for title, value in values.items():
            title = title.replace("_", " ")
            self.select(title, value) if title == "Recipe" else self.fill(title, value)
        wanted = {"deployments": {"id": {"any_": [self.deployment(deployment)["id"]]}}, "limit": 200}
        known = self._ids(wanted)
        self.page.get_by_role("button", name="Submit").click()
        deadline = time.monotonic() + 20
        while not (new := self._ids(wanted) - known):
            if (shown := self._toast()) or time.monotonic() > deadline:
                self.refusal = shown
                return None
            self.page.wait_for_timeout(200)
        return new.pop()

    def _ids(self, wanted: dict[str, Any]) -> set[str]:
        return {run["id"] for run in self.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()}

    def _toast(self) -> str:
        """The error that the page shows for a form, for some seconds."""
        lines = self.page.inner_text("body").splitlines()
        return next((line for line in lines if line.startswith("Error creating flow run")), "")

    # Schedules.

    def add_schedule(self, deployment: str, slug: str, cron: str) -> None:
        """Adds a schedule to a deployment, in the dialog of its page."""
        self.open_deployment(deployment)
        self.page.get_by_role("button", name="Schedule", exact=True).click()
        dialog = self.page.locator(".p-modal, [role=dialog]").first
        dialog.get_by_text("Cron", exact=True).click()
        dialog.get_by_placeholder("Enter a unique identifier for this schedule").fill(slug)
        dialog.locator("input[type=text]").nth(1).fill(cron)
        dialog.get_by_role("button", name="Save").click()
        deadline = time.monotonic() + 20
        while not any(found["slug"] == slug for found in self.deployment(deployment)["schedules"]):
            assert time.monotonic() < deadline, f"no schedule {slug}"
            self.page.wait_for_timeout(200)

    # The buttons of a run.

    def press(self, run: str, button: str) -> None:
        """Presses a button of the run's page, and the confirming button of its dialog."""
        self.open_run(run)
        self.page.get_by_role("button", name=button, exact=True).first.click()
        self.page.locator(".p-modal, [role=dialog]").get_by_role(
            "button", name=re.compile("Submit|Cancel Run|Confirm")
        ).click()

    def choose(self, run: str, item: str) -> None:
        """Chooses an item in the menu of the run's page in Prefect's new style, and confirms it in the dialog."""
        self.page.goto(f"{self.url}/v2/runs/flow-run/{run}")
        self.page.locator("button:has(svg[class*=vertical])").first.click()
        self.page.get_by_role("menuitem", name=item).click()
        self.page.locator("[role=dialog]").get_by_role("button", name=item).last.click()
        self.page.get_by_role("dialog").wait_for(state="hidden")

    # State and logs of runs, and waiting for them.

    def run(self, run: str) -> dict[str, Any]:
        return self.api.get(f"/flow_runs/{run}").raise_for_status().json()

    def parts(self, run: str) -> list[dict[str, Any]]:
        wanted = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "sort": "START_TIME_ASC"}
        return self.api.post("/flow_runs/filter", json=wanted).raise_for_status().json()

    def lines(self, run: str) -> list[str]:
        wanted = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"}
        return [line["message"] for line in self.api.post("/logs/filter", json=wanted).raise_for_status().json()]

    def wait(self, run: str, *states: str, timeout_s: float = 900) -> dict[str, Any]:
        """Waits until the run is in a state of one of these names, or has ended if none is given; the run."""
        self.page.goto("about:blank")  # a page that shows an active run uses a third of a core
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.run(run)
            if found["state_name"] in states or (not states and found["state_type"] in FINAL):
                return found
            if time.monotonic() > deadline or (states and found["state_type"] in FINAL):
                raise AssertionError(f"{found['name']} is {found['state_name']}: {found['state']['message']}")
            time.sleep(0.5)

    def wait_for_line(self, run: str, text: str, timeout_s: float = 600) -> str:
        """Waits for the first line of a run's log that matches."""
        self.page.goto("about:blank")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self.lines(run):
                if re.search(text, line):
                    return line
            time.sleep(0.5)
        raise AssertionError(f"no line of the log matches {text!r}: {self.lines(run)[-5:]}")

    def _log_in(self, text: str) -> None:
        self._open("/deployments")
        self.page.locator("input[type=password]").fill(text)
        self.page.get_by_role("button", name="Login").click()
        self.page.wait_for_url(f"{self.url}/deployments")

    def _open(self, path: str) -> None:
        self.page.goto(f"{self.url}{path}")
        self.page.wait_for_timeout(3000)  # pages load and fade in; one that shows an active run is never quiet
