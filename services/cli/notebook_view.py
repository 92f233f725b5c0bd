"""Shows the progress of a run in a notebook, as one output that is replaced."""

from __future__ import annotations

import io
from typing import Any

from rich.console import RenderableType

from services.cli.console import plain_console

WIDTH = 100
"""Characters of a line; a notebook scrolls to what its window does not show."""
_PAGE = '<pre style="line-height:normal;overflow-x:auto">{code}</pre>'


class NotebookView:
    """An output of a notebook's cell, which is drawn in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: dict[str, str] = {}

    def update(self, drawing: RenderableType) -> None:
        """Draws what is given in place of what was drawn before."""
        from IPython.display import display

        content = _content_of(drawing)
        if content == self._shown:
            return
        self._shown = content
        if self._handle is None:
            show: Any = display  # It has no types.
            self._handle = show(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def _content_of(drawing: RenderableType) -> dict[str, str]:
    """Returns a drawing in the formats of which a notebook's page, or a terminal, shows one."""
    console = plain_console(
        file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False, force_terminal=False
    )
    console.print(drawing)
    page = console.export_html(code_format=_PAGE, inline_styles=True, clear=False)
    return {"text/html": page, "text/plain": console.export_text()}
