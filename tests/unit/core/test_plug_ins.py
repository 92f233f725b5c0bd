"""Tasks of installed packages are found by entry point, and the example of the docs works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bapo_core.errors import TaskError
from bapo_core.tasks import SyntheticTask, get_task, task_names
from services.verifier.pool import VerifierPool

DOCS = Path(__file__).parents[3] / "docs" / "adding-a-task.md"


def write_distribution(
    directory: Path, name: str, entry_points: str, code: str, group: str = "bapo.tasks"
) -> None:
    """Writes what pip installs for a distribution."""
    module = name.replace("-", "_")
    (directory / f"{module}.py").write_text(code)
    info = directory / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")


@pytest.fixture
def site_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("bapo_mine", "bapo_his", "bapo_sums"):
        sys.modules.pop(name, None)


def read_code_blocks() -> dict[str, str]:
    """Returns the docs' code blocks by the file that their first line names."""
    pairs = re.findall(r"```\w+\n# (\S+)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return dict(pairs)


def test_the_example_of_the_docs_works_in_the_verifier(site_directory: Path) -> None:
    code = read_code_blocks()["bapo_sums.py"]
    points = re.search(r'"bapo\.tasks"\]\n(.*?)\n', read_code_blocks()["pyproject.toml"])
    assert points is not None
    write_distribution(site_directory, "bapo-sums", points[1].replace('"', ""), code)
    assert "sums" in task_names()
    task = get_task("sums", largest=9)
    assert isinstance(task, SyntheticTask)
    train, test = task.generate_split(0, train=20, test=5)
    assert len({task.uid(payload) for payload in [*train, *test]}) == 25
    pool = VerifierPool(1, 10.0)
    try:
        payload = {"a": 2, "b": 3}
        verdicts = pool.verify("sums", {}, [(payload, "5"), (payload, "6"), (payload, "five")])
    finally:
        pool.close()
    assert [verdict.reward for verdict in verdicts] == [1, 0, 0]
    assert [verdict.status for verdict in verdicts] == ["ok", "wrong_value", "not_a_number"]


def test_a_distribution_that_pip_installs_is_found(tmp_path: Path) -> None:
    """The example also works when pip installs it from its pyproject.toml."""
    pytest.importorskip("setuptools", reason="needs setuptools: run `make install`")
    project, target = tmp_path / "project", tmp_path / "target"
    project.mkdir()
    for name, content in read_code_blocks().items():
        if name in ("pyproject.toml", "bapo_sums.py"):
            (project / name).write_text(content)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(target), str(project)],
        check=True,
        timeout=600,
    )
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "from bapo_core.tasks import get_task, task_names\n"
        "print(get_task('sums').verify({'a': 1, 'b': 1}, '2').reward, 'sums' in task_names())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["1.0", "True"], done.stderr


def test_an_unknown_name_lists_the_known_ones(site_directory: Path) -> None:
    write_distribution(site_directory, "bapo-mine", "mine = bapo_mine:Task", "Task = int\n")
    # `chance` is the plug-in of tests/plug_in/.
    known = r"no task 'nonsense'; .*, chance_diagrams, countdown, .*, geometry, math, mine"
    with pytest.raises(TaskError, match=known):
        get_task("nonsense")


def test_a_plug_in_that_is_no_task_is_named(site_directory: Path) -> None:
    write_distribution(site_directory, "bapo-mine", "mine = bapo_mine:Task", "Task = int\n")
    with pytest.raises(
        TaskError, match="makes a int, which lacks some of name, uid, render, verify, columns"
    ):
        get_task("mine")


def test_a_plug_in_that_does_not_load_is_named(site_directory: Path) -> None:
    write_distribution(
        site_directory, "bapo-mine", "mine = bapo_mine:Task\nhis = bapo_his:Task", ""
    )
    with pytest.raises(TaskError, match="cannot load bapo_mine:Task of bapo-mine"):
        get_task("mine")
    with pytest.raises(TaskError, match="No module named 'bapo_his'"):
        get_task("his")


def test_two_plug_ins_of_one_name_are_refused(site_directory: Path) -> None:
    write_distribution(site_directory, "bapo-mine", "mine = bapo_mine:Task", "Task = int\n")
    write_distribution(site_directory, "bapo-his", "mine = bapo_his:Task", "Task = int\n")
    with pytest.raises(TaskError, match="installed more than once"):
        get_task("mine")


def test_the_task_math_is_constructed_without_math_verify_and_sympy() -> None:
    code = (
        "import sys; sys.modules['math_verify'] = sys.modules['sympy'] = None\n"
        "import bapo_core.tasks; bapo_core.tasks.get_task('math')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_an_option_that_a_task_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(TaskError, match="task math: it has no option instruktion; its options are"):
        get_task("math", instruktion="Antworte.")
