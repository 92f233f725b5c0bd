"""The task `geometry`: rows of Geometry3K, prompts of text and images, and generated problems."""

from __future__ import annotations

import cmath
import io
import math
import random
from typing import Any

import pytest
from PIL import Image

from bapo_core.errors import TaskError
from bapo_core.tasks import ImageTask, SyntheticTask, get_task
from bapo_core.tasks.diagrams import Angle, draw
from bapo_core.tasks.figures import KINDS, Figure, random_figure
from bapo_core.tasks.geometry import GeometryTask

TASK = GeometryTask()
FIRST = {"digest": "a" * 64, "width": 30, "height": 20}
SECOND = {"digest": "b" * 64, "width": 30, "height": 20}


def row(**changes: Any) -> dict[str, Any]:
    return {"images": [FIRST], "problem": "<image>Find x.", "answer": "47", **changes}


def figures(kind: str, count: int = 60) -> list[Figure]:
    rng = random.Random(5)
    return [random_figure(kind, rng) for _ in range(count)]  # type: ignore[arg-type]


def test_geometry_is_a_task_with_images_that_generates_problems() -> None:
    assert isinstance(TASK, ImageTask)
    assert isinstance(TASK, SyntheticTask)
    assert not isinstance(get_task("math"), ImageTask)


# ---- rows ---------------------------------------------------------------------------------------


def test_a_row_of_geometry3k_is_a_problem() -> None:
    assert TASK.parse_row(row()) == row()
    assert TASK.parse_row(row(answer=None)) is None


def test_images_that_the_problem_does_not_place_come_first() -> None:
    payload = TASK.parse_row(row(images=[FIRST, SECOND], problem="Find x."))
    assert payload == row(images=[FIRST, SECOND], problem="<image><image>Find x.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": []}, r"images is \[\]; make it a list of at least one image"),
        ({"images": None}, "images is None"),
        ({"images": [FIRST, SECOND]}, "has 1 times <image>, but 2 images; make them equally many"),
        ({"problem": " "}, "make it the text of a problem"),
        ({"answer": {}}, "make it text, a number or a list of those"),
    ],
)
def test_invalid_rows_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TASK.parse_row(row(**changes))


def test_the_uid_follows_from_the_problem_and_its_images() -> None:
    assert TASK.uid(row()) == TASK.uid(row(problem="<image>Find  x. ", answer="3"))
    assert len({TASK.uid(row()), TASK.uid(row(images=[SECOND])), TASK.uid(row(problem="?"))}) == 3


# ---- prompts ------------------------------------------------------------------------------------


def test_images_stand_where_the_problem_places_them() -> None:
    task = GeometryTask(instruction="Answer.")
    payload = row(images=[FIRST, SECOND], problem="In <image>, as in <image>, find x.")
    (message,) = task.render(payload)
    assert message == {
        "role": "user",
        "content": [
            {"type": "text", "text": "In "},
            {"type": "image", **FIRST},
            {"type": "text", "text": ", as in "},
            {"type": "image", **SECOND},
            {"type": "text", "text": ", find x.\n\nAnswer."},
        ],
    }


def test_the_diagram_template_has_no_text_and_takes_the_answer_alone() -> None:
    task = GeometryTask(template="diagram")
    (message,) = task.render(row())
    assert message["content"] == [{"type": "image", **FIRST}]
    assert task.verify(row(), " 47").reward == 1.0
    assert task.verify(row(), "48").reward == 0.0
    assert task.verify(row(), "").status == "no_answer"


# ---- grading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("47", r"so \boxed{47}", 1.0),
        ("47", r"\boxed{47.0}", 1.0),
        ("47", "47", 0.0),
        ("47", r"\boxed{46}", 0.0),
        (r"4 \sqrt { 3 }", r"\boxed{\sqrt{48}}", 1.0),
        (r"\frac { 9 } { 2 }", r"\boxed{4.5}", 1.0),
        (r"16 \pi", r"\boxed{16}", 0.0),
    ],
)
def test_answers_are_compared_numerically_and_symbolically(
    answer: str, response: str, reward: float
) -> None:
    verdict = TASK.verify(row(answer=answer), response)
    assert verdict.reward == reward
    assert verdict.parts.keys() == set(TASK.reward_parts)


