"""Which requests of browsers the servers of the local stack take: those of their own pages.

A browser that has logged in to a server sends the login with every request to it, also with requests that pages of other origins
make. On 127.0.0.1 those may be pages of any user of this machine: another port is another origin.
"""

from collections.abc import Mapping


def foreign_page(method: str, path: str, headers: Mapping[str, str]) -> str:
    """Empty, or why a request is refused: a page of another origin sent it. A link to the first page may be followed.

    `headers` ignores case. Pages cannot set or leave out these headers, and programs do not send them.
    """
    origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "none")
    if origin and origin.partition("://")[2] != headers.get("host"):
        return f"A page of {origin} sent this request; only pages of this server may.\n"
    link = (method, path, headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    if site in ("none", "same-origin") or link == ("GET", "/", "navigate", "document"):
        return ""
    return "A page of another origin sent this request. Open the first page of this server instead.\n"
