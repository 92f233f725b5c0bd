"""The grader of `math` and that of MoPPS and DeepScaleR agree as `docs/verifier.md` says.

`python -m benchmarks.grader_agreement` writes the pairs and the verdicts.
"""

from __future__ import annotations

import json
from collections import Counter

from benchmarks.grader_agreement import PAIRS, construct, grade

STORED = json.loads(PAIRS.read_text())


def test_the_pairs_are_those_that_the_benchmark_constructs() -> None:
    verdicts = ("ours", "other")
    pairs = [{k: v for k, v in pair.items() if k not in verdicts} for pair in STORED["pairs"]]
    assert pairs == list(construct())
    assert Counter(pair["class"] for pair in pairs) == {
        "equal": 70,
        "equivalent": 200,
        "wrong": 150,
        "malformed": 80,
    }


def test_our_verdicts_are_the_recorded_ones() -> None:
    assert grade(STORED["pairs"]) == [pair["ours"] for pair in STORED["pairs"]]


def test_the_graders_agree_as_often_as_the_page_says() -> None:
    differing = Counter(
        (pair["class"], pair["form"], pair["ours"] == "ok", pair["other"])
        for pair in STORED["pairs"]
        if (pair["ours"] == "ok") != pair["other"]
    )
    assert differing == {
        ("equivalent", "decimals of a fraction to 6 places", True, False): 10,
        ("equivalent", "a fraction that is not reduced", True, False): 10,
        ("equivalent", "an integer as a quotient", True, False): 10,
        ("equivalent", "an integer as arithmetic", True, False): 10,
        ("equivalent", "a set in another order", True, False): 10,
        ("equivalent", "scientific notation", True, False): 10,
        ("wrong", "another unit", False, True): 10,
        ("wrong", "an equation that contradicts itself", False, True): 4,
    }


def test_neither_grader_accepts_what_is_malformed() -> None:
    malformed = [pair for pair in STORED["pairs"] if pair["class"] == "malformed"]
    assert not any(pair["ours"] == "ok" or pair["other"] for pair in malformed)
