"""Random numbers that are a function of seed, step, operation, sample and place in the sample::

    key = hash(seed, step) --> hash with the operation --> hash with the sample --> stream
    number i of a sample in an operation = i-th number of SplitMix64 that begins at its stream

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) is a
counter hashed by two multiplications of 64-bit integers, so all numbers of a tensor are made at
once, with the same bits on every device.

A value is seen as ``[before, samples, after]`` (``blocks``); the elements of a sample are numbered
over before and after. A value without samples draws from the stream of the operation.

ATen's random operations follow by their definitions; ``DRAWS`` has them by name. Each takes a site
(``RandomSite``), then the operation's own arguments. All are in training mode: a call out of
training draws nothing (``dropout.draws``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MANTISSA = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _signed(number: int) -> int:
    """Return the int64 with the same 64 bits."""
    number &= _MASK
    return number - 2**64 if number >= 2**63 else number


_STEP, _TIMES_1, _TIMES_2 = _signed(_GOLDEN), _signed(_FIRST), _signed(_SECOND)


def mix(number: int) -> int:
    """Apply SplitMix64's finaliser to an unsigned 64-bit number."""
    number = ((number ^ number >> 30) * _FIRST) & _MASK
    number = ((number ^ number >> 27) * _SECOND) & _MASK
    return number ^ number >> 31


def step_key(seed: int, step: int) -> int:
    """Return the key of all streams of a step, as an int64."""
    return _signed(mix((mix((seed + _GOLDEN) & _MASK) + step * _GOLDEN) & _MASK))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift to the right without sign, unlike the shift of int64."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    # In place where possible: for large masks memory takes the time.
    bits = _shifted(bits, 30).bitwise_xor_(bits).mul_(_TIMES_1)
    bits = _shifted(bits, 27).bitwise_xor_(bits).mul_(_TIMES_2)
    return _shifted(bits, 31).bitwise_xor_(bits)


def counters(calls: Sequence[int], device: torch.device) -> Tensor:
    """Return the start values of the streams of random operations at these calls of the model."""
    return torch.tensor([_signed((call + 1) * _GOLDEN) for call in calls], device=device)


def streams(key: Tensor, start: Tensor, counters: Tensor, samples: int) -> Tensor:
    """Return the streams of all random operations of a stage in a micro-batch.

    Args:
        key: ``step_key`` as an int64 tensor of shape [].
        start: place of the first sample in the batch, as an int64 tensor of shape [].

    Returns:
        int64 of shape [operations, 1 + samples]: the stream of the operation itself comes first.
    """
    own = _mix(key + counters).unsqueeze(1)
    order = torch.arange(1, samples + 1, device=key.device) + start
    return torch.cat([own, _mix(own + order * _STEP)], 1)


