"""Arguments of vLLM that a configuration may give: those of memory, batching and sharding.

A configuration may be somebody else's. vLLM has over 250 arguments, some of which load code
(`--middleware`, `--worker-cls`, `--logits-processors`, `--log-config-file`), fetch models, read
files or open addresses, and accepts abbreviations. So what is not listed here is refused, and is
the operator's, who sets `BAPO_VLLM_ARGS`.
"""

from __future__ import annotations

from collections.abc import Sequence

WITH_VALUE = frozenset(
    f"--{name}"
    for name in (
        # memory
        *("gpu-memory-utilization", "kv-cache-memory-bytes", "cpu-offload-gb", "block-size"),
        *("kv-cache-dtype", "num-gpu-blocks-override", "mamba-cache-dtype", "mamba-block-size"),
        *("mamba-ssm-cache-dtype", "mamba-cache-mode", "quantization"),
        # batching
        *("max-num-seqs", "max-num-batched-tokens", "max-cudagraph-capture-size", "seed"),
        *("long-prefill-token-threshold", "scheduling-policy", "optimization-level"),
        *("performance-mode", "attention-backend", "moe-backend", "linear-backend"),
        # sharding
        *("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"),
        *("decode-context-parallel-size", "prefill-context-parallel-size", "all2all-backend"),
        *("max-parallel-loading-workers", "mm-encoder-tp-mode", "mm-encoder-attn-backend"),
    )
)
SWITCHES = frozenset(
    f"--{name}"
    for switch in (
        *("enforce-eager", "enable-prefix-caching", "enable-chunked-prefill", "async-scheduling"),
        *("enable-expert-parallel", "enable-eplb", "disable-custom-all-reduce"),
        *("disable-cascade-attn", "disable-sliding-window", "disable-hybrid-kv-cache-manager"),
        *("disable-chunked-mm-input", "skip-mm-profiling", "enable-flashinfer-autotune"),
    )
    for name in (switch, f"no-{switch}")
)


def check_vllm_arguments(arguments: Sequence[str]) -> None:
    """Raises `ValueError` for an argument that is not listed, and for one without its value."""
    words = iter(arguments)
    for word in words:
        name, separator, value = word.partition("=")
        if name in SWITCHES and not separator:
            continue
        if name not in WITH_VALUE:
            raise ValueError(
                f"{word!r} is not an argument that a configuration may give to vLLM; those of "
                "memory, batching and sharding are, by their whole names "
                f"({', '.join(sorted(WITH_VALUE | SWITCHES)[:3])}, ...; docs/rollout.md). Put "
                "another one into BAPO_VLLM_ARGS where the replicas run (rollout.vllmArgs of the "
                "chart)"
            )
        if not separator:
            value = next(words, "")
        if not value or value.startswith("-"):
            raise ValueError(f"{name} has no value; put it after the argument in the list")
