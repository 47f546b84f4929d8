"""Handwritten digits."""

import pytest

from anabranch.errors import DataError
from benchmarks.datasets import digits


def test_rows_become_pictures():
    """Four points and the digit a row; the first of five is held out."""
    rows = [["0", "4", "8", "16", str(i)] for i in range(6)]
    result = digits.encode(rows, side=2, brightest=16)
    assert result.images[3].tolist() == [[0, 0.25], [0.5, 1]]
    assert result.digit.tolist() == [0, 1, 2, 3, 4, 5]
    assert result.held_out.tolist() == [0, 5]
    assert result.training.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("load", "count", "side"), [(digits.load_mnist, 5000, 28), (digits.load_small_digits, 1797, 8)]
)
def test_the_real_digits(load, count, side):
    """All ten digits, in black and white. MNIST asks the registry the first time."""
    result = load()
    assert result.images.shape == (count, side, side)
    assert (result.images.min(), result.images.max()) == (0, 1)
    assert result.digit.unique().tolist() == list(range(10))
    assert result.digit[result.held_out].unique().tolist() == list(range(10))


def test_a_damaged_file_is_named(tmp_path, monkeypatch):
    """As a copy that was cut short."""
    (tmp_path / "mnist_5k.csv.gz").write_bytes(b"not gzip")
    monkeypatch.setattr(digits, "fetch", lambda package: tmp_path)
    with pytest.raises(DataError, match=r"mnist_5k\.csv\.gz cannot be read"):
        digits.load_mnist()
