"""What runs inside vLLM's workers (`--worker-extension-cls`), in vLLM's own environment.

Imports nothing of ours: that environment has vLLM and what it needs, and no more.
"""

from __future__ import annotations

from typing import Any


class LoadsPolicies:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def load_policy(self, weights_path: str) -> None:
        """Replaces the weights by those of a Hugging Face directory."""
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """On CPU, vLLM multiplies by a packed copy of the output layer.

        A reload packs the layers anew whose weights it loads. An output layer that is tied to the
        embedding has none of its own, so it would keep the copy of the old ones, silently.
        """
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        packed = getattr(head, "cpu_linear", None)
        if packed is not None:
            head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr]
