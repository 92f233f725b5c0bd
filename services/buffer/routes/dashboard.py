"""The dashboard: a few static files, which hold no data and so want no token."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

from services import dashboard
from services.common.errors import not_found

FILES = Path(dashboard.__file__).parent

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    # Nothing inline and nothing from elsewhere: what a model wrote can never become code here.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A new release is seen at once; between releases, 304.
    "Cache-Control": "no-cache",
}


def dashboard_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    # Only these are ever served, whatever path is asked for.
    files = {
        path.relative_to(FILES).as_posix(): path
        for path in FILES.rglob("*")
        if path.suffix in MEDIA_TYPES
    }

    @router.get("/")
    def index(request: Request) -> Response:
        return _serve(request, files["index.html"])

    @router.get("/dashboard/{name:path}")
    def file(request: Request, name: str) -> Response:
        if name not in files:
            raise not_found(f"file {name[:200]!r} in the dashboard")
        return _serve(request, files[name])

    return router


def _serve(request: Request, path: Path) -> Response:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=MEDIA_TYPES[path.suffix], headers=headers)
