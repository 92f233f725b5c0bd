"""Examples and presets load, and errors of a configuration name the key, value and remedy."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bapo_core.config import (
    PRESETS,
    ConfigError,
    RunConfig,
    config_from,
    json_schema,
    load_config,
    override_config,
    parse_overrides,
    parse_values,
)
from bapo_core.config.estimators import GroupAdvantageConfig
from bapo_core.config.evaluation import EvaluationSet
from bapo_core.config.loss import BehaviorConfig, DecoupledConfig
from bapo_core.config.objectives import CispoConfig, GspoConfig, PpoConfig, SapoConfig
from bapo_core.config.presets import SUMMARIES
from bapo_core.config.rollouts import VllmConfig
from bapo_core.config.samplers import DotsConfig, ExgrpoConfig, UniformConfig

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    assert load_config(path).warnings() == []


@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_preset_loads_and_survives_serialization(algorithm: str) -> None:
    config = load_config(None, [f"algorithm={algorithm}"])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_defaults_are_those_of_the_paper() -> None:
    config = RunConfig()
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (256, 8)
    assert (config.sync.every, config.sync.reevaluate_every) == (5, 5)
    assert config.reevaluate.c1 == 1 / 8
    assert config.replay_window.c2_range == (1 / 8, 4 / 8)
    assert config.replay_window.c3_range == (2 / 8, 5 / 8)
    assert (config.optimizer.learning_rate, config.kl.coefficient) == (1e-6, 0.001)


def test_the_file_wins_over_the_preset_and_overrides_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: grpo\nsync: {every: 3}\nseed: 1\n")
    assert load_config(path).sync.every == 3
    assert load_config(path).fresh.filter == "none"
    assert load_config(path, ["sync.every=4"]).sync.every == 4
    assert load_config(path, ["optimizer.learning_rate=1e-4"]).optimizer.learning_rate == 1e-4


def split(overrides: str) -> list[str]:
    """Splits overrides where a key follows a space."""
    return re.split(r" (?=[\w.]+=)", overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sync.evry=3", "override sync.evry: no such key; did you mean sync.every?"),
        ("x2.c1=0.25", "x2: no such key; it was renamed to reevaluate"),
        ("adaptive.direction=eq8", "adaptive: no such key; it was renamed to replay.window"),
        ("zzz=3", "zzz: no such key; known keys: name, algorithm"),
        # Names of TRL, verl and prime-rl.
        ("rollout.num_generations=4", "no such key; here it is rollout.group_size (docs/coming-"),
        ("learning_rate=1e-5", "no such key; here it is optimizer.learning_rate"),
        ("loss.objective.epsilon=0.1", "here it is loss.objective.clip_low"),
        ("max_steps=3", "here it is steps"),
        ("data.train_batch_size=3", "data.train_batch_size: no such key; here it is rollout.prom"),
        # A key of one section, without its section.
        ("microbatch_tokens=512", "no such key; did you mean optimizer.microbatch_tokens?"),
        ("rollout.group_size=1", "rollout.group_size: input should be greater than or equal to 2"),
        ("rollout.group_size=255", "rollout.group_size: input should be less than or equal to 254"),
        ("mlflow.tracking_uri=http://me:secret@mlflow", "mlflow.tracking_uri: holds a user or a"),
        ("sync.every=0", "sync.every: input should be greater than or equal to 1 (got 0)"),
        ("replay.window.c2_range=[0.6, 0.7]", "c2 is above c3 at the low end (0.6 > 0.25)"),
        ("replay.window.c3_range=[0.7, 0.3]", "write the lower bound first"),
        (
            "batch.capacity=63",
            "the batch capacity (63 groups) is below optimizer.minibatch_prompts (64)",
        ),
        ("rollout.top_p=0.9", "top_p is 0.9: training rollouts must sample the whole distribution"),
        ("rollout.top_k=50", "set top_k to -1"),
        (
            "rollout.engine.journal_interval_s=2",
            "with rollout.engine.kind=transformers; it belongs to rollout.engine.kind=vllm",
        ),
        (
            "rollout.engine={kind: vllm, journal_interval_s: -1}",
            "rollout.engine.journal_interval_s",
        ),
        ("rollout.vllm_args=[]", "vllm_args: no such key; it was renamed to rollout.engine.args"),
        ("rollout.dtype=bfloat16", "it was renamed to rollout.engine.dtype"),
        ("rollout.journal_interval_s=1", "it was renamed to rollout.engine.journal_interval_s"),
        ("task.train_prompts=100", "one step may draw 256"),
        (
            "sampler={kind: mopps, candidates: 8}",
            "one step may draw 2048 (rollout.prompts_per_step x rollout.max_generation_rounds x "
            "sampler.candidates)",
        ),
        ("sampler={kind: mopps, band: [0.7, 0.3]}", "band is [0.7, 0.3]: write the lower bound"),
        ("sampler={kind: mopps, decay: 1.5}", "sampler.decay: input should be less than or equal"),
        (
            "response_replay.candidates=32",
            "no such key with response_replay.groups=off; it belongs to response_replay.groups=all "
            "or unsolved or revisited",
        ),
        ("response_replay.enabled=true", "it was renamed to response_replay.groups, which is `off"),
        ("response_replay.min_cache=1", "it was renamed to response_replay.min_candidates"),
        ("response_replay=true", "response_replay: must be a section or one of all, off, revisi"),
        (
            "replay=off replay.last_step=5",
            "no such key with replay.select=off; it belongs to replay.select=window or mixed",
        ),
        ("replay=mixed replay.window.r_tot=ema", "it belongs to replay.select=window"),
        (
            "replay=mixed replay.min_ess_fraction=0.8",
            "it belongs to replay.select=effective_sample_size",
        ),
        ("replay=effective_sample_size replay.window.r_tot=ema", "replay.window: no such key with"),
        ("replay=effective_sample_size replay.buffer.max_age=3", "buffer.max_age: no such key"),
        (
            "replay={select: effective_sample_size, min_ess_fraction: 1}",
            "replay.min_ess_fraction: input should be less than 1 (got 1)",
        ),
        ("replay.enabled=false", "renamed to replay.select, which is `off` for false"),
        ("replay_window.r_tot=ema", "replay_window: no such key; it was renamed to replay.window"),
        ("high_quality_buffer.capacity=8", "it was renamed to replay.buffer"),
        ("hard_buffer.store_new_in_high=true", "it was renamed to replay.store_reevaluated"),
        ("loss.norm=actual", "loss.norm: no such key; it was renamed to loss.minibatch_norm"),
        ("hard_buffer.after=keep", "renamed to hard_buffer.evict_solved, which is true for drop_"),
        ("sampler.as_of=step", "it was renamed to sampler.posterior_as_of"),
        ("sampler.kind=thompson", "sampler.kind: 'thompson' is not one of dots, exgrpo,"),
        (
            "sampler.decay=0.5",
            "no such key with sampler.kind=uniform; it belongs to sampler.kind=mopps or dots",
        ),
        (
            "algorithm=mopps sampler.temperature=1",
            "with sampler.kind=mopps; it belongs to sampler.kind=dots",
        ),
        ("sampler={kind: dots, band: [0, 1]}", "it belongs to sampler.kind=mopps"),
        ("sampler.select=band", "sampler.select: no such key; it was renamed to sampler.band, whi"),
        (
            "fresh.gaussian_mean=0.4",
            "no such key with fresh.filter=range; it belongs to fresh.filter=gaussian",
        ),
        ("fresh.filter=gauss", "fresh.filter: 'gauss' is not one of gaussian, none, range, unifo"),
        ("sampler={kind: mopps, prior_run: countdown}", "is 'countdown', the run itself; name an"),
        ("evaluation={temperature: 0, samples: 2}", "set samples to 1, or a temperature above 0"),
        ("demonstrations.join=all fresh.filter=gaussian", "set fresh.filter to range or none"),
        ("checkpoint={keep_best: 1, every: 3}", "make evaluation.every (20) a multiple of"),
        ("algorithm=sac", "algorithm: 'sac' is not one of areal_async, arpo"),
        (
            "loss.objective=sac",
            "override loss.objective.kind: 'sac' is not one of adaptive_clipping, cispo, clip_cov",
        ),
        (
            "advantage.estimator=gaee",
            "advantage.estimator: 'gaee' is not one of gae, group, maxrl, ",
        ),
        ("advantage=gaee", "advantage.estimator: 'gaee' is not one of gae, group, maxrl, opo"),
        ("critic.clip=1", "critic: no such key; it was renamed to advantage.critic, of the estim"),
        (
            "advantage.critic.clip=1",
            "advantage.critic: no such key with advantage.estimator=group; it belongs to "
            "advantage.estimator=gae",
        ),
        (
            "advantage.gamma=0.9",
            "with advantage.estimator=group; it belongs to advantage.estimator=gae or reinforce_pp",
        ),
        (
            "advantage={estimator: rloo, std: sample, lam: 0.9}",
            "advantage.std: no such key with advantage.estimator=rloo; it belongs to "
            "advantage.estimator=group; override advantage.lam: no such key with "
            "advantage.estimator=rloo; it belongs to advantage.estimator=gae",
        ),
        ("loss.objective=gpso", "did you mean gspo?"),
        ("loss.objective.kind=[ppo]", "loss.objective.kind: ['ppo'] is not one of adaptive_clip"),
        ("loss.objective=3", "loss.objective: must be a section or one of adaptive_clipping, cisp"),
        ("loss.objective=", "loss.objective: must be a section or one of adaptive_clipping, cispo"),
        ("loss=ppo", "loss: input should be a valid dictionary"),
        (
            "loss.objective=cispo loss.objective.dual_clip=3",
            "override loss.objective.dual_clip: no such key with loss.objective.kind=cispo; it "
            "belongs to loss.objective.kind=ppo or adaptive_clipping",
        ),
        (
            "loss.objective.level=token",
            "no such key with loss.objective.kind=ppo; it belongs to loss.objective.kind=topr",
        ),
        (
            "loss={objective: {kind: cispo, hgh: 1}}",
            "loss.objective.hgh: no such key with loss.objective.kind=cispo, whose keys are kind, "
            "clip_low, clip_high",
        ),
        ("loss.objective={cliphigh: 1}", "no such key; did you mean loss.objective.clip_high?"),
        ("loss.clip_high=1", "loss.clip_high: no such key; it was renamed to loss.objective.clip_"),
        ("loss.cispo={}", "loss.cispo: no such key; it was renamed to loss.objective, of kind ci"),
        ("loss.ratio=behavior", "loss.ratio: no such key; it was renamed to loss.correction"),
        (
            "loss.weight_cap=5",
            "loss.weight_cap: no such key; it was renamed to loss.correction.weig",
        ),
        (
            "algorithm=grpo loss.correction.weight_norm=batch",
            "loss.correction.kind=behavior; it belongs to loss.correction.kind=prox_current or dec",
        ),
        ("loss.options={a: 1}", "loss.options: no such key; it was renamed to loss.objective"),
        ("loss.objective=gspo", "correction.weight_level is 'token': a response has one ratio"),
        ("loss.objective=gmpo", "weight_level to geometric or sequence, or correction to behavior"),
        (
            "loss.objective=topr",
            "objective is 'topr' but correction is 'prox_current': its equation",
        ),
        ("loss.objective=m2po", "set correction to behavior"),
        ("loss.objective=adaptive_clipping", "set correction to behavior"),
        ("loss.correction={weight_floor: 3}", "weight_floor (3) is not below weight_cap (3)"),
        ("advantage={estimator: rloo, scale: batch}", "it belongs to advantage.estimator=group"),
        ("kl.placement=reward", "kl.placement is 'reward' but advantage.estimator is 'group'"),
        (
            "algorithm=bapo_adaptive_clipping loss.objective.low_range=[0.9,0.6]",
            "loss.objective: low_range is [0.9, 0.6]: write the lower bound first",
        ),
        (
            "algorithm=bapo_adaptive_clipping loss.objective.high_range=[0.2,0.3]",
            "which are bounds of the ratio and not distances from 1",
        ),
        (
            "algorithm=clip_cov loss.objective.covariances=[5,1]",
            "loss.objective: covariances is [5, 1]: write the lower bound first",
        ),
        (
            "algorithm=gspo advantage.estimator=gae",
            "which needs one advantage for a response, but advantage.estimator=gae gives one for",
        ),
        (
            "algorithm=gmpo advantage={estimator: reinforce_pp, gamma: 0.9}",
            "advantage.estimator=reinforce_pp gives one for each token",
        ),
        (
            "loss.objective.clip_center=current",
            "set correction to behavior or objective.clip_center to one",
        ),
        (
            "response_replay={groups: all, min_candidates: 17}",
            "response_replay: min_candidates (17) is above candidates (16), so nothing would be",
        ),
        (
            "response_replay={groups: all, only_correct: true}",
            "only_correct is true but advantages is 'split': compared with each other alone",
        ),
        (
            "response_replay={groups: all, replace: true}",
            "replace is true but advantages is 'split'",
        ),
        (
            "response_replay={groups: all, replace: true, advantages: mixed}",
            "which leaves no fresh response of a group of 8; lower response_replay.count",
        ),
        (
            "response_replay={groups: all, count: 1}",
            "a response by itself has nothing to be compared with; set advantages to mixed",
        ),
        (
            "response_replay={groups: all, strategy: all, candidates: 1, min_candidates: 1}",
            "a response by itself has nothing to be compared with; set advantages to mixed",
        ),
        (
            "algorithm=arpo response_replay.strategy=all",
            "which leaves no fresh response of a group of 8; lower response_replay.candidates",
        ),
        (
            "algorithm=arpo demonstrations.join=all response_replay.count=7",
            "which leaves no fresh response of a group of 8; lower response_replay.count",
        ),
        (
            "algorithm=arpo fresh.filter=gaussian",
            "fresh.filter is 'gaussian', which keeps no group without a correct response",
        ),
        (
            "algorithm=luffy demonstrations.join=unsolved fresh.filter=gaussian",
            "fresh.filter is 'gaussian', which keeps no group without a correct response",
        ),
        (
            "lora.rank=2 lora.targets=[q_proj,model.lm_head]",
            "lora.targets names model.lm_head, but the weights of embeddings and of the output",
        ),
        (
            "lora.rank=2 lora.targets=[embed_tokens,wte]",
            "names embed_tokens, wte, but the weights of embeddings and of the output layer are",
        ),
        (
            "response_replay=all loss.correction=decoupled",
            "is 'decoupled', which has the trainer's log-probs of whole groups alone",
        ),
        (
            "response_replay=all batch.dedup=rollout",
            "would put responses into a batch twice; set batch.dedup=prompt",
        ),
        (
            "response_replay=revisited",
            "sampler.kind is 'uniform', which revisits no prompts; set sampler.kind=exgrpo",
        ),
        (
            "algorithm=exgrpo rollout.max_generation_rounds=2 fresh.filter=range",
            "a step has one round of prompts that are revisited",
        ),
        (
            "loss.by_source={replayed: {shaping: 0.1}}",
            "by_source.replayed.shaping is given but correction is 'prox_current'",
        ),
        (
            "algorithm=grpo loss.by_source={replayed: {shaping: 0.1, clip_low: 0.2}}",
            "shaping is given with a clip bound, but the shaped ratio is not clipped",
        ),
        (
            "algorithm=cispo loss.by_source={replayed: {clip_low: 0.2}}",
            "by_source.replayed has a clip bound but objective is 'cispo'",
        ),
        ("loss.by_source={old: {}}", "loss.by_source.old"),
        (
            "kl.convex={}",
            "convex is given with reference 'rollout' and coefficient 0.001, but it needs a KL",
        ),
        (
            "algorithm=remix_grpo kl.placement=reward advantage.estimator=reinforce_pp",
            "the KL to theta_t is 0 when rewards are computed; set placement to loss",
        ),
        (
            "algorithm=remix_grpo lora.rank=8",
            "the reference has no adapters to become the policy",
        ),
        (
            "demonstrations.supervise_every=8",
            "supervise_every is 8 with reevaluate.enabled, but both take prompts from the hard",
        ),
        (
            "algorithm=relift hard_buffer.capacity=64",
            "(128) is above the capacity of the hard buffer (64), so no update would ever be due",
        ),
        ("name=Bad Name", "name: string should match pattern"),
        ("steps=soon", "steps: input should be a valid integer"),
        ("kl.coefficient=.nan", "kl.coefficient"),
        ("steps", "write key=value"),
        ("steps=[", "is not YAML"),
    ],
)
def test_an_invalid_configuration_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, split(override))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "interval_s"),
    [
        (["rollout.engine=vllm"], 1.0),
        (["rollout.engine=vllm", "rollout.max_response_tokens=1024"], 0.0),
        (
            [
                "rollout.engine=vllm",
                "rollout.max_response_tokens=64",
                "rollout.engine.journal_interval_s=5",
            ],
            5.0,
        ),
        (["rollout.engine=vllm", "rollout.engine.journal_interval_s=0"], 0.0),
        (["rollout.engine=transformers"], 0.0),
    ],
)
def test_long_responses_of_vllm_are_journalled(overrides: list[str], interval_s: float) -> None:
    assert load_config(None, overrides).journal_interval_s == interval_s


@pytest.mark.parametrize("name", ["gaussian", "uniform", "none"])
def test_dynamic_sampling_is_refused_with_a_filter_that_it_cannot_count(name: str) -> None:
    overrides = ["rollout.max_generation_rounds=2", "task.train_prompts=1000"]
    assert load_config(None, [*overrides, "fresh.filter=range"])
    with pytest.raises(ConfigError, match=f"is 2 with fresh.filter={name}: dynamic sampling"):
        load_config(None, [*overrides, f"fresh.filter={name}"])


def test_importance_weights_without_a_correction_by_them_are_refused() -> None:
    overrides = ["loss.correction.weight_cap=5", "loss.correction.weight_level=sequence"]
    assert not load_config(None, overrides).warnings()
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*overrides, "loss.correction=behavior"])
    for key in ("weight_cap", "weight_level"):
        assert (
            f"override loss.correction.{key}: no such key with loss.correction.kind=behavior; it "
            "belongs to loss.correction.kind=prox_current or decoupled"
        ) in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            "algorithm=gspo loss.correction=behavior sync.every=5",
            "loss.objective=gspo with loss.correction=behavior clips almost every response",
        ),
        (
            "steps=4 optimizer.warmup_steps=0",
            "sync.every is 5 and steps is 4: all rollouts come from the initial model",
        ),
        (
            "replay.window={direction: fixed, r_tot: ema}",
            "replay.window.r_tot=ema change nothing with replay.window.direction=fixed",
        ),
        ("replay.window.ema_decay=0.5", "replay.window.ema_decay=0.5 change nothing with replay."),
        (
            "reevaluate={enabled: false, c1: 0.2} hard_buffer.capacity=9",
            "reevaluate.c1=0.2 and hard_buffer.capacity=9 change nothing with reevaluate.enabled=F",
        ),
        ("kl={coefficient: 0, estimator: k1}", "kl.estimator=k1 change nothing with kl.coeffi"),
        ("lora.alpha=64", "lora.alpha=64 change nothing with lora.rank=0"),
        ("reward.overlong_weight=2", "reward.overlong_weight=2.0 change nothing with reward.over"),
        (
            "rollout.max_generation_rounds=2 batch.capacity=640",
            "the batch capacity (640) is above the 512 groups of all generation rounds",
        ),
        ("sync.lag=2", "sync.lag is 2 with reevaluate.enabled: re-evaluations need the current"),
        (
            "algorithm=grpo sync.interrupt_rollouts=true",
            "sync.interrupt_rollouts changes nothing with sync.lag=0",
        ),
        (
            "algorithm=areal_async rollout.max_generation_rounds=2 fresh.filter=range",
            "sync.interrupt_rollouts changes nothing with rollout.max_generation_rounds=2",
        ),
        ("algorithm=dots", "sampler.kind=dots predicts difficulty by the posterior"),
        # What it reads is not pointed out.
        ("algorithm=dots sampler.temperature=0.1 sampler.decay=0.5", "sampler.kind=dots predicts"),
        (
            "algorithm=mopps sync.lag=2 sampler.posterior_as_of=step",
            "sync.lag is 2 with sampler.posterior_as_of=step: the prompts of a step depend on the",
        ),
        (
            "batch={fresh_fraction: 0.5, capacity: 512}",
            "batch.fresh_fraction=0.5 changes nothing with batch.capacity=512",
        ),
        (
            "algorithm=grpo batch.fresh_fraction=0.5",
            "batch.fresh_fraction=0.5 leaves room in every batch that nothing fills with",
        ),
        (
            "algorithm=luffy reward.weights={format: 0.1}",
            "demonstrations have the reward of a correct answer (1) without the part format",
        ),
        (
            "algorithm=luffy demonstrations.join=none",
            "loss.by_source.demonstrated changes nothing: no batch of this run has such",
        ),
        (
            "algorithm=grpo loss.by_source={replayed: {coefficient: 0.5}, fresh: {}}",
            "loss.by_source.replayed changes nothing",
        ),
        ("algorithm=opo", "advantage.estimator=opo is derived for exactly on-policy updates"),
        (
            "algorithm=dr_grpo advantage.eps=1.0e-4",
            "advantage.eps=0.0001 change nothing with advantage.scale=none",
        ),
        (
            "loss.correction.weight_mode=unit loss.correction.weight_cap=5",
            "loss.correction.weight_cap=5.0 change nothing with loss.correction.weight_mode=unit",
        ),
        (
            "mlflow.experiment=mine",
            "mlflow.experiment=mine change nothing with an empty mlflow.tracking_uri",
        ),
    ],
)
def test_a_valid_configuration_with_a_surprising_effect_gets_a_warning(
    overrides: str, warning: str
) -> None:
    (message,) = load_config(None, split(overrides)).warnings()
    assert message.startswith(warning)


@pytest.mark.parametrize(
    "overrides",
    [
        "loss.objective=cispo loss.objective.clip_high=4",
        "loss.objective.clip_high=4 loss.objective=cispo",
        "loss.objective.kind=cispo loss.objective.clip_high=4",
        "loss.objective={kind: cispo, clip_high: 4}",
        "loss={objective: {kind: cispo, clip_high: 4}}",
        "loss={objective: cispo} loss.objective.clip_high=4",
        "loss.objective=sapo loss.objective=cispo loss.objective.clip_high=4",
        "algorithm=cispo loss.objective.clip_high=4",
        "algorithm=gspo loss.objective=cispo loss.objective.clip_high=4",
    ],
)
def test_a_kind_is_selected_by_its_name_or_by_the_key_kind(overrides: str) -> None:
    assert load_config(None, split(overrides)).loss.objective == CispoConfig(clip_high=4.0)


def test_the_keys_of_another_kind_are_not_inherited() -> None:
    """A clip range of 0.2, as that of PPO, means something else to other objectives."""
    file = {"loss": {"objective": {"clip_low": 0.1}}}
    for algorithm in ("bapo", "grpo", "grpo_delayed", "dapo", "luffy", "cispo"):
        values = {**file, "algorithm": algorithm}
        config = override_config(values, parse_overrides(["loss.objective=sapo"]))
        assert config.loss.objective == SapoConfig()
    for objective in ("cispo", {"kind": "cispo"}):
        config = config_from({"algorithm": "dapo", "loss": {"objective": objective}})
        assert config.loss.objective == CispoConfig()


def test_a_file_changes_a_key_of_the_kind_that_its_preset_or_the_command_line_names() -> None:
    file = {"algorithm": "gspo", "loss": {"objective": {"clip_low": 0.1}}}
    assert config_from(file).loss.objective == GspoConfig(clip_low=0.1)
    same = override_config(file, parse_overrides(["loss.objective=gspo"]))
    assert same.loss.objective == GspoConfig(clip_low=0.1)
    assert config_from({"loss": {"objective": {"clip_low": 0.1}}}).loss.objective == PpoConfig(
        clip_low=0.1
    )


@pytest.mark.parametrize("algorithm", ["gspo", "cispo", "m2po"])
def test_keys_of_a_file_are_dropped_by_an_algorithm_that_gives_their_section_another_kind(
    algorithm: str,
) -> None:
    """The file is one for PPO, whose clip range says nothing about the bounds of other objectives.

    So one file serves a comparison of algorithms.
    """
    plain = load_config(None, [f"algorithm={algorithm}"])
    for file in ({}, {"algorithm": "grpo"}, {"algorithm": "dapo"}):
        settings = {"objective": {"clip_low": 0.1, "clip_high": 0.3}, "minibatch_norm": "actual"}
        values = {**file, "loss": settings}
        config = override_config(values, {"algorithm": algorithm})
        assert config.loss.objective == plain.loss.objective
        assert config.loss.minibatch_norm == "actual"
        shared = {"loss": {"objective": {"dual_clip": 3.0}}}
        config = override_config(values, shared, {"algorithm": algorithm}, {"seed": 1})
        assert config.loss.objective == plain.loss.objective
    with pytest.raises(ConfigError, match=r"belongs to loss\.objective\.kind=ppo"):
        override_config({}, {"algorithm": algorithm, "loss": {"objective": {"dual_clip": 3.0}}})


def test_keys_of_a_file_hold_under_an_algorithm_that_leaves_the_kind_of_their_section() -> None:
    file = {"loss": {"objective": {"clip_center": "current"}}, "advantage": {"std": "sample"}}
    config = override_config(file, {"algorithm": "luffy"})
    assert config.loss.objective == PpoConfig(
        clip_low=None, clip_high=None, dual_clip=None, clip_center="current"
    )
    assert config.advantage == GroupAdvantageConfig(scale="none", std="sample")
    named = {"algorithm": "grpo", "loss": {"objective": {"kind": "sapo"}}}
    changed = {"loss": {"objective": {"positive_temperature": 2.0}}}
    with pytest.raises(ConfigError, match=r"algorithm=cispo would keep loss\.objective\.kind=sapo"):
        override_config(named, {"algorithm": "cispo"})
    config = override_config(named, changed, {"algorithm": "maxrl"})
    assert config.loss.objective == SapoConfig(positive_temperature=2.0)


def test_keys_that_mean_the_same_in_both_kinds_are_kept() -> None:
    file = {"loss": {"correction": {"weight_cap": 5.0}}}
    config = override_config(file, parse_overrides(["loss.correction=decoupled"]))
    assert config.loss.correction == DecoupledConfig(weight_cap=5.0)
    config = override_config(file, parse_overrides(["loss.correction=behavior"]))
    assert config.loss.correction == BehaviorConfig()


def test_a_sampler_keeps_the_keys_that_another_one_reads_as_well() -> None:
    file = {"sampler": {"kind": "mopps", "candidates": 6, "prior_run": "before", "band": [0, 1]}}
    config = override_config(file, parse_overrides(["sampler=dots"]))
    assert config.sampler == DotsConfig(candidates=6, prior_run="before")
    config = override_config(file, parse_overrides(["sampler=exgrpo"]))
    assert config.sampler == ExgrpoConfig(prior_run="before")
    assert override_config(file, parse_overrides(["sampler=uniform"])).sampler == UniformConfig()


def test_a_sampler_of_a_plug_in_has_keys_of_its_own_and_those_of_results() -> None:
    """`frontier` is the plug-in of tests/plug_in/."""
    section = {"kind": "frontier", "explore": 0.1, "posterior_as_of": "step", "half_life": 9.0}
    config = config_from({"sampler": section})
    stored = config.model_dump(mode="json")
    assert stored["sampler"] == {**section, "prior_run": None, "decay": 1.0}
    assert RunConfig.model_validate(stored).model_dump(mode="json") == stored
    with pytest.raises(ConfigError, match=r"no such key with sampler\.kind=frontier"):
        config_from({"sampler": {**section, "candidates": 8}})
    with pytest.raises(ConfigError, match=r"explore: no such key with sampler\.kind=mopps"):
        config_from({"sampler": {**section, "kind": "mopps"}})


def test_a_key_of_a_file_belongs_to_the_kind_that_the_command_line_names() -> None:
    """It is no key of the default kind, so nothing else can be meant."""
    file = {"rollout": {"engine": {"args": ["--enforce-eager"]}}}
    config = override_config(file, parse_overrides(["rollout.engine=vllm"]))
    assert config.rollout.engine == VllmConfig(args=["--enforce-eager"])
    with pytest.raises(ConfigError, match=r"it belongs to rollout\.engine\.kind=vllm"):
        config_from(file)


@pytest.mark.parametrize("off", ["off", "'off'", "{groups: off}", "false"])
def test_off_is_a_kind_whether_yaml_reads_it_as_false_or_not(off: str) -> None:
    config = load_config(None, ["algorithm=repo", f"response_replay={off}"])
    assert config.response_replay == RunConfig().response_replay
    text = f"algorithm: repo\nresponse_replay: {off}\n"
    assert config_from(parse_values(text, "text")) == config
    assert load_config(None, ["algorithm=repo", "response_replay.groups=off"]) == config


def test_a_stored_configuration_has_the_keys_of_its_kinds_alone() -> None:
    stored = load_config(None, ["algorithm=sapo"]).model_dump(mode="json")
    assert stored["loss"]["objective"] == {
        "kind": "sapo",
        "positive_temperature": 1.0,
        "negative_temperature": 1.05,
    }
    assert RunConfig.model_validate(stored).model_dump(mode="json") == stored


@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_preset_has_a_summary_with_its_source(algorithm: str) -> None:
    assert re.search(r"arXiv \d{4}\.\d{5}", SUMMARIES[algorithm])
    assert SUMMARIES.keys() == PRESETS.keys()
    assert algorithm in json_schema()["properties"]["algorithm"]["enum"]


def test_a_stored_configuration_names_an_algorithm_that_exists() -> None:
    with pytest.raises(ValidationError, match="'sac' is not one of areal_async, arpo"):
        RunConfig.model_validate({"algorithm": "sac"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML at line"),
        ("- 1", "must hold keys and values, not a list"),
        ("rollout: 3", "rollout: input should be a valid dictionary"),
        ("sync: {every: 3}\nseed: 1\nsync: {every: 4}", "sync is given twice, at lines 1 and 3"),
        ("sync:\n  every: 3\n  every: 4", "every is given twice, at lines 2 and 3; remove one"),
    ],
)
def test_the_error_of_an_invalid_file_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_the_error_of_a_missing_file_names_it() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_config("nowhere.yaml")


def test_a_schedule_that_loads_weights_twice_gets_a_warning() -> None:
    config = load_config(None, ["sync.every=4", "sync.reevaluate_every=6"])
    assert "then the older ones again" in config.warnings()[0]


@given(
    v=st.integers(1, 9),
    m=st.integers(1, 9),
    k=st.integers(1, 9),
    phase=st.sampled_from(["algorithm1", "first_step"]),
    lag=st.integers(0, 6),
)
def test_every_version_that_a_rollout_needs_is_published(
    v: int, m: int, k: int, phase: str, lag: int
) -> None:
    config = load_config(
        None,
        [f"sync.every={v}", f"sync.reevaluate_every={m}", f"evaluation.every={k}", "steps=30"]
        + [f"sync.phase={phase}", f"sync.lag={lag}"],
    )
    for t in range(1, 31):
        assert config.publishes_at(config.schedule.policy_version(t))
        if config.schedule.reevaluates_at(t) or config.evaluates_at(t):
            assert config.publishes_at(t)
    assert config.publishes_at(31)
    assert config.checkpoints_after(30)


@pytest.mark.parametrize(
    ("as_of", "phase", "expected"),
    [
        ("sync", "algorithm1", [0, 0, 2, 2, 2, 5, 5]),
        ("sync", "first_step", [0, 0, 0, 3, 3, 3, 6]),
        ("step", "algorithm1", [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_adaptive_prompts_depend_on_the_commit_before_the_last_sync_or_step(
    as_of: str, phase: str, expected: list[int]
) -> None:
    overrides = ["sync.every=3", f"sync.phase={phase}"]
    uniform = load_config(None, overrides)
    adaptive = load_config(
        None, [*overrides, "sampler.kind=mopps", f"sampler.posterior_as_of={as_of}"]
    )
    assert [uniform.sampled_as_of(t) for t in range(1, 8)] == [0] * 7
    assert [adaptive.sampled_as_of(t) for t in range(1, 8)] == expected


def test_the_fraction_of_fresh_groups_sets_the_capacity_of_a_batch() -> None:
    assert load_config(None, ["batch.fresh_fraction=0.5"]).batch_capacity == 512
    assert RunConfig().batch_capacity == 256
    # 256 / 0.6 = 426.7 is between 6 and 7 minibatches of 64.
    assert load_config(None, ["batch.fresh_fraction=0.6"]).batch_capacity == 448
    # 3 x 0.1 is not 0.3 in floating point.
    tenths = ["rollout.prompts_per_step=3", "optimizer.minibatch_prompts=1"]
    assert load_config(None, [*tenths, "batch.fresh_fraction=0.3"]).batch_capacity == 10
    dots = load_config(None, ["algorithm=dots", "rollout.prompts_per_step=32"])
    assert dots.batch_capacity == 64


def test_overrides_of_one_section_are_merged() -> None:
    assert parse_overrides(["a.b=1", "a.c=x", "d=[1, 2]"]) == {"a": {"b": 1, "c": "x"}, "d": [1, 2]}


# ---- evaluation sets -----------------------------------------------------------------------------


def test_an_evaluation_set_inherits_from_the_run_what_it_does_not_set() -> None:
    config = config_from(
        {
            "task": {"options": {"template": "short", "max_number": 9}, "test_prompts": 50},
            "rollout": {"temperature": 0.9},
            "evaluation": {
                "every": 8,
                "samples": 16,
                "sets": {
                    "cd-4": {"options": {"numbers": [4]}, "every": 4},
                    "cd-34": {"top_p": 0.7},
                },
            },
        }
    )
    assert list(config.evaluation_sets) == ["cd-34", "cd-4"]
    assert config.primary_set == "cd-34"
    assert config.evaluation_sets["cd-4"] == EvaluationSet(
        name="cd-4",
        path=None,
        options={"template": "short", "max_number": 9, "numbers": [4]},
        columns={},
        prompts=50,
        samples=16,
        temperature=0.9,
        top_p=1.0,
        every=4,
    )
    assert config.evaluation_sets["cd-34"].top_p == 0.7
    assert config.evaluation_sets_at(4) == ["cd-4"]
    assert config.evaluation_sets_at(8) == ["cd-34", "cd-4"]


def test_a_run_without_evaluation_sets_has_the_set_test() -> None:
    config = config_from({"task": {"train_path": "a.jsonl", "test_path": "b.jsonl"}})
    assert list(config.evaluation_sets) == ["test"]
    assert config.evaluation_sets["test"].path == "b.jsonl"
    assert config.primary_set == "test"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"primary": "amc"},
            "evaluation.primary is 'amc', which is no set .* one of aime24, minerva",
        ),
        ({"sets": {"AIME": {}}}, "evaluation.sets.AIME.*string should match pattern"),
        (
            {"sets": {"a": {"sample": 3}}},
            "evaluation.sets.a.sample: no such key; did you mean evaluation.sets.a.samples",
        ),
        ({"sets": {"a": {"top_p": 1.5}}}, "evaluation.sets.a.top_p: .* less than or equal to 1"),
    ],
)
def test_invalid_evaluation_sets_are_refused(values: dict[str, Any], message: str) -> None:
    sets = {"aime24": {"path": "a"}, "minerva": {"path": "b"}}
    with pytest.raises(ConfigError, match=message):
        config_from({"evaluation": {"sets": sets, **values}})


def test_a_test_path_beside_evaluation_sets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"test_path is x.json, but .* evaluation.sets \(amc"):
        config_from({"task": {"test_path": "x.json"}, "evaluation": {"sets": {"amc": {}}}})


def test_an_evaluation_set_that_is_given_twice_is_refused() -> None:
    text = "evaluation:\n  sets:\n    amc: {path: a}\n    amc: {path: b}\n"
    with pytest.raises(ConfigError, match="amc is given twice, at lines 3 and 4"):
        config_from(parse_values(text, "config"))


def test_keep_best_needs_a_checkpoint_at_each_evaluation_of_the_primary_set() -> None:
    sets = {"a": {"every": 10}, "b": {"every": 7}}
    values = {"checkpoint": {"every": 5, "keep_best": 1}, "evaluation": {"sets": sets}}
    assert config_from(values).primary_set == "a"
    values["evaluation"]["primary"] = "b"
    with pytest.raises(ConfigError, match=r"make evaluation.every \(7\) a multiple"):
        config_from(values)


def test_the_share_of_the_reference_falls_stepwise() -> None:
    """The share is lambda(t) = max(1 - 0.1 ceil(max(t - 50, 0) / 10), 0.5), arXiv 2507.06892."""
    kl = load_config(None, ["algorithm=remix_grpo"]).kl
    for step in range(1, 200):
        expected = max(1 - 0.1 * math.ceil(max(step - 50, 0) / 10), 0.5)
        assert kl.reference_share(step) == pytest.approx(expected)
    assert [step for step in (1, 50, 51, 200) if kl.resets_before(step)] == [51, 200]
    assert load_config(None, []).kl.reference_share(100) == 1.0


def test_groups_are_replayed_up_to_the_last_step_of_replay() -> None:
    config = load_config(None, ["algorithm=remix_grpo"])
    assert config.replays_at(50)
    assert not config.replays_at(51)
    assert load_config(None, []).replays_at(471)
    assert not load_config(None, ["replay=off"]).replays_at(1)


@pytest.mark.parametrize(
    ("task", "best"),
    [
        ({"reward": "rewards.py:score"}, "high reward"),
        ({"reward": "rewards.py:score", "solved_at": 1.0}, "more correct"),
        ({"name": "math"}, "more correct"),
    ],
)
def test_evaluations_are_ranked_by_the_measure_of_the_task(task: dict[str, Any], best: str) -> None:
    settings = config_from({"task": {"train_path": "a", "test_path": "b", **task}}).task
    evaluations = {
        "more correct": (0.5, 1.0),
        "high reward": (0.25, 2.0),
        "low reward": (0.25, -1.0),
    }
    ranks = {
        name: settings.rank(accuracy=accuracy, reward=reward)
        for name, (accuracy, reward) in evaluations.items()
    }
    assert max(ranks, key=lambda name: ranks[name]) == best
    assert ranks["high reward"] > ranks["low reward"], "of equal accuracies, the reward decides"
