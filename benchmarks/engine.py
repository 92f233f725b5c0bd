"""Compares the transformers engine with `model.generate`: same model, prompts and samples.

    python -m benchmarks.engine [--out benchmarks/results/engine.json] [--model DIR]

There are two regimes besides the model as it is. *varied*: the logit of the end token is raised, so
that responses end after about a third of the limit on average; `generate` computes every row until
the last one ends. *equal*: the end token is impossible, so that every response has the limit's
length and dropping finished rows saves nothing. Engine and `generate` take turns, in alternating
order; the ratio is that of the medians of tokens per second. `generate` returns no log-probs and
the engine always does; they are compared with a teacher-forced forward pass over whole sequences,
and both with the same pass in double precision.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bapo_core.tasks.countdown import CountdownTask
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.model.resolve import TINY_MODEL
from services.rollout.api.wire import GeneratedGroup, PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine

TEMPERATURE = 1.0
TOLERANCE = 1e-5
NEVER = -1e4
"""Added to a logit, it makes the token impossible without an infinity in the log-softmax."""


WARM_UP_RUNS = 10
"""Unmeasured runs on a GPU, in which kernels are loaded and the engine's token steps captured."""


class BiasedHead(nn.Module):
    """The output layer with a constant added to the logit of one token.

    The constant is a tensor, because a captured step of the engine does not see that a number has
    changed.
    """

    bias: Tensor

    def __init__(self, head: nn.Module, token: int, bias: float) -> None:
        super().__init__()
        self.head, self.token = head, token
        device = next(head.parameters()).device
        self.register_buffer("bias", torch.tensor(bias, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        logits[..., self.token] += self.bias
        return logits


@dataclass(frozen=True, slots=True)
class Timing:
    """The tokens of one run, up to and including each end token, and its duration in seconds."""

    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Contest:
    """Runs the engine and `generate` on one model and one set of prompts."""

    def __init__(self, model: Any, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        self.model, self.prompts, self.sampling = model, prompts, sampling
        self.engine = TransformersEngine()
        self.engine.use(model, 1)
        self.end = int(model.generation_config.eos_token_id)
        self.tokens, self.mask = (tensor.to(model.device) for tensor in _left_padded(prompts))

    def run_engine(self, seed: int) -> tuple[Timing, list[GeneratedGroup]]:
        requests = [
            PromptRequest(prompt_token_ids=prompt, seed=seed * 100_003 + index)
            for index, prompt in enumerate(self.prompts)
        ]
        started = time.perf_counter()
        groups = self.engine.generate(requests, self.sampling, policy_version=1)
        seconds = time.perf_counter() - started
        return Timing(sum(len(r.token_ids) for g in groups for r in g.responses), seconds), groups

    def run_generate(self, seed: int) -> Timing:
        torch.manual_seed(seed)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True,
            temperature=self.sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.sampling.max_tokens,
            num_return_sequences=self.sampling.group_size,
            eos_token_id=self.end,
            pad_token_id=0,
            use_cache=True,
        )
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                self.tokens, attention_mask=self.mask, generation_config=config
            ).cpu()
        seconds = time.perf_counter() - started
        new = output[:, self.tokens.shape[1] :]
        ended = (new == self.end).long().cumsum(dim=1)
        # Counts the tokens up to and including the first end token.
        return Timing(int(((ended - (new == self.end).long()) == 0).sum()), seconds)


def logprob_errors(
    model: Any, prompts: Sequence[list[int]], groups: Sequence[GeneratedGroup]
) -> dict[str, float]:
    """Returns the largest differences between three log-probs of the sampled tokens, in nats.

    They are the engine's; those of a forward pass over each whole sequence without a cache
    (`forward`); and those of the same pass in double precision (`float64`), which shows how much of
    the first difference is rounding to single precision on either side.
    """
    exact_model = copy.deepcopy(model).double()
    worst = {"engine_forward": 0.0, "engine_float64": 0.0, "forward_float64": 0.0}
    tokens = above = 0
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group.responses:
            engine = torch.tensor(response.logprobs)
            forward = _teacher_forced(model, prompt, response.token_ids)
            exact = _teacher_forced(exact_model, prompt, response.token_ids)
            for name, difference in (
                ("engine_forward", engine - forward),
                ("engine_float64", engine - exact),
                ("forward_float64", forward - exact),
            ):
                worst[name] = max(worst[name], float(difference.abs().max()))
            tokens += len(engine)
            above += int(((engine - forward).abs() > TOLERANCE).sum())
    return {**worst, "tokens": tokens, "engine_forward_above_1e-5": above}


@torch.inference_mode()
def _teacher_forced(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Returns the log-probs (tokens,) of the response at the benchmark's temperature."""
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].cpu()
    # In bfloat16, the log-softmax itself would round by some hundredths of a nat.
    exact = logits.float() if logits.dtype.itemsize == 2 else logits
    logprobs = torch.log_softmax(exact / TEMPERATURE, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def compete(
    contest: Contest,
    repeats: int,
    console: Console,
    name: str,
    *,
    checked: int | None = None,
    warm_up: int = 1,
) -> dict[str, Any]:
    """Returns the medians of both over the repeats, after `warm_up` unmeasured runs of each.

    checked: number of prompts whose log-probs are compared, all of them unless given.
    """
    for seed in reversed(range(warm_up)):
        _, groups = contest.run_engine(seed)
        contest.run_generate(seed)
    errors = logprob_errors(contest.model, contest.prompts[:checked], groups[:checked])
    engine: list[Timing] = []
    generate: list[Timing] = []

    def time_engine(seed: int) -> None:
        engine.append(contest.run_engine(seed)[0])

    def time_generate(seed: int) -> None:
        generate.append(contest.run_generate(seed))

    for seed in range(1, repeats + 1):
        order: list[Callable[[int], None]] = [time_engine, time_generate]
        if seed % 2 == 0:
            order.reverse()
        for run in order:
            run(seed)
        console.print(
            f"{name} {seed}/{repeats}: engine {engine[-1].speed:,.0f} tok/s in "
            f"{engine[-1].seconds:.2f} s, generate {generate[-1].speed:,.0f} tok/s in "
            f"{generate[-1].seconds:.2f} s",
            highlight=False,
        )
    return _summary(contest, engine, generate, errors)


def _summary(
    contest: Contest, engine: list[Timing], generate: list[Timing], errors: dict[str, float]
) -> dict[str, Any]:
    engine_speed = statistics.median(timing.speed for timing in engine)
    generate_speed = statistics.median(timing.speed for timing in generate)
    responses = len(contest.prompts) * contest.sampling.group_size
    return {
        "responses": responses,
        "mean_length": statistics.mean(timing.tokens for timing in engine) / responses,
        "engine_tokens_per_s": engine_speed,
        "generate_tokens_per_s": generate_speed,
        "ratio_of_medians": engine_speed / generate_speed,
        "ratios_of_pairs": [a.speed / b.speed for a, b in zip(engine, generate, strict=True)],
        "engine_median_s": statistics.median(timing.seconds for timing in engine),
        "generate_median_s": statistics.median(timing.seconds for timing in generate),
        "max_logprob_differences": errors,
        "engine": [asdict(timing) for timing in engine],
        "generate": [asdict(timing) for timing in generate],
    }


def find_end_bias(model: Any, contest: Contest, share: float) -> float:
    """Returns the end token's bias with which the mean length is about `share` of the limit.

    It is found by bisection with one run each, as the mean length falls with a growing bias.
    """
    low, high = NEVER / 1e3, -NEVER / 1e3
    responses = len(contest.prompts) * contest.sampling.group_size
    for _ in range(10):
        middle = (low + high) / 2
        model.lm_head.bias.fill_(middle)
        timing, _ = contest.run_engine(7)
        too_long = timing.tokens / responses > share * contest.sampling.max_tokens
        low, high = (middle, high) if too_long else (low, middle)
    return (low + high) / 2


def countdown_prompts(model: Path, count: int) -> list[list[int]]:
    """Returns the tokens of Countdown prompts, encoded by the tokenizer of a model directory."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    task = CountdownTask(template="short")
    return [
        [int(token) for token in tokenizer.encode(task.render(problem)[0]["content"])]
        for problem in task.generate(seed=1, n=count)
    ]


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    directory = arguments.model or TINY_MODEL
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    model.eval().requires_grad_(False)
    prompts = countdown_prompts(directory, arguments.prompts)
    sampling = Sampling(
        temperature=TEMPERATURE, max_tokens=arguments.max_tokens, group_size=arguments.group_size
    )
    contest = Contest(model, prompts, sampling)
    result: dict[str, Any] = {
        "machine": machine("torch", "transformers"),
        "max_tokens": sampling.max_tokens,
    }
    warm_up = WARM_UP_RUNS if model.device.type == "cuda" else 1

    def measure_regime(name: str) -> dict[str, Any]:
        return compete(contest, arguments.repeats, console, name, warm_up=warm_up)

    result["as_it_is"] = measure_regime("as it is")
    model.lm_head = BiasedHead(model.lm_head, contest.end, 0.0)
    model.lm_head.bias.fill_(find_end_bias(model, contest, 1 / 3))
    result["varied"] = measure_regime("varied")
    model.lm_head.bias.fill_(NEVER)
    result["equal"] = measure_regime("equal")
    return result


def _left_padded(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    return tokens, mask


def main() -> None:
    parser = make_parser(__doc__, "engine")
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: tiny)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    result = measure(arguments, Console())
    report(result, arguments.out)


if __name__ == "__main__":
    main()
