"""Which runs make the tables, and the runs themselves, kept in a file.

Every case has a learning rate of its own (``fixed``). So that no contender wins because that rate
suits it, each also takes the best of a small grid, found on other seeds than those reported
(``searched``).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.convergence.contenders import CONTENDERS
from benchmarks.convergence.training import Run, train
from benchmarks.planners.common import Row

SEEDS = range(10)
SEARCH_SEEDS = range(1000, 1002)
"""On which rates are compared; never among those reported."""

LAST = 3
"""Epochs whose mean counts: at a constant learning rate a single one is up or down by chance."""

RATES = {
    "sgdm": (0.003, 0.01, 0.03),
    "adam": (0.0003, 0.001, 0.003),
    "adamw": (0.0003, 0.001, 0.003),
}


@dataclass(frozen=True)
class Case:
    """A task as it is cut and trained.

    Attributes:
        task: key of ``TASKS``.
        stages: number of them.
        optimizer: key of ``OPTIMIZERS``.
        lr: the fixed rate.
        epochs: number of them.
    """

    task: str
    stages: int
    optimizer: str
    lr: float
    epochs: int

    def __str__(self) -> str:
        return f"{self.task}-{self.stages}-{self.optimizer}"

    @property
    def contenders(self) -> list[str]:
        """Those that work with the optimizer."""
        return [name for name, c in CONTENDERS.items() if c.recipe(self.optimizer)]

    def run(self, contender: str, seed: int, lr: float | None = None) -> Run:
        """One run, by default at the fixed rate."""
        rate = self.lr if lr is None else lr
        return Run(self.task, self.stages, self.optimizer, rate, contender, seed, self.epochs)


CASES = {
    str(case): case
    for case in (
        Case("mnist", 4, "sgdm", 0.01, 10),
        Case("mnist", 4, "adamw", 0.003, 10),
        Case("mnist", 8, "adamw", 0.001, 10),
        Case("charlm", 8, "adam", 0.003, 16),
        Case("digits", 4, "sgdm", 0.01, 20),
        Case("digits", 8, "adamw", 0.001, 20),
    )
}
"""Name -> case."""


class Runs:
    """Results by run; each is made once and added to a file, from which another process goes on.

    Args:
        file: of one JSON object per line; None keeps nothing.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._found: dict[Run, Row] = {}
        names = [field.name for field in dataclasses.fields(Run)]
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                row = json.loads(line)
                self._found[Run(*(row.pop(name) for name in names))] = row

    def __getitem__(self, run: Run) -> Row:
        if run not in self._found:
            started = time.perf_counter()
            found = train(run) | {"seconds": time.perf_counter() - started}
            self._found[run] = found
            if self._file is not None:
                with self._file.open("a") as stream:
                    stream.write(json.dumps(dataclasses.asdict(run) | found) + "\n")
        return self._found[run]

    def all(self, runs: Iterable[Run]) -> list[Row]:
        """Of several runs, in their order; says on standard error how far it is."""
        return list(self._said(list(runs)))

    def _said(self, runs: list[Run]) -> Iterator[Row]:
        missing = [run for run in runs if run not in self._found]
        for run in runs:
            if run in missing:
                count = f"{missing.index(run) + 1}/{len(missing)}"
                sys.stderr.write(f"{count} {' '.join(map(str, dataclasses.astuple(run)))}\n")
            yield self[run]


def score(row: Row) -> float:
    """Held-out accuracy in points: mean over the last epochs."""
    return 100 * statistics.fmean(row["accuracy"][-LAST:])


def fixed(case: Case, runs: Runs, seeds: range, contenders: Collection[str]) -> list[Row]:
    """These contenders, as far as they work with the case, at the fixed rate."""
    names = [name for name in case.contenders if name in contenders]
    # All contenders for a seed, then the next seed: a file that ends early is of use.
    runs.all(case.run(name, seed) for seed in seeds for name in names)
    return [_row(case, name, runs, seeds, case.lr) for name in names]


def searched(case: Case, runs: Runs, seeds: range, contenders: Collection[str]) -> list[Row]:
    """Likewise, each at its best rate of the grid, which other seeds have found."""
    rates = RATES[case.optimizer]
    best: dict[str, float] = {}
    for name in (name for name in case.contenders if name in contenders):
        means = {
            lr: statistics.fmean(
                map(score, runs.all(case.run(name, seed, lr) for seed in SEARCH_SEEDS))
            )
            for lr in rates
        }
        best[name] = max(rates, key=lambda lr: means[lr])
    runs.all(case.run(name, seed, lr) for seed in seeds for name, lr in best.items())
    return [_row(case, name, runs, seeds, lr) for name, lr in best.items()]


def _row(case: Case, name: str, runs: Runs, seeds: range, lr: float) -> Row:
    found = runs.all(case.run(name, seed, lr) for seed in seeds)
    return {
        "case": str(case),
        "contender": name,
        "lr": lr,
        "accuracy": [score(row) for row in found],
        "curves": [row["accuracy"] for row in found],
    }
