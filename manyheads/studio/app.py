"""The server of the page: loopback only, a random token in every address, bounded requests, and one router per tab."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from manyheads.errors import ManyheadsError, OutputError
from manyheads.studio.session import Sessions

WEB = Path(__file__).with_name("web")
MAX_BODY = 1 << 20  # bytes of a request
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(sessions: Sessions, token: str, hosts: set[str]) -> FastAPI:
    """The app; every address begins with the token, and requests for other hosts are refused."""
    from manyheads.studio import field, look, model, probe, tour

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    page = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    router = APIRouter(prefix="/api")

    @router.post("/session")
    def open_session() -> dict[str, Any]:
        return {"session": sessions.start()}

    @router.post("/session/{session}/close")
    def close_session(session: str) -> dict[str, Any]:
        sessions.close(session)
        return {}

    page.include_router(router)
    for tab in (look, model, probe, field, tour):
        page.include_router(tab.router(sessions), prefix="/api")
    page.mount("/", StaticFiles(directory=WEB, html=True))
    app.mount(f"/{token}", page)

    @page.exception_handler(ManyheadsError)
    def explain(request: Request, error: ManyheadsError) -> JSONResponse:
        return JSONResponse({"code": error.code, "message": error.message, "hint": error.hint}, status_code=422)

    @page.exception_handler(RequestValidationError)
    def explain_request(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"code": "usage.argument", "message": "the request has wrong fields"}, status_code=422)

    @page.exception_handler(HTTPException)
    def explain_status(request: Request, error: HTTPException) -> JSONResponse:
        tree = {"code": "usage.argument", "message": str(error.detail)}
        return JSONResponse(tree, status_code=error.status_code, headers=error.headers)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.headers.get("host", "") not in hosts:
            return Response("unknown host", status_code=421)
        origin = request.headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in hosts:
            return Response("other origins are refused", status_code=403)
        if not request.headers.get("content-length", "0").isdecimal() or "chunked" in request.headers.get(
            "transfer-encoding", ""
        ):
            return Response("a length is required", status_code=411)
        if int(request.headers.get("content-length", "0")) > MAX_BODY:
            return Response("the request is too large", status_code=413)
        response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    return app


@contextmanager
def serve(sessions: Sessions, port: int = 0) -> Iterator[str]:
    """Serves the page from a thread; yields its address, which has a random token."""
    token = secrets.token_urlsafe(16)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # so that a browser may connect before the server has started
    except OSError as error:
        raise OutputError(f"port {port} cannot be used: {error.strerror}", hint="leave out --port") from None
    port = listener.getsockname()[1]
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
    config = uvicorn.Config(
        create_app(sessions, token, hosts), log_level="error", access_log=False, h11_max_incomplete_event_size=1 << 16
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/{token}/"
    finally:
        server.should_exit = True
        thread.join(timeout=60)  # a computation that ends with the program would abort it
        listener.close()
