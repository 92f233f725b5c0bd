"""Takes the pictures of the dashboard in docs/images, from runs on this machine (`make pictures`).

The stack must run (`bapo stack up`), with the run of `make run` as `countdown`, and that of
`bapo run examples/geometry.yaml` as `geometry`. Chromium is that of `make install-chromium`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.stack.settings import default_home
from services.stack.stack import Endpoints, find_stack

IMAGES = Path(__file__).parents[1] / "docs/images"
COLOURS = 256
"""Colours of a picture: enough for a page, in a third of the bytes."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A page of the dashboard."""

    name: str
    address: str
    width: int = 1400
    height: int | None = None
    """Pixels from the top; None is the whole page."""


def list_pictures(endpoints: Endpoints) -> Iterator[Picture]:
    yield Picture("dashboard-overview", "/runs/countdown")
    yield Picture("dashboard-difficulty", "/runs/countdown/difficulty?before=60")
    learnt, seen = (find_prompt(endpoints, run) for run in ("countdown", "geometry"))
    yield Picture("dashboard-prompt", f"/runs/countdown/prompt?uid={learnt}")
    yield Picture("dashboard-diagram", f"/runs/geometry/prompt?uid={seen}", 1200, 1400)


def find_prompt(endpoints: Endpoints, run: str) -> str:
    """Returns the prompt that the model learnt best of those that it could not solve at first."""
    client = BufferClient(endpoints.buffer_url, endpoints.token, run=run)
    unsolved = [prompt for prompt in client.all_prompts() if prompt.first_mean == 0]
    return max(unsolved, key=lambda prompt: (prompt.last_mean, prompt.attempts)).uid


def take(browser: Browser, endpoints: Endpoints, picture: Picture) -> None:
    context = browser.new_context(
        viewport={"width": picture.width, "height": picture.height or 900}, color_scheme="light"
    )
    page = context.new_page()
    page.goto(f"{endpoints.buffer_url}/#token={endpoints.token}&{picture.address}")
    page.wait_for_selector("main h1")
    page.wait_for_selector("[aria-busy]", state="detached")
    page.wait_for_load_state("networkidle")
    data = page.screenshot(full_page=picture.height is None)
    context.close()
    image = Image.open(BytesIO(data)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(IMAGES / f"{picture.name}.png", optimize=True)


def main() -> None:
    endpoints = find_stack(default_home())
    program = shutil.which("chromium")
    if endpoints is None:
        raise BapoError("no stack runs; start it with `bapo stack up`")
    if program is None:
        raise BapoError("there is no chromium; run `make install-chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for picture in list_pictures(endpoints):
            take(browser, endpoints, picture)
        browser.close()


if __name__ == "__main__":
    try:
        main()
    except BapoError as error:
        sys.exit(f"error: {error}")
