"""CANDLE-Uno on measured responses of cell lines to drugs (GDSC2).

mutations  -> dense layers --+
copies     -> dense layers --+
short runs -> dense layers --+-- concatenate -> dense layers -> ln IC50
long runs  -> dense layers --+
counts     -> dense layers --+
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from anabranch.data.batches import shuffled
from anabranch.data.drugs import load_responses
from anabranch.models.candle_uno import CandleUno
from anabranch.models.sizes import Sizes
from anabranch.models.workload_builders import dataset_workload
from anabranch.workload import Batch, Workload


@dataclass(frozen=True)
class DrugSizes(Sizes):
    """``genes``: in each of the two branches of the cell line; ``bits``: of each fingerprint;
    ``steps``: in which the learning rate decays.
    """

    layers: int = 4
    top_layers: int = 4
    width: int = 4096
    genes: int = 4096
    bits: int = 4096
    dropout: float = 0.1
    learning_rate: float = 1e-4
    steps: int = 10_000
    seed: int = 0


PRESETS = {
    "published": DrugSizes(),
    "small": DrugSizes(
        layers=2,
        top_layers=2,
        width=256,
        genes=512,
        bits=512,
        dropout=0.0,
        learning_rate=5e-4,
        steps=1300,
    ),
}


def workload(sizes: DrugSizes, *, meta: bool = False) -> Workload:
    """CANDLE-Uno on the responses; cell lines are held out."""
    table = load_responses(sizes.genes, sizes.bits)

    def gather(rows: torch.Tensor) -> Batch:
        cell, drug = table.cell[rows], table.drug[rows]
        return {
            "inputs": [
                table.mutations[cell],
                table.copies[cell],
                table.short_runs[drug],
                table.long_runs[drug],
                table.counts[drug],
            ],
            "target": table.response[rows],
        }

    features = table.mutations, table.copies, table.short_runs, table.long_runs, table.counts
    widths = [feature.shape[1] for feature in features]
    return dataset_workload(
        "drugs",
        lambda: CandleUno(widths, sizes.width, sizes.layers, sizes.top_layers, sizes.dropout),
        gather,
        partial(shuffled, table.training),
        table.held_out,
        sizes,
        example=table.training,
        meta=meta,
        chance={"r2": 0.0},
    )
