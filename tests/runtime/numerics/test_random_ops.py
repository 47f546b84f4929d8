"""Random operations by their definitions, with numbers by sample."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anabranch.runtime.numerics.random_streams import step_key
from tests.runtime.numerics.by_sample import rewritten

WIDTH, LENGTH = 8, 6


def value(
    function: Callable[[Tensor], Tensor], x: Tensor, *, step: int = 0, start: int = 0
) -> Tensor:
    """What the function makes of x, at a step and from a sample on."""
    seen: list[Tensor] = []

    def look(h: Tensor) -> Tensor:
        return torch.sin(function(h))

    module = rewritten(look, len(x), tuple(x.shape[1:]))

    class Watch(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            if node.target is torch.ops.aten.sin.default:
                seen.append(self.env[node.args[0]])  # type: ignore[index]
            return super().run_node(node)

    Watch(module).run(torch.tensor(step_key(0, step)), torch.tensor(start), x)  # type: ignore[arg-type]
    return seen[0].detach()


def test_dropout_keeps_its_share_and_its_mean() -> None:
    """Each sample on its own mask; kept elements are divided by the share."""
    out = value(lambda x: F.dropout(x, 0.25), torch.ones(4, 50_000))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    torch.testing.assert_close(out.mean(1), torch.ones(4), rtol=0, atol=0.02)
    assert not torch.equal(out[0], out[1])


def test_feature_dropout_drops_whole_features() -> None:
    """All of a sample's channel, or nothing of it."""
    out = value(lambda x: F.dropout2d(x, 0.5), torch.ones(4, 500, 3, 3))
    assert set(out.sum((2, 3)).unique().tolist()) == {0.0, 18.0}
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), rtol=0, atol=0.15)


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 50_000)
    out = value(lambda h: function(h, 0.3, training=True), x)
    torch.testing.assert_close(out.mean(), torch.tensor(0.0), rtol=0, atol=0.03)
    torch.testing.assert_close(out.var(), torch.tensor(1.0), rtol=0, atol=0.05)


def test_dropout_of_everything() -> None:
    """Probability 1 gives zeros, with gradients of zero."""
    module = rewritten(lambda x: F.dropout(x, 1.0), 4, (3,))
    (loss,) = module(torch.tensor(1), torch.tensor(0), torch.ones(4, 3))
    loss.backward()
    assert loss == 0
    assert module.weight.grad == 0  # type: ignore[attr-defined]


def test_attention_without_dropped_weights_is_attention() -> None:
    """With a probability so small that nothing is dropped: causal, masked, scaled, grouped."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, LENGTH, WIDTH)
    mask = torch.rand(LENGTH, LENGTH) > 0.3
    mask.fill_diagonal_(True)
    for options in (
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": torch.randn(LENGTH, LENGTH), "scale": 0.7},
        {"enable_gqa": True},
    ):

        def attend(h: Tensor, p: float, options: dict[str, object] = options) -> Tensor:
            other = h[:, :2] if "enable_gqa" in options else h
            return F.scaled_dot_product_attention(
                h,
                other,
                other,
                dropout_p=p,
                **options,  # type: ignore[arg-type]
            )

        found = value(lambda h, attend=attend: attend(h, 1e-12), x)  # type: ignore[misc]
        torch.testing.assert_close(found, attend(x, 0.0))


def test_attention_drops_weights() -> None:
    """Values of ones: each row is the sum of what is kept, 1 in the mean."""
    x = torch.ones(4, 2, 40, 3)
    out = value(lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5), x)
    torch.testing.assert_close(out.mean(), torch.tensor(1.0), rtol=0, atol=0.05)
    assert len(out[..., 0].unique()) > 10
    torch.testing.assert_close(out[..., 0] * 20, (out[..., 0] * 20).round())


def test_bernoulli_follows_its_probabilities() -> None:
    x = torch.full((4, 20_000), 0.2)
    torch.testing.assert_close(
        value(torch.bernoulli, x).mean(), torch.tensor(0.2), rtol=0, atol=0.01
    )
