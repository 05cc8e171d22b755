"""What pages of other origins, and people without the login, get from the servers behind our rules: nothing."""

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web

from vitline.infra.local.access.own_pages import foreign_page
from vitline.infra.local.access.ray_page import serving
from vitline.infra.settings import basic_authorization

HOST = {"host": "127.0.0.1:5000"}
FOLLOWED = {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "allowed"),
    [
        ("POST", "/api", {}, True),  # a program
        ("POST", "/api", {"origin": "http://127.0.0.1:5000", "sec-fetch-site": "same-origin"}, True),
        ("GET", "/", {"sec-fetch-site": "none"}, True),  # typed
        ("GET", "/", FOLLOWED, True),  # a link from Prefect
        ("GET", "/logical/kill_actor", FOLLOWED, False),
        ("POST", "/", FOLLOWED, False),  # a form
        ("GET", "/", FOLLOWED | {"sec-fetch-dest": "iframe"}, False),
        ("GET", "/api", {"sec-fetch-site": "same-site"}, False),  # an image of another port
        ("GET", "/api", {"sec-fetch-site": "cross-site"}, False),
        ("GET", "/api", {"origin": "http://127.0.0.1:9999"}, False),
        ("OPTIONS", "/api", {"origin": "http://attacker.example"}, False),
        ("POST", "/api", {"origin": "null"}, False),
    ],
)
def test_only_programs_and_own_pages_send_requests(method, path, headers, allowed):
    assert (foreign_page(method, path, HOST | headers) == "") is allowed


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_the_page_of_ray_takes_login_or_token_and_keeps_the_token_to_itself():
    """In front of a server that sets a cookie as Ray does."""
    seen, login = [], {"Authorization": basic_authorization("vitline:word")}

    async def ray(request: web.Request) -> web.StreamResponse:
        seen.append((request.raw_path, request.headers.get("Authorization"), "Cookie" in request.headers))
        if request.path == "/tail":
            talk = web.WebSocketResponse()
            await talk.prepare(request)
            await talk.send_str(f"log of {await talk.receive_str()}")
            return talk
        reply = web.Response(body=await request.read() or b"page")
        reply.set_cookie("ray-authentication-token", "token")
        return reply

    async def scenario():
        inner, outer = free_port(), free_port()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", ray)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", inner).start()
        url = f"http://127.0.0.1:{outer}"
        async with (
            serving(outer, f"http://127.0.0.1:{inner}", "token", "vitline:word"),
            aiohttp.ClientSession() as client,
        ):

            async def ask(method, path, **headers):
                async with client.request(method, url + path, headers=headers, data=b"x" * (method == "POST")) as reply:
                    return reply.status, await reply.read(), "Set-Cookie" in reply.headers

            assert (await ask("GET", "/"))[0] == 401
            assert (await ask("GET", "/", Authorization=basic_authorization("vitline:wrong")))[0] == 401
            assert (await ask("GET", "/", Origin="http://127.0.0.1:1", **login))[0] == 403
            assert not seen
            assert await ask("GET", "/", Cookie="a=b", **login) == (200, b"page", False)
            assert await ask("POST", "/api/a%2Fb?c=%20", Authorization="Bearer other") == (200, b"x", False)
            async with client.ws_connect(f"{url}/tail", headers=login) as talk:
                await talk.send_str("job")
                assert await talk.receive_str() == "log of job"
            await runner.cleanup()
            assert (await ask("GET", "/", **login))[0] == 503

    asyncio.run(scenario())
    assert seen == [
        ("/", "Bearer token", False),
        ("/api/a%2Fb?c=%20", "Bearer other", False),
        ("/tail", "Bearer token", False),
    ]
