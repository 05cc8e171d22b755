"""The MLflow server of the local stack: MLflow's own web application, behind the login of the stack (`--app-name vitline`).

Without it, every user of this machine could read any file of the stack's user through the artifact location of a new
experiment, and register a model that runs code where it is served. MLflow's own `basic-auth` application needs a database of
users and hashes the password anew for each request.
"""

import hmac

from mlflow.server.fastapi_app import app as mlflow_app
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from infra.settings import Settings, basic_authorization

_OPEN = ("/health", "/version")


class LoginRequired:
    """An ASGI application that passes on requests with the right Authorization header, and answers others with 401."""

    def __init__(self, app: ASGIApp, login: str) -> None:
        self._app, self._expected = app, basic_authorization(login).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
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


app = LoginRequired(mlflow_app, Settings().mlflow_login())
