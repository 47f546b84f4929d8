"""Options of a model, as typed on the command line."""

from dataclasses import dataclass

import pytest

from anabranch.models.sizes import with_options


@dataclass(frozen=True)
class Sizes:
    layers: int = 4
    dropout: float = 0.0
    tied: bool = False
    pooling: str = "sum"


def test_text_becomes_the_type_of_the_field():
    """The command line knows text only."""
    options = {"layers": "8", "dropout": "0.5", "tied": "true", "pooling": "mean"}
    assert with_options(Sizes(), options, "m") == Sizes(8, 0.5, True, "mean")


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("layer", "8", "m has no option layer; it has layers=4, dropout=0.0, tied=False"),
        ("layers", "many", "option layers=many: write a whole number, such as layers=4"),
        ("layers", "2.5", "write a whole number"),
        ("layers", "-1", "must be finite and not negative"),
        ("dropout", "nan", "must be finite"),
        ("tied", "maybe", "write true or false"),
    ],
)
def test_what_does_not_fit_is_refused(key, text, message):
    """The message shows what would fit."""
    with pytest.raises(ValueError, match=message):
        with_options(Sizes(), {key: text}, "m")
