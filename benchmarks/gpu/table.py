"""Writes the GPU table of benchmarks/README.md: `python -m benchmarks.gpu.table`.

Each row names the device and the commit that it was measured on, and says so if the code of its
part has changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.digest import digest_of
from benchmarks.gpu.parts import BY_NAME
from benchmarks.gpu.record import Record

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "benchmarks/README.md"
RESULTS = ROOT / "benchmarks/results/gpu"
START, END = "<!-- gpu -->\n", "<!-- /gpu -->\n"
NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    result: str
    """Name of the result in the part's file."""
    title: str
    compared: str
    """Published or targeted figure that the result is compared with."""
    show: Callable[[Any], str]


def _rates(result: Any) -> str:
    """Shows an update of the trainer part."""
    rate = result["tokens_per_s"]["update"]
    # Results of before kernels were chosen do not name theirs, which was `varlen`.
    attention = f" ({', '.join(kernels)})" if (kernels := result.get("attention")) else ""
    mfu = 100 * result["mfu_published_formula"]
    return f"{rate:,.0f} tok/s, {mfu:.1f}%, {result['memory']['reserved_gib']:.1f} GiB{attention}"


def _attention(result: Any) -> str:
    """Shows the passes of the summary of an attention kernel."""
    times = [result["ms"].get(f"qwen3-0.6b/{row}") for row in (16_384, 65_536)]
    if not any(times):
        return "refused"
    shown = "; ".join(
        "failed" if pair is None else f"{pair[0]:.1f}, {pair[1]:.1f}" for pair in times
    )
    return f"{shown} ms"


def _phase(result: Any) -> str:
    """Shows a side of the part ragged."""
    if "failed" in result:
        return "out of memory" if "OutOfMemory" in result["failed"] else "failed"
    return f"{result['tokens_per_s']:,.0f} tok/s, {result['peak_gib']:.1f} GiB"


def _generation(result: Any) -> str:
    if "steady" in result:
        return f"{result['steady']['ratio']:.2f}"
    return f"{result['ratio_of_medians']:.2f}"


def _logprobs(result: Any) -> str:
    if isinstance(result, str):
        return result
    milliseconds = 1e3 * result["seconds"]["median"]
    return f"{milliseconds:.0f} ms, {result['memory']['extra_gib']:.2f} GiB"


def _difference(result: Any) -> str:
    word = "" if result["within_tolerance"] else ": BEYOND TOLERANCE"
    return f"{result['logprob_mean']:.1e}, {result['gradient']:.1e}{word}"


def _bits(result: Any) -> str:
    return "same bits" if result["next_step_bits"] else f"{result['next_step_difference']:.1e}"


def _steps(result: Any) -> str:
    rate = result["tokens_per_s"]["update"]
    return f"{rate:,.0f} tok/s"


def _end_to_end(result: Any) -> str:
    device = result["device"] or {"mean_utilisation": float("nan")}
    busy = 100 * device["mean_utilisation"]
    return f"{result['steps_per_hour']:,.0f} steps/h, device busy {busy:.0f}% of the time"


def _trl(ratios: Any) -> str:
    return (
        "none"
        if not ratios
        else ", ".join(
            f"{name}: {ratio['speed']:.2f}, {ratio['extra_memory']:.2f}"
            for name, ratio in ratios.items()
        )
    )