class RandomSite(NamedTuple):
    """A random operation of a stage in a micro-batch.

    Attributes:
        streams: see the function ``streams``; ``row`` is the row of this operation.
        blocks: (before, samples, after), with 0 samples for a value without samples.
    """

    streams: Tensor
    row: int
    blocks: tuple[int, int, int]
    shape: Sequence[int]

    @property
    def per_sample(self) -> int:
        return self.blocks[0] * self.blocks[2]

    def hashes(self, count: int) -> Tensor:
        """Return numbers of 64 random bits, of shape [samples or 1, count]."""
        samples = self.blocks[1]
        keys = self.streams[self.row, 1 : 1 + samples] if samples else self.streams[self.row, :1]
        counter = torch.arange(1, count + 1, device=keys.device) * _STEP
        return _mix(keys.unsqueeze(1) + counter)

    def _placed(self, numbers: Tensor) -> Tensor:
        """Reshape numbers from one row per sample to the shape of the value."""
        before, samples, after = self.blocks
        rows = numbers.reshape(max(samples, 1), before, after)
        return rows.transpose(0, 1).reshape(self.shape)

    def kept(self, probability: float) -> Tensor:
        """Return booleans that are true with a probability, to 32 bits; each hash makes two."""
        halves = self.hashes(-(-self.per_sample // 2)).view(torch.int32)[:, : self.per_sample]
        # Numbers of int32 begin at -2^31; the lowest ones, by the probability, are true.
        limit = round(probability * 2**32) - 2**31
        return self._placed(halves < limit if limit < 2**31 else halves == halves)

    def _uniform(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return numbers per sample in [0, 1) that a type holds exactly, as its ``exact_type``."""
        size = _MANTISSA.get(dtype, 24)
        return _shifted(self.hashes(count), 64 - size).to(exact_type(dtype)) * 2.0**-size

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return numbers in [0, 1), with as many bits as the type holds exactly."""
        return self._placed(self._uniform(self.per_sample, dtype).to(dtype))

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return standard normal numbers, by Box and Muller; for half precision from float32."""
        numbers = self._uniform(2 * self.per_sample, exact_type(dtype))
        first, second = numbers[:, : self.per_sample], numbers[:, self.per_sample :]
        radius = torch.sqrt(-2.0 * torch.log1p(-first))
        return self._placed((radius * torch.cos(2.0 * math.pi * second)).to(dtype))

    def integer(self, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """Return integers in [low, high)."""
        numbers = _shifted(self.hashes(self.per_sample), 1) % (high - low) + low
        return self._placed(numbers.to(dtype))


def draw(
    name: str,
    streams: Tensor,
    row: int,
    blocks: tuple[int, int, int],
    shape: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a random operation at a site; a stage's graph calls this."""
    return DRAWS[name](RandomSite(streams, row, blocks, shape), *args, **kwargs)


def native_dropout(site: RandomSite, x: Tensor, p: float, *_: Any) -> tuple[Tensor, Tensor]:
    """Dropout that returns its mask as well."""
    keep = site.kept(1.0 - p)
    return torch.where(keep, x * (0.0 if p >= 1.0 else 1.0 / (1.0 - p)), 0.0), keep


def dropout(site: RandomSite, x: Tensor, p: float, *_: Any) -> Tensor:
    """Zero with probability p, the rest scaled up; a shape with ones drops whole features."""
    return native_dropout(site, x, p)[0]


def alpha_dropout(site: RandomSite, x: Tensor, p: float, *_: Any) -> Tensor:
    """Dropout that keeps mean and variance under SELU (Klambauer and others, 2017)."""
    if p >= 1.0:
        return dropout(site, x, p)
    alpha = 1.7580993408473766
    scale = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    shift = alpha * scale * p
    return torch.where(site.kept(1.0 - p), x * scale + shift, shift - alpha * scale)


def attention(
    site: RandomSite,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose weights are computed as a tensor, for dropout."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        size = query.size(-2), key.size(-2)
        attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    return torch.matmul(dropout(site, weights, dropout_p), value)


def bernoulli(site: RandomSite, x: Tensor, p: float | Tensor | None = None, **_: Any) -> Tensor:
    """Ones with a probability: ``p``, or x itself."""
    if isinstance(p, Tensor) or p is None:
        probability = x if p is None else p
        return (site.uniform(exact_type(probability.dtype)) < probability).to(x.dtype)
    return site.kept(p).to(x.dtype)


def rrelu(
    site: RandomSite,
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    *_: Any,
    **__: Any,
) -> Tensor:
    """ReLU whose negative side has random slopes."""
    slope = site.uniform(x.dtype) * (upper - lower) + lower
    return torch.where(x <= 0, x * slope, x)


def uniform(site: RandomSite, x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    """Between two numbers, of the type of x."""
    return site.uniform(x.dtype) * (high - low) + low


def normal(site: RandomSite, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    """Normal, of the type of x."""
    return site.normal(x.dtype) * std + mean


def normal_of(
    site: RandomSite, mean: Tensor | float, std: Tensor | float = 1.0, *_: Any, **__: Any
) -> Tensor:
    dtype = next(t.dtype for t in (mean, std) if isinstance(t, Tensor))
    return site.normal(dtype) * std + mean


def exponential(site: RandomSite, x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    """Exponential, and above zero, since Gumbel noise takes the logarithm."""
    exact = exact_type(x.dtype)
    numbers = site.uniform(exact).clamp_min(torch.finfo(exact).eps / 2)
    return (-torch.log1p(-numbers) / rate).to(x.dtype)


def rand(site: RandomSite, like: object, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Uniform, of a size or like a tensor."""
    return site.uniform(dtype or _own_type(like))


def randn(site: RandomSite, like: object, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Normal, of a size or like a tensor."""
    return site.normal(dtype or _own_type(like))


def _own_type(like: object) -> torch.dtype:
    return like.dtype if isinstance(like, Tensor) else torch.get_default_dtype()


def randint(site: RandomSite, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """``randint(high, size)`` or ``randint(low, high, size)``."""
    low, high = args[:2] if len(args) == 3 else (0, args[0])
    return site.integer(low, high, dtype or torch.int64)


def randint_like(
    site: RandomSite, x: Tensor, *limits: int, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """``randint_like(x, high)`` or ``randint_like(x, low, high)``."""
    low, high = limits if len(limits) == 2 else (0, limits[0])
    return site.integer(low, high, dtype or x.dtype)


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the operation that changes its first argument; views of it see the change."""

    def write(site: RandomSite, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(function(site, x, *args, **kwargs))

    return write


DRAWS: Mapping[str, Callable[..., Any]] = {
    "aten::dropout": dropout,
    "aten::dropout_": _in_place(dropout),
    "aten::feature_dropout": dropout,
    "aten::feature_dropout_": _in_place(dropout),
    "aten::native_dropout": native_dropout,
    "aten::alpha_dropout": alpha_dropout,
    "aten::alpha_dropout_": _in_place(alpha_dropout),
    "aten::feature_alpha_dropout": alpha_dropout,
    "aten::feature_alpha_dropout_": _in_place(alpha_dropout),
    "aten::scaled_dot_product_attention": attention,
    "aten::bernoulli": bernoulli,
    "aten::bernoulli_": _in_place(lambda site, x, p=0.5, **_: bernoulli(site, x, p)),
    "aten::rrelu": rrelu,
    "aten::rrelu_": _in_place(rrelu),
    "aten::uniform": uniform,
    "aten::uniform_": _in_place(uniform),
    "aten::normal": normal_of,
    "aten::normal_": _in_place(normal),
    "aten::exponential_": _in_place(exponential),
    "aten::rand": rand,
    "aten::rand_like": rand,
    "aten::randn": randn,
    "aten::randn_like": randn,
    "aten::randint": randint,
    "aten::randint_like": randint_like,
}
"""Name of an ATen operation -> its function; other random operations cannot draw by sample."""
