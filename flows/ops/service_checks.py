"""Checks of the configured services: that they answer, grant access, run the expected versions and keep the time.

They use plain HTTP with short timeouts first, because client libraries retry for much longer, and then the clients of commands and
jobs, which read more settings: logins, proxies, certificates.
"""

import contextlib
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from vitline.flows.ops.check import BUSY_ADVICE, Check, patience
from vitline.infra.environment.certificates import CERTIFICATE_ADVICE, named_files
from vitline.infra.environment.proxies import named_proxies, through_proxy
from vitline.infra.local.processes import is_busy, load
from vitline.infra.local.running_stack import stack_dir
from vitline.infra.local.stack import find_stack
from vitline.infra.settings import Settings, changed_environment
from vitline.infra.storage import Store, StoreFailed, open_store, probe_conditional_writes

TIMEOUT_S = 4.0
_MOST_BYTES = 20_000_000
"""Limit of a reply; the list of deployments holds every form."""
_NONE: Mapping[str, str] = {}
# Leases compare no clocks. Times on pages, `quiet_minutes`, deadlines and signed requests to S3 do.
MAX_CLOCK_DIFFERENCE_S = 5.0
CLOCK_ADVICE = (
    "Times on pages, deadlines and requests to S3 need equal clocks: let NTP set them (`timedatectl set-ntp true`)."
)


class Reply(NamedTuple):
    """A reply of a server with any status. `ahead_s` is how far its clock is ahead of this machine's, plus or minus
    `uncertain_s`; None if it sent no date."""

    status: int
    text: str
    ahead_s: float | None
    uncertain_s: float


def ask(
    url: str,
    headers: Mapping[str, str] = _NONE,
    form: Mapping[str, object] | None = None,
    method: str | None = None,
) -> Reply:
    """The reply to a GET, or to a POST of `form` as JSON, or to another `method`. Raises OSError if there is none."""
    data = None if form is None else json.dumps(form).encode()
    request = urllib.request.Request(url, data=data, headers=dict(headers), method=method)
    if form is not None:
        request.add_header("Content-Type", "application/json")
    began = time.time()
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S * patience()) as answer:
            status, sent, body = answer.status, answer.headers, answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as refused:
        with refused:
            status, sent, body = refused.code, refused.headers, refused.read(_MOST_BYTES)
    except http.client.HTTPException as unreadable:
        raise OSError(f"{url} does not speak HTTP ({unreadable!r})") from unreadable
    except urllib.error.URLError as away:
        cause = away.reason if isinstance(away.reason, BaseException) else away
        raise OSError(f"{url} does not answer{through_proxy(url)}: {away.reason}") from cause
    except OSError as away:
        raise OSError(f"{url} does not answer{through_proxy(url)}: {away}") from away
    waited_s = time.time() - began
    ahead_s = None
    if sent.get("Date"):
        # The header holds whole seconds, rounded down.
        ahead_s = parsedate_to_datetime(sent["Date"]).timestamp() + 0.5 - (began + waited_s / 2)
    return Reply(status, body.decode(errors="replace"), ahead_s, 0.5 + waited_s / 2)


