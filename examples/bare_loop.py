"""BAPO in one file: read this, from top to bottom, to understand the method.

    python examples/bare_loop.py examples/countdown.yaml steps=20    # two minutes

This is Algorithm 1 of arXiv 2602.20722 on `bapo_core` (the rules), torch and transformers alone;
`bapo run` adds services, a database and recovery, and nothing to the method. With the services'
sampler and learner the batches equal those of `bapo run` (`benchmarks/stack.py` checks it); with
the short ones below they do until a difference in rounding changes a sampled token.
"""

import sys
from operator import attrgetter
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bapo_core import buffers, filters, importance, losses, sampling, thresholds, types
from bapo_core.advantages import group_relative
from bapo_core.batch import build_batch
from bapo_core.config import RunConfig, load_config
from bapo_core.kl import kl_penalty
from bapo_core.seeding import derive_rng, derive_seed
from bapo_core.tasks import get_task

# Keys of which this file implements the default value alone.
DEFAULTS_ONLY = """loss.minibatch_norm fresh.filter replay.select replay.last_step sampler lora
kl.reference loss.objective.kind loss.correction evaluation.samples rollout.max_generation_rounds
replay.window.r_tot replay.store_reevaluated reward response_replay batch.dedup advantage.estimator
optimizer.epochs loss.by_source reevaluate.rule task.train_path sync.lag task.test_path
loss.aggregation sync.weights_dtype evaluation.sets reevaluate.enabled hard_buffer.evict_solved
loss.mask_truncated evaluation.top_p evaluation.temperature demonstrations advantage.scale"""


def train(config, directory, sample=None, learner=None):
    """Runs Algorithm 1 from the model in `directory`, and yields the batch of every step.

    sample, learner: used in place of `sample_groups` and `Learner`.
    """
    sample, learner = sample or sample_groups, learner or Learner(config, directory)
    alpha, theta_t = load_model(directory), load_model(directory)  # to sample; the learner trains
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    task = get_task(config.task.name, **config.task.options)
    sizes = {"train": config.task.train_prompts, "test": config.task.test_prompts}
    prompts, held_out = task.generate_split(config.task.data_seed, **sizes)
    by_uid = {task.uid(prompt): prompt for prompt in prompts}
    groups = []  # (prompt, responses, rewards), by group id
    hard, high = [], []  # B_bad and B_high, as GroupSummary

    def roll_out(kind, t, prompts, policy):
        """Samples and verifies G responses to each prompt."""
        summaries, chat = [], {"add_generation_prompt": True, "return_dict": False}
        ids = [tokenizer.apply_chat_template(task.render(prompt), **chat) for prompt in prompts]
        seeds = [derive_seed(config.seed, kind, t, task.uid(prompt)) for prompt in prompts]
        sampled = sample(config, policy, ids, seeds) if prompts else []
        for prompt, tokens, responses in zip(prompts, ids, sampled, strict=True):
            texts = tokenizer.batch_decode([r[0] for r in responses], skip_special_tokens=True)
            rewards = [task.verify(prompt, text).reward for text in texts]
            uid, k, version = task.uid(prompt), int(sum(rewards)), config.rollout_version(t, kind)
            summaries.append(types.GroupSummary(len(groups), uid, t, k, len(rewards), version))
            groups.append((tokens, responses, rewards))
        return summaries

    c1, bounds, age = config.reevaluate.c1, config.replay_window, config.high_quality_buffer.max_age
    for t in range(1, config.steps + 2):
        theta_t.load_state_dict(learner.model.state_dict())
        if config.evaluates_at(t):
            scores = [group.accuracy for group in roll_out("evaluation", t, held_out, theta_t)]
            print(f"theta_{t}: held-out accuracy {sum(scores) / len(scores):.3f}", flush=True)
        if t > config.steps:
            return
        # Sync: alpha becomes theta_t every v steps. In between, rollouts are off-policy.
        if config.schedule.syncs_at(t):
            alpha.load_state_dict(theta_t.state_dict())
        # X1, fresh: alpha answers B prompts G times; groups with mixed rewards train (Eq. 5).
        step = {"dataset_size": len(prompts), "prompts_per_step": config.rollout.prompts_per_step}
        places = sampling.prompt_positions(config.seed, t, **step)
        fresh = roll_out("fresh", t, [prompts[place] for place in places], alpha)
        x1 = filters.range_filter(fresh)
        # X2, re-evaluated: every m steps theta_t answers hard prompts; groups above c1 (Eq. 6).
        stored, rng = [], derive_rng(config.seed, "reevaluate", t)
        if config.schedule.reevaluates_at(t):
            stored = buffers.choose_reevaluated(hard, limit=config.most_reevaluated, rng=rng)
        again = roll_out("reevaluation", t, [by_uid[old.prompt_uid] for old in stored], theta_t)
        pairs = zip(stored, again, strict=True)
        x2 = [new for old, new in pairs if buffers.promoted(old, new, c1=c1)]
        # X3, replayed: stored groups with c2 <= mu <= c3 fill the room left (Eq. 7, Eq. 8).
        r_tot = thresholds.running_reward("batch", fresh, None, [])
        window = thresholds.replay_window(r_tot, bounds.c2_range, bounds.c3_range, bounds.direction)
        x3 = buffers.eligible_high(high, step=t, window=window, max_age=age)
        # Update: Eq. 3 (prox_current) on the batch, which is never padded to its capacity.
        room, rng = config.batch_capacity, derive_rng(config.seed, "batch", t)
        batch = build_batch(x1, x2, x3, capacity=room, window=window, c1=c1, rng=rng)
        if batch.members:
            learner.step(t, batch, [groups[member.group.group_id] for member in batch.members])
        # Buffers: solved prompts leave B_bad; then fresh groups, unfiltered, enter both by mu.
        solved = buffers.evict_solved(hard, {new.prompt_uid: new for new in again}, c1=c1)
        hard = buffers.BufferChange([], solved).apply(hard)
        hard = buffers.admit_hard(hard, fresh, c1=c1, capacity=config.hard_capacity).apply(hard)
        limits = {"capacity": config.high_quality_buffer.capacity, "max_age": age, "step": t}
        high = buffers.admit_high(high, fresh, window=window, **limits).apply(high)
        counts = ", ".join(f"{count} {source}" for source, count in batch.counts.items())
        print(f"step {t}: accuracy {r_tot:.3f}, batch of {counts}", flush=True)
        yield batch


