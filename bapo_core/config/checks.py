"""The checks of values of several sections: what is refused, and what is warned about."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from bapo_core.config.base import Section
from bapo_core.config.batches import NoResponseReplayConfig
from bapo_core.config.evaluation import GREEDY_TEMPERATURE, TEST_SET
from bapo_core.config.objectives import SEQUENCE_OBJECTIVES
from bapo_core.config.samplers import AdaptiveConfig
from bapo_core.thresholds import replay_window, within

if TYPE_CHECKING:
    from bapo_core.config.run import RunConfig


READ_LAYERS = frozenset(
    ("embed_tokens", "embed_positions", "embed_in", "wte", "wpe", "word_embeddings")
    + ("tok_embeddings", "lm_head", "embed_out")
)
"""Names, in models of transformers, of embeddings and of output layers."""


def refuse_contradictions(config: RunConfig) -> None:
    """Raises `ValueError` for values of several sections that contradict each other."""
    for refuse in (
        _refuse_dynamic_sampling_of_other_groups,
        _refuse_advantages_that_do_not_fit_the_loss,
        _refuse_response_replay,
        _refuse_filters_that_drop_joined_groups,
        _refuse_supervised_updates,
        _refuse_greedy_samples,
        _refuse_rewards_that_do_not_fit_the_estimator,
        _refuse_resets_of_adapters,
        _refuse_adapters_of_layers_that_are_read,
        _refuse_evaluation_sets,
        _refuse_functions_without_a_weight,
        _refuse_sizes_that_do_not_fit,
    ):
        refuse(config)


def list_warnings(config: RunConfig) -> list[str]:
    """Returns warnings about settings that are valid and surprising."""
    warnings = []
    if config.sync.lag and config.reevaluate.enabled:
        warnings.append(
            f"sync.lag is {config.sync.lag} with reevaluate.enabled: re-evaluations need the "
            "current weights, so rollouts wait for the trainer every sync.reevaluate_every "
            "steps"
        )
    if config.sync.interrupt_rollouts and not config.sync.lag:
        warnings.append(
            "sync.interrupt_rollouts changes nothing with sync.lag=0: the weights of a sync "
            "are published when all responses before it have ended; set sync.lag"
        )
    elif config.sync.interrupt_rollouts and config.rollout.max_generation_rounds > 1:
        warnings.append(
            "sync.interrupt_rollouts changes nothing with rollout.max_generation_rounds="
            f"{config.rollout.max_generation_rounds}: the prompts of a step follow from the "
            "rewards of the step before, so its responses end before new weights are loaded"
        )
    if (
        config.reevaluate.enabled
        and not config.sync.lag
        and not config.schedule.one_load_serves_both
    ):
        warnings.append(
            f"sync.every (v={config.sync.every}) does not divide sync.reevaluate_every "
            f"(m={config.sync.reevaluate_every}) or sync.phase is first_step, so the engine "
            "loads the current weights for each re-evaluation and then the older ones again: "
            "correct, but slower; make reevaluate_every a multiple of every, with phase "
            "algorithm1"
        )
    if config.batch_capacity % config.optimizer.minibatch_prompts:
        warnings.append(
            f"optimizer.minibatch_prompts ({config.optimizer.minibatch_prompts}) does not divide "
            f"the batch capacity ({config.batch_capacity}), so the last minibatch of a full "
            "batch is short"
        )
    if config.steps > 1 and config.schedule.policy_version(config.steps) == 1:
        warnings.append(
            f"sync.every is {config.sync.every} and steps is {config.steps}: all rollouts come "
            "from the initial model; lower sync.every or raise steps"
        )
    if config.optimizer.warmup_steps >= config.steps:
        warnings.append(
            f"optimizer.warmup_steps is {config.optimizer.warmup_steps} and steps is "
            f"{config.steps}: no step has the whole learning rate "
            f"{config.optimizer.learning_rate:g}; lower warmup_steps or raise steps"
        )
    warnings += _warnings_about_methods(config)
    warnings += _warnings_about_sampling(config)
    warnings += _warnings_about_batches(config)
    warnings += _warnings_about_unused_keys(config)
    empty = _empty_windows(config)
    if config.replay.select == "window" and empty:
        warnings.append(
            f"with rollout.group_size {config.rollout.group_size}, the replay window [c2, c3] "
            f"holds no accuracy k/G for {empty:.0%} of the values of r_tot, so nothing is "
            "stored for replay then; widen replay.window.c2_range and c3_range, or raise the "
            "group size"
        )
    return warnings


def _refuse_dynamic_sampling_of_other_groups(config: RunConfig) -> None:
    if config.rollout.max_generation_rounds > 1 and config.fresh.filter != "range":
        raise ValueError(
            f"rollout.max_generation_rounds is {config.rollout.max_generation_rounds} with "
            f"fresh.filter={config.fresh.filter}: dynamic sampling counts groups with mixed "
            "rewards, all of which only fresh.filter=range keeps; set "
            "rollout.max_generation_rounds=1 or fresh.filter=range"
        )


def _refuse_advantages_that_do_not_fit_the_loss(config: RunConfig) -> None:
    advantage, objective = config.advantage, config.loss.objective.kind
    estimator = advantage.estimator
    in_reward = config.kl.placement == "reward"
    if in_reward and estimator != "reinforce_pp":
        raise ValueError(
            f"kl.placement is 'reward' but advantage.estimator is '{estimator}', which has no "
            "rewards of single tokens; set advantage.estimator=reinforce_pp or "
            "kl.placement=loss"
        )
    by_token = estimator == "gae" or (
        advantage.estimator == "reinforce_pp" and (in_reward or advantage.gamma < 1.0)
    )
    if objective in SEQUENCE_OBJECTIVES and by_token:
        raise ValueError(
            f"loss.objective is '{objective}', which needs one advantage for a response, but "
            f"advantage.estimator={estimator} gives one for each token; set "
            "advantage.estimator=group (or reinforce_pp with advantage.gamma=1 and "
            "kl.placement=loss)"
        )


def _refuse_response_replay(config: RunConfig) -> None:
    settings, size = config.response_replay, config.rollout.group_size
    if config.sampler.kind == "exgrpo" and config.rollout.max_generation_rounds > 1:
        raise ValueError(
            "sampler.kind is 'exgrpo' with rollout.max_generation_rounds="
            f"{config.rollout.max_generation_rounds}: a step has one round of prompts that are "
            "revisited; set rollout.max_generation_rounds=1 or another sampler.kind"
        )
    if isinstance(settings, NoResponseReplayConfig):
        return
    if settings.groups == "revisited" and config.sampler.kind != "exgrpo":
        raise ValueError(
            "response_replay.groups is 'revisited' but sampler.kind is "
            f"'{config.sampler.kind}', which revisits no prompts; set sampler.kind=exgrpo, or "
            "response_replay.groups to all or unsolved"
        )
    demonstrated = int(config.demonstrations.join != "none")
    if settings.replace and settings.most + demonstrated >= size:
        key = f"response_replay.{settings.most_key}"
        and_one = " and a demonstration" if demonstrated else ""
        raise ValueError(
            f"{key} is {settings.most} with response_replay.replace{and_one}, which leaves no "
            f"fresh response of a group of {size}; lower {key}"
        )
    if config.loss.correction.kind == "decoupled":
        raise ValueError(
            "response_replay is on but loss.correction is 'decoupled', which has the "
            "trainer's log-probs of whole groups alone; set loss.correction to behavior or "
            "prox_current"
        )
    if config.replay.select != "off" and config.batch.dedup == "rollout":
        raise ValueError(
            "response_replay and replay with batch.dedup=rollout would put "
            "responses into a batch twice; set batch.dedup=prompt, or disable one of the two"
        )


def _refuse_filters_that_drop_joined_groups(config: RunConfig) -> None:
    joins = {
        "response_replay.groups": config.response_replay.groups == "unsolved",
        "demonstrations.join": config.demonstrations.join == "unsolved",
    }
    joins_all = config.demonstrations.join == "all"
    if joins_all and config.fresh.filter in ("gaussian", "uniform"):
        raise ValueError(
            f"demonstrations.join is 'all' but fresh.filter is '{config.fresh.filter}', which "
            "drops groups without a correct response that the demonstration makes mixed; set "
            "fresh.filter to range or none"
        )
    for key, unsolved in joins.items():
        if unsolved and config.fresh.filter == "gaussian":
            raise ValueError(
                f"{key} is 'unsolved' but fresh.filter is 'gaussian', which keeps no group "
                "without a correct response, so nothing would join; set fresh.filter to range "
                "or none"
            )


def _refuse_supervised_updates(config: RunConfig) -> None:
    count = config.demonstrations.supervise_every
    if count and config.reevaluate.enabled:
        raise ValueError(
            f"demonstrations.supervise_every is {count} with reevaluate.enabled, but both take "
            "prompts from the hard buffer; set supervise_every=0 or reevaluate.enabled=false"
        )
    if count > config.hard_capacity:
        raise ValueError(
            f"demonstrations.supervise_every ({count}) is above the capacity of the hard "
            f"buffer ({config.hard_capacity}), so no update would ever be due; raise "
            "hard_buffer.capacity"
        )


def _refuse_greedy_samples(config: RunConfig) -> None:
    for settings in config.evaluation_sets.values():
        if settings.temperature == GREEDY_TEMPERATURE and settings.samples > 1:
            raise ValueError(
                f"the evaluation set {settings.name} has temperature 0 and "
                f"{settings.samples} samples, but greedy responses to a prompt are all the "
                "same; set samples to 1, or a temperature above 0"
            )


def _refuse_rewards_that_do_not_fit_the_estimator(config: RunConfig) -> None:
    if config.advantage.estimator == "maxrl" and config.reward.may_be_negative:
        raise ValueError(
            "advantage.estimator is 'maxrl', which divides by the mean reward of a group, but "
            "the reward section allows rewards below 0; set reward.wrong=0, "
            "reward.overlong_share=0 and no negative weight, or another estimator"
        )


def _refuse_resets_of_adapters(config: RunConfig) -> None:
    if config.kl.reset_after is not None and config.lora.rank:
        raise ValueError(
            f"kl.reset_after is {config.kl.reset_after} but lora.rank is {config.lora.rank}: the "
            "reference has no adapters to become the policy; set one of them to null or 0"
        )


def _refuse_adapters_of_layers_that_are_read(config: RunConfig) -> None:
    read = [name for name in config.lora.targets if name.rpartition(".")[2] in READ_LAYERS]
    if config.lora.rank and read:
        raise ValueError(
            f"lora.targets names {', '.join(read)}, but the weights of embeddings and of the "
            "output layer are read and not called, so their adapters would not be trained; name "
            "other layers, such as [q_proj, v_proj], or [all-linear]"
        )


def _refuse_evaluation_sets(config: RunConfig) -> None:
    names, primary = sorted(config.evaluation.sets) or [TEST_SET], config.evaluation.primary
    if primary is not None and primary not in names:
        raise ValueError(
            f"evaluation.primary is {primary!r}, which is no set of evaluation.sets; choose "
            f"one of {', '.join(names)}"
        )
    if config.evaluation.sets and config.task.test_path is not None:
        raise ValueError(
            f"task.test_path is {config.task.test_path}, but the held-out prompts are those of "
            f"evaluation.sets ({', '.join(names)}); remove task.test_path "
            "(task.test_path=null), or make it the path of a set"
        )


def _refuse_functions_without_a_weight(config: RunConfig) -> None:
    functions = config.task.functions
    if functions is None:
        return
    for name in functions.names[1:]:
        if name not in config.reward.weights:
            raise ValueError(
                f"task.reward names {name} after the first function, but reward.weights has no "
                f"weight for it, so that it would count for nothing; set reward.weights.{name}=1, "
                "or another weight"
            )
    for name, settings in config.evaluation.sets.items():
        if settings.options:
            raise ValueError(
                f"evaluation.sets.{name}.options are set beside task.reward; remove them: a reward "
                "function has none"
            )


def _refuse_sizes_that_do_not_fit(config: RunConfig) -> None:
    minibatch = config.optimizer.minibatch_prompts
    if config.batch_capacity < minibatch:
        raise ValueError(
            f"the batch capacity ({config.batch_capacity} groups) is below "
            f"optimizer.minibatch_prompts ({minibatch}); raise batch.capacity or "
            "rollout.prompts_per_step, or lower optimizer.minibatch_prompts"
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if config.optimizer.microbatch_tokens < longest:
        raise ValueError(
            f"optimizer.microbatch_tokens ({config.optimizer.microbatch_tokens}) is below the "
            f"longest sequence, rollout.max_prompt_tokens + rollout.max_response_tokens "
            f"({longest}); raise optimizer.microbatch_tokens"
        )
    if config.sync.transport == "nccl" and config.rollout.engine.kind != "vllm":
        raise ValueError(
            f"sync.transport is nccl, which rollout.engine {config.rollout.engine.kind} does not "
            "support; set rollout.engine to vllm, or sync.transport to object_store"
        )
    every = config.evaluation_sets[config.primary_set].every
    if config.checkpoint.keep_best and every % config.checkpoint.every:
        raise ValueError(
            f"checkpoint.keep_best is {config.checkpoint.keep_best}, which needs a checkpoint of "
            f"every policy version that is evaluated; make evaluation.every ({every}) a "
            f"multiple of checkpoint.every ({config.checkpoint.every})"
        )
    if config.task.train_prompts < config.prompts_needed:
        raise ValueError(
            f"task.train_prompts is {config.task.train_prompts} but "
            f"{config.explain_prompts_needed()}; raise task.train_prompts"
        )
    if isinstance(config.sampler, AdaptiveConfig) and config.sampler.prior_run == config.name:
        raise ValueError(
            f"sampler.prior_run is {config.name!r}, the run itself; name an earlier run, or "
            "remove sampler.prior_run"
        )


def _warnings_about_methods(config: RunConfig) -> list[str]:
    """Returns warnings about objectives and estimators."""
    warnings = []
    objective, estimator = config.loss.objective.kind, config.advantage.estimator
    replays = config.replay.select != "off" or config.response_replay.groups != "off"
    stale = config.sync.every > 1 or config.sync.lag > 0 or replays
    if objective == "gspo" and config.loss.correction.kind == "behavior" and stale:
        warnings.append(
            "loss.objective=gspo with loss.correction=behavior clips almost every response that an "
            "earlier policy sampled (sync.every above 1, or replay), because its bounds are "
            "3e-4 and 4e-4 from 1; set loss.correction=prox_current with "
            "loss.correction.weight_level=geometric"
        )
    if estimator == "opo" and config.optimizer.minibatch_prompts < config.batch_capacity:
        warnings.append(
            "advantage.estimator=opo is derived for exactly on-policy updates, but "
            f"optimizer.minibatch_prompts ({config.optimizer.minibatch_prompts}) is below the "
            f"batch capacity ({config.batch_capacity}), so later minibatches are off-policy; "
            "raise optimizer.minibatch_prompts"
        )
    return warnings


def _warnings_about_sampling(config: RunConfig) -> list[str]:
    """Returns warnings about the sampler."""
    warnings = []
    sampler = config.sampler
    if (
        isinstance(sampler, AdaptiveConfig)
        and sampler.posterior_as_of == "step"
        and config.sync.lag
    ):
        warnings.append(
            f"sync.lag is {config.sync.lag} with sampler.posterior_as_of=step: the prompts of a "
            "step depend on the commit of the step before, so rollouts wait for the trainer in "
            "every step; set sampler.posterior_as_of=sync"
        )
    if config.sampler.kind == "dots":
        warnings.append(
            "sampler.kind=dots predicts difficulty by the posterior of each prompt's own "
            "results, not by the paper's embedding model, so every prompt that was never drawn "
            "counts as of medium difficulty (0.5); sampler.prior_run gives it results"
        )
    return warnings


def _warnings_about_batches(config: RunConfig) -> list[str]:
    """Returns warnings about what batches are composed of."""
    warnings = []
    absent = {
        "reevaluated": not config.reevaluate.enabled,
        "replayed": not (config.replay.select != "off" or config.response_replay.groups != "off"),
        "demonstrated": config.demonstrations.join == "none",
    }
    warnings += [
        f"loss.by_source.{source} changes nothing: no batch of this run has such responses"
        for source in config.loss.by_source
        if absent.get(source)
    ]
    if config.demonstrations.join != "none" and config.reward.weights:
        parts = " and ".join(sorted(config.reward.weights))
        warnings.append(
            f"demonstrations have the reward of a correct answer ({config.reward.correct:g}) "
            f"without the part {parts} of reward.weights, so beside sampled responses that "
            "have it too, their advantage is negative; remove the weights, or set "
            "demonstrations.join=none"
        )
    fresh = config.rollout.prompts_per_step * config.rollout.max_generation_rounds
    if config.rollout.max_generation_rounds > 1 and config.batch_capacity > fresh:
        warnings.append(
            f"the batch capacity ({config.batch_capacity}) is above the {fresh} groups of all "
            "generation rounds (rollout.prompts_per_step x rollout.max_generation_rounds), so "
            "every step takes all rounds; lower batch.capacity, or raise one of these"
        )
    if config.batch.fresh_fraction < 1.0 and config.replay.select == "off":
        warnings.append(
            f"batch.fresh_fraction={config.batch.fresh_fraction} leaves room in every batch that "
            "nothing fills with replay=off; set replay=window, mixed or effective_sample_size, or "
            "batch.fresh_fraction=1"
        )
    if config.batch.fresh_fraction < 1.0 and config.batch.capacity is not None:
        warnings.append(
            f"batch.fresh_fraction={config.batch.fresh_fraction} changes nothing with "
            f"batch.capacity={config.batch.capacity}, which sets the batch's size"
        )
    return warnings


def _warnings_about_unused_keys(config: RunConfig) -> list[str]:
    """Returns warnings about keys that a value of another key turns off."""
    warnings = []
    for is_off, condition, keys in _conditions(config):
        changed = [text for key in keys.split() if is_off and (text := _changed(config, key))]
        if changed:
            warnings.append(f"{' and '.join(changed)} change nothing with {condition}")
    return warnings


def _conditions(config: RunConfig) -> list[tuple[bool, str, str]]:
    """Returns whether a condition holds, the condition, and the keys that then have no effect."""
    correction, advantage, window = config.loss.correction, config.advantage, config.replay_window
    hard = "reevaluate.c1 " + _keys("hard_buffer", config.hard_buffer)
    return [
        (
            correction.kind != "behavior" and correction.weight_mode == "unit",
            "loss.correction.weight_mode=unit",
            "loss.correction.weight_cap loss.correction.weight_floor loss.correction.weight_norm",
        ),
        (
            advantage.estimator == "group" and advantage.scale == "none",
            "advantage.scale=none",
            "advantage.std advantage.eps",
        ),
        (
            window.direction == "fixed",
            "replay.window.direction=fixed",
            "replay.window.r_tot replay.window.ema_decay",
        ),
        (
            config.replay.select == "window"
            and window.direction != "fixed"
            and window.r_tot != "ema",
            f"replay.window.r_tot={window.r_tot}",
            "replay.window.ema_decay",
        ),
        (
            not config.reevaluate.enabled,
            "reevaluate.enabled=False",
            "reevaluate.rule reevaluate.max_prompts sync.reevaluate_every "
            + ("" if config.demonstrations.enabled else hard),
        ),
        (config.kl.coefficient == 0, "kl.coefficient=0", "kl.estimator kl.reset_after"),
        (not config.mlflow.tracking_uri, "an empty mlflow.tracking_uri", "mlflow.experiment"),
        (config.lora.rank == 0, "lora.rank=0", "lora.alpha lora.targets"),
        (config.reward.overlong_share == 0, "reward.overlong_share=0", "reward.overlong_weight"),
    ]


def _keys(name: str, section: Section) -> str:
    """Returns the dotted keys of a section, separated by spaces."""
    return " ".join(f"{name}.{key}" for key in type(section).model_fields)


def _empty_windows(config: RunConfig) -> float:
    """Returns the share of r_tot in [0, 1] at which no accuracy k/G is in the window."""
    settings, size = config.replay_window, config.rollout.group_size
    windows = [
        replay_window(share / 1000, settings.c2_range, settings.c3_range, settings.direction)
        for share in range(1001)
    ]
    empty = [not any(within(k / size, c2, c3) for k in range(size + 1)) for c2, c3 in windows]
    return sum(empty) / len(empty)


def _changed(config: RunConfig, path: str) -> str:
    """Returns `path=value` for a key that has not its default, and nothing for another."""
    parent, _, key = path.rpartition(".")
    section: Section = attrgetter(parent)(config)
    value = getattr(section, key)
    default = type(section).model_fields[key].get_default(call_default_factory=True)
    return "" if value == default else f"{path}={value}"
