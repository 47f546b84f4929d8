from __future__ import annotations

from typing import Any

import pytest
import torch

from anabranch.graph.capture import capture
from anabranch.graph.istft import istft
from tests.graph.chain import check_split
from tests.graph.nets import Net, batch, stage_each

HANN, HAMMING = torch.hann_window(16), torch.hamming_window(16)


@pytest.mark.parametrize(
    "options",
    [
        {"window": HANN},
        {"window": torch.hamming_window(12), "win_length": 12, "normalized": True},
        {"window": HANN, "hop_length": 8, "length": 60},
        {"window": HANN, "length": 70},
        {"window": HAMMING, "center": False},
        {"window": HAMMING, "onesided": False},
    ],
    ids=["plain", "short window", "shorter", "padded", "no centre", "two sides"],
)
def test_signal_and_gradient_are_those_of_torch(options: dict[str, Any]) -> None:
    """For each option, also where the end is padded, with samples and without."""
    torch.manual_seed(0)
    given = {key: value for key, value in options.items() if key != "length"}
    for shape in ((2, 64), (64,)):
        spectrum = torch.stft(torch.randn(shape), 16, return_complex=True, **given)
        spectrum.requires_grad_()
        signals = [inverse(spectrum, 16, **options) for inverse in (torch.istft, istft)]
        torch.testing.assert_close(signals[1], signals[0])
        gradients = [torch.autograd.grad(s.square().sum(), spectrum)[0] for s in signals]
        torch.testing.assert_close(gradients[1], gradients[0])


def test_it_is_captured() -> None:
    """As a function and as a method of tensors."""

    def body(_: Net, h: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(h, 4, window=torch.ones(4), return_complex=True)
        return torch.istft(spectrum * 2, 4, window=torch.ones(4)) + spectrum.istft(
            4, window=torch.ones(4)
        )

    captured = capture(Net(body), batch())
    assert check_split(captured, batch(), stage_each(captured), exact=False) < 1e-5
