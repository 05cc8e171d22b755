"""The home page in Prefect: one artifact, written anew in its place, and what Prefect knows for it."""

from collections.abc import Sequence

from prefect.client.orchestration import SyncPrefectClient

from vitline.flows.on_prefect.deploy.registered import next_run, tagged
from vitline.flows.on_prefect.home.address import find_home
from vitline.flows.on_prefect.home.home import Upcoming, home_markdown
from vitline.flows.on_prefect.prefect_observer import client
from vitline.flows.ops.server_http import pages_url
from vitline.infra.local.paths import free_disk
from vitline.infra.settings import Settings
from vitline.infra.storage import open_store

HOUSEKEEPING = ("reconcile", "collect-garbage")


def write_home(settings: Settings, problems: Sequence[str]) -> None:
    """Writes the page. `problems` are sentences about what needs a person."""
    folder, free = free_disk(settings)
    disk = f"{free / 1e9:,.0f} GB are free on the disk of `{folder}`."
    with client() as api:
        text = home_markdown(open_store(settings.root), problems, upcoming_runs(api, settings), disk)
        if found := find_home(settings):
            api.request("PATCH", "/artifacts/{id}", path_params={"id": found}, json={"data": text})
        else:
            name = settings.project
            page = {"key": name, "type": "markdown", "description": f"{name}: home", "data": text}
            api.request("POST", "/artifacts/", json=page)


def upcoming_runs(api: SyncPrefectClient, settings: Settings) -> list[Upcoming]:
    """The next run of each deployment of the project that has one, the next first; not those of housekeeping."""
    found = []
    for deployment in tagged(api, settings.project):
        flow, run = api.read_flow(deployment.flow_id).name, next_run(api, deployment.id)
        if flow in HOUSEKEEPING or run is None or run.expected_start_time is None:
            continue
        page = f"{pages_url(settings)}/deployments/deployment/{deployment.id}"
        found.append(Upcoming(run.expected_start_time, f"{flow}/{deployment.name}", page))
    return sorted(found)
