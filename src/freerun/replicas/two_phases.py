"""The two-phase round of ACCO: every step behind the computation, every committed step from a whole batch.

phase A   compute g_A at the provisional weights      meanwhile: the commit of the previous round
phase B   compute g_B at the committed weights        meanwhile: the provisional step, from g_A alone
commit    step from (Σ g_A + Σ g_B) / (N_A + N_B)
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from freerun.collectives import exchange_scalars
from freerun.groups import Group
from freerun.replicas.base import State, Timing
from freerun.replicas.behind import Behind
from freerun.replicas.sharded import Shard, Stepping
from freerun.steps import Steps


class Phase(Enum):
    """At which weights the gradient under way is computed."""

    AT_PROVISIONAL = "A"
    AT_COMMITTED = "B"


class TwoPhases:
    """The rounds of one replica.

    `batch` is how many microbatches of all replicas count as one update in the learning rate's schedule. The gradient
    is a sum over microbatches of their mean gradients, divided by `divided_by`.
    """

    def __init__(
        self,
        weights: Tensor,
        gradient: Tensor,
        shard: Shard,
        stepping: Stepping,
        channel: Group,
        timing: Timing,
        *,
        batch: float,
        divided_by: float,
    ) -> None:
        self.phase = Phase.AT_PROVISIONAL
        self.progress = 0.0
        self._weights = weights
        self._shard = shard
        self._stepping = stepping
        self._channel = channel
        self._batch = batch
        self._divided_by = divided_by
        self._behind = Behind(weights, gradient, shard, channel, timing)
        self._first = shard.gradient.clone()
        self._first_delay = 0
        self._counts = dict.fromkeys(Phase, 0.0)

    @property
    def busy(self) -> bool:
        """Whether ending the phase now would have to wait."""
        return self._behind.busy

    def end_phase(self, microbatches: int, delay: int) -> Steps[None]:
        """Put in place the weights of the next phase, and launch what this phase's gradient is for."""
        yield from self._complete()
        if self.phase is Phase.AT_PROVISIONAL:
            self._first_delay = delay
            self._behind.launch(lambda: self._propose(microbatches, delay))
            self.phase = Phase.AT_COMMITTED
        else:
            self._behind.launch(lambda: self._commit(microbatches, max(delay, self._first_delay)))
            self.phase = Phase.AT_PROVISIONAL

    def finish(self) -> Steps[None]:
        """Leave committed weights; a phase A without its B is committed alone."""
        yield from self._complete()
        if self.phase is Phase.AT_COMMITTED:
            self._behind.launch(self._commit_first, collect=False)
            self.phase = Phase.AT_PROVISIONAL
            self._counts[Phase.AT_COMMITTED] = 0.0
            yield from self._complete()

    def committed(self) -> Steps[Tensor]:
        """The newest committed weights."""
        if self.phase is Phase.AT_PROVISIONAL and self._behind.under_way:
            return (yield from self._behind.arrived())
        return self._weights

    def state_dict(self) -> Steps[State]:
        """Everything but the optimizer and the weights in place."""
        behind = yield from self._behind.state_dict()
        return {
            "phase": self.phase.value,
            "progress": self.progress,
            "master": self._shard.master,
            "first": self._first,
            "first_delay": self._first_delay,
            "counts": {phase.value: count for phase, count in self._counts.items()},
            "behind": behind,
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self.phase = Phase(state["phase"])
        self.progress = state["progress"]
        self._shard.master.copy_(state["master"])
        self._first.copy_(state["first"])
        self._first_delay = state["first_delay"]
        self._counts = {phase: state["counts"][phase.value] for phase in Phase}
        self._behind.load_state_dict(state["behind"])

    def _complete(self) -> Steps[None]:
        committing = self._behind.under_way and self.phase is Phase.AT_PROVISIONAL
        yield from self._behind.complete()
        if committing:
            self.progress += sum(self._counts.values()) / self._batch

    def _propose(self, microbatches: int, delay: int) -> Steps[Tensor]:
        self._first.copy_(self._shard.gradient)
        count = yield from self._count(Phase.AT_PROVISIONAL, microbatches)
        self._shard.gradient.mul_(self._divided_by / count)
        proposed = yield from self._stepping.propose(self.progress, delay)
        if proposed is None:
            return self._shard.master
        return self._shard.arranged(self._stepping.optimizer, proposed)

    def _commit(self, microbatches: int, delay: int) -> Steps[Tensor]:
        count = yield from self._count(Phase.AT_COMMITTED, microbatches)
        self._shard.gradient.add_(self._first).mul_(self._divided_by / (self._counts[Phase.AT_PROVISIONAL] + count))
        yield from self._stepping.step(self.progress, delay)
        return self._shard.master

    def _commit_first(self) -> Steps[Tensor]:
        self._shard.gradient.copy_(self._first).mul_(self._divided_by / self._counts[Phase.AT_PROVISIONAL])
        yield from self._stepping.step(self.progress, self._first_delay)
        return self._shard.master

    def _count(self, phase: Phase, microbatches: int) -> Steps[float]:
        """How many microbatches all replicas have done in a phase."""
        rows = yield from exchange_scalars(self._channel, [float(microbatches)])
        self._counts[phase] = sum(count for (count,) in rows)
        return self._counts[phase]
