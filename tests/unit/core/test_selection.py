"""What a configuration selects by name is checked before a run begins, plug-ins included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo_core.advantages import get_estimator
from bapo_core.algorithm import get_batch_rule
from bapo_core.config import ConfigError, RunConfig, config_from
from bapo_core.errors import BapoError
from bapo_core.objectives import get_objective
from bapo_core.sampling import get_sampler
from bapo_core.selection import check_selection
from bapo_core.tasks import get_task
from services.cli.main import main
from tests.unit.core.test_plug_ins import write_distribution

Lookup = Callable[[str], Any]


@pytest.fixture
def site_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("bapo_mine", None)


@pytest.mark.parametrize(
    ("kind", "group", "name", "get"),
    [
        ("task", "bapo.tasks", "countdown", get_task),
        ("sampler", "bapo.samplers", "uniform", get_sampler),
        ("batch rule", "bapo.batch_rules", "algorithm1", get_batch_rule),
        ("objective", "bapo.objectives", "ppo", get_objective),
        ("estimator", "bapo.estimators", "group", get_estimator),
    ],
)
def test_a_plug_in_that_has_the_name_of_what_is_built_in_is_refused(
    kind: str, group: str, name: str, get: Lookup, site_directory: Path
) -> None:
    check_selection(RunConfig())
    get(name)
    write_distribution(site_directory, "bapo-mine", f"{name} = bapo_mine:this", "", group)
    message = (
        f"{kind} {name}: bapo has a {kind} of this name, and so has bapo_mine:this of bapo-mine, "
        "which would be ignored; rename its entry point, or uninstall the package"
    )
    for use in (lambda: get(name), lambda: check_selection(RunConfig())):
        with pytest.raises(BapoError, match=message):
            use()


@pytest.mark.parametrize(
    ("group", "name"), [("bapo.samplers", "mopps"), ("bapo.estimators", "gae")]
)
def test_what_a_configuration_does_not_select_is_not_refused(
    group: str, name: str, site_directory: Path
) -> None:
    write_distribution(site_directory, "bapo-mine", f"{name} = bapo_mine:this", "", group)
    check_selection(RunConfig())


@pytest.mark.parametrize(
    ("group", "override", "message"),
    [
        ("bapo.samplers", "sampler=mine", "sampler mine: cannot load bapo_mine:this of bapo-mine"),
        ("bapo.batch_rules", "batch=mine", "batch rule mine: cannot load bapo_mine:this"),
    ],
)
def test_the_check_of_a_configuration_loads_its_data_rules(
    group: str,
    override: str,
    message: str,
    site_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_distribution(site_directory, "bapo-mine", "mine = bapo_mine:this", "", group)
    with pytest.raises(SystemExit):
        main(["config", "check", override])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "values", "base"),
    [
        ("bapo.samplers", {"sampler": "mine"}, "samplers.PlugInSamplerConfig"),
        ("bapo.batch_rules", {"batch": "mine"}, "batches.BatchConfig"),
        ("bapo.objectives", {"loss": {"objective": "mine"}}, "base.Section"),
        ("bapo.estimators", {"advantage": "mine"}, "base.Section"),
    ],
)
def test_settings_that_are_no_section_of_their_kind_are_refused(
    group: str, values: dict[str, Any], base: str, site_directory: Path
) -> None:
    write_distribution(
        site_directory,
        "bapo-mine",
        f"mine = bapo_mine:this\n[{group}.settings]\nmine = bapo_mine:Settings",
        "class Settings: pass\nthis = None\n",
        group,
    )
    message = f"section of settings mine: .*name a subclass of bapo_core.config.{base}"
    with pytest.raises(ConfigError, match=message):
        config_from(values)
