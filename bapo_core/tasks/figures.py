"""Generates problems of plane geometry, whose given numbers stand in their diagrams.

Each problem has a whole number as its answer, which follows from the numbers in the diagram by one
theorem. Diagrams are turned at random; problems with equal numbers are the same problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import radians, sin, tan
from typing import Literal, get_args

from bapo_core.tasks.diagrams import Angle, Diagram, Label, Point, direction

Kind = Literal["triangle", "parallel", "circle", "area"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FIND_X = "<image>Find x."
_FIND_AREA = "<image>Find the area of the figure."
_TURNS = tuple(range(0, 360, 15))


@dataclass(frozen=True, slots=True)
class Figure:
    """A problem with its diagram and its answer."""

    key: tuple[str, ...]
    """Identifies the problem, however its diagram is turned."""
    problem: str
    answer: int
    diagram: Diagram


def random_figure(kind: Kind, rng: random.Random) -> Figure:
    """Draws a problem of this kind at random."""
    figure = rng.choice(_MAKERS[kind])(rng)
    return replace(figure, diagram=figure.diagram.turned(rng.choice(_TURNS)))


# ---- triangles ----------------------------------------------------------------------------------


def _interior_angle(rng: random.Random) -> Figure:
    """Asks for the third angle of a triangle, which is 180° minus the two others."""
    a, b = _two_angles(rng)
    corners = _triangle(a, b)
    sides = _polygon(corners)
    first, second, third = _corner_angles(corners, (f"{a}°", f"{b}°", "x"))
    diagram = Diagram(segments=sides, angles=[first, second, third], labels=_names("ABC", corners))
    return Figure(_key("interior", sorted((a, b))), _FIND_X, 180 - a - b, diagram)


def _exterior_angle(rng: random.Random) -> Figure:
    """Asks for an exterior angle of a triangle, which is the sum of the two opposite angles."""
    a, b = _two_angles(rng)
    corners = _triangle(a, b)
    left, right, top = corners
    beyond = top + (top - left) / abs(top - left) * 0.4 * abs(right - left)
    first, second, _ = _corner_angles(corners, (f"{a}°", f"{b}°", ""))
    diagram = Diagram(
        segments=[*_polygon(corners), (top, beyond)],
        angles=[first, second, Angle(top, right, beyond, "x")],
        labels=[*_names("AB", corners[:2], top), Label(beyond, "D", top)],
    )
    return Figure(_key("exterior", sorted((a, b))), _FIND_X, a + b, diagram)


def _two_angles(rng: random.Random) -> tuple[int, int]:
    """Returns two angles of a triangle whose angles are all at least 25°."""
    a = rng.randint(25, 125)
    return a, rng.randint(25, 155 - a)


def _triangle(a: int, b: int) -> tuple[Point, Point, Point]:
    """Returns the corners of a triangle of these angles at the first and the second of them."""
    side = sin(radians(b)) / sin(radians(a + b))
    return 0j, 1 + 0j, direction(a) * side


def _corner_angles(
    corners: tuple[Point, Point, Point], labels: tuple[str, str, str]
) -> tuple[Angle, Angle, Angle]:
    """Returns the angles of a triangle whose corners are listed counterclockwise."""
    a, b, c = corners
    return Angle(a, b, c, labels[0]), Angle(b, c, a, labels[1]), Angle(c, a, b, labels[2])


# ---- parallel lines -----------------------------------------------------------------------------


def _transversal(rng: random.Random) -> Figure:
    """Asks for an angle at parallel lines and a transversal: equal to another, or 180° minus it."""
    a = rng.choice([n for n in range(30, 151) if n != 90])
    position = rng.randrange(4)
    along = direction(a)
    lower, upper = 0j, along / sin(radians(a)) * 0.8
    ends = [lower - along * 0.6, upper + along * 0.6]
    # The four angles at the lower line, counterclockwise from the one that corresponds to `a`.
    sides = [lower + 1, lower + along, lower - 1, lower - along]
    start, end = sides[position], sides[(position + 1) % 4]
    center = (lower + upper) / 2
    diagram = Diagram(
        segments=[
            (lower - 0.9, lower + 0.9),
            (upper - 0.9, upper + 0.9),
            (ends[0], ends[1]),
        ],
        angles=[Angle(upper, upper + 1, upper + along, f"{a}°"), Angle(lower, start, end, "x")],
        labels=[Label(upper + 0.9, "m", center), Label(lower + 0.9, "n", center)],
    )
    answer = a if position % 2 == 0 else 180 - a
    return Figure(_key("transversal", [a, position]), f"{_PARALLEL} Find x.", answer, diagram)


def _zigzag(rng: random.Random) -> Figure:
    """Asks for an angle between two parallel lines, which is the sum of the angles at the lines."""
    a, b = rng.randint(25, 75), rng.randint(25, 75)
    corner = 0j
    top, bottom = complex(1 / tan(radians(a)), 1), complex(1 / tan(radians(b)), -1)
    left, right = -0.6, max(top.real, bottom.real) + 0.6
    diagram = Diagram(
        segments=[
            (complex(left, 1), complex(right, 1)),
            (complex(left, -1), complex(right, -1)),
            (corner, top),
            (corner, bottom),
        ],
        angles=[
            Angle(top, top - 1, corner, f"{a}°"),
            Angle(bottom, corner, bottom - 1, f"{b}°"),
            Angle(corner, bottom, top, "x"),
        ],
        labels=[Label(complex(right, 1), "m", corner), Label(complex(right, -1), "n", corner)],
    )
    return Figure(_key("zigzag", sorted((a, b))), f"{_PARALLEL} Find x.", a + b, diagram)


_PARALLEL = "<image>The lines m and n are parallel."


# ---- circles ------------------------------------------------------------------------------------


def _inscribed_angle(rng: random.Random) -> Figure:
    """Asks for a central or an inscribed angle over an arc; the former is twice the latter."""
    inscribed, given = rng.randint(20, 80), rng.choice(("central", "inscribed"))
    center, start = 0j, direction(-90 - inscribed)
    end, corner = direction(-90 + inscribed), direction(90 + rng.randint(-30, 30))
    labels = ("x", f"{2 * inscribed}°") if given == "central" else (f"{inscribed}°", "x")
    diagram = Diagram(
        segments=[(center, start), (center, end), (corner, start), (corner, end)],
        circles=[(center, 1.0)],
        angles=[Angle(corner, start, end, labels[0]), Angle(center, start, end, labels[1])],
        labels=_names("ABC", (start, end, corner), center),
    )
    answer = inscribed if given == "central" else 2 * inscribed
    problem = "<image>The circle has the centre O. Find x."
    labelled = replace(diagram, labels=[*diagram.labels, Label(center, "O", -1j)])
    return Figure(_key(f"given {given}", [inscribed]), problem, answer, labelled)


def _chords(rng: random.Random) -> Figure:
    """Asks for the angle between two chords, which is half the sum of the two opposite arcs."""
    a = rng.randint(40, 140)
    b = rng.choice([n for n in range(40, 141) if (a + n) % 2 == 0 and a + n <= 260])
    gap = (360 - a - b) / 2
    first, second = direction(0), direction(a)
    third, fourth = direction(a + gap), direction(a + gap + b)
    crossing = _intersection(first, third, second, fourth)
    diagram = Diagram(
        segments=[(first, third), (second, fourth)],
        circles=[(0j, 1.0)],
        angles=[Angle(crossing, first, second, "x")],
        labels=[
            *_names("ABCD", (first, second, third, fourth), 0j),
            Label(direction(a / 2), f"{a}°", 0j),
            Label(direction(a + gap + b / 2), f"{b}°", 0j),
        ],
    )
    problem = "<image>The numbers outside the circle are those of the arcs AB and CD. Find x."
    return Figure(_key("chords", sorted((a, b))), problem, (a + b) // 2, diagram)


def _intersection(a: Point, b: Point, c: Point, d: Point) -> Point:
    """Returns the point where the lines ab and cd meet."""
    along, across = b - a, d - c
    share = ((c - a) * across.conjugate()).imag / (along * across.conjugate()).imag
    return a + along * share


# ---- areas --------------------------------------------------------------------------------------


def _rectangle(rng: random.Random) -> Figure:
    """Asks for the area of a rectangle."""
    width, height = _two_lengths(rng)
    corners = (0j, complex(width), complex(width, height), complex(0, height))
    diagram = Diagram(
        segments=_polygon(corners),
        right_angles=[Angle(corners[0], corners[1], corners[3], "")],
        labels=_lengths(width, height),
    )
    return Figure(_key("rectangle", sorted((width, height))), _FIND_AREA, width * height, diagram)


def _right_triangle(rng: random.Random) -> Figure:
    """Asks for the area of a right triangle."""
    width, height = _two_lengths(rng, even=True)
    corners = (0j, complex(width), complex(0, height))
    diagram = Diagram(
        segments=_polygon(corners),
        right_angles=[Angle(corners[0], corners[1], corners[2], "")],
        labels=_lengths(width, height),
    )
    return Figure(
        _key("right triangle", sorted((width, height))), _FIND_AREA, width * height // 2, diagram
    )


def _parallelogram(rng: random.Random) -> Figure:
    """Asks for the area of a parallelogram, whose height is drawn."""
    width, height = _two_lengths(rng)
    shift = width * rng.choice((0.2, 0.3, 0.4))
    corners = (0j, complex(width), complex(width + shift, height), complex(shift, height))
    foot = complex(shift, 0)
    diagram = Diagram(
        segments=_polygon(corners),
        dashed=[(corners[3], foot)],
        right_angles=[Angle(foot, foot + 1, corners[3], "")],
        labels=[
            Label(corners[1] / 2, str(width), corners[1] / 2 + 1j),
            Label((foot + corners[3]) / 2, str(height), (foot + corners[3]) / 2 - 1),
        ],
    )
    return Figure(_key("parallelogram", [width, height]), _FIND_AREA, width * height, diagram)


def _two_lengths(rng: random.Random, *, even: bool = False) -> tuple[int, int]:
    """Returns two lengths, neither more than 2.5 times the other.

    even: whether their product must be even.
    """
    while True:
        width, height = rng.randint(3, 40), rng.randint(3, 40)
        if max(width, height) <= 2.5 * min(width, height) and not (even and width * height % 2):
            return width, height


def _lengths(width: int, height: int) -> list[Label]:
    """Returns labels of the sides below and on the left of a figure whose corner is the origin."""
    below, left = complex(width / 2), complex(0, height / 2)
    return [Label(below, str(width), below + 1j), Label(left, str(height), left + 1)]


# ---- drawing ------------------------------------------------------------------------------------


def _polygon(corners: tuple[Point, ...]) -> list[tuple[Point, Point]]:
    return [(corners[index - 1], corner) for index, corner in enumerate(corners)]


def _names(letters: str, points: tuple[Point, ...], center: Point | None = None) -> list[Label]:
    """Returns labels of points, on the side away from `center`, or else from their mean."""
    if center is None:
        center = sum(points) / len(points)
    return [Label(point, letter, center) for letter, point in zip(letters, points, strict=True)]


def _key(name: str, numbers: list[int]) -> tuple[str, ...]:
    return (name, *map(str, numbers))


_MAKERS: dict[Kind, tuple[Callable[[random.Random], Figure], ...]] = {
    "triangle": (_interior_angle, _exterior_angle),
    "parallel": (_transversal, _zigzag),
    "circle": (_inscribed_angle, _chords),
    "area": (_rectangle, _right_triangle, _parallelogram),
}
