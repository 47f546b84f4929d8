"""Will this flight be more than 15 minutes late? DLRM on the flights from New York.

schedule   -> dense layers ----+
weather    -> dense layers ----+
carrier    -> embedding -------+-- concatenate -> dense layers -> late or not
...                            |
flight     -> embedding -------+
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from anabranch.data.batches import batches, shuffled, whole_batches
from anabranch.data.flights import load_flights
from anabranch.models.dlrm import DLRM
from anabranch.models.sizes import at_least_one
from anabranch.models.synthetic_data import seeded
from anabranch.models.workload_builders import EXAMPLE_SAMPLES, adam, initialised
from anabranch.workload import Batch, Workload, to_meta


@dataclass(frozen=True)
class FlightSizes:
    """``layers``: in a dense branch; ``embedding``: width of every table."""

    layers: int = 4
    top_layers: int = 3
    width: int = 4096
    embedding: int = 64
    dropout: float = 0.1
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(self, "layers", "width", "embedding")


PRESETS = {
    "published": FlightSizes(),
    "small": FlightSizes(
        layers=3, top_layers=2, width=128, embedding=16, dropout=0.0, learning_rate=1e-3
    ),
}


def workload(sizes: FlightSizes, *, meta: bool = False) -> Workload:
    """DLRM on the flights; days are held out, and half of the flights of either part are late."""
    flights = load_flights()

    def gather(rows: torch.Tensor) -> Batch:
        return {
            "dense": [flights.schedule[rows], flights.weather[rows]],
            "sparse": [column[rows] for column in flights.sparse],
            "target": flights.late[rows],
        }

    def data(batch_size: int, epoch: int) -> Iterator[Batch]:
        order = shuffled(flights.training, seeded(sizes.seed, epoch))
        return whole_batches(gather, order, batch_size)

    def make() -> DLRM:
        return DLRM(
            [flights.schedule.shape[1], flights.weather.shape[1]],
            flights.tables,
            width=sizes.width,
            layers=sizes.layers,
            top_layers=sizes.top_layers,
            embedding=sizes.embedding,
            dropout=sizes.dropout,
        )

    example = gather(flights.training[:EXAMPLE_SAMPLES])
    share = flights.late[flights.held_out].mean().item()
    return Workload(
        module=initialised(make, sizes.seed, meta=meta),
        example=to_meta(example) if meta else example,
        data=data,
        eval_data=lambda batch_size: batches(gather, flights.held_out, batch_size),
        optimizer=partial(adam, learning_rate=sizes.learning_rate),
        chance={"accuracy": max(share, 1 - share)},
        name="flights",
    )
