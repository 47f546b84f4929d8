"""Modules without their dropout."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from anabranch.runtime.numerics.dropout import NoDropout


class Attention(nn.MultiheadAttention):
    """As a layer of its own, with or without its weights."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__(8, 2, dropout=0.5, batch_first=True)
        self._need = need_weights

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Of a sequence to itself."""
        found: Tensor = super().forward(x, x, x, need_weights=self._need)[0]
        return found


class Packed(nn.LSTM):
    """Of sequences of two lengths."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """Their values alone."""
        packed = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        return super().forward(packed)[0].data


class Named(nn.LSTM):
    """By a call that names its arguments."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        """Without a state before."""
        none = torch.zeros(self.num_layers, len(x), self.hidden_size)
        return torch.lstm(
            input=x,
            hx=(none, none),
            params=self._flat_weights,
            has_biases=True,
            num_layers=self.num_layers,
            dropout=self.dropout,
            train=self.training,
            bidirectional=False,
            batch_first=True,
        )


RECURRENT = {"input_size": 8, "hidden_size": 8, "num_layers": 2, "dropout": 0.5}


@pytest.mark.parametrize(
    "make",
    [
        partial(nn.Dropout, 0.5),
        partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.5, batch_first=True),
        partial(Attention, need_weights=True),
        partial(Attention, need_weights=False),
        partial(nn.LSTM, **RECURRENT, batch_first=True),
        partial(nn.GRU, **RECURRENT, batch_first=True),
        partial(nn.RNN, **RECURRENT, batch_first=True),
        partial(Packed, **RECURRENT, batch_first=True),
        partial(Named, **RECURRENT, batch_first=True),
    ],
    ids=["dropout", "transformer", "weights", "fused", "lstm", "gru", "rnn", "packed", "named"],
)
def test_a_module_of_torch_computes_as_in_evaluation(make):
    """Attention and recurrent layers call their dropout where no mode sees it."""
    torch.manual_seed(0)
    module, x = make().train(), torch.randn(2, 5, 8)

    def first() -> Tensor:
        found = module(x)
        return found[0] if isinstance(found, tuple) else found

    assert not torch.equal(first(), first())
    with NoDropout():
        found = first()
    assert module.training
    module.eval()
    torch.testing.assert_close(found, first())