# ---- generated problems -------------------------------------------------------------------------


def measure_degrees(angle: Angle) -> float:
    """Returns the degrees of an angle, counterclockwise from its first side."""
    turn = (angle.end - angle.vertex) / (angle.start - angle.vertex)
    return math.degrees(cmath.phase(turn)) % 360


@pytest.mark.parametrize("kind", ["triangle", "parallel", "circle"])
def test_every_angle_of_a_diagram_has_the_size_of_its_label(kind: str) -> None:
    for figure in figures(kind):
        labels = {angle.label: measure_degrees(angle) for angle in figure.diagram.angles}
        assert labels.pop("x") == pytest.approx(figure.answer)
        for label, degrees in labels.items():
            assert float(label.removesuffix("°")) == pytest.approx(degrees)


def test_the_area_of_a_diagram_is_the_answer() -> None:
    for figure in figures("area"):
        corners = [end for _, end in figure.diagram.segments]
        area = sum(
            (first.conjugate() * second).imag / 2
            for first, second in zip(corners, corners[1:] + corners[:1], strict=True)
        )
        assert area == pytest.approx(figure.answer)
        for angle in figure.diagram.right_angles:
            assert measure_degrees(angle) == pytest.approx(90)


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_stand_in_the_diagram_and_not_in_the_problem(kind: str) -> None:
    for figure in figures(kind):
        assert not any(character.isdigit() for character in figure.problem)


def test_a_diagram_is_a_png_of_the_size_asked_for() -> None:
    data = draw(figures("circle")[0].diagram, 112).png
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, image.size) == ("PNG", (112, 112))
        assert image.getextrema() == (0, 255)
    assert draw(figures("circle")[0].diagram, 112).png == data


def test_the_texts_of_a_drawing_are_those_of_its_diagram() -> None:
    (figure,) = figures("triangle", 1)
    angles = [angle.label for angle in figure.diagram.angles if angle.label]
    expected = [*angles, *(label.text for label in figure.diagram.labels)]
    assert sorted(text for _, _, text in draw(figure.diagram, 112).texts) == sorted(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_stand_on_the_grid_near_their_places(kind: str) -> None:
    for figure in figures(kind, 10):
        free = draw(figure.diagram, 112).texts
        for (x, y, text), (column, row, moved) in zip(
            free, draw(figure.diagram, 112, label_grid=7).texts, strict=True
        ):
            assert moved == text
            assert (column % 7, row % 7) == (0, 0)
            assert max(abs(column - x), abs(row - y)) <= 3.5 + 1e-9


def test_the_task_draws_labels_on_its_grid() -> None:
    plain, on_grid = (
        GeometryTask(pixels=112, label_grid=grid).generate(3, 5) for grid in (None, 7)
    )
    assert [p["answer"] for p in plain] == [p["answer"] for p in on_grid]
    assert all(p["images"] != q["images"] for p, q in zip(plain, on_grid, strict=True))


def test_train_and_test_problems_are_disjoint_and_of_all_kinds() -> None:
    train, test = TASK.generate_split(3, train=150, test=50)
    assert (len(train), len(test)) == (150, 50)
    images = [payload["images"][0] for payload in (*train, *test)]
    assert len(set(images)) == 200
    assert {p["problem"] for p in train} == {p["problem"] for p in test}
    assert TASK.generate_split(3, train=10, test=50)[1] == test


def test_no_two_problems_have_the_same_numbers_in_the_same_figure() -> None:
    task = GeometryTask(kinds=["parallel"], pixels=56)
    with pytest.raises(ValueError, match=r"found \d+ distinct problems and no further one in"):
        task.generate(0, 3_000)
    problems = task.generate(0, 1_000)
    images = {payload["images"][0] for payload in problems}
    assert len(images) == 1_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "long"}, "choose boxed or diagram"),
        ({"kinds": ["square"]}, "list some of triangle, parallel, circle, area"),
        ({"kinds": []}, "list some of"),
        ({"pixels": 20}, "choose a size from 56 to 1024"),
        ({"label_grid": 0}, "choose null or a number from 1 to 28, an eighth of pixels"),
        ({"pixels": 112, "label_grid": 15}, "choose null or a number from 1 to 14"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        get_task("geometry", **options)
