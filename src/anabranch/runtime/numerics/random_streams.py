"""Random numbers that are a function of seed, step, operation, sample and place in the sample::

    key = hash(seed, step) --> hash with the operation --> hash with the sample --> stream
    number i of a sample in an operation = i-th number of SplitMix64 that begins at its stream

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) is a
counter hashed by two multiplications of 64-bit integers, so all numbers of a tensor are made at
once, with the same bits on every device.

A value's elements are seen as ``[before, samples, after]`` (``blocks``); a sample's are counted
through before and after. A value without samples draws from the stream of the operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MANTISSA = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    number &= _MASK
    return number - 2**64 if number >= 2**63 else number


_STEP, _TIMES_1, _TIMES_2 = _signed(_GOLDEN), _signed(_FIRST), _signed(_SECOND)


def mix(number: int) -> int:
    """SplitMix64's finaliser, on an unsigned 64-bit number."""
    number = ((number ^ number >> 30) * _FIRST) & _MASK
    number = ((number ^ number >> 27) * _SECOND) & _MASK
    return number ^ number >> 31


def step_key(seed: int, step: int) -> int:
    """Return the key of all streams of a step, as an int64."""
    return _signed(mix((mix((seed + _GOLDEN) & _MASK) + step * _GOLDEN) & _MASK))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift to the right; that of int64 repeats the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    # In place where it can be: for large masks memory is what takes the time.
    bits = _shifted(bits, 30).bitwise_xor_(bits).mul_(_TIMES_1)
    bits = _shifted(bits, 27).bitwise_xor_(bits).mul_(_TIMES_2)
    return _shifted(bits, 31).bitwise_xor_(bits)


def counters(calls: Sequence[int], place: torch.device) -> Tensor:
    """Return the start values of the streams of random operations at these calls of the model."""
    return torch.tensor([_signed((call + 1) * _GOLDEN) for call in calls], device=place)


def streams(key: Tensor, start: Tensor, counters: Tensor, samples: int) -> Tensor:
    """Streams of all random operations of a stage in a micro-batch.

    Args:
        key: ``step_key`` as an int64 tensor of shape [].
        start: the first sample's place in the batch, likewise.

    Returns:
        int64 of shape [operations, 1 + samples]: first that of the operation itself.
    """
    own = _mix(key + counters).unsqueeze(1)
    order = torch.arange(1, samples + 1, device=key.device) + start
    return torch.cat([own, _mix(own + order * _STEP)], 1)


class RandomSite(NamedTuple):
    """A stage's random operation in a micro-batch; samples in ``blocks`` may be 0."""

    streams: Tensor
    row: int
    blocks: tuple[int, int, int]
    shape: Sequence[int]

    @property
    def per_sample(self) -> int:
        """Numbers per sample."""
        return self.blocks[0] * self.blocks[2]

    def hashes(self, count: int) -> Tensor:
        """64 random bits each, of shape [samples or 1, count]."""
        samples = self.blocks[1]
        keys = self.streams[self.row, 1 : 1 + samples] if samples else self.streams[self.row, :1]
        counter = torch.arange(1, count + 1, device=keys.device) * _STEP
        return _mix(keys.unsqueeze(1) + counter)

    def _placed(self, numbers: Tensor) -> Tensor:
        """From one row per sample to the value's own shape."""
        before, samples, after = self.blocks
        rows = numbers.reshape(max(samples, 1), before, after)
        return rows.transpose(0, 1).reshape(self.shape)

    def kept(self, probability: float) -> Tensor:
        """Booleans that are true with a probability, to 32 bits; two of them from each hash."""
        halves = self.hashes(-(-self.per_sample // 2)).view(torch.int32)[:, : self.per_sample]
        # The int32 begin at -2^31; the first share of them is true.
        limit = round(probability * 2**32) - 2**31
        return self._placed(halves < limit if limit < 2**31 else halves == halves)

    def _uniform(self, count: int, dtype: torch.dtype) -> Tensor:
        """Numbers per sample in [0, 1), as ``exact_type`` of a type that holds them."""
        size = _MANTISSA.get(dtype, 24)
        return _shifted(self.hashes(count), 64 - size).to(exact_type(dtype)) * 2.0**-size

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Numbers in [0, 1), with as many bits as the type holds exactly."""
        return self._placed(self._uniform(self.per_sample, dtype).to(dtype))

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, by Box and Muller; for half precision from float32."""
        numbers = self._uniform(2 * self.per_sample, exact_type(dtype))
        first, second = numbers[:, : self.per_sample], numbers[:, self.per_sample :]
        radius = torch.sqrt(-2.0 * torch.log1p(-first))
        return self._placed((radius * torch.cos(2.0 * math.pi * second)).to(dtype))

    def integer(self, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """Integers in [low, high)."""
        numbers = _shifted(self.hashes(self.per_sample), 1) % (high - low) + low
        return self._placed(numbers.to(dtype))
