"""Migrations on a real server: up and down with data, and equal to the declared tables."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from alembic import command
from sqlalchemy import create_engine, inspect, make_url, select, text
from sqlalchemy.orm import Session

from bapo_core.config import config_from, flatten, parse_values
from bapo_core.config.batches import (
    GaussianFilterConfig,
    HighQualityBufferConfig,
    MixedReplayConfig,
    NoReplayConfig,
    NoResponseReplayConfig,
    ReplayWindowConfig,
    ResponseReplayConfig,
    WindowReplayConfig,
)
from bapo_core.config.estimators import CriticConfig, GaeConfig, RlooConfig
from bapo_core.config.loss import BehaviorConfig, DecoupledConfig, ProxCurrentConfig
from bapo_core.config.objectives import CispoConfig, PpoConfig, SapoConfig
from bapo_core.config.rollouts import TransformersConfig, VllmConfig
from bapo_core.config.samplers import DotsConfig, MoppsConfig, UniformConfig
from bapo_core.errors import BapoError
from services.buffer import migrate
from services.buffer.api.trajectories import encode_groups
from services.buffer.migrate import alembic_config, downgrade, upgrade
from services.buffer.queries.evaluations import list_evaluations
from services.buffer.runs.runs import get_run
from services.buffer.storage.tables import Base, SpanRow
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config, synthetic_group


def plain(url: str) -> str:
    return url.replace("postgresql+psycopg", "postgresql")


@pytest.fixture
def database(stack: Endpoints) -> Iterator[str]:
    """Creates an empty database and returns its URL."""
    url = stack.database_url.replace("/postgres?", "/migrations?")
    with psycopg.connect(plain(stack.database_url), autocommit=True) as connection:
        connection.execute("create database migrations")
    yield url
    with psycopg.connect(plain(stack.database_url), autocommit=True) as connection:
        connection.execute("drop database migrations with (force)")


def test_up_down_up(database: str) -> None:
    upgrade(database)
    engine = create_engine(database)
    assert set(Base.metadata.tables) <= set(inspect(engine).get_table_names())
    downgrade(database, "base")
    assert set(inspect(engine).get_table_names()) == {"bapo_version"}
    upgrade(database)
    assert set(Base.metadata.tables) <= set(inspect(engine).get_table_names())
    engine.dispose()


def test_migrations_and_tables_agree(database: str) -> None:
    upgrade(database)
    command.check(alembic_config(database))


def test_a_newer_schema_is_refused(database: str) -> None:
    upgrade(database)
    with psycopg.connect(plain(database), autocommit=True) as connection:
        connection.execute("update bapo_version set version_num = '9999'")
    with pytest.raises(BapoError, match=r"schema revision 9999, .* a newer version has migrated"):
        upgrade(database)


def rows(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Returns every row of the database as text, by table."""
    by_table = {}
    with psycopg.connect(plain(url)) as connection:
        for table in sorted(Base.metadata.tables):
            cursor = connection.execute(f"select t::text from {table} t order by 1")  # type: ignore[arg-type]
            by_table[table] = list(cursor)
    return by_table


