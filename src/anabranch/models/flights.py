"""DLRM on the flights from New York: will this one be more than 15 minutes late?

schedule   -> dense layers ----+
weather    -> dense layers ----+
carrier    -> embedding -------+-- concatenate -> dense layers -> late or not
...                            |
flight     -> embedding -------+
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from anabranch.data.batches import shuffled
from anabranch.data.flights import load_flights
from anabranch.models.dlrm import DLRM
from anabranch.models.sizes import Sizes
from anabranch.models.workload_builders import dataset_workload
from anabranch.workload import Batch, Workload


@dataclass(frozen=True)
class FlightSizes(Sizes):
    """``layers``: in a dense branch; ``embedding``: width of every table;
    ``steps``: in which the learning rate decays.
    """

    layers: int = 4
    top_layers: int = 3
    width: int = 4096
    embedding: int = 64
    dropout: float = 0.1
    learning_rate: float = 1e-4
    steps: int = 10_000
    seed: int = 0


PRESETS = {
    "published": FlightSizes(),
    "small": FlightSizes(
        layers=3, top_layers=2, width=128, embedding=16, dropout=0.0, learning_rate=1e-3, steps=1000
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

    share = flights.late[flights.held_out].mean().item()
    return dataset_workload(
        "flights",
        make,
        gather,
        partial(shuffled, flights.training),
        flights.held_out,
        sizes,
        example=flights.training,
        meta=meta,
        chance={"accuracy": max(share, 1 - share)},
    )
