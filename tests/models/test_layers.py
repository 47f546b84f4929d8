"""The shared layers against PyTorch's own."""

import pytest
import torch
from torch import nn

from anabranch.models.layers import Attention, DenseLayer, TransformerLayer


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_pytorch(causal):
    """Same weights, same result as nn.MultiheadAttention."""
    ours, theirs = Attention(12, 3, causal=causal), nn.MultiheadAttention(12, 3, batch_first=True)
    projections = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x = torch.randn(2, 5, 12)
    hidden = torch.ones(5, 5).triu(1).bool() if causal else None
    expected, _ = theirs(x, x, x, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(ours(x), expected)


def test_causal_layers_do_not_see_ahead():
    """Changing the last position changes no other."""
    layer = TransformerLayer(8, 2, 16, causal=True)
    x = torch.randn(1, 4, 8)
    changed = torch.cat([x[:, :3], torch.randn(1, 1, 8)], 1)
    torch.testing.assert_close(layer(x)[:, :3], layer(changed)[:, :3])


def test_dense_layers_keep_the_variance():
    """Twenty of them in line neither fade nor explode: so they are initialised."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    for _ in range(20):
        x = DenseLayer(256, 256)(x)
    assert 0.1 < x.square().mean().item() < 10


def test_dropout_acts_in_training_only():
    """Evaluation is deterministic."""
    layer = DenseLayer(16, 16, dropout=0.5)
    x = torch.randn(4, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
