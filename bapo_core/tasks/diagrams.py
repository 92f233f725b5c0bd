"""Diagrams of plane geometry, drawn as PNG by Pillow.

A diagram is made of points in a plane whose y axis points up. Drawing scales it to the image, so
only proportions matter, and these are exact.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Point = complex
"""A point or a vector of the plane."""

_SCALE = 3
"""Diagrams are drawn this many times larger and reduced, which smooths their lines."""
_MARGIN = 0.13
_FONT = 0.068
"""Height of letters as a share of the image."""


@dataclass(frozen=True, slots=True)
class Angle:
    """An angle with an arc and a label, from `start` to `end` counterclockwise."""

    vertex: Point
    start: Point
    """A point on the first side."""
    end: Point
    """A point on the second side."""
    label: str


@dataclass(frozen=True, slots=True)
class Label:
    """A text beside a point."""

    position: Point
    text: str
    away_from: Point
    """The text is moved from the position, away from this point."""


@dataclass(frozen=True, slots=True)
class Diagram:
    """The elements of a drawing, each of which is optional."""

    segments: Sequence[tuple[Point, Point]] = ()
    dashed: Sequence[tuple[Point, Point]] = ()
    circles: Sequence[tuple[Point, float]] = ()
    """Centre and radius."""
    angles: Sequence[Angle] = ()
    right_angles: Sequence[Angle] = ()
    """Angles that are marked by a square instead of an arc; their labels are not drawn."""
    labels: Sequence[Label] = ()

    def points(self) -> Iterable[Point]:
        """Yields points whose bounding box contains the diagram, but for its texts."""
        for start, end in (*self.segments, *self.dashed):
            yield start
            yield end
        for center, radius in self.circles:
            yield center + complex(radius, radius)
            yield center - complex(radius, radius)

    def turned(self, degrees: float) -> Diagram:
        """Returns the diagram, turned counterclockwise about the origin."""
        turn = direction(degrees)

        def turn_all(pairs: Sequence[tuple[Point, Point]]) -> list[tuple[Point, Point]]:
            return [(start * turn, end * turn) for start, end in pairs]

        def turn_angles(angles: Sequence[Angle]) -> list[Angle]:
            return [Angle(a.vertex * turn, a.start * turn, a.end * turn, a.label) for a in angles]

        return Diagram(
            segments=turn_all(self.segments),
            dashed=turn_all(self.dashed),
            circles=[(center * turn, radius) for center, radius in self.circles],
            angles=turn_angles(self.angles),
            right_angles=turn_angles(self.right_angles),
            labels=[
                Label(label.position * turn, label.text, label.away_from * turn)
                for label in self.labels
            ],
        )


def direction(degrees: float) -> Point:
    """Returns the unit vector at this angle to the x axis."""
    radians = math.radians(degrees)
    return complex(math.cos(radians), math.sin(radians))


@dataclass(frozen=True, slots=True)
class Drawing:
    """A diagram as an image."""

    png: bytes
    texts: Sequence[tuple[float, float, str]]
    """The texts of the image: column and row of the centre, in pixels, and the characters."""


def draw(diagram: Diagram, size: int, label_grid: int | None = None) -> Drawing:
    """Draws the diagram in black on white, on size x size pixels.

    label_grid: texts are moved so that their centres are multiples of this many pixels; None leaves
    them where they are.
    """
    from PIL import Image, ImageDraw

    image = Image.new("L", (size * _SCALE, size * _SCALE), 255)
    pen = _Pen(ImageDraw.Draw(image), diagram, size * _SCALE, (label_grid or 0) * _SCALE)
    pen.draw()
    buffer = io.BytesIO()
    reduced = image.resize((size, size), Image.Resampling.BOX)
    reduced.save(buffer, format="PNG")
    texts = [(column / _SCALE, row / _SCALE, text) for (column, row), text in pen.texts]
    return Drawing(buffer.getvalue(), texts)


class _Pen:
    """Draws one diagram on a canvas of `size` pixels.

    grid: the centres of texts are multiples of this many pixels; 0 for any centres.
    """

    def __init__(self, canvas: Any, diagram: Diagram, size: int, grid: int) -> None:
        from PIL import ImageFont

        self._canvas, self._diagram, self._size, self._grid = canvas, diagram, size, grid
        self.texts: list[tuple[tuple[float, float], str]] = []
        self._font = ImageFont.load_default(size * _FONT)
        self._width = max(1, round(size * 0.008))
        points = list(diagram.points())
        left, right = min(p.real for p in points), max(p.real for p in points)
        bottom, top = min(p.imag for p in points), max(p.imag for p in points)
        self._middle = complex((left + right) / 2, (bottom + top) / 2)
        self._unit = size * (1 - 2 * _MARGIN) / max(right - left, top - bottom)

    def draw(self) -> None:
        diagram = self._diagram
        for center, radius in diagram.circles:
            x, y = self._pixel(center)
            r = radius * self._unit
            box = (x - r, y - r, x + r, y + r)
            self._canvas.ellipse(box, outline=0, width=self._width)
        for start, end in diagram.segments:
            self._line(start, end)
        for start, end in diagram.dashed:
            for step in range(0, 10, 2):
                self._line(
                    start + (end - start) * step / 10, start + (end - start) * (step + 1) / 10
                )
        for angle in diagram.right_angles:
            self._right_angle(angle)
        for angle in diagram.angles:
            self._angle(angle)
        for label in diagram.labels:
            away = label.position - label.away_from
            away /= abs(away)
            self._text(
                self._pixel(label.position + away * 0.07 * self._size / self._unit), label.text
            )

    def _pixel(self, point: Point) -> tuple[float, float]:
        offset = (point - self._middle) * self._unit
        return self._size / 2 + offset.real, self._size / 2 - offset.imag

    def _line(self, start: Point, end: Point) -> None:
        self._canvas.line((*self._pixel(start), *self._pixel(end)), fill=0, width=self._width)

    def _text(self, pixel: tuple[float, float], text: str) -> None:
        if self._grid:
            column, row = (round(value / self._grid) * self._grid for value in pixel)
            pixel = (column, row)
        self._canvas.text(pixel, text, fill=0, font=self._font, anchor="mm")
        self.texts.append((pixel, text))

    def _angle(self, angle: Angle) -> None:
        first = math.degrees(_phase(angle.start - angle.vertex))
        opening = (math.degrees(_phase(angle.end - angle.vertex)) - first) % 360
        # The label of a narrow angle is farther from the vertex, between sides that are apart.
        narrow = math.sin(math.radians(min(opening, 90)) / 2)
        distance = self._size * min(0.3, max(0.12, 0.06 / narrow))
        radius = distance * 0.55
        x, y = self._pixel(angle.vertex)
        box = (x - radius, y - radius, x + radius, y + radius)
        # Pillow measures angles clockwise, because its y axis points down.
        self._canvas.arc(box, -first - opening, -first, fill=0, width=self._width)
        middle = angle.vertex + direction(first + opening / 2) * distance / self._unit
        self._text(self._pixel(middle), angle.label)

    def _right_angle(self, angle: Angle) -> None:
        side = 0.05 * self._size / self._unit
        start, end = angle.start - angle.vertex, angle.end - angle.vertex
        along, across = start / abs(start) * side, end / abs(end) * side
        self._line(angle.vertex + along, angle.vertex + along + across)
        self._line(angle.vertex + across, angle.vertex + along + across)


def _phase(vector: Point) -> float:
    return math.atan2(vector.imag, vector.real)
