"""Tests the names of the runs that pipelines train."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_core.errors import ConfigError
from pipelines.naming import LONGEST_MADE, check_run_name, name_run
from services.buffer.api.wire import RUN_NAME


def test_a_given_name_is_kept() -> None:
    assert name_run("mine", "Run of bapo (1a2b)", "bapo-x7k2p") == "mine"


@pytest.mark.parametrize(
    ("kubeflow_run", "workflow", "name"),
    [
        ("Run of bapo (1a2b)", "bapo-x7k2p", "run-of-bapo-1a2b-x7k2p"),
        ("Clone of Run of bapo (1a2b)", "bapo-9q3zz", "clone-of-run-of-bapo-1a2b-9q3zz"),
        ("2026-11-26 nightly", "nightly-3-2739292", "bapo-2026-11-26-nightly-2739292"),
        ("Über", "bapo-x7k2p", "ber-x7k2p"),
        ("", "bapo-x7k2p", "bapo-x7k2p"),
        ("My Run", "", "my-run"),
    ],
)
def test_an_empty_name_is_made_of_kubeflows(kubeflow_run: str, workflow: str, name: str) -> None:
    assert name_run("", kubeflow_run, workflow) == name


@given(st.text(max_size=200))
def test_every_name_that_is_made_is_valid(kubeflow_run: str) -> None:
    name = name_run("", kubeflow_run, "bapo-x7k2p")
    assert re.fullmatch(RUN_NAME, name)
    check_run_name(name)
    assert len(name) <= LONGEST_MADE + len("bapo-")
    assert name.endswith("-x7k2p")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My Run", "bapo_run is 'My Run': a name has lower-case letters, .* example 'my-run'"),
        ("Mine", "give for example 'mine', or leave it empty for a new run"),
        ("9lives", "begins with a letter, .* example 'bapo-9lives'"),
        ("mine-", "bapo_run is 'mine-': it ends with a hyphen, .* give for example 'mine'"),
        ("a" * 64, "at most 63 characters"),
    ],
)
def test_an_invalid_name_is_refused_with_a_valid_one(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run_name(name)
