"""The suite's branches for a GPU, with stand-ins for the device: its clock, memory and tools."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import device, end_to_end
from benchmarks.trl_steps import Instant, Meter

GIB = 1 << 30


class StandIn:
    """A GPU on which every call takes a second, and which allocates what the test tells it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now, self.allocated, self.peak = 0.0, 2 * GIB, 5 * GIB

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.time = stand_in.now

            def synchronize(self) -> None:
                stand_in.calls.append("event synchronize")

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.time - self.time)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda name=name: stand_in.calls.append(name))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: stand_in.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: stand_in.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 6 * GIB)
        monkeypatch.setattr(device, "GPU", True)
        monkeypatch.setattr(end_to_end, "GPU", True)

    def work(self) -> None:
        self.now += 1.0
        self.calls.append("work")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    return stand_in


def test_time_is_that_of_the_devices_own_clock(gpu: StandIn) -> None:
    assert device.seconds_of(gpu.work, repeats=2, warm_up=1) == [1.0, 1.0]
    # The warm-up is over before the first measurement, and each is over before the next.
    assert gpu.calls == ["work", "synchronize", *["work", "event synchronize"] * 2]


def test_memory_is_what_the_block_added_to_the_device(gpu: StandIn) -> None:
    with device.peak_memory() as memory:
        gpu.calls.append("block")
    assert memory.report() == {"peak_gib": 5.0, "extra_gib": 3.0, "reserved_gib": 6.0}
    assert gpu.calls == ["empty_cache", "reset_peak_memory_stats", "block", "synchronize"]


def test_both_sides_of_the_comparison_measure_the_device(gpu: StandIn) -> None:
    meter = Meter()
    meter.reset(torch.nn.Linear(1, 1))
    gpu.calls.clear()
    Instant()
    assert gpu.calls == ["synchronize"]
    report = meter.report()
    assert (report["before_mib"], report["peak_mib"], report["extra_mib"]) == (2_048, 5_120, 3_072)


def test_utilisation_is_read_while_the_block_runs(
    gpu: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, ready = tmp_path / "nvidia-smi", tmp_path / "ready"
    tool.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/options\nprintf "0\\n50\\n100\\n50\\n"\n')
    with tool.open("a") as script:
        script.write(f"touch {ready}\nexec sleep 1000\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with end_to_end.utilisation() as readings:
        while not ready.exists():
            time.sleep(0.01)
    assert end_to_end.busy(readings) == {"readings": 4, "mean_utilisation": 0.5, "idle_share": 0.25}
    assert "-lms 100" in (tmp_path / "options").read_text()