def installed(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_store(settings: Settings) -> Check:
    """List, write, read (whole and a range), delete, and the conditional writes that leases need."""
    store, started = open_store(settings.root), time.perf_counter()
    if store.uri.startswith("s3://"):
        try:
            ask(s3_url(settings))  # the S3 client itself waits for half a minute
        except OSError as away:
            variable = "AWS_ENDPOINT_URL" + ("" if settings.s3_endpoint_url else ", which is not set")
            if not _of_certificate(away):
                return _away("store", away, variable, settings.s3_endpoint_url)
    key = (
        f"doctor/{time.time_ns()}-{uuid.uuid4().hex}"  # the time lets collect-garbage delete what a killed doctor left
    )
    try:
        for what, permission, step in _store_steps(store, key):
            try:
                wrong = step()
            except StoreFailed as failed:
                return Check("store", False, f"cannot {what}: {failed}"[:300], _store_advice(store, failed, permission))
            if wrong:
                return Check("store", False, f"{store.uri} {wrong}", "Do not use this store.")
    finally:
        with contextlib.suppress(StoreFailed, OSError, ValueError):
            store.delete(key)
    seconds = time.perf_counter() - started
    return Check("store", True, f"{store.uri}: list, write, read, ranges, delete, conditional writes ({seconds:.2f} s)")


@contextlib.contextmanager
def object_of_doctor(settings: Settings) -> Iterator[str]:
    """The key of an object that others have to find in the store; empty if it cannot be written, which the check of the store says."""
    store, written = open_store(settings.root), f"doctor/{time.time_ns()}-{uuid.uuid4().hex}"
    try:
        store.write(written, b"vitline")
    except (OSError, RuntimeError):
        written = ""
    try:
        yield written
    finally:
        if written:
            store.discard(written)


def check_store_of_all(settings: Settings, written: str) -> Check:
    """That a node reaches the store, and that it is the same one: it holds what the submitting machine has written."""
    check = check_store(settings)
    if not check.ok or not written:
        return check
    try:
        open_store(settings.root).read(written)
    except FileNotFoundError:
        advice = "All machines need one store at VITLINE_ROOT: a bucket, or a folder that they share."
        return Check("store", False, f"{settings.root} does not hold what the doctor has written elsewhere", advice)
    return check._replace(found="the same as where the doctor runs")


def _store_steps(store: Store, key: str) -> list[tuple[str, str, Callable[[], str | None]]]:
    """Operations in order: name, the permission that S3 needs, and a function that returns an error text or None."""

    def absent() -> str | None:
        return "lists a key that was never written" if store.list(key) else None

    def read() -> str | None:
        return None if store.read(key) == b"vitline" else "returned bytes that differ from those written"

    def part() -> str | None:
        return None if store.read(key, 1, 4) == b"itl" else "returned another range than the one asked for"

    def listed() -> str | None:
        return None if store.list(key) == [key] else "does not list a key that was written"

    return [
        ("list", "s3:ListBucket", absent),
        ("write", "s3:PutObject", lambda: store.write(key, b"vitline")),
        ("read", "s3:GetObject", read),
        ("read a range", "s3:GetObject", part),
        ("list", "s3:ListBucket", listed),
        ("delete", "s3:DeleteObject", lambda: store.delete(key)),
        ("write conditionally", "s3:PutObject", lambda: probe_conditional_writes(store)),
    ]


def _store_advice(store: Store, failed: StoreFailed, permission: str) -> str:
    known = {
        "InvalidAccessKeyId": "The store does not know this key: correct AWS_ACCESS_KEY_ID.",
        "SignatureDoesNotMatch": "The secret does not belong to the key: correct AWS_SECRET_ACCESS_KEY.",
        "ExpiredToken": "Get new credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.",
        "InvalidToken": "Correct AWS_SESSION_TOKEN, or unset it.",
        "NoSuchBucket": "Create the bucket, or correct VITLINE_ROOT.",
        "ContainerNotFound": "Create the container, or correct VITLINE_ROOT.",
        "RequestTimeTooSkewed": "Correct this machine's clock.",
        "PermanentRedirect": "Set AWS_REGION to the region of the bucket.",
        "AuthorizationHeaderMalformed": "Set AWS_REGION to the region of the bucket.",
        "OtherRange": "Let the proxy or cache before the store pass on the header Range, or set AWS_ENDPOINT_URL to the store.",
    }
    if failed.code in known:
        return known[failed.code]
    if "CERTIFICATE_VERIFY_FAILED" in str(failed):
        return CERTIFICATE_ADVICE
    if not store.uri.startswith("s3://"):
        return str(failed).rsplit(". ", 1)[-1]
    if failed.status in (401, 403):
        return f"The store refuses this operation: grant the key {permission} on VITLINE_ROOT, or use another key."
    if "credentials" in str(failed.__cause__).lower():
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    return "Check that the store is running, and correct AWS_ENDPOINT_URL or VITLINE_ROOT."


def s3_url(settings: Settings) -> str:
    return settings.s3_endpoint_url or f"https://s3.{settings.s3_region or 'us-east-1'}.amazonaws.com"


def check_job_server(settings: Settings) -> Check:
    """The configured job server answers, accepts the token, and runs the Ray version that is installed here."""
    address = settings.ray_address
    assert address is not None
    if urlsplit(address).scheme not in ("http", "https"):
        return Check("ray", False, f"RAY_ADDRESS is {address}", "Set it to the job server, as in http://HOST:8265.")
    try:
        token = settings.ray_token()
    except OSError as error:
        return Check("ray", False, f"the token cannot be read: {error}", "Correct RAY_AUTH_TOKEN_PATH.")
    try:
        reply = ask(f"{address.rstrip('/')}/api/version", {"Authorization": f"Bearer {token}"} if token else {})
    except OSError as away:
        return _away("ray", away, "RAY_ADDRESS", address)
    if reply.status in (401, 403):
        advice = "Set RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) to the token that the cluster was started with."
        return Check("ray", False, f"{address} refuses access: {_line(reply.text)}", advice)
    try:
        found = str(json.loads(reply.text)["ray_version"])
    except (ValueError, KeyError, TypeError):
        return Check("ray", False, f"{address} is not a Ray job server ({_shown(reply)})", "Correct RAY_ADDRESS.")
    # Jobs run in the cluster's Ray; the protocols of two versions differ.
    if found != installed("ray"):
        advice = f"Install ray=={found} here, or the Ray of requirements.lock on the cluster."
        return Check("ray", False, f"{address}: Ray {found}, here {installed('ray') or 'not installed'}", advice)
    return Check("ray", True, f"{address}: Ray {found}")


def check_prefect(settings: Settings) -> Check:
    url = settings.prefect_api_url
    if url is None:
        return Check("prefect", True, "no PREFECT_API_URL: `vitline stack up` starts a server")
    try:
        reply = ask(f"{url.rstrip('/')}/admin/version", settings.prefect_headers())
    except OSError as away:
        if not _of_certificate(away):
            return _away("prefect", away, "PREFECT_API_URL", url)
        return _asked_by_prefect(settings, url)
    if reply.status in (401, 403):
        advice = "Set PREFECT_API_AUTH_STRING (own server) or PREFECT_API_KEY (Prefect Cloud) for flows and workers."
        return Check("prefect", False, f"{url} refuses access ({_shown(reply)})", advice)
    found = reply.text.strip().strip('"')
    if reply.status != 200 or not found[:1].isdigit():
        advice = "Correct PREFECT_API_URL; it ends in /api, as in http://127.0.0.1:4200/api."
        return Check("prefect", False, f"{url} is not a Prefect server ({_shown(reply)})", advice)
    compared = _versions("prefect", url, found, installed("prefect"))
    return _asked_by_prefect(settings, url) if compared.ok else compared


def _asked_by_prefect(settings: Settings, url: str) -> Check:
    from prefect.client.orchestration import SyncPrefectClient

    from vitline.flows.ops.prefect_errors import sentence_of

    key, login = settings.prefect_api_key, settings.prefect_api_auth_string
    try:
        with SyncPrefectClient(
            url,
            api_key=key.get_secret_value() if key else None,
            auth_string=login.get_secret_value() if login else None,
            httpx_settings={"timeout": TIMEOUT_S * patience()},
        ) as api:
            return _versions("prefect", url, api.api_version(), installed("prefect"))
    except Exception as error:
        return Check("prefect", False, f"Prefect's client: {sentence_of(error) or error}"[:600], CERTIFICATE_ADVICE)


def check_mlflow(settings: Settings) -> Check:
    uri = settings.mlflow_tracking_uri
    if uri is None:
        return Check("mlflow", True, "no MLFLOW_TRACKING_URI: runs stay in the store; `vitline runs send` sends them")
    if urlsplit(uri).scheme not in ("http", "https"):
        return Check("mlflow", True, f"{uri} is not a server, so nothing is checked")
    # /version answers every host name; a search answers only those that the server allows.
    try:
        reply = ask(f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1", settings.mlflow_headers())
    except OSError as away:
        if not _of_certificate(away):
            return _away("mlflow", away, "MLFLOW_TRACKING_URI", uri)
        return _asked_by_mlflow(settings, uri, "")
    if reply.status == 403 and "host" in reply.text.lower():
        host = urlsplit(uri).netloc
        advice = f"Start the MLflow server with --allowed-hosts '{host}' added (name and port, as clients write it)."
        return Check("mlflow", False, f"{uri} refuses the host {host}: {_line(reply.text)}", advice)
    if reply.status in (401, 403):
        advice = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        return Check("mlflow", False, f"{uri} refuses access ({_shown(reply)})", advice)
    try:
        json.loads(reply.text)["experiments"] if reply.status == 200 else json.loads("")
    except (ValueError, KeyError, TypeError):
        advice = "Correct MLFLOW_TRACKING_URI."
        return Check("mlflow", False, f"{uri} is not an MLflow server ({_shown(reply)})", advice)
    found = ask(f"{uri.rstrip('/')}/version", settings.mlflow_headers()).text.strip()
    compared = _versions("mlflow", uri, found, installed("mlflow-skinny") or installed("mlflow"))
    return _asked_by_mlflow(settings, uri, compared.found) if compared.ok else compared


def _asked_by_mlflow(settings: Settings, uri: str, found: str) -> Check:
    from vitline.infra.mlflow.tracking import Tracking

    password, token = settings.mlflow_tracking_password, settings.mlflow_tracking_token
    login = {
        "MLFLOW_TRACKING_USERNAME": settings.mlflow_tracking_username,
        "MLFLOW_TRACKING_PASSWORD": password and password.get_secret_value(),
        "MLFLOW_TRACKING_TOKEN": token and token.get_secret_value(),
    }
    try:
        with changed_environment(
            MLFLOW_HTTP_REQUEST_MAX_RETRIES="0", **{name: value for name, value in login.items() if value}
        ):
            Tracking(uri).ping()
    except Exception as error:
        advice = CERTIFICATE_ADVICE if "certificate" in str(error).lower() else "Correct what the message names."
        return Check("mlflow", False, f"MLflow's client: {error}"[:600], advice)
    return Check("mlflow", True, found or uri)


def check_certificates() -> Check:
    """The certificates of authorities and the proxies that the variables of this process name."""
    files = named_files()
    if missing := [f"{name}={path}" for name, path in files.items() if not Path(path).exists()]:
        found = f"a file is not there: {', '.join(missing)}"
        return Check(
            "certificates", False, found, "Correct the variable there; on a node of Ray, where Ray is started."
        )
    named = ", ".join(f"{name}={value}" for name, value in (files | named_proxies()).items())
    return Check("certificates", True, named or "those of the system, no proxy")


def check_clock(settings: Settings) -> Check:
    """This machine's clock against those of the services, by the date of their replies. Other checks report services that
    do not answer."""
    urls = {
        "S3": s3_url(settings) if settings.root.startswith("s3://") else None,
        "Prefect": settings.prefect_api_url and f"{settings.prefect_api_url.rstrip('/')}/health",
        "MLflow": settings.mlflow_tracking_uri and f"{settings.mlflow_tracking_uri.rstrip('/')}/health",
        "Ray": settings.ray_address and f"{settings.ray_address.rstrip('/')}/api/version",
    }
    services = {name: url for name, url in urls.items() if url and url.startswith("http")}
    if not services:
        return Check("clock", True, "no service to compare with")
    with ThreadPoolExecutor(len(services)) as threads:
        replies = dict(zip(services, threads.map(_reply_of, services.values()), strict=True))
    compared, wrong = [], []
    for name, reply in replies.items():
        if reply is None or reply.ahead_s is None:
            continue
        compared.append(name)
        if abs(reply.ahead_s) > MAX_CLOCK_DIFFERENCE_S + reply.uncertain_s:
            side = "ahead of" if reply.ahead_s > 0 else "behind"
            wrong.append(f"{name}'s clock is {abs(reply.ahead_s):.0f} s {side} this machine's")
    if wrong:
        return Check("clock", False, "; ".join(wrong), CLOCK_ADVICE)
    return Check("clock", True, f"agrees with {', '.join(compared)}" if compared else "no service answered with a date")


def _of_certificate(away: OSError) -> bool:
    """Whether plain HTTP does not accept the certificate of a server. The server's own client may."""
    return isinstance(away.__cause__, ssl.SSLError)


def _away(name: str, away: OSError, variable: str, url: str | None) -> Check:
    if is_busy() and isinstance(away.__cause__ or away, TimeoutError):
        return Check(name, False, f"{away}"[:300] + f", and this machine is busy: {load()}", BUSY_ADVICE)
    if _of_certificate(away):
        advice = CERTIFICATE_ADVICE
    elif url and through_proxy(url):
        advice = "Correct the proxy, or add the host to NO_PROXY."
    elif is_of_stack(name, variable, url):
        advice = f"It is of the local stack: `vitline stack restart {'s3' if name == 'store' else name}`."
    else:
        advice = f"Start it, or correct {variable}."
    return Check(name, False, str(away)[:300], advice)


def is_of_stack(name: str, variable: str, url: str | None) -> bool:
    """Whether the service at a URL is of this folder's local stack, so that its commands help. Others advise what their owner can do."""
    stack = find_stack(stack_dir(Settings()))
    return stack is not None and url == stack.env.get(variable) and any(found.name == name for found in stack.services)


def _reply_of(url: str) -> Reply | None:
    try:
        return ask(url)
    except OSError:
        return None


def _versions(name: str, url: str, server: str, client: str | None) -> Check:
    """Compares the minor versions: patch releases are compatible, minor ones change the protocol."""
    same = client is not None and client.split(".")[:2] == server.split(".")[:2]
    advice = "" if same else f"Install {name}=={server} here, or the version of requirements.lock on the server."
    return Check(name, same, f"{url}: server {server}, here {client or 'not installed'}", advice)


def _line(text: str) -> str:
    return " ".join(text.split())[:120]


def _shown(reply: Reply) -> str:
    return f"status {reply.status}: {_line(reply.text)}"