PRIME_RL = "prime-rl on one H100: "
ROWS = (
    Row(
        *("ceilings", "matrix_product", "8192³ matrix product, bf16", "989 TFLOP/s (vendor)"),
        lambda result: f"{result['tflops']:.0f} TFLOP/s",
    ),
    Row(
        *(
            "ceilings",
            "device_copy",
            "copy within the device",
            "3,350 (vendor, H100), 4,800 (H200)",
        ),
        lambda result: f"{result['gb_per_s']:,.0f} GB/s",
    ),
    Row(
        *("trainer", "qwen3-0.6b-16384", "update, Qwen3-0.6B, rows of 16,384"),
        PRIME_RL + "11,900 tok/s, 11.1%, 12.5 GiB",
        _rates,
    ),
    Row(
        *("trainer", "qwen3-0.6b-16384-compiled", "the same, layers compiled"),
        PRIME_RL + "the same run",
        _rates,
    ),
    Row(
        *("trainer", "qwen3-0.6b-16384-kept", "the same, no recomputation", "target 24,000 tok/s"),
        _rates,
    ),
    Row(
        *("trainer", "qwen3-0.6b-65536", "update, Qwen3-0.6B, rows of 65,536"),
        PRIME_RL + "10,150 tok/s, 26.8%, 19.6 GiB",
        _rates,
    ),
    Row(
        *("trainer", "qwen3-0.6b-65536-compiled", "the same, layers compiled"),
        PRIME_RL + "the same run",
        _rates,
    ),
    Row(
        *("trainer", "qwen3-4b-16384-lora16", "update, Qwen3-4B, LoRA 16, rows of 16,384"),
        PRIME_RL + "6,230 tok/s, 21.7%, 23.3 GiB",
        _rates,
    ),
    Row(
        *("trainer", "qwen3-4b-16384-lora16-compiled", "the same, layers compiled"),
        PRIME_RL + "the same run",
        _rates,
    ),
    *(
        Row(
            *("attention", kernel, f"attention, {kernel}, one row of 16,384; 65,536"),
            "forward, backward of a layer of Qwen3-0.6B",
            _attention,
        )
        for kernel in ("flash4", "varlen", "varlen-repeated", "padded")
    ),
    *(
        Row("logprobs", name, f"log-probs, 16,384 x 151,936: {title}", compared, _logprobs)
        for name, title, compared in (
            ("ours", "ours", "Liger x 1.1, summed in fp32"),
            ("ours_with_entropy", "ours with entropy", ""),
            ("liger", "Liger, summed in bf16", ""),
            ("liger_fp32", "Liger, summed in fp32", ""),
            ("whole", "the whole matrix", ""),
        )
    ),
    *(
        Row("correctness", name, f"difference, {title}", "log-prob (mean), gradient", _difference)
        for name, title in (
            ("fp32_against_cpu", "fp32 on GPU and CPU"),
            ("bf16_against_cpu", "bf16 on GPU, fp32 on CPU"),
            ("bf16_packed_against_one_by_one", "packed and one by one, bf16"),
            ("bf16_compiled_against_not", "compiled and not, bf16"),
            ("wide_heads_in_bf16_against_cpu", "heads of 512"),
            ("windows_in_bf16_against_cpu", "sliding windows (Gemma 3)"),
            ("experts_in_bf16_against_cpu", "experts (Qwen3-MoE)"),
            ("recurrent_in_bf16_against_cpu", "recurrent layers (LFM2)"),
        )
    ),
    Row("correctness", "restart", "the step after a restart", "the same bits", _bits),
    Row(
        *("correctness", "engine_against_trainer_in_bf16", "KL(engine, trainer), bf16", "1e-3"),
        lambda result: f"{result['kl']:.1e}",
    ),
    Row("ragged", "ours", "optimisation phase, 16 x 8 ragged responses", "", _phase),
    Row("ragged", "trl", "the same, TRL", "", _phase),
    Row("ragged", "ratios", "the same against TRL: speed, memory", "1.5, 0.6", _trl),
    *(
        Row("prefix", name, f"update, prompt:response {name}", "", _steps)
        for name in ("4096:1024", "2048:2048", "512:4096")
    ),
    *(
        Row(
            *("generate", name, f"engine against `model.generate`, {name}", "tokens a second"),
            _generation,
        )
        for name in ("tiny", "qwen3-0.6b")
    ),
    Row("end_to_end", "resumed", "`bapo run` on Countdown, after a kill", "", _end_to_end),
    Row(
        *("vllm", "throughput", "collector against bare vLLM, tokens a second", "0.97"),
        lambda result: f"{result['ratio']:.2f}",
    ),
    Row(
        *("vllm", "sync", "new weights served, against upload + download + load", "1.3"),
        lambda result: f"{result['ratio']:.2f}",
    ),
    Row(
        *("vllm", "parity", "KL(vLLM, trainer), bf16", "1e-3"),
        lambda result: f"{result['metrics']['mismatch_kl']:.1e}",
    ),
)


def fill(readme: str, results: Path) -> str:
    """Returns the text with its table made from the results."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    records = {path.stem: Record.read(path) for path in sorted(results.glob("*.json"))}
    lines = ["| measured | compared with | result | device, commit |", "| --- | --- | --- | --- |"]
    for row in ROWS:
        record = records.get(row.part)
        cells = (row.title, row.compared, _cell(row, record), _origin(row, record))
        lines.append(f"| {' | '.join(cells)} |")
    return before + START + "\n".join(lines) + "\n" + END + after


def _cell(row: Row, record: Record | None) -> str:
    if record is None or record.size == "toy":
        return NOT_RUN
    if row.result in record.results:
        return row.show(record.results[row.result])
    if row.result in record.failures:
        return "failed"
    return record.status if record.status in ("failed", "timed out") else NOT_RUN


def _origin(row: Row, record: Record | None) -> str:
    """Returns device and commit of a result, and whether the part's code has changed since."""
    if record is None or row.result not in record.results or record.size == "toy":
        return ""
    origin = record.origin_of(row.result)
    same = origin.get("digest") == digest_of(BY_NAME[row.part])
    changed = "" if same else ", changed since"
    return f"{origin['device'].removeprefix('NVIDIA ')}, {origin['commit'][:7]}{changed}"


def main() -> None:
    README.write_text(fill(README.read_text(), RESULTS))


if __name__ == "__main__":
    main()
