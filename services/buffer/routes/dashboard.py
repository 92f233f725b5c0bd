"""Serves the dashboard: static files, which hold no data and so need no token."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

from services import dashboard
from services.common.problems import not_found

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    # No inline code and none of other origins: the text of a response can never run as a script.
    # Images of prompts are fetched with the token and shown from memory (blob:).
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Browsers ask each time, so that a new release is seen at once; between releases they get 304.
    "Cache-Control": "no-cache",
}

_DIRECTORY = Path(dashboard.__file__).parent
FILES = {
    path.relative_to(_DIRECTORY).as_posix(): path
    for path in _DIRECTORY.rglob("*")
    if path.suffix in MEDIA_TYPES
}
"""Files that are served, by name. Only these are ever read, whatever path a request has."""

router = APIRouter(include_in_schema=False)


@router.get("/")
def serve_index(request: Request) -> Response:
    """Returns the page of the dashboard."""
    return _serve(request, FILES["index.html"])


@router.get("/docs")
def serve_documentation(request: Request) -> Response:
    """Returns the page that lists the routes of the REST API."""
    return _serve(request, FILES["docs.html"])


@router.get("/dashboard/{name:path}")
def serve_file(request: Request, name: str) -> Response:
    """Returns a style sheet, a script or an image of the dashboard."""
    if name not in FILES:
        raise not_found(f"file {name[:200]!r} in the dashboard")
    return _serve(request, FILES[name])


def _serve(request: Request, path: Path) -> Response:
    body = path.read_bytes()
    if root_path := request.scope["root_path"]:
        # A page at /team/bapo, without a slash at its end, has other relative addresses.
        body = body.replace(b'="dashboard/', f'="{root_path}/dashboard/'.encode())
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=MEDIA_TYPES[path.suffix], headers=headers)
