"""Stepping a shard behind the computation: the gradient leaves and new weights arrive through one more flat buffer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from freerun.groups import Group
from freerun.replicas.base import State, Timing
from freerun.replicas.sharded import Shard
from freerun.steps import Steps, Task, finish


class Behind:
    """At most one round trip under way: gradients to their shards, a step there, everyone's new weights back."""

    def __init__(self, weights: Tensor, gradient: Tensor, shard: Shard, channel: Group, timing: Timing) -> None:
        self._weights = weights
        self._gradient = gradient
        self._shard = shard
        self._channel = channel
        self._timing = timing
        self._travelling = weights.clone()
        self._under_way: Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a round trip was launched and not completed."""
        return self._under_way is not None

    @property
    def busy(self) -> bool:
        """Whether completing would have to wait."""
        return self._under_way is not None and not self._under_way.ready()

    def launch(self, step: Callable[[], Steps[Tensor]], *, collect: bool = True) -> None:
        """Send this replica's gradient off; once `collect`ed, `step` turns the shard's sum into its new weights."""
        assert self._under_way is None
        self._travelling.copy_(self._gradient)
        self._under_way = self._channel.background(self._round_trip(step, collect))

    def complete(self) -> Steps[None]:
        """Put the new weights in place, if a round trip is under way."""
        if self._under_way is not None:
            self._weights.copy_((yield from self.arrived()))
            self._under_way = None

    def arrived(self) -> Steps[Tensor]:
        """The new weights that are under way, not put in place."""
        assert self._under_way is not None
        yield from self._timing.stand_still(finish(self._under_way))
        return self._travelling

    def state_dict(self) -> Steps[State]:
        """The weights under way, if any."""
        return {"arrived": (yield from self.arrived())} if self._under_way is not None else {}

    def load_state_dict(self, state: State) -> None:
        """Have the same under way."""
        self._under_way = None
        if state:
            self._travelling.copy_(state["arrived"])
            self._under_way = Task.over(None)

    def _round_trip(self, step: Callable[[], Steps[Tensor]], collect: bool) -> Steps[None]:
        if collect:
            yield from self._timing.communicate(self._shard.collect(self._travelling))
        own = yield from step()
        yield from self._timing.communicate(self._shard.spread(own, self._travelling))
