"""What the HTTP services of Proximo have in common: who may ask, and how much. Needs the extra `serve`."""

import asyncio
import hmac

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

BODY_SECONDS = 30.0
"""Time for the body of a request to arrive."""


def authorise(request: Request, token: str | None) -> None:
    """Raises HTTPException for a request without the bearer token, if there is one."""
    if token is None:
        return
    sent = request.headers.get("Authorization", "")
    if not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "a bearer token is required", {"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body of the request. Rejects a body that is too large or too slow before it is complete."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise HTTPException(413, f"a request has at most {max_bytes} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client disconnected") from None
    return bytes(body)


def http_server(application: Starlette, *, grace_seconds: int) -> uvicorn.Server:
    """The server of an application. `grace_seconds`: for running requests, once it must end."""
    return uvicorn.Server(
        uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=grace_seconds,
        )
    )
