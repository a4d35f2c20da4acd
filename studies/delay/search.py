"""A search over settings: populations of runs in the laboratory, each bred from the best of those before.

    python -m studies.delay.search --stages 32 --device cuda --seconds 480

One seed for the search, four others for the best of it. Every run is kept, whatever came of it, as a line of
results/search/pN.csv; those that were repeated with other seeds are in results/search/pN-confirmed.json.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from freerun import config_files
from freerun.config import Config
from freerun.files import write_text
from studies.delay.laboratory import WINDOW, Laboratory, crossing
from studies.delay.rules import Setting
from studies.outcome import TARGET

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "search"
SEEDS = (1, 2, 3, 4)
"""Those of the confirmation; the search has seed 0."""
ELITE = 24
SPREAD = 0.12
"""Standard deviation of a mutation, in units of a knob's range."""

Genome = dict[str, float | None]
"""Where each knob stands in its range, 0 to 1; None is off."""


@dataclass(frozen=True)
class Knob:
    """What the search may turn."""

    low: float
    high: float
    log: bool = False
    off: float | None = None
    """The value that switches it off; None if it can't be."""
    one_minus: bool = False
    of_delay: bool = False
    """Whether it means nothing without delay."""

    def value(self, place: float | None) -> float:
        """The setting at a place in the range."""
        if place is None:
            assert self.off is not None
            return self.off
        ends = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        found = ends[0] + place * (ends[1] - ends[0])
        found = math.exp(found) if self.log else found
        found = float(f"{found:.3g}")
        return round(1 - found, 6) if self.one_minus else found

    def place(self, value: float) -> float | None:
        """The place in the range that gives a setting."""
        if self.off is not None and value == self.off:
            return None
        if self.low == self.high:
            return 0.5
        given = 1 - value if self.one_minus else value
        low, high, given = (
            (math.log(x) for x in (self.low, self.high, given)) if self.log else (self.low, self.high, given)
        )
        return min(1.0, max(0.0, (given - low) / (high - low)))


KNOBS = {
    "lr": Knob(1e-3, 6e-2, log=True),
    "beta1": Knob(0.004, 0.2, log=True, one_minus=True),
    "beta2": Knob(0.0005, 0.05, log=True, one_minus=True),
    "covariance_beta": Knob(0.0005, 0.1, log=True, one_minus=True),
    "fresh": Knob(0.05, 0.9, off=0.0),
    "corrected": Knob(1.0, 1.0, off=0.0),
    "tempering": Knob(0.1, 1.2, off=0.0),
    "power": Knob(0.1, 1.3, off=0.0, of_delay=True),
    "others_power": Knob(0.1, 1.3, off=0.0, of_delay=True),
    "others_rate": Knob(0.1, 4.0, log=True, off=1.0),
    "damping": Knob(1e-3, 5.0, log=True, off=0.0, of_delay=True),
    "damping_power": Knob(0.5, 3.0, of_delay=True),
    "ahead": Knob(0.1, 1.5, off=0.0, of_delay=True),
    "limit": Knob(1.0, 12.0, log=True, off=0.0),
    "beta1_power": Knob(0.05, 0.8, off=0.0, of_delay=True),
    "fresh_power": Knob(-0.5, 0.5, off=0.0, of_delay=True),
    "rows": Knob(1.0, 1.0, off=0.0),
}

OURS = Setting(8e-3, beta1=0.99, fresh=0.4, corrected=False, tempering=0.5, power=0.75, others_power=0.75)
ANCHORS = (
    OURS,
    dataclasses.replace(OURS, lr=1.6e-2, power=1.0, others_power=1.0),
    dataclasses.replace(OURS, tempering=0.0, power=0.0, others_power=0.0, damping=1.0, damping_power=2.0),
    dataclasses.replace(OURS, lr=4e-3, power=0.0, others_power=0.0),
    dataclasses.replace(OURS, lr=4e-3, fresh=0.2, power=0.5, others_power=0.5, ahead=1.0, covariance_beta=0.99),
    Setting(1e-3),
    Setting(3e-3),
)
"""Where the search begins, beside chance: settings known to be good, and the paper's."""