def test_down_and_up_again_with_data(stack: Endpoints, database: str) -> None:
    """The rows that 0002 derives from older rows equal those that the service wrote."""
    driver = Driver(stack, small_config("migrated", steps=70))
    for step in range(1, 67):
        driver.run_step(step)
    evaluated = [
        synthetic_group(prompt.uid, 1, size=4, rng=random.Random(prompt.uid))
        for prompt in driver.client.step_prompts(1, "evaluation").prompts
    ]
    driver.client.post_groups(1, "evaluation", encode_groups(evaluated))
    driver.roll_out(67)
    driver.client.batch(67)
    copy_database(stack, "migrations")
    with psycopg.connect(plain(database)) as connection:
        # The copy has what other tests stored, of which older schemas cannot keep everything.
        connection.execute("delete from run where name <> 'migrated'")
        # It knows a dataset by its prompts alone, so it loses one without prompts.
        connection.execute("delete from dataset where size = 0")
        # Replicas send their heartbeats again within seconds, so going back drops them.
        connection.execute("delete from replica")
        # The older schema has neither digests, sources of datasets, spans, stored configurations,
        # reward files, posteriors of samplers, nor a target version, a workflow, a place in the
        # queue and the time at which an attempt began.
        connection.execute("update step_record set digests = null")
        connection.execute("update dataset set digest = null, source = null")
        connection.execute("delete from span")
        connection.execute("delete from stored_config")
        connection.execute("delete from reward_file")
        connection.execute("delete from sampler_posterior")
        connection.execute("update run set target_version = 0, workflow = null, queued_at = null")
        connection.execute("update run set attempt_began_at = null")
        # Its batches have no recorded decisions.
        connection.execute("update step_record set decisions = null, supervised = null")
        # How many of its responses were cut off is not known.
        connection.execute("update rollout_group set cut_off = null")
        # The range of the rewards of a group is not known.
        connection.execute("update rollout_group set lowest_reward = null, highest_reward = null")
        # It has no majority votes either.
        connection.execute("update rollout_group set majority = null")
        connection.execute("update evaluation set majority = null")
        # Rewards other than 0 and 1 cannot be computed from what the older schema has.
        for table in ("rollout_group", "step_record"):
            connection.execute(f"update {table} set mean_reward = 0, reward_parts = '{{}}'")
        connection.execute("update evaluation set mean_reward = 0")
    before = rows(database)
    assert before["difficulty_snapshot"]
    assert before["evaluation"]
    downgrade(database, "0001")
    upgrade(database)
    with psycopg.connect(plain(database)) as connection:
        for table in ("rollout_group", "step_record"):
            connection.execute(f"update {table} set mean_reward = 0, reward_parts = '{{}}'")
        # 0010 makes the rewards of groups of their accuracies, and 0030 evaluations of these.
        cursor = connection.execute("select mean_reward, mean_accuracy from evaluation")
        assert all(reward == pytest.approx(accuracy) for reward, accuracy in cursor)
        connection.execute("update evaluation set mean_reward = 0")
    after = rows(database)
    # Going back loses the names of tokens, and the revoked ones.
    for table in before:
        if table != "api_token":
            assert after[table] == before[table], table


def test_an_older_version_continues_a_changed_run_with_its_last_values(
    stack: Endpoints, database: str
) -> None:
    client = Driver(stack, small_config("reconfigured-before")).client
    client.change_config({"steps": 20, "optimizer.learning_rate": 1e-5})
    client.change_config({"steps": 30})
    expected = client.stored_config()
    copy_database(stack, "migrations")
    with psycopg.connect(plain(database)) as connection:
        connection.execute("delete from run where name <> 'reconfigured-before'")
    downgrade(database, "0030")
    with psycopg.connect(plain(database)) as connection:
        assert connection.execute("select config from run").fetchall() == [(expected,)]
    upgrade(database)


def test_the_configuration_of_an_older_run_keeps_its_values(database: str) -> None:
    """0005 and 0017 to 0027 move keys of a stored configuration, and going back restores them."""
    config = small_config(
        "older",
        fresh={"filter": "uniform", "uniform_fraction": 0.4},
        reevaluate={"c1": 0.5, "rule": "any_gain"},
        replay="off",
        hard_buffer={"capacity": 17},
        # The default of a new run is `nominal`.
        loss={"objective": {"kind": "cispo", "clip_high": 4.0}, "minibatch_norm": "actual"},
    )
    stored = json.loads((Path(__file__).parent / "older_config.json").read_text())
    upgrade(database, "0004")
    with psycopg.connect(plain(database)) as connection:
        connection.execute(
            "insert into run (name, config, train_dataset, test_dataset, status, current_step,"
            " attempt, wanted_version) values ('older', %s, 'a', 'b', 'running', 3, 1, 2)",
            [json.dumps(stored)],
        )
        connection.execute(
            "insert into activity select id, repeat('a', 32), 'trainer', 'update', 3, now(), now()"
            " from run"
        )
    upgrade(database)
    engine = create_engine(database)
    with Session(engine) as session:
        run = get_run(session, "older")
        assert run.config == config
        assert run.target_version == 2
        (span,) = session.scalars(select(SpanRow))
        assert (span.component, span.name, span.step) == ("trainer", "update", 3)
    engine.dispose()
    downgrade(database, "0004")
    with psycopg.connect(plain(database)) as connection:
        (row,) = connection.execute("select config, wanted_version from run")
        # Without replay, these values had no effect.
        stored["high"]["max_age"] = 3
        stored["adaptive"] |= {"c2_range": [0.125, 0.5], "c3_range": [0.25, 0.625]}
        assert row == (stored, 2)
        assert list(connection.execute("select part, step from activity")) == [("trainer", 3)]


