"""Builds the requests for the groups of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.seeding import derive_seed
from bapo_core.tasks import Task
from services.buffer.api import wire
from services.datasets import tokenize_prompt
from services.datasets.images import image_digests
from services.model.vision import VisionProcessor
from services.rollout.api.wire import GenerateRequest, PromptRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STREAM_EVERY = 32
"""Tokens of a response after which replicas stream them if there is a journal."""
STREAM_EVERY_TO_INTERRUPT = 1
"""Tokens of a response after which replicas stream them if new weights interrupt rollouts. An
interruption discards tokens that have not been streamed, whereas the end of a response is streamed
at once. So any larger number would bias responses towards short ones."""


class RequestBuilder:
    """Tokenizes the prompts of jobs and adds the settings of their samples."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        vision: VisionProcessor | None,
        tasks: Mapping[str | None, Task],
    ) -> None:
        """vision: the processor of a model that reads images.

        tasks: the task of each evaluation set by its name; None for training prompts.
        """
        self._config, self._tokenizer, self._vision = config, tokenizer, vision
        self._tasks = tasks

    def build(
        self, job: wire.Rollouts, prompts: wire.StepPrompts, weights: wire.StoredVersion
    ) -> GenerateRequest:
        """Returns the request for all prompts of a job, to be answered under `weights`."""
        rollout = self._config.rollout
        stream_every = STREAM_EVERY if self._config.journal_interval_s else 0
        if self._config.interrupts_rollouts:
            stream_every = STREAM_EVERY_TO_INTERRUPT
        evaluated = None
        if job.evaluation_set is not None:
            evaluated = self._config.evaluation_sets[job.evaluation_set]
        return GenerateRequest(
            policy_version=prompts.policy_version,
            manifest_digest=weights.manifest_digest,
            temperature=evaluated.temperature if evaluated else rollout.temperature,
            top_p=evaluated.top_p if evaluated else 1.0,
            max_tokens=rollout.max_response_tokens,
            group_size=evaluated.samples if evaluated else rollout.group_size,
            prompts=[
                PromptRequest(
                    prompt_token_ids=self._tokenize(job, prompt),
                    images=image_digests(prompt.payload),
                    seed=derive_seed(self._config.seed, job.kind, job.step, prompt.uid),
                )
                for prompt in prompts.prompts
            ],
            stream_every=stream_every,
        )

    def _tokenize(self, job: wire.Rollouts, prompt: wire.PromptItem) -> list[int]:
        task, rollout = self._tasks[job.evaluation_set], self._config.rollout
        token_ids = tokenize_prompt(
            task, prompt, self._tokenizer, self._vision, rollout.prompt_date
        )
        limit = rollout.max_prompt_tokens
        if len(token_ids) > limit:
            raise BapoError(
                f"prompt {prompt.uid!r} has {len(token_ids)} tokens, more than "
                f"rollout.max_prompt_tokens ({limit}); raise the limit or drop the prompt"
            )
        return token_ids
