"""The proxies that variables name: which requests go through one, and that none to this machine does."""

import importlib.util
import os
import re
import urllib.request
from urllib.parse import urlsplit

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_THIS_MACHINE = ("localhost", ".localhost", "127.0.0.1", "::1")


def named_proxies() -> dict[str, str]:
    """The proxies, without their logins, by the variables of this process that name them."""
    return {name: _without_login(os.environ[name]) for name in _set_variables()}


def _set_variables() -> list[str]:
    return [name for name in os.environ if name.lower() in _PROXIES and os.environ[name]]


def _without_login(proxy: str) -> str:
    return re.sub(r"^(\w+://)?.*@", r"\1", proxy)


def through_proxy(url: str, *, all_proxy: bool = False) -> str:
    """For errors: the proxy to which requests to a URL go, and how to avoid it; empty where they go directly.

    `all_proxy`: the client also reads ALL_PROXY, as Prefect's and MLflow's do.
    """
    address, found = urlsplit(url), urllib.request.getproxies()
    kind = next((kind for kind in (address.scheme, *(["all"] if all_proxy else [])) if kind in found), None)
    if kind is None or urllib.request.proxy_bypass(address.netloc):
        return ""
    name = next(name for name in (f"{kind}_proxy", f"{kind}_proxy".upper()) if name in os.environ)
    return f" (through the proxy {_without_login(found[kind])} of {name}: correct it, or add {address.hostname} to NO_PROXY)"


def reach_this_machine_directly() -> None:
    """Adds this machine to NO_PROXY for this process and its children, where a proxy is set: no proxy reaches loopback.

    Without the package socksio, Prefect's client fails for any address where a SOCKS proxy is set, so that is unset where the server is
    on this machine.
    """
    proxies = _set_variables()
    if not proxies:
        return
    known = [host.strip() for name in ("no_proxy", "NO_PROXY") for host in os.environ.get(name, "").split(",")]
    hosts = "*" if "*" in known else ",".join(filter(None, dict.fromkeys([*known, *_THIS_MACHINE])))
    os.environ.update(no_proxy=hosts, NO_PROXY=hosts)
    if _is_here(os.environ.get("PREFECT_API_URL", "")) and not importlib.util.find_spec("socksio"):
        for name in proxies:
            if os.environ[name].startswith("socks"):
                del os.environ[name]


def _is_here(url: str) -> bool:
    """Whether the host of a URL is this machine, by its name or number alone."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # such as http://[
        return False
    return host in _THIS_MACHINE or host.endswith(".localhost")
