"""When a run saves, and how its processes agree to stop early."""

from __future__ import annotations

import math
import signal
import sys
import time
from types import FrameType

from freerun.config import Config
from freerun.mesh import Board, Place
from freerun.weights.delay import lag


class Saves:
    """Which versions are saved, and after which version the run ends.

    A signal asks for an early end. The first stage of each replica then puts up a version that no stage has passed yet,
    far enough away for all to hear of it in time; the largest one is the end for all.
    """

    def __init__(self, config: Config, place: Place, board: Board) -> None:
        self.asked = False
        # how many updates elastic accumulation takes is known only when it gets there
        self.end = sys.maxsize if config.replicas.elastic else config.training.updates
        self.stopped = False
        self._updates = config.training.updates
        self._every = config.checkpoint.every
        self._place = place
        self._board = board
        self._ahead = math.ceil(lag(0, place.stages, config.pipeline.slack) / config.pipeline.microbatches)
        self._put = False
        self._started = time.perf_counter()
        self._first_version: int | None = None

    def listen(self) -> None:
        """Take SIGINT and SIGTERM as the wish to stop; a second one ends the process at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked = True
            signal.signal(number, signal.SIG_DFL)

        signal.signal(signal.SIGINT, ask)
        signal.signal(signal.SIGTERM, ask)

    def due(self, version: int) -> bool:
        """Whether this version is saved."""
        return version == self.end or (self._every > 0 and version % self._every == 0)

    def within(self, version: int, delay: int) -> bool:
        """Whether a version is among the last `delay` before one that is saved in the midst of training, or may be."""
        if self.asked:
            return True
        saved = [self.end, -(-version // self._every) * self._every] if self._every else [self.end]
        return any(point < self._updates and point - delay <= version for point in saved)

    def made(self, version: int, ended: bool) -> None:
        """A version has been made: see whether the run ends here, or is to end early, and where."""
        if ended:
            self.end = version
        if self._first_version is None:
            self._first_version, self._started = version, time.perf_counter()
        if not self.asked or self.stopped:
            return
        if self._place.replicas * self._place.stages == 1:
            self._stop(version)
            return
        if self._place.first and not self._put:
            self._board.put(f"stop/{self._place.replica}", version + self._margin(version))
            self._put = True
        wishes = [self._board.look(f"stop/{replica}") for replica in range(self._place.replicas)]
        known = [wish for wish in wishes if wish is not None]
        if len(known) == len(wishes):
            self._stop(max(known))

    def _stop(self, version: int) -> None:
        self.end = min(self.end, version)
        self.stopped = True

    def _margin(self, version: int) -> int:
        """Updates that the other stages may be ahead by, twice, and what a signal may take to reach every process."""
        done = version - (self._first_version or 0)
        a_second = done / max(time.perf_counter() - self._started, 1e-3)
        return 2 * self._ahead + 2 + math.ceil(a_second)
