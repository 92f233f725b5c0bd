"""bapo computes what TRL's trainers compute, and differs where docs/parity.md says so.

TRL has no function for a loss: its trainers compute it in `_compute_loss`, which is called here on
an object with the settings that the method reads, and with the log-probs of a case in place of a
model's. Values and gradients are compared in float64.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_core.config import load_config
from bapo_core.config.objectives import PpoConfig
from bapo_core.kl import kl_penalty
from bapo_core.losses import Aggregation, aggregate
from tests.parity.cases import CASES, Case, Loss, assert_same, make_case, our_loss, single_token

pytestmark = [
    pytest.mark.parity,
    # TRL's configuration sets a deprecated field of the transformers'.
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning"),
]

each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
LONGEST = 9


def configuration(trl: Any, **settings: Any) -> Any:
    """Returns TRL's configuration, with its own defaults."""
    return trl.GRPOConfig(
        output_dir="unused", use_cpu=True, bf16=False, report_to=[], save_strategy="no", **settings
    )


def their_loss(
    trl: Any,
    case: Case,
    *,
    trainer: Any = None,
    weights: Tensor | None = None,
    reference: Tensor | None = None,
    tokens_of_the_batch: int | None = None,
    **settings: Any,
) -> Loss:
    """Returns the loss of one of TRL's trainers.

    reference: log-probs of the reference policy, whose KL penalty has the coefficient 1.
    """
    args = configuration(trl, **settings)
    logprobs = case.logprobs.clone().requires_grad_()
    metrics: Any = {"train": defaultdict(list)}
    stand_in = SimpleNamespace(
        args=args,
        # As GRPOTrainer.__init__ sets them.
        beta=0.0 if reference is None else 1.0,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        importance_sampling_level=args.importance_sampling_level,
        max_completion_length=LONGEST,
        top_entropy_quantile=args.top_entropy_quantile,
        off_policy_mask_threshold=args.off_policy_mask_threshold,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda values: values, reduce=lambda values, **_: values
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )
    ids = torch.zeros(case.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": case.mask.long(),
        "advantages": case.advantages[:, 0],
        "old_per_token_logps": case.old_logprobs,
        "old_logps": (case.old_logprobs * case.mask).sum(dim=1),
        "importance_sampling_ratio": weights,
        "ref_per_token_logps": reference,
        "num_items_in_batch": torch.tensor(tokens_of_the_batch or int(case.mask.sum())),
    }
    loss = (trainer or trl.GRPOTrainer)._compute_loss(stand_in, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    clipped = metrics["train"]["clip_ratio/region_mean"]
    return Loss(loss.detach(), gradient, clipped[0] if clipped else 0.0)


AGGREGATIONS: dict[str, Aggregation] = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""TRL's loss types that have PPO's clip -> the aggregation."""

each_type = pytest.mark.parametrize(("loss_type", "aggregation"), AGGREGATIONS.items())


@each_case
@each_type
def test_ppo_equals_the_clipped_loss_types(
    trl: Any, case: Case, loss_type: str, aggregation: Aggregation
) -> None:
    ours = our_loss(
        case,
        "ppo",
        aggregation,
        weights=case.weights,
        longest=LONGEST,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=4.0,
    )
    settings = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 4.0}
    theirs = their_loss(trl, case, weights=case.weights, loss_type=loss_type, **settings)
    assert_same(ours, theirs)


@each_case
def test_clipped_tokens_equal_without_a_dual_clip(trl: Any, case: Case) -> None:
    ours = our_loss(case, "ppo", clip_low=0.2, clip_high=0.28, dual_clip=None)
    theirs = their_loss(trl, case, epsilon=0.2, epsilon_high=0.28)
    assert_same(ours, theirs)
    assert ours.clipped == pytest.approx(theirs.clipped)


@each_case
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [("grpo", "seq-mean-token-mean"), ("luspo", "seq-mean-token-sum")],
)
def test_gspo_equals_the_sequence_level(
    trl: Any, case: Case, loss_type: str, aggregation: Aggregation
) -> None:
    weights = case.weights
    settings = {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}
    ours = our_loss(case, "gspo", aggregation, weights=weights)
    assert_same(ours, their_loss(trl, case, weights=weights, loss_type=loss_type, **settings))


@each_case
def test_gmpo_equals_gmpo_trainer(trl: Any, case: Case) -> None:
    from trl.experimental.gmpo import GMPOTrainer  # type: ignore[import-not-found]

    theirs = their_loss(trl, case, trainer=GMPOTrainer, epsilon=0.4)
    ours = our_loss(case, "gmpo", "seq-mean-token-mean")
    assert_same(ours, theirs)
    assert ours.clipped == pytest.approx(theirs.clipped)


@each_case
def test_cispo_equals_cispo_whose_bound_is_not_a_distance_from_1(trl: Any, case: Case) -> None:
    ours = our_loss(case, "cispo", weights=case.weights, clip_high=0.5)
    theirs = their_loss(trl, case, weights=case.weights, loss_type="cispo", epsilon_high=1.5)
    assert_same(ours, theirs)


def test_the_default_bound_of_cispo_makes_the_weights_of_trl_at_most_a_fifth(trl: Any) -> None:
    case = single_token(0.0)
    assert float(their_loss(trl, case, loss_type="cispo").gradient) == pytest.approx(-0.2)
    assert float(our_loss(case, "cispo").gradient) == pytest.approx(-1.0)


@each_case
def test_sapo_equals_sapo(trl: Any, case: Case) -> None:
    ours = our_loss(case, "sapo", "seq-mean-token-mean", weights=case.weights)
    assert_same(ours, their_loss(trl, case, weights=case.weights, loss_type="sapo"))


def test_rloo_equals_rloo_trainer_in_the_gradient_of_the_first_update(trl: Any) -> None:
    loss = load_config(None, ["algorithm=rloo"]).loss
    assert (loss.objective.kind, loss.aggregation) == ("ppo", "seq-mean-token-sum")
    bounds = loss.objective.model_dump(include={"clip_low", "clip_high", "dual_clip"})

    def both(case: Case) -> tuple[Tensor, Tensor]:
        ours = our_loss(case, "ppo", loss.aggregation, **bounds)
        return ours.gradient, their_loss(trl, case, trainer=trl.RLOOTrainer).gradient

    assert_same(*both(CASES["on policy"]))
    # Afterwards TRL has one ratio for a response, and bapo one for a token.
    ours, theirs = both(make_case(6, noise=0.02))
    assert not torch.allclose(ours, theirs, rtol=0.01)


@pytest.mark.parametrize("biased", [True, False])
@each_case
def test_k3_equals_the_kl_penalty(trl: Any, case: Case, biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(case.logprobs.shape, generator=generator, dtype=torch.float64)
    reference = case.logprobs + 0.4 * noise
    penalised = replace(case, advantages=torch.zeros_like(case.advantages))
    theirs = their_loss(
        trl, penalised, reference=reference, loss_type="bnpo", use_bias_correction_kl=not biased
    )
    logprobs = case.logprobs.clone().requires_grad_()
    penalties = kl_penalty(
        logprobs,
        reference,
        case.old_logprobs,
        case.mask,
        estimator="k3" if biased else "k3_corrected",
    )
    loss = aggregate(penalties, case.mask, "token-mean")
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_same(Loss(loss.detach(), gradient, 0.0), theirs)


def test_k3_has_no_limit_in_trl(trl: Any) -> None:
    case = single_token(0.0, advantage=0.0)
    reference = case.logprobs + 4.0
    arguments = (case.logprobs, reference, case.old_logprobs, case.mask)
    assert float(kl_penalty(*arguments, estimator="k3")) == 10.0
    theirs = their_loss(trl, case, reference=reference)
    assert float(theirs.value) == pytest.approx(torch.tensor(4.0).exp().item() - 5.0)


@pytest.mark.parametrize(
    ("settings", "objective", "options", "limit"),
    [
        ({}, "ppo", {"dual_clip": None}, 20.0),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo"},
            "gspo",
            {"clip_high": 0.2},
            10.0,
        ),
    ],
    ids=["token", "sequence"],
)
def test_trl_does_not_clamp_log_ratios(
    trl: Any, settings: dict[str, Any], objective: str, options: dict[str, Any], limit: float
) -> None:
    case = single_token(25.0, advantage=-1.0)
    assert float(our_loss(case, objective, **options).value.log()) == pytest.approx(limit)
    assert float(their_loss(trl, case, **settings).value.log()) == pytest.approx(25.0)


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "dr_grpo"])
def test_responses_without_tokens_count_in_means_of_trl(trl: Any, loss_type: str) -> None:
    case = CASES["mixed"]
    mask = case.mask.clone()
    mask[:4] = False
    half = replace(case, mask=mask)
    aggregation = AGGREGATIONS[loss_type]
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    ours = our_loss(half, "ppo", aggregation, longest=LONGEST, **bounds)
    assert_same(ours.value, 2 * their_loss(trl, half, loss_type=loss_type).value)


def test_padding_of_trl_must_be_finite(trl: Any) -> None:
    case = CASES["mixed"]
    padded = replace(case, logprobs=torch.where(case.mask, case.logprobs, torch.nan))
    assert_same(our_loss(padded, "ppo"), our_loss(case, "ppo"))
    assert bool(their_loss(trl, padded).value.isnan())


def test_the_tokens_of_the_whole_minibatch_count_in_dapo_and_those_of_a_part_in_bnpo(
    trl: Any,
) -> None:
    case = CASES["mixed"]
    parts = [
        replace(
            case,
            **{
                name: getattr(case, name)[rows]
                for name in ("logprobs", "old_logprobs", "advantages", "mask", "weights")
            },
        )
        for rows in (slice(0, 3), slice(3, 8))
    ]
    bounds = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    ours = our_loss(case, "ppo", **bounds).value
    tokens = int(case.mask.sum())
    dapo = sum(their_loss(trl, part, tokens_of_the_batch=tokens).value for part in parts)
    assert_same(ours, dapo)
    bnpo = sum(their_loss(trl, part, loss_type="bnpo").value for part in parts) / 2
    assert float(bnpo) != pytest.approx(float(ours), rel=0.01)


def test_defaults_of_trl(trl: Any) -> None:
    config, loss, objective = configuration(trl), load_config(None, []).loss, PpoConfig()
    assert (config.loss_type, loss.aggregation) == ("dapo", "token-mean")
    assert loss.objective == objective
    assert (config.epsilon, config.epsilon_high) == (objective.clip_low, None)
    assert objective.clip_high == 0.28
    assert (config.delta, objective.dual_clip) == (None, 10.0)
