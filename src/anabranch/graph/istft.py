"""``torch.istft`` of operations that a trace can follow.

PyTorch's own looks at the values of the window, which a trace does not have, only to raise.
"""

from __future__ import annotations

from torch import Tensor, fft
from torch.nn import functional as F


def istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Signal of a spectrogram, [..., frequencies, frames] -> [..., samples], as ``torch.istft``."""
    if return_complex:
        raise NotImplementedError("istft with return_complex=True cannot be captured")
    hop, size = hop_length or n_fft // 4, win_length or n_fft
    window = input.real.new_ones(size) if window is None else window
    left = (n_fft - size) // 2
    window = F.pad(window, (left, n_fft - size - left))
    half = input[..., : n_fft // 2 + 1, :].transpose(-2, -1)  # of one with two sides
    parts = fft.irfft(half, n_fft, norm="ortho" if normalized else "backward")
    count = input.shape[-1]
    total = n_fft + hop * (count - 1)

    def added(parts: Tensor) -> Tensor:
        """Sum of the frames where they overlap, [..., frames, n_fft] -> [..., total]."""
        columns = parts.reshape(-1, count, n_fft).transpose(1, 2)
        signals = F.fold(columns, (1, total), (1, n_fft), stride=(1, hop))
        return signals.reshape(*parts.shape[:-2], total)

    begin = n_fft // 2 if center else 0
    end = total - begin if length is None else begin + length
    weights = added(window.square().expand(count, n_fft))
    signal = added(parts * window)[..., begin:end] / weights[begin:end]
    return F.pad(signal, (0, max(end - total, 0)))
