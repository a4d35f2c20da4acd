"""Averaging in rounds beside training: launch at one update, finish at a later one, several under way at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from freerun.collectives import exchange_scalars
from freerun.groups import Group
from freerun.replicas.base import BESIDE, State, Timing
from freerun.steps import Steps, Task, finish

FREE_ROUNDS = 2
"""Rounds that may be under way when each finishes as it arrives; a launch that would be one too many is put off."""


@dataclass
class Round:
    """A round under way."""

    number: int
    launched: int
    """Updates done when it was launched."""
    remembered: Tensor
    """This replica's weights at the round's coordinates when it was launched."""
    task: Task[Tensor | None]


class Rounds(ABC):
    """One replica's part in the rounds.

    With a fixed `delay` a round finishes exactly that many updates after its launch. With None it finishes at the first
    update that finds it arrived: then replicas may do different numbers of rounds in their time, and the first one to
    end tells the others, in place of a round, that there will be no more.
    """

    def __init__(self, weights: Tensor, group: Group, interval: int, delay: int | None) -> None:
        self.timing = Timing()
        self.weights = weights
        self.group = group
        self.channel = group.channel(BESIDE)
        self.under_way: deque[Round] = deque()
        self._interval = interval
        self._delay = delay
        self._launched = 0
        self._due = 0
        self._over = group.size == 1
        self._closed = False

    @abstractmethod
    def take(self, number: int) -> Tensor:
        """A copy of the weights that a round is about."""

    @abstractmethod
    def exchange(self, number: int, values: Tensor) -> Steps[Tensor]:
        """What the round makes of all replicas' values; runs beside training, the rounds one after the other."""

    @abstractmethod
    def put(self, done: Round, result: Tensor) -> None:
        """Let the weights have the round's result."""

    def advance(self, update: int) -> Steps[None]:
        """`update` updates are done: finish the rounds that are due, launch one if it is time."""
        yield from self._finish_due(update)
        if update % self._interval == 0:
            self._due += 1
        if self._launched < self._due and self._may_launch():
            self._launch(update, last=False)
            yield from self._finish_due(update)

    def finish(self) -> Steps[None]:
        """Complete what is under way, and tell the others if they can't know that it was the last."""
        if self._delay is None and not self._over:
            self._launch(-1, last=True)
        while self.under_way:
            yield from self._finish_first()
        self._over = True

    def state_dict(self) -> Steps[State]:
        """The rounds under way, after waiting for their results.

        Free rounds may still need replicas that are behind, so they are left out; they don't promise to be repeated.
        """
        saved = []
        for done in self.under_way if self._delay is not None else ():
            result = yield from self.timing.stand_still(finish(done.task))
            saved.append(
                {"number": done.number, "launched": done.launched, "remembered": done.remembered, "result": result}
            )
        return {"launched": self._launched if self._delay is not None else self._due, "under_way": saved}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self._launched = self._due = state["launched"]
        self.under_way = deque(
            Round(saved["number"], saved["launched"], saved["remembered"], Task.over(saved["result"]))
            for saved in state["under_way"]
        )

    def _may_launch(self) -> bool:
        return not self._over and (self._delay is not None or len(self.under_way) < FREE_ROUNDS)

    def _launch(self, update: int, *, last: bool) -> None:
        number = self._launched
        values = self.take(number)
        task = self.channel.background(self._round(number, values.clone(), last))
        self.under_way.append(Round(number, update, values, task))
        self._launched += 1

    def _round(self, number: int, values: Tensor, last: bool) -> Steps[Tensor | None]:
        if self._delay is None:
            if self._closed:
                return None
            rows = yield from exchange_scalars(self.channel, [float(last)])
            self._closed = any(ends for (ends,) in rows)
            if self._closed:
                return None
        return (yield from self.timing.communicate(self.exchange(number, values)))

    def _finish_due(self, update: int) -> Steps[None]:
        while self.under_way:
            first = self.under_way[0]
            due = first.task.ready() if self._delay is None else first.launched + self._delay <= update
            if not due:
                return
            yield from self._finish_first()

    def _finish_first(self) -> Steps[None]:
        done = self.under_way.popleft()
        result = yield from self.timing.stand_still(finish(done.task))
        if result is None:
            self._over = True
        else:
            self.put(done, result)
