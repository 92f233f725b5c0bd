"""The schedule of syncs of the rollout policy (every v steps) and of re-evaluations (every m).

Steps are 1-based. Policy version t is theta_t: the trainer's weights *before* update t, so the
base model is version 1 and the weights after T steps are version T + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["algorithm1", "first_step"]


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """A schedule with sync period v, re-evaluation period m, the phase of the sync, and its lag.

    `algorithm1` syncs when t mod v = 0 (Algorithm 1 of the paper), so that a re-evaluation finds
    the current weights already loaded whenever v divides m. `first_step` syncs when
    (t-1) mod v = 0 (the authors' code).

    With a lag, a sync loads the weights of so many steps before, so that rollouts of later steps
    are generated while the trainer is still at earlier ones.
    """

    v: int
    m: int
    phase: Phase = "algorithm1"
    lag: int = 0

    def __post_init__(self) -> None:
        if self.v < 1 or self.m < 1:
            raise ValueError(
                f"v={self.v}, m={self.m}: v and m are periods in steps; give at least 1"
            )
        if self.lag < 0:
            raise ValueError(f"lag={self.lag}: the lag is a number of steps; give at least 0")

    @property
    def _offset(self) -> int:
        return 0 if self.phase == "algorithm1" else 1

    def syncs_at(self, t: int) -> bool:
        """Whether alpha <- theta_(t - lag) before the rollouts of step t."""
        return (t - self._offset) % self.v == 0

    def reevaluates_at(self, t: int) -> bool:
        """Whether hard prompts are re-evaluated at step t (t mod m = 0)."""
        return t % self.m == 0

    def _last_sync(self, t: int) -> int:
        """Returns the step of the last sync at t, or 1, the first step."""
        return max(1, t - (t - self._offset) % self.v)

    def policy_version(self, t: int) -> int:
        """Returns alpha at step t: the version that the last sync loaded, or 1, the base model."""
        return max(1, self._last_sync(t) - self.lag)

    def sync_window(self, t: int) -> range:
        """Returns the steps of the sync window of t, which share its rollout policy alpha."""
        first = self._last_sync(t)
        following = t + 1
        while not self.syncs_at(following):
            following += 1
        return range(first, following)

    def staleness(self, t: int) -> int:
        """Returns the staleness of fresh rollouts, step minus policy version: 0 .. v - 1 + lag."""
        return t - self.policy_version(t)

    @property
    def one_load_serves_both(self) -> bool:
        """Whether every re-evaluation falls on a sync, so that theta_t is already loaded."""
        return self.phase == "algorithm1" and self.m % self.v == 0 and self.lag == 0
