"""Ray's head node, whose page and job server are behind the login of the stack.

python -m vitline.infra.local.access.ray_page --port PORT --dashboard-port PORT --login FILE -- COMMAND OF RAY

Ray's own page keeps the token in a cookie of 127.0.0.1. Cookies know no ports, so a page that another user of this machine serves
on any other port would receive it. Here a browser logs in as it does for MLflow, with a login that it sends to this port only, and
never sees the token. Programs send the token, as to Ray itself.
"""

import argparse
import asyncio
import contextlib
import hmac
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from vitline.infra.children import end_with_parent
from vitline.infra.local.access.own_pages import foreign_page
from vitline.infra.settings import Settings, basic_authorization

# Headers of one connection, and what must not pass: the login, and cookies in either direction.
_NOT_PASSED = {"authorization", "connection", "cookie", "host", "keep-alive", "set-cookie", "te", "trailer"}
_NOT_PASSED |= {"transfer-encoding", "upgrade"}
_LARGEST_MESSAGE_BYTES = 64 * 1024 * 1024


class RayPage:
    """Passes requests on to the server at `dashboard` if they have the login, which the token then replaces, or a token."""

    def __init__(self, session: aiohttp.ClientSession, dashboard: str, token: str, login: str) -> None:
        self._session, self._dashboard = session, dashboard
        self._token, self._login = f"Bearer {token}", basic_authorization(login)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if problem := foreign_page(request.method, request.path, request.headers):
            return web.Response(status=403, text=problem)
        given = request.headers.get("Authorization") or request.headers.get("X-Ray-Authorization") or ""
        if hmac.compare_digest(given.encode(errors="replace"), self._login.encode()):
            given = self._token
        elif not given.lower().startswith("bearer "):  # Ray itself checks a token
            ask = {"WWW-Authenticate": 'Basic realm="Ray of vitline"'}
            text = "Log in with the user and password of the local stack: `vitline stack status` names their file.\n"
            return web.Response(status=401, text=text, headers=ask)
        url = URL(self._dashboard + request.raw_path, encoded=True)
        headers = _passed(request.headers)
        headers["Authorization"] = given
        try:
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await self._talk(request, url, headers)
            return await self._fetch(request, url, headers)
        except aiohttp.ClientError as error:
            return web.Response(status=503, text=f"Ray does not answer ({error})")

    async def _fetch(self, request: web.Request, url: URL, headers: CIMultiDict[str]) -> web.StreamResponse:
        body = request.content if request.can_read_body else None
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as reply:
            answer = web.StreamResponse(status=reply.status, reason=reply.reason, headers=_passed(reply.headers))
            with contextlib.suppress(ConnectionResetError):  # the client has left
                await answer.prepare(request)
                async for piece in reply.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
            return answer

    async def _talk(self, request: web.Request, url: URL, headers: CIMultiDict[str]) -> web.StreamResponse:
        """Passes messages in both directions until one side closes, as `ray job logs --follow` needs."""
        for name in [name for name in headers if name.lower().startswith("sec-websocket-")]:
            del headers[name]
        async with self._session.ws_connect(url, headers=headers, max_msg_size=_LARGEST_MESSAGE_BYTES) as ray:
            client = web.WebSocketResponse(max_msg_size=_LARGEST_MESSAGE_BYTES)
            await client.prepare(request)
            both = [asyncio.create_task(_pass_messages(ray, client)), asyncio.create_task(_pass_messages(client, ray))]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            await client.close()
            return client


Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


async def _pass_messages(source: Socket, target: Socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        async for message in source:
            if message.type is aiohttp.WSMsgType.TEXT:
                await target.send_str(message.data)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await target.send_bytes(message.data)


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_PASSED)


@contextlib.asynccontextmanager
async def serving(port: int, dashboard: str, token: str, login: str) -> AsyncIterator[None]:
    """Serves on this port of 127.0.0.1. Raises OSError if it is in use."""
    endless = aiohttp.ClientTimeout(total=None, connect=10)
    nothing = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(timeout=endless, cookie_jar=nothing, auto_decompress=False) as session:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", RayPage(session, dashboard, token, login).answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield
        finally:
            await runner.cleanup()


async def run(port: int, dashboard_port: int, login: str, command: Sequence[str]) -> int:
    """Serves as long as the command runs, which gets SIGTERM and SIGINT, and returns its exit code."""
    token = Settings().ray_token()
    assert token, "every process of Ray has RAY_AUTH_TOKEN_PATH"
    async with serving(port, f"http://127.0.0.1:{dashboard_port}", token, login):
        ray = await asyncio.create_subprocess_exec(*command, preexec_fn=end_with_parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ray.send_signal, number)
        return await ray.wait()


def main() -> None:
    """Runs Ray's head node and its page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dashboard-port", type=int, required=True)
    parser.add_argument("--login", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    code = asyncio.run(run(given.port, given.dashboard_port, given.login.read_text().strip(), given.command))
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