def lay_over(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns nested values with changes, without what `merge` knows of today's sections."""
    laid = {
        key: lay_over(values.get(key) or {}, change) if isinstance(change, dict) else change
        for key, change in changes.items()
    }
    return {**values, **laid}


def test_the_configuration_of_every_preset_keeps_its_values(database: str) -> None:
    """Configurations as they were stored before sections had kinds become today's presets.

    A stored run keeps its value of the one default that has changed since.
    """
    stored = json.loads((Path(__file__).parent / "older_presets.json").read_text())
    default = stored.pop("default")
    upgrade(database, "0016")
    with psycopg.connect(plain(database)) as connection:
        for name, changes in stored.items():
            connection.execute(
                "insert into run (name, config, train_dataset, test_datasets, status, current_step,"
                " attempt) values (%s, %s, 'a', '{\"test\": \"b\"}', 'stopped', 0, 1)",
                [name.replace("_", "-"), json.dumps(lay_over(default, changes))],
            )
    upgrade(database)
    engine = create_engine(database)
    different = {}
    with Session(engine) as session:
        for name in stored:
            migrated = flatten(
                get_run(session, name.replace("_", "-")).config.model_dump(mode="json")
            )
            new = flatten(config_from({"algorithm": name}).model_dump(mode="json"))
            different[name] = {
                key: (migrated.get(key), new.get(key))
                for key in {*migrated, *new}
                if migrated.get(key) != new.get(key)
            }
    engine.dispose()
    assert different == {name: {"loss.minibatch_norm": ("actual", "nominal")} for name in stored}


def test_the_text_of_a_stored_configuration_keeps_its_values(database: str) -> None:
    """A text whose keys have moved is written anew; another one is left as it is."""
    texts = {
        "ppo": "# bounds\nalgorithm: grpo\nloss: {clip_low: 0.1, aggregation: token-mean}\n",
        "preset": "algorithm: cispo\nloss: {cispo: {clip_high: 4}}\n",
        "selected": "loss: {objective: sapo}\n",
        "weights": "algorithm: areal_async\nloss: {weight_cap: 4}\n",
        "ratio": "loss: {ratio: decoupled, weight_level: geometric}\n",
        "without": "algorithm: grpo\nloss: {ratio: behavior, weight_cap: 4}\n",
        "critic": "algorithm: ba_ppo\nadvantage: {lam: 0.9, eps: 0.1}\ncritic: {clip: 0.1}\n",
        "advantage": "algorithm: rloo\nadvantage: {std: sample}\ncritic: {clip: 0.1}\n",
        "vllm": "rollout: {engine: vllm, vllm_args: [--enforce-eager], journal_interval_s: 2}\n",
        "engine": "rollout: {engine: transformers, dtype: float32}\n",
        "filter": "fresh: {filter: gaussian, gaussian_mean: 0.4, uniform_fraction: 0.5}\n",
        "norm": "loss: {norm: actual}\n",
        "sampler": "sampler: {kind: mopps, select: band, temperature: 1.0}\n",
        "uniform": "sampler: {kind: uniform, candidates: 8}\n",
        "window": "replay_window: {direction: off}\nhigh_quality_buffer: {capacity: 9}\n",
        "names": "hard_buffer: {after: keep}\nsampler: {kind: dots, as_of: step}\n",
        "without replay": "replay: {enabled: false, last_step: 4}\nreplay_window: {r_tot: ema}\n",
        "mixed": "algorithm: dots\nhigh_quality_buffer: {max_age: 7}\n",
        "stored again": "hard_buffer: {store_new_in_high: true}\n",
        "responses": "algorithm: repo\nresponse_replay: {cache: 8, min_cache: 4}\n",
        "no responses": "response_replay: {enabled: false, cache: 8}\n",
        "other": "# comment\nsteps: 3\n",
    }
    upgrade(database, "0016")
    with psycopg.connect(plain(database)) as connection:
        for name, stored in texts.items():
            connection.execute(
                "insert into stored_config (name, text) values (%s, %s)", [name, stored]
            )
    upgrade(database)
    with psycopg.connect(plain(database)) as connection:
        migrated = dict(connection.execute("select name, text from stored_config").fetchall())
    configs = {name: config_from(parse_values(text, "config")) for name, text in migrated.items()}
    losses = {name: config.loss for name, config in configs.items()}
    objectives = {name: loss.objective for name, loss in losses.items()}
    assert objectives["ppo"] == PpoConfig(clip_low=0.1, clip_high=0.2, dual_clip=None)
    assert objectives["preset"] == CispoConfig(clip_high=4.0)
    assert objectives["selected"] == SapoConfig()
    assert losses["weights"].correction == ProxCurrentConfig(weight_cap=4.0, weight_mode="mask")
    assert losses["ratio"].correction == DecoupledConfig(weight_level="geometric")
    assert losses["without"].correction == BehaviorConfig()
    rollouts = {name: config.rollout for name, config in configs.items()}
    assert rollouts["vllm"].engine == VllmConfig(args=["--enforce-eager"], journal_interval_s=2.0)
    assert rollouts["engine"].engine == TransformersConfig()
    assert configs["filter"].fresh == GaussianFilterConfig(gaussian_mean=0.4)
    assert losses["norm"].minibatch_norm == "actual"
    assert configs["sampler"].sampler == MoppsConfig(band=(0.3, 0.7))
    assert configs["uniform"].sampler == UniformConfig()
    assert configs["window"].replay == WindowReplayConfig(
        window=ReplayWindowConfig(direction="fixed"), buffer=HighQualityBufferConfig(capacity=9)
    )
    assert not configs["names"].hard_buffer.evict_solved
    assert configs["names"].sampler == DotsConfig(posterior_as_of="step")
    assert configs["without replay"].replay == NoReplayConfig()
    assert configs["mixed"].replay == MixedReplayConfig(
        buffer=HighQualityBufferConfig(capacity=512, max_age=7)
    )
    assert configs["stored again"].replay == WindowReplayConfig(store_reevaluated=True)
    assert configs["responses"].response_replay == ResponseReplayConfig(
        candidates=8, min_candidates=4
    )
    assert configs["no responses"].response_replay == NoResponseReplayConfig()
    advantages = {name: config.advantage for name, config in configs.items()}
    assert advantages["critic"] == GaeConfig(lam=0.9, critic=CriticConfig(clip=0.1))
    assert advantages["advantage"] == RlooConfig()
    assert {name for name, text in texts.items() if migrated[name] == text} == {"selected", "other"}
    downgrade(database, "0016")
    with psycopg.connect(plain(database)) as connection:
        restored = dict(connection.execute("select name, text from stored_config").fetchall())
    parsed = {name: yaml.safe_load(text) for name, text in texts.items()}
    # These had no effect.
    del parsed["without"]["loss"]["weight_cap"]
    del parsed["critic"]["advantage"]["eps"]
    del parsed["engine"]["rollout"]["dtype"]
    del parsed["filter"]["fresh"]["uniform_fraction"]
    parsed["sampler"]["sampler"] = {"kind": "mopps", "select": "band", "band": [0.3, 0.7]}
    parsed["uniform"] = {"sampler": {"kind": "uniform"}}
    parsed["window"]["replay_window"]["direction"] = "off"
    parsed["without replay"] = {"replay": {"enabled": False}}
    parsed["no responses"] = {"response_replay": {"enabled": False}}
    parsed["advantage"] = {"algorithm": "rloo", "advantage": {}}
    assert {name: yaml.safe_load(text) for name, text in restored.items()} == parsed


def test_the_rewards_of_an_older_run_are_its_accuracies(database: str) -> None:
    """0010 adds mean rewards, which were k/G while rewards were 0 or 1."""
    upgrade(database, "0009")
    with psycopg.connect(plain(database)) as connection:
        connection.execute(
            "insert into run (name, config, train_dataset, test_dataset, status, current_step,"
            " attempt) values ('older', '{}', 'a', 'b', 'running', 1, 1)"
        )
        connection.execute(
            "insert into prompt (dataset, uid, position, task, payload)"
            " values ('a', 'p', 0, 'countdown', '{}')"
        )
        connection.execute(
            "insert into rollout_group (run_id, step, kind, prompt_id, position, policy_version,"
            " correct, size, mean_reward, object_key, object_digest, row_start, row_count,"
            " token_count) select run.id, 1, 'fresh', prompt.id, 0, 1, 3, 4, 0.75, 'k', 'd', 0, 4,"
            " 9 from run, prompt"
        )
        connection.execute(
            "insert into buffer_entry (run_id, buffer, group_id, mean_reward, inserted_step)"
            " select run_id, 'high_quality', id, mean_reward, 1 from rollout_group"
        )
        for step, bins in ((1, [1, 0, 0, 2, 1]), (2, [0, 0, 0, 0, 0])):
            connection.execute(
                "insert into step_record (run_id, step, r_tot, c2, c3, counts, rollouts, tokens,"
                " bins) select id, %s, 0.5, 0.2, 0.5, '{}', 16, 30, %s from run",
                [step, json.dumps(bins)],
            )
    upgrade(database)
    with psycopg.connect(plain(database)) as connection:
        columns = "accuracy, mean_reward, reward_parts"
        (group,) = connection.execute(f"select {columns} from rollout_group")
        assert group == (0.75, 0.75, {"answer": 0.75})
        assert list(connection.execute("select accuracy from buffer_entry")) == [(0.75,)]
        steps = connection.execute(
            "select mean_reward, reward_parts from step_record order by step"
        )
        # Of 16 responses, 2 x 3 + 1 x 4 are correct; a step without groups has the reward 0.
        assert list(steps) == [(0.625, {"answer": 0.625}), (0.0, {"answer": 0.0})]
    downgrade(database, "0009")
    with psycopg.connect(plain(database)) as connection:
        assert list(connection.execute("select mean_reward from rollout_group")) == [(0.75,)]
        assert list(connection.execute("select mean_reward from buffer_entry")) == [(0.75,)]


def test_a_configuration_without_a_renamed_section_is_left_alone(database: str) -> None:
    upgrade(database, "0004")
    with psycopg.connect(plain(database)) as connection:
        connection.execute(
            "insert into run (name, config, train_dataset, test_dataset, status, current_step,"
            " attempt) values ('older', '{\"seed\": 1}', 'a', 'b', 'created', 0, 0)"
        )
    upgrade(database)
    with psycopg.connect(plain(database)) as connection:
        assert list(connection.execute("select config from run")) == [({"seed": 1},)]


def test_an_older_run_has_the_set_test_and_keeps_its_evaluations(database: str) -> None:
    """0011 gives every run evaluation sets; going back keeps the primary one."""
    upgrade(database, "0009")
    with psycopg.connect(plain(database)) as connection:
        connection.execute(
            "insert into run (name, config, train_dataset, test_dataset, status, current_step,"
            " attempt) values ('older', '{}', 'a', 'b', 'running', 3, 1)"
        )
        connection.execute("insert into evaluation select id, 1, 0.5, '[1, 1]', 2, 9 from run")
    upgrade(database)
    engine = create_engine(database)
    with Session(engine) as session:
        run = get_run(session, "older")
        assert run.test_datasets == {"test": "b"}
        (evaluation,) = list_evaluations(run)
        assert (evaluation.evaluation_set, evaluation.mean_accuracy) == ("test", 0.5)
        assert [score.metric for score in evaluation.scores] == ["mean"]
    engine.dispose()
    with psycopg.connect(plain(database)) as connection:
        connection.execute(
            "update run set test_datasets = jsonb_build_object('test', 'b', 'second', 'c'),"
            ' config = \'{"evaluation": {"primary": "test"}}\''
        )
        connection.execute(
            "insert into evaluation (run_id, version, evaluation_set, mean_accuracy, mean_reward,"
            " bins, prompts, tokens) select id, 1, 'second', 0.75, 0.75, '[0, 1]', 1, 4 from run"
        )
    downgrade(database, "0009")
    with psycopg.connect(plain(database)) as connection:
        assert list(connection.execute("select test_dataset from run")) == [("b",)]
        assert list(connection.execute("select mean_accuracy from evaluation")) == [(0.5,)]


def test_steps_that_dynamic_sampling_had_begun_are_drawn_anew(database: str) -> None:
    """0014 goes over from reserved prompts to the stream, of which a step has all its prompts."""
    upgrade(database, "0013")
    recorded = {  # (step, correct of 4) of each group; B is 2, of at most 3 rounds
        "dapo": [(1, 0), (1, 0), (2, 1), (2, 3), (3, 0), (3, 4), (4, 2), (4, 2), (4, 2)],
        "grpo": [(3, 0)],
        "mopps": [(3, 0)],
    }
    with psycopg.connect(plain(database)) as connection:
        for name, groups in recorded.items():
            rollout = {"prompts_per_step": 2, "max_generation_rounds": 1 + 2 * (name != "grpo")}
            kind = "mopps" if name == "mopps" else "uniform"
            config = {"rollout": rollout, "sampler": {"kind": kind}, "batch": {"capacity": None}}
            connection.execute(
                "insert into run (name, config, train_dataset, test_datasets, status, current_step,"
                " attempt) values (%s, %s, %s, '{}', 'running', 1, 1)",
                [name, json.dumps(config), name],
            )
            for number, (step, correct) in enumerate(groups):
                connection.execute(
                    "insert into prompt (dataset, uid, position, task, payload)"
                    " values (%s, %s, %s, 'countdown', '{}')",
                    [name, f"{name}-{number}", number],
                )
                connection.execute(
                    "insert into rollout_group (run_id, step, kind, prompt_id, position,"
                    " policy_version, correct, size, accuracy, mean_reward, reward_parts,"
                    " object_key, object_digest, row_start, row_count, token_count)"
                    " select run.id, %s, 'fresh', prompt.id, 0, 1, %s, 4, 0, 0, '{}', 'k', 'd', 0,"
                    " 4, 9 from run, prompt where name = %s and uid = %s",
                    [step, correct, name, f"{name}-{number}"],
                )
    upgrade(database)
    with psycopg.connect(plain(database)) as connection:
        kept = connection.execute(
            "select name, step, count(*) from rollout_group join run on run.id = run_id"
            " group by 1, 2 order by 1, 2"
        )
        assert list(kept) == [
            ("dapo", 1, 2),  # committed
            ("dapo", 2, 2),  # complete: two of two groups are mixed
            ("grpo", 3, 1),
            ("mopps", 3, 1),
        ]


def copy_database(stack: Endpoints, name: str) -> None:
    """Copies the stack's database to `name`; Postgres allows no connections to it meanwhile."""
    template1 = plain(stack.database_url).replace("/postgres?", "/template1?")
    with psycopg.connect(template1, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")  # type: ignore[arg-type]
        connection.execute("alter database postgres allow_connections false")
        try:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = 'postgres'"
            )
            connection.execute(f"create database {name} template postgres")  # type: ignore[arg-type]
        finally:
            connection.execute("alter database postgres allow_connections true")


def test_an_unreachable_database_is_waited_for_and_then_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The chart's Job waits like this before an installation."""
    monkeypatch.setattr(migrate, "POLL_INTERVAL_S", 0.05)
    url = "postgresql+psycopg://bapo:secret@127.0.0.1:1/bapo"
    with caplog.at_level("INFO"), pytest.raises(BapoError) as caught:
        migrate.await_database(url, 0.2)
    assert "127.0.0.1:1/bapo did not accept a connection" in str(caught.value)
    assert "check the address, the credentials" in str(caught.value)
    assert "secret" not in str(caught.value) + caplog.text
    assert "waiting for the database" in caplog.text


def test_a_database_that_cannot_store_unicode_is_refused(database: str) -> None:
    """SQLAlchemy fails to connect to one, with a `TypeError`."""
    name = "ascii"
    with create_engine(database, isolation_level="AUTOCOMMIT").connect() as connection:
        encoding = "ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0"
        connection.execute(text(f"CREATE DATABASE {name} {encoding}"))
    url = make_url(database).set(database=name).render_as_string(hide_password=False)
    with pytest.raises(BapoError, match=r"/ascii.* has the encoding SQL_ASCII, which cannot store"):
        migrate.await_database(url, 5.0)


def test_the_jobs_command_migrates(database: str) -> None:
    environment = {**os.environ, "BAPO_DATABASE_URL": database}
    completed = subprocess.run(
        [sys.executable, "-m", "services.buffer.migrate"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0
    assert "the schema is current" in completed.stderr + completed.stdout
    engine = create_engine(database)
    assert set(Base.metadata.tables) <= set(inspect(engine).get_table_names())
    engine.dispose()
