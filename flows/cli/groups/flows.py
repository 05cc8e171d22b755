"""`vitline flows`: deployments in Prefect."""

from dataclasses import asdict
from typing import Annotated

import typer

from vitline.flows import console
from vitline.flows.cli.command_line import Json, Root, settings, show_one, show_rows
from vitline.flows.cli.form_options import PLAN_OPTIONS
from vitline.vit.cost.estimate import GPU, TRAINING_MFU, PlanGpus

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("deploy")
def flows_deploy(
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            help="Deployments file (YAML): names, pools, schedules and form values. What it names is sent each time. Default: the "
            "deployments of vitline.",
        ),
    ] = None,
    nightly: Annotated[
        bool, typer.Option("--nightly", help="Activate new schedules of vitline's deployments at once.")
    ] = False,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            help="Work pool of all deployments. Default: each keeps its own; new ones use that of the others, or of the project's name.",
        ),
    ] = None,
    job_variable: Annotated[
        list[str] | None,
        typer.Option(
            "--job-variable",
            help="Set a variable of the pool's jobs: `--job-variable image=vitline:1`, the value as JSON or text. "
            "Repeatable; other variables stay. Prefect shows them, so they must hold no secrets.",
        ),
    ] = None,
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify",
            help="Notification block that alerts send to, as TYPE/NAME: `--notify slack-webhook/vision-team`. Alerts that already "
            "have an action are not changed.",
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Register every flow with its form at the Prefect server of $PREFECT_API_URL, and create the alerts that were never created;
    edits made in Prefect are kept.

    Example: `vitline flows deploy --pool gpus --job-variable namespace=training`

    Example: `vitline flows deploy --file deployments.yaml`
    """
    from vitline.flows.forms.overrides import parse_assignments
    from vitline.flows.on_prefect.alerts.automations import alert_lines, create_alerts
    from vitline.flows.on_prefect.deploy.deployments_file import read_deployments
    from vitline.flows.on_prefect.deploy.registered import beside_file, beside_lines
    from vitline.flows.on_prefect.deploy.registration import register, registration_lines
    from vitline.flows.on_prefect.deployments import DEPLOYMENTS

    chosen, variables = settings(root), parse_assignments(job_variable or [], "--job-variable", "NAME=VALUE")
    if file and nightly:
        raise ValueError(
            f"--nightly is for vitline's own deployments. In {file}, new schedules are active unless they say `active: false`."
        )
    deployments = read_deployments(file, chosen) if file else DEPLOYMENTS
    done = register(chosen, deployments, nightly_active=nightly, pool=pool, job_variables=variables)
    alerts = create_alerts(notify)
    beside = beside_file(deployments, chosen) if file else {}
    if json:
        rows = [asdict(deployment) for deployment in done]
        console.emit({"deployments": rows, "not in the file": list(beside), "alerts": alerts._asdict()})
    else:
        lines = beside_lines(file, deployments, beside) if file else []
        for text in [*registration_lines(done), *lines, *alert_lines(alerts, notify)]:
            console.print_result(text)
    if any(deployment.problem for deployment in done):
        raise typer.Exit(1)


@app.command("ls")
def flows_ls(root: Root = None, json: Json = False) -> None:
    """List the deployments as registered in Prefect: form values, schedules, next start.

    Example: `vitline flows ls`
    """
    from vitline.flows.on_prefect.deployments import DEPLOYMENTS

    chosen = settings(root)
    if chosen.prefect_api_url is None:
        console.say("PREFECT_API_URL is not set; `vitline flows deploy` registers these deployments at a server.")
        rows = [
            {"deployment": d.full_name, "what": d.description, "filled in": d.request, "schedule": "not registered"}
            for d in DEPLOYMENTS
        ]
    else:
        from vitline.flows.on_prefect.deploy.registered import registered_rows

        rows = registered_rows(chosen)
    empty = "No deployment is registered with this Prefect; `vitline flows deploy` registers them."
    show_rows("deployments", rows, ["deployment", "what", "filled in", "schedule", "next start"], json, empty)


@app.command("trigger")
def flows_trigger(
    deployment: Annotated[str, typer.Argument(help="FLOW/DEPLOYMENT; `vitline flows ls` lists them.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Set a field of the form: `--set seed=1`. Repeatable.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Print the log of the flow run until it ends.")] = False,
    plan: Annotated[bool, PLAN_OPTIONS["plan"][2]] = False,
    gpu: Annotated[str, PLAN_OPTIONS["gpu"][2]] = GPU,
    mfu: Annotated[float, PLAN_OPTIONS["mfu"][2]] = TRAINING_MFU,
    gpu_hour_price: Annotated[float | None, PLAN_OPTIONS["gpu_hour_price"][2]] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Start a deployment as the Prefect UI does, after the same checks.

    Example: `vitline flows trigger pretrain-then-transfer/demo --set seed=1 --wait`

    Example: `vitline flows trigger pretrain-then-transfer/nightly --plan --gpu H100`
    """
    from vitline.flows.cli.trigger import follow, planned, trigger
    from vitline.flows.forms.overrides import parse_overrides

    chosen, changes = settings(root), parse_overrides(set_ or [])
    if plan:
        from vitline.flows.cli.evaluation import show_pipeline_plan

        gpus = PlanGpus(gpu, mfu, gpu_hour_price)
        show_pipeline_plan(chosen, planned(chosen, deployment, changes), gpus, as_json=json)
        return
    run, page = trigger(chosen, deployment, changes)
    console.say(f"started {run.name}: {page}")
    ended = follow(run.id) if wait else run
    state = ended.state
    shown = {"flow_run": str(run.id), "page": page, "state": state and state.name, "message": state and state.message}
    show_one(shown, json)
    if wait and (state is None or not state.is_completed()):
        raise typer.Exit(1)


@app.command("resume")
def flows_resume(
    names: Annotated[list[str], typer.Argument(help="Names or ids of flow runs, as on their pages.")],
    root: Root = None,
    json: Json = False,
) -> None:
    """Continue flow runs that were interrupted, suspended or failed, from their last checkpoints. A night continues as the same night.

    Example: `vitline flows resume icons-birds-s0-1121-030000`
    """
    from vitline.flows.cli.trigger import resume

    rows = [{"flow run": run.name, "page": page} for run, page in resume(settings(root), names)]
    show_rows("continued", rows, ["flow run", "page"], json, "")