class Search:
    """The search at one depth of pipeline."""

    def __init__(self, base: Config, stages: int, device: str, population: int, most: int) -> None:
        self.base, self.stages, self.device = base, stages, device
        self.population, self.most = population, most
        self.chance = random.Random(stages)
        self.knobs = {name: knob for name, knob in KNOBS.items() if stages > 1 or not knob.of_delay}
        self.known: list[tuple[float, Genome]] = []
        self.path = RESULTS / f"p{stages}.csv"

    def run(self, seconds: float) -> None:
        """Populations until the time is nearly over, then the best with other seeds."""
        begun, longest = time.monotonic(), 0.0
        while True:
            before = time.monotonic()
            self.try_all(self.next_population())
            now = time.monotonic()
            longest = max(longest, now - before)
            best, genome = self.known[0]
            print(
                f"P={self.stages} {now - begun:.0f} s, {len(self.known)} runs, best {best:.0f}: {self.setting(genome)}",
                flush=True,
            )
            if now - begun + 1.6 * longest > seconds:
                break
        self.confirm()

    def next_population(self) -> list[Genome]:
        """Chance and anchors first; then children of the best, and still some chance."""
        if not self.known:
            found = [self.genome(dataclasses.replace(anchor, stages=self.stages)) for anchor in ANCHORS]
            found += [self.child(found) for _ in range(self.population // 4)]
            return found + [self.by_chance() for _ in range(self.population - len(found))]
        elite = [genome for _, genome in self.known[:ELITE]]
        children = [self.child(elite) for _ in range(self.population * 9 // 10)]
        return children + [self.by_chance() for _ in range(self.population - len(children))]

    def by_chance(self) -> Genome:
        """A genome from nowhere."""
        return {
            name: None if knob.off is not None and self.chance.random() < 0.4 else self.chance.random()
            for name, knob in self.knobs.items()
        }

    def child(self, elite: Sequence[Genome]) -> Genome:
        """Each knob from either parent, some of them moved."""
        parents = [elite[min(int(self.chance.expovariate(4 / len(elite))), len(elite) - 1)] for _ in range(2)]
        found: Genome = {}
        for name, knob in self.knobs.items():
            place = self.chance.choice(parents)[name]
            if knob.off is not None and self.chance.random() < 0.08:
                place = self.chance.random() if place is None else None
            elif place is not None and self.chance.random() < 0.4:
                place = min(1.0, max(0.0, self.chance.gauss(place, SPREAD)))
            found[name] = place
        return found

    def genome(self, setting: Setting) -> Genome:
        """The genome that describes a setting."""
        return {name: knob.place(float(getattr(setting, name))) for name, knob in self.knobs.items()}

    def setting(self, genome: Genome, seed: int = 0) -> Setting:
        """The setting that a genome describes."""
        values = {name: knob.value(genome[name]) for name, knob in self.knobs.items()}
        return Setting(**{**values, "corrected": bool(values["corrected"])}, stages=self.stages, seed=seed)

    def try_all(self, genomes: Sequence[Genome]) -> None:
        """Run a population and keep what came of it, best first."""
        settings = [self.setting(genome) for genome in genomes]
        updates = self.most if not self.known else min(self.most, int(1.15 * self.known[0][0]) + WINDOW)
        losses = Laboratory(self.base, settings, self.device, coarse=True).run(updates, until=TARGET)
        last = losses[-WINDOW:].mean(0).tolist()
        crossings = crossing(losses, TARGET)
        for genome, reached, loss in zip(genomes, crossings, last, strict=True):
            self.known.append((_score(reached, loss, len(losses)), genome))
        self.known.sort(key=lambda pair: pair[0])
        self._write(settings, crossings, last, len(losses))

    def confirm(self, how_many: int = ELITE) -> None:
        """The best again, with other seeds."""
        best = [genome for _, genome in self.known[:how_many]]
        settings = [self.setting(genome, seed) for genome in best for seed in SEEDS]
        updates = int(1.5 * self.known[0][0]) + WINDOW
        reached = crossing(Laboratory(self.base, settings, self.device).run(updates, until=TARGET), TARGET)
        rows = []
        for i, (score, _) in enumerate(self.known[:how_many]):
            own = reached[i * len(SEEDS) : (i + 1) * len(SEEDS)]
            mean = sum(found or updates for found in own) / len(own)
            rows.append(
                {"mean": mean, "crossings": own, "in_the_search": score, "setting": _plain(settings[i * len(SEEDS)])}
            )
        rows.sort(key=lambda row: row["mean"])
        write_text(self.path.with_name(f"p{self.stages}-confirmed.json"), json.dumps(rows, indent=1) + "\n")
        print(f"P={self.stages} confirmed: {json.dumps(rows[:3])}", flush=True)

    def _write(
        self, settings: Sequence[Setting], crossings: Sequence[int | None], last: Sequence[float], updates: int
    ) -> None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        begun = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if begun:
                writer.writerow([*self.knobs, "crossing", "loss", "updates"])
            for setting, reached, loss in zip(settings, crossings, last, strict=True):
                values = [f"{float(getattr(setting, name)):g}" for name in self.knobs]
                writer.writerow([*values, reached or "", f"{loss:.3f}", updates])


def _score(reached: int | None, loss: float, updates: int) -> float:
    """Updates to the target; where it was not reached, more than any that did."""
    if reached is not None:
        return float(reached)
    return updates + 1000 * (loss - TARGET) if math.isfinite(loss) else 1e6


def _plain(setting: Setting) -> dict[str, float]:
    """What a setting changes."""
    default = Setting(0.0)
    return {
        f.name: getattr(setting, f.name)
        for f in dataclasses.fields(Setting)
        if f.name != "seed" and getattr(setting, f.name) != getattr(default, f.name)
    }


def main() -> None:
    """Search at one depth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--stages", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--population", type=int, default=256)
    parser.add_argument("--most", type=int, default=800, help="updates of a run that does not reach the target")
    parser.add_argument("--source", default="python-stdlib", help="data.source")
    given = parser.parse_args()
    base = config_files.read(str(HERE / "workload.toml"), [("data.source", given.source)])
    Search(base, given.stages, given.device, given.population, given.most).run(given.seconds)


if __name__ == "__main__":
    main()
