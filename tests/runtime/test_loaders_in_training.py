"""Training on DataLoaders and data sets, by several ranks and from the middle of an epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from anabranch import launch
from anabranch.checkpoint import Checkpoint, load_state_dict
from anabranch.data.columns import Columns
from anabranch.graph.capture import capture
from anabranch.training import SaveEvery, train, train_async
from anabranch.workload import Workload
from tests.runtime.small import Built, Chain, batch, built, plan, with_options, with_programs
from tests.runtime.training import begin_again, sgd

pytestmark = pytest.mark.dist

SAMPLES = 42
HELD_OUT = 20


def samples(count: int = SAMPLES, seed: int = 5) -> dict[str, Tensor]:
    return dict(batch(count, seed))


def columns() -> Columns:
    return Columns(samples())


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        values = samples()
        for i in range(SAMPLES):
            yield {name: value[i] for name, value in values.items()}


class Stateful:
    """A loader with a position of its own, and a count of what it has read."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        start, self.at = self.at, 0
        for i in range(start, 3):
            self.at = i + 1
            yield samples(16, i)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "kind": "stateful"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


SOURCES: dict[str, Any] = {
    "loader of columns": lambda: DataLoader(columns(), batch_size=16, shuffle=True),
    "workers": lambda: DataLoader(columns(), batch_size=16, shuffle=True, num_workers=1),
    "stream": Stream,
    "stateful": Stateful,
}


@pytest.mark.parametrize(
    ("name", "is_async"),
    [*((name, False) for name in SOURCES), ("stateful", True)],
)
def test_training_goes_on_in_the_middle_of_an_epoch(name: str, is_async: bool, tmp_path: Path):
    """Eight steps at once, and the last three again from the checkpoint in the second of three
    batches: losses and weights are the same bits. Ranks have random states of their own.
    """
    model = with_programs(built("TwoBranch"), 2, 10, 16)
    chosen = plan(model, 2, microbatch_size=16 if is_async else 4)
    options = {"policy": "stash"} if is_async else {}

    def rank(steps: int, save: str, **further: Any) -> tuple[float, ...]:
        workload = with_options(model, data=SOURCES[name](), optimizer=sgd)
        return (train_async if is_async else train)(
            workload, chosen, captured=model.captured, check_gradients=False, steps=steps,
            save=tmp_path / save, save_every=SaveEvery(5), **options, **further,
        ).losses  # fmt: skip

    torch.manual_seed(11)
    whole = launch.run(lambda: rank(8, "whole"), 2, timeout=60.0)[0]
    saved = tmp_path / "whole" / "step-5"
    assert Checkpoint(saved).progress.position == 2
    assert launch.run(lambda: rank(3, "rest", resume=saved), 2, timeout=60.0)[0] == whole[5:]
    expected, found = (load_state_dict(tmp_path / name) for name in ("whole", "rest"))
    assert all(torch.equal(found[key], value) for key, value in expected.items())


class Counted:
    """A column of which a rank counts the samples that it reads."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.read = values, 0

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, numbers: Tensor) -> Tensor:
        self.read += len(numbers)
        return self.values[numbers]


class Weighted(Chain):
    """Labels of -100 are left out of the mean, so the last stage counts the others."""

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        scores = self.head(self.body(x))
        return F.cross_entropy(scores, torch.where(word > 4, label, -100))


def weighted() -> Built:
    torch.manual_seed(0)
    module, example = Weighted(), batch(4)
    return Built(capture(module, example), Workload(module, example))


def test_a_rank_reads_the_columns_of_its_own_stages():
    """The first reads no label and the last no input, but for the first batch, which rank 0 checks
    against one process; losses and held-out means are those of data that is read whole. The last
    stage, whose loss counts labels, reads what it counts.
    """
    model = with_programs(weighted(), 4, evaluation=True)
    chosen = plan(model, 3)
    # 32 samples of two batches, and 20 held out.
    train_values, held_out = samples(32), samples(HELD_OUT, 6)

    def rank(by_column: bool) -> tuple[tuple[float, ...], float, dict[str, int]]:
        counted = {key: Counted(value) for key, value in train_values.items()}
        others = {key: Counted(value) for key, value in held_out.items()}
        data: Any = Columns(counted, length=32)
        held: Any = Columns(others, length=HELD_OUT)
        if not by_column:
            data = DataLoader(data, 16, shuffle=False, collate_fn=list_of(data))
            held = DataLoader(held, 16, collate_fn=list_of(held))
        else:
            data = DataLoader(data, 16, shuffle=False)
        workload = with_options(model, data=data, eval_data=held, optimizer=sgd)
        run = train(workload, chosen, captured=model.captured, epochs=2)
        reads = {key: counted[key].read + others[key].read for key in counted}
        return run.losses, run.metrics["loss"], reads

    start = {key: value.clone() for key, value in model.module.state_dict().items()}

    def both() -> list[tuple[tuple[float, ...], float, dict[str, int]]]:
        found = [rank(True)]
        begin_again(model.module, start)
        return [*found, rank(False)]

    by_column, whole = zip(*launch.run(both, 3, timeout=60.0), strict=True)
    assert by_column[0][:2] == whole[0][:2]
    everything = 4 * 16 + HELD_OUT
    assert all(set(reads.values()) == {everything} for _, _, reads in whole)
    first, last = by_column[0][2], by_column[-1][2]
    assert (first["x"], last["label"]) == (everything, everything)
    assert first["label"] == 16  # of the check
    assert last["x"] == 0
    assert last["word"] == everything


def list_of(data: Columns) -> Any:
    """Samples -> a batch, by the user's own function, so that all columns are read."""
    return lambda found: {key: torch.stack([f[key] for f in found]) for key in data.column_names}
