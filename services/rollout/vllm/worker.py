"""The extension of vLLM's worker class (`--worker-extension-cls`) that replaces a policy's weights.

This file is copied alone into vLLM's environment (`services.rollout.vllm.server`), so it must
import nothing but the standard library and what vLLM depends on.
"""

from __future__ import annotations

import os
from typing import Any

WEIGHTS_ROOT = "POLICY_WEIGHTS_ROOT"
"""Environment variable with the directory in which this node has its versions of the weights."""


class LoadsPolicies:
    """Mix-in of vLLM's worker class; `/collective_rpc` calls `load_policy` on every worker."""

    model_runner: Any

    def load_policy(self, weights_path: str) -> None:
        """Replaces the weights by those of a Hugging Face directory.

        weights_path: absolute, or relative to this node's own directory of versions, because the
        workers of all nodes get the same call. Raises `ValueError` if it is not below that
        directory, where the replica puts the versions whose digests it has checked.
        """
        worker: Any = self
        root = os.path.realpath(os.environ[WEIGHTS_ROOT])
        path = os.path.realpath(os.path.join(root, weights_path))
        if not path.startswith(root + os.sep):
            raise ValueError(f"{weights_path} is not below {root}, which has this node's versions")
        worker.reload_weights(weights_path=path)
        self._repack_tied_head()

    def substitute_placeholders(self, token: int, substitute: int) -> None:
        """Feeds `substitute` for each `token`, the placeholder of images, that was sampled.

        There is no image for it. The trainer does the same (`services.model.vision.fed_tokens`).
        """
        model = self.model_runner.get_model()
        embed = model.embed_input_ids

        def embed_without_sampled_placeholders(
            input_ids: Any, multimodal_embeddings: Any = None, *, is_multimodal: Any = None
        ) -> Any:
            sampled = input_ids == token
            if is_multimodal is not None:
                sampled &= ~is_multimodal.to(sampled.device)
            input_ids = input_ids.masked_fill(sampled, substitute)
            return embed(input_ids, multimodal_embeddings, is_multimodal=is_multimodal)

        model.embed_input_ids = embed_without_sampled_placeholders

    def _repack_tied_head(self) -> None:
        """Repacks an output layer that is tied to the embedding.

        On CPU, vLLM multiplies by packed copies of weights, and a reload repacks only the layers
        whose weights it loads. A tied output layer has no weights of its own in the files, so it
        would silently go on with the packed copy of the old ones.
        """
        model = self.model_runner.get_model()
        if hasattr(model, "get_language_model"):  # it reads images
            model = model.get_language_model()
        head = getattr(model, "lm_head", None)
        packed = getattr(head, "cpu_linear", None)
        if packed is not None:
            head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr]