@torch.inference_mode()
def sample_groups(config, policy, prompts, seeds):
    """Samples (token ids, log-probs) of G responses to each prompt, decided by its seed alone."""
    length, size = config.rollout.max_response_tokens, config.rollout.group_size
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    uniforms = [torch.rand(length, size, generator=draw, dtype=torch.double) for draw in draws]
    ids = pad([prompt for prompt in prompts for _ in range(size)], "left")
    mask = pad([[1] * len(prompt) for prompt in prompts for _ in range(size)], "left")
    ends, cache = torch.tensor(policy.generation_config.eos_token_id), DynamicCache()
    responses, rows = [([], []) for _ in ids], torch.arange(len(ids))  # rows that have not ended
    for uniform in torch.cat(uniforms, dim=1):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = policy(ids, mask, positions, cache, logits_to_keep=1).logits[:, -1]
        logprobs = torch.log_softmax(logits.float() / config.rollout.temperature, dim=-1)
        # By inversion: the first token whose cumulative probability exceeds the uniform.
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        ids = torch.searchsorted(cumulative, uniform[rows, None] * cumulative[:, -1:], right=True)
        for row, token, logprob in zip(rows, ids, logprobs.gather(1, ids), strict=True):
            responses[row][0].append(int(token))
            responses[row][1].append(float(logprob))
        going = (~torch.isin(ids[:, 0], ends)).nonzero()[:, 0]
        if len(going) == 0:
            break
        cache.batch_select_indices(going)
        rows, ids = rows[going], ids[going]
        mask = torch.nn.functional.pad(mask[going], (0, 1), value=1)
    return [responses[start : start + size] for start in range(0, len(responses), size)]


class Learner:
    """theta with its optimizer, and the update of Eq. 3, without micro-batches."""

    def __init__(self, config, directory):
        self.config, self.model, settings = config, load_model(directory), config.optimizer
        options = {"betas": (settings.beta1, settings.beta2), "weight_decay": settings.weight_decay}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)

    def step(self, t, _, groups):
        """Updates theta on the groups, one minibatch of whole groups at a time."""
        config, settings, loss = self.config, self.config.optimizer, self.config.loss
        rate = settings.learning_rate * min(1.0, t / max(1, settings.warmup_steps))
        self.optimizer.param_groups[0]["lr"] = rate
        # A row is a prompt with a response; column i is the prediction of its token i + 1.
        rows = [(prompt, *response) for prompt, responses, _ in groups for response in responses]
        ids = pad([prompt + tokens for prompt, tokens, _ in rows])
        behavior = pad([[0.0] * (len(prompt) - 1) + logprobs for prompt, _, logprobs in rows])
        mask = pad([[0] * (len(prompt) - 1) + [1] * len(tokens) for prompt, tokens, _ in rows])
        rewards, adv = torch.tensor([rewards for *_, rewards in groups]), config.advantage
        advantages = group_relative(rewards, std=adv.std, eps=adv.eps).view(-1, 1)
        proximal = self.score(ids)[0].detach()  # by theta_t, before its first update
        weights = importance.truncated_weights(proximal, behavior, mask)  # at most 3
        derive_rng(config.seed, "minibatch", t).shuffle(order := list(range(len(groups))))
        clip = loss.objective.model_dump(include={"clip_low", "clip_high", "dual_clip"})
        for chosen in torch.tensor(order).split(settings.minibatch_prompts):
            at = torch.arange(len(ids)).view(len(groups), -1)[chosen.sort().values].flatten()
            (logprobs, entropy), alpha = self.score(ids[at]), behavior[at]
            terms = logprobs, proximal[at], advantages[at], mask[at]
            policy = losses.clipped_surrogate(*terms, **clip, weights=weights[at])
            penalty = kl_penalty(logprobs, alpha, alpha, mask[at], estimator=config.kl.estimator)
            total = policy + config.kl.coefficient * penalty - loss.entropy_coefficient * entropy
            self.optimizer.zero_grad()
            (total * losses.token_scale(mask[at], "token-mean")).sum().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.gradient_clip)
            self.optimizer.step()

    def score(self, ids):
        """Returns (log-probs of every token but the first, entropies) under theta."""
        logits = self.model(ids).logits[:, :-1] / self.config.rollout.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return logprobs.gather(2, ids[:, 1:, None])[..., 0], entropy


def pad(rows, side="right"):
    return pad_sequence([torch.tensor(r) for r in rows], batch_first=True, padding_side=side)


def load_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32", trust_remote_code=False)


def main():
    config, defaults = load_config(sys.argv[1], sys.argv[2:]), RunConfig()
    for key in DEFAULTS_ONLY.split():
        if attrgetter(key)(config) != attrgetter(key)(defaults):
            sys.exit(f"{key}: only {attrgetter(key)(defaults)} is implemented; use `bapo run`")
    tiny = Path(__file__).parents[1] / "services/model/tiny_model"
    list(train(config, tiny if config.model.path == "tiny" else config.model.path))


if __name__ == "__main__":
    main()
