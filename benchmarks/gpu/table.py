"""Writes the GPU table of benchmarks/README.md: `python -m benchmarks.gpu.table`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    mfu = 100 * result["mfu_published_formula"]
    return f"{rate:,.0f} tok/s, {mfu:.1f}%, {result['memory']['reserved_gib']:.1f} GiB"


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
    device = result["device"] or {"idle_share": float("nan")}
    return f"{result['steps_per_hour']:,.0f} steps/h, {100 * device['idle_share']:.0f}% idle"


def _trl(ratios: Any) -> str:
    return ", ".join(
        f"{name}: {ratio['speed']:.2f}, {ratio['extra_memory']:.2f}"
        for name, ratio in ratios.items()
    )


PRIME_RL = "prime-rl on one H100: "
ROWS = (
    Row(
        *("ceilings", "matrix_product", "8192³ matrix product, bf16", "989 (vendor)"),
        lambda result: f"{result['tflops']:.0f} TFLOP/s",
    ),
    Row(
        *("ceilings", "device_copy", "copy within the device", "4,800 (vendor)"),
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
    Row("ragged", "ratios", "TRL, 16 x 8 ragged responses: speed, memory", "1.5, 0.6", _trl),
    *(
        Row("prefix", name, f"update, prompt:response {name}", "", _steps)
        for name in ("4096:1024", "2048:2048", "512:4096")
    ),
    *(
        Row(
            *("generate", name, f"engine against `model.generate`, {name}", "tokens a second"),
            lambda result: f"{result['ratio_of_medians']:.2f}",
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
    device = next((record.device for record in records.values()), "GPU")
    lines = [f"| measured | compared with | {device} |", "| --- | --- | --- |"]
    lines += [f"| {row.title} | {row.compared} | {_cell(row, records)} |" for row in ROWS]
    return before + START + "\n".join(lines) + "\n" + END + after


def _cell(row: Row, records: dict[str, Record]) -> str:
    record = records.get(row.part)
    if record is None or record.size == "toy":
        return NOT_RUN
    if row.result in record.results:
        return row.show(record.results[row.result])
    return record.status if record.status in ("failed", "timed out") else NOT_RUN


def main() -> None:
    README.write_text(fill(README.read_text(), RESULTS))


if __name__ == "__main__":
    main()
