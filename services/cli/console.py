"""The console to which commands print tables and progress."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from services.common.printable import escape_controls


class _PlainConsole(Console):
    """A console that escapes the control characters of what it prints."""

    def render_str(self, text: str, **options: Any) -> Text:
        # Here for the widths of columns: cells are measured before they are rendered.
        return super().render_str(escape_controls(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=escape_controls(segment.text))


def plain_console(**options: Any) -> Console:
    """Returns a console that prints text as it is, with its control characters escaped.

    Rich reads brackets as markup unless told otherwise. Errors of engines, uids of prompts and
    labels have brackets of their own, which would be lost or raise `MarkupError`.
    """
    return _PlainConsole(markup=False, highlight=False, **options)
