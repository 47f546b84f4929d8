"""Drug responses as tensors."""

import pytest
import torch

from anabranch.errors import DataError
from benchmarks.datasets import drugs
from tests.benchmarks.datasets.fakes import fake_responses


def test_names_that_differ_in_signs_are_one_cell_line():
    """The tables of the package write NCI-H1299 and NCIH1299."""
    responses = fake_responses()
    assert responses.mutations.shape == (16, 12)
    assert len(responses.response) == 16 * 3


def test_ambiguous_cell_lines_are_left_out():
    """KM-H2 and KMH-2 are two cell lines, whose features cannot be told apart."""
    pairs = [("KM-H2", "a", "1"), ("KMH-2", "a", "2"), ("A-1", "a", "3")]
    assert drugs.unambiguous(pairs) == [("A1", "a", "3")]


def test_whole_cell_lines_are_held_out():
    """Two of sixteen, each with its three drugs; training has mean 0 and variance 1."""
    responses = fake_responses()
    held_out = set(responses.cell[responses.held_out].tolist())
    assert len(held_out) == 2
    assert len(responses.held_out) == 6
    assert not held_out & set(responses.cell[responses.training].tolist())
    seen = responses.response[responses.training]
    assert seen.mean().abs() < 1e-5
    assert (seen.std() - 1).abs() < 1e-5


def test_the_genes_that_differ_most_are_chosen():
    """Among the training cell lines, in the order of the table."""
    full, few = fake_responses(), fake_responses(genes=4)
    assert few.copies.shape == (16, 4)
    training = full.cell[full.training].unique()
    variance = full.copies[training].var(0)
    chosen = few.copies[training].var(0)
    assert chosen.min() >= variance.sort(descending=True).values[3] - 1e-6


def test_fingerprints_mark_runs_of_characters():
    """CCO has the runs C, O, CC, CO and CCO; C comes twice and counts once."""
    assert drugs.fingerprint("CCO", range(1, 4), 1 << 20).sum() == 5
    assert drugs.fingerprint("CCO", range(4, 7), 64).sum() == 0
    one, two = (drugs.fingerprint("CC(=O)N", range(1, 4), 64) for _ in range(2))
    assert torch.equal(one, two)


def test_a_pickle_of_another_shape_is_refused(tmp_path, monkeypatch):
    """The message names the file."""
    (tmp_path / "GDSC2_IC50.csv").write_text("CELL_LINE_NAME,DRUG_NAME,LN_IC50\na,b,1\n")
    (tmp_path / "GDSC_MUT.pkl").write_bytes(b"\x80\x04]\x94.")  # an empty list
    monkeypatch.setattr(drugs, "fetch", lambda package: tmp_path)
    with pytest.raises(DataError, match=r"GDSC_MUT\.pkl holds no table by name"):
        drugs.load_responses()
