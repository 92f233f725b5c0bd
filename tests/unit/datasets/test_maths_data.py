"""Public mathematics problems load as they are published, and their own answers are accepted.

The files beside this one have the forms of the public ones, with problems of our own. The public
files themselves are read by `pytest -m maths`, from the directory that BAPO_MATHS_DATA names.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bapo_core.tasks import get_task
from services.datasets import DataSources, read_dataset
from services.datasets.dataset import Dataset
from services.verifier.pool import VerifierPool

EXAMPLES = Path(__file__).with_name("maths")
PUBLIC = {
    "aime": (30, 0),
    "amc": (83, 0),
    "math": (500, 0),
    "minerva": (272, 0),
    "olympiad_bench": (675, 0),
    "math-train": (7469, 4),
}
"""Problems and rows without an answer of each public file. One problem of MATH is there twice."""


def load(directory: Path, name: str) -> Dataset:
    return read_dataset(get_task("math"), str(directory / f"{name}.json"), DataSources(), {})


def refused_answers(dataset: Dataset) -> list[str]:
    """Returns the reference answers that the verifier does not accept as an answer."""
    pairs = [
        (prompt.payload, f"Therefore, the answer is $\\boxed{{{answer}}}$.")
        for prompt in dataset.prompts
        for answer in (
            prompt.payload["answer"]
            if isinstance(prompt.payload["answer"], list)
            else [prompt.payload["answer"]]
        )
    ]
    pool = VerifierPool(workers=1, deadline_s=30.0)
    try:
        verdicts = pool.verify("math", {}, pairs)
    finally:
        pool.close()
    return [
        f"{response}: {verdict.status}"
        for (_, response), verdict in zip(pairs, verdicts, strict=True)
        if verdict.reward != 1
    ]


def test_problems_of_every_public_form_load_and_their_answers_are_accepted() -> None:
    datasets = {name: load(EXAMPLES, name) for name in PUBLIC}
    assert {name: (len(found.prompts), found.left_out) for name, found in datasets.items()} == {
        "aime": (2, 0),
        "amc": (2, 0),
        "math": (4, 0),
        "minerva": (3, 0),
        "olympiad_bench": (6, 0),
        "math-train": (2, 2),
    }
    prompts = [prompt for dataset in datasets.values() for prompt in dataset.prompts]
    assert refused_answers(Dataset("examples", prompts)) == []


@pytest.mark.maths
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_file_loads_and_its_answers_are_accepted(name: str) -> None:
    directory = os.environ.get("BAPO_MATHS_DATA")
    if directory is None:
        pytest.skip("needs the public files: set BAPO_MATHS_DATA to their directory")
    dataset = load(Path(directory), name)
    assert (len(dataset.prompts), dataset.left_out) == PUBLIC[name]
    assert refused_answers(dataset) == []
