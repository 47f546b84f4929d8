"""Glyphs and their names."""

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.data import glyphs
from anabranch.data.glyphs import load_glyphs, name_pieces, true_and_false_pairs, word_pieces
from anabranch.errors import DataError


@pytest.fixture(scope="module")
def data():
    return load_glyphs()


def test_every_glyph_has_ink_and_a_name(data):
    """Blanks would be pairs that nobody can tell."""
    assert len(data.names) > 5000
    assert data.images.shape == (len(data.names), 32, 32)
    assert (data.images.amax((1, 2)) > 0).all()
    assert data.pieces.shape == (len(data.names), 12, 24)
    assert (data.pieces[:, 0, 0] > 0).all()


def test_pictures_show_their_glyph(data):
    """An equals sign is the same upside up and left to right; a full stop lies low."""
    equals = data.images[data.names.index("EQUALS SIGN")]
    ink = equals.sum(1).nonzero().flatten()
    assert len(ink) < 16
    stop = data.images[data.names.index("FULL STOP")].sum(1).nonzero().flatten()
    assert stop.min() > 16


def test_whole_glyphs_are_held_out(data):
    """One in eight, none of which is trained on."""
    assert len(data.held_out) == len(data.names) // 8
    together = torch.cat([data.training, data.held_out])
    assert together.sort().values.tolist() == list(range(len(data.names)))


def test_a_word_is_itself_and_its_parts():
    """<AB> gives itself, <AB, AB>, <A, AB, B>, A and B: eight pieces and padding."""
    numbers = word_pieces("AB", 1 << 30)
    assert len(numbers) == 24
    assert sum(number > 0 for number in numbers) == 8
    shared = set(word_pieces("DOTS-12", 1 << 30)) & set(word_pieces("DOTS-14", 1 << 30))
    assert len(shared - {0}) > 10


def test_names_are_padded_with_empty_words():
    """All names have the same shape."""
    rows = name_pieces("SPACE BAR", 100)
    assert [any(row) for row in rows] == [True, True] + [False] * 10


@given(st.integers(2, 40), st.integers(0, 1000))
def test_half_of_the_pairs_are_true(count, seed):
    """Every picture twice: once with its own name, once with another glyph's of the same set."""
    rows = torch.arange(count) * 3
    pairs = true_and_false_pairs(rows, torch.Generator().manual_seed(seed))
    picture, name, belongs = pairs.unbind(1)
    assert sorted(picture.tolist()) == sorted(rows.tolist() * 2)
    assert torch.equal(picture == name, belongs == 1)
    assert set(name.tolist()) <= set(rows.tolist())
    assert belongs.sum() == count


def test_other_names_change_with_the_epoch():
    """So that they are not learned by heart; the same seed gives the same again."""
    rows = torch.arange(50)
    one, two, other = (
        true_and_false_pairs(rows, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(
        one[one[:, 0].argsort(stable=True)], other[other[:, 0].argsort(stable=True)]
    )


def test_without_matplotlib_the_way_on_is_named(monkeypatch):
    """It is an extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install matplotlib"):
        glyphs.load_glyphs()
