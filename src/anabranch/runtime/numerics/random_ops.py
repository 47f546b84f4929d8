"""ATen's random operations by their definitions, with numbers from streams (``RandomSite``).

Each takes a site, then the operation's own arguments; ``DRAWS`` has them by name. All are in
training: a call out of training draws nothing (``dropout.draws``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch.runtime.numerics.random_streams import RandomSite, exact_type


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
    """Dropout that returns what it kept as well."""
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
    """Attention with its weights in memory, where they are dropped."""
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
    """Ones with a probability: that given, or x itself."""
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
    """``torch.normal`` of tensors."""
    dtype = next(t.dtype for t in (mean, std) if isinstance(t, Tensor))
    return site.normal(dtype) * std + mean


def exponential(site: RandomSite, x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    """Exponential and above zero, whose logarithm Gumbel noise takes."""
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
    """The operation that changes its first argument; views of it see the change."""

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
    "aten::bernoulli_": _in_place(bernoulli),
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
"""By name of the ATen operation; all others that draw cannot be had by sample."""
