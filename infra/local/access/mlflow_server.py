"""The MLflow server of the local stack: MLflow's own web application, behind the login of the stack, in one process.

python -m vitline.infra.local.access.mlflow_server --port PORT

Its settings are variables (`_mlflow_environment` in `infra/local/services.py`). The log has the lines of that process.

Without it, every user of this machine could read any file of the stack's user through the artifact location of a new
experiment, and register a model that runs code where it is served. MLflow's own `basic-auth` application needs a database of
users and hashes the password anew for each request.
"""

import argparse
import hmac
from copy import deepcopy

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vitline.infra.local.access.own_pages import foreign_page
from vitline.infra.mlflow.mlflow_private import server_app
from vitline.infra.settings import Settings, basic_authorization, inherited_environment

_OPEN = ("/health", "/version")


class LoginRequired:
    """An ASGI application that passes on requests with the right Authorization header, and answers others with 401. Requests of pages of
    other origins get 403: MLflow itself allows every origin of this machine, and browsers send it the login."""

    def __init__(self, app: ASGIApp, login: str) -> None:
        self._app, self._expected = app, basic_authorization(login).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = scope["type"] == "http" and foreign_page(scope["method"], scope["path"], Headers(scope=scope))
        if foreign:
            await PlainTextResponse(foreign, status_code=403)(scope, receive, send)
        elif scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = {"WWW-Authenticate": 'Basic realm="MLflow of vitline"'}
            text = "Log in with the user and password of the local stack: `vitline stack status` names their file.\n"
            await PlainTextResponse(text, status_code=401, headers=headers)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in _OPEN:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def main() -> None:
    """Serves on 127.0.0.1 until SIGTERM.

    Raises what `server_app` raises.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, required=True)
    mlflow_app = server_app(inherited_environment(()))
    log = deepcopy(uvicorn.config.LOGGING_CONFIG)
    for formatter in log["formatters"].values():
        formatter |= {"fmt": f"%(asctime)s {formatter['fmt']}", "datefmt": "%Y/%m/%d %H:%M:%S"}
    app = LoginRequired(mlflow_app, Settings().mlflow_login())
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_config=log)


if __name__ == "__main__":
    main()
