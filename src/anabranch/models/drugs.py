"""How does this cell line respond to this drug? CANDLE-Uno on measured responses (GDSC2).

mutations  -> dense layers --+
copies     -> dense layers --+
short runs -> dense layers --+-- concatenate -> dense layers -> ln IC50
long runs  -> dense layers --+
counts     -> dense layers --+
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from anabranch.data.batches import batches, shuffled, whole_batches
from anabranch.data.drugs import load_responses
from anabranch.models.candle_uno import CandleUno
from anabranch.models.sizes import at_least_one
from anabranch.models.synthetic_data import seeded
from anabranch.models.workload_builders import EXAMPLE_SAMPLES, adam, initialised
from anabranch.workload import Batch, Workload, to_meta


@dataclass(frozen=True)
class DrugSizes:
    """``genes``: in each of the two branches of the cell line; ``bits``: of each fingerprint."""

    layers: int = 4
    top_layers: int = 4
    width: int = 4096
    genes: int = 4096
    bits: int = 4096
    dropout: float = 0.1
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(self, "layers", "width", "genes", "bits")


PRESETS = {
    "published": DrugSizes(),
    "small": DrugSizes(
        layers=2, top_layers=2, width=256, genes=512, bits=512, dropout=0.0, learning_rate=5e-4
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

    def data(batch_size: int, epoch: int) -> Iterator[Batch]:
        order = shuffled(table.training, seeded(sizes.seed, epoch))
        return whole_batches(gather, order, batch_size)

    example = gather(table.training[:EXAMPLE_SAMPLES])
    widths = [features.shape[1] for features in example["inputs"]]
    make = partial(CandleUno, widths, sizes.width, sizes.layers, sizes.top_layers, sizes.dropout)
    return Workload(
        module=initialised(make, sizes.seed, meta=meta),
        example=to_meta(example) if meta else example,
        data=data,
        eval_data=lambda batch_size: batches(gather, table.held_out, batch_size),
        optimizer=partial(adam, learning_rate=sizes.learning_rate),
        chance={"r2": 0.0},
        name="drugs",
    )
