"""Code with the same values in place of library code that tracing cannot follow; ``multimodal`` has
that for its own models.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from anabranch.device.kinds import CPU
from anabranch.graph.module_state import with_attributes
from anabranch.graph.tracing.adaptive_softmax import without_questions
from anabranch.graph.tracing.ctc_loss import traceable
from anabranch.graph.tracing.patches import depends_on_batch


def _broadcast(masking: Any) -> Callable[..., Any]:
    """``torch.vmap`` over the four dimensions of a mask is broadcasting, where the mask's function
    works on whatever indices it is given, as those of transformers do.
    """

    def expansion(mask_function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *indices: mask_function(*masking._non_vmap_expansion_sdpa(*indices))

    return expansion


def _masked_select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values[mask]``, of which the tracer knows that one mask always chooses as many."""
    shape = torch.broadcast_shapes(values.shape, mask.shape)  # type: ignore[no-untyped-call]
    values = values if values.shape == shape else values.expand(shape)
    return values[mask if mask.shape == shape else mask.expand(shape)]


def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """``bincount`` of classes that are counted; a batch with a larger entry fails at the view."""
    counts = torch.ops.aten.bincount(input, weights, minlength)
    return counts.view(minlength) if minlength > 1 else counts


def _contiguous(tensor: Any, memory_format: Any = torch.contiguous_format) -> Any:
    """``contiguous``, a call of what is so already too, as ``h0.expand(1, n, d)`` of one sample."""
    return torch.ops.aten.contiguous(tensor, memory_format=memory_format)


def _unless_moved(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``Module.to`` and the like, without writes where all tensors have that device and type."""

    def applied(self: nn.Module, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with disable_proxy_modes_tracing():
            tensors = [*self.parameters(), *self.buffers()]
            if all(change(tensor) is tensor for tensor in tensors):
                return self
        return apply(self, change, *args, **kwargs)

    return applied


def _on_real_device(construct: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast`` of the device type of a tensor on the meta device, which has none."""

    def constructed(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        kind = CPU if device_type == "meta" else device_type
        construct(self, kind, *args, **kwargs)

    return constructed


def _never(_: Any) -> Callable[[], bool]:
    return lambda: False


def _causal_if_known(transformer: Any) -> Callable[..., bool]:
    """True for the causal mask, for which ``nn.Transformer`` takes a faster kernel; False for one
    in a buffer, whose values a trace does not know: the kernel for any mask is right as well.
    """

    detect: Callable[..., bool] = transformer._detect_is_causal_mask

    def detected(mask: torch.Tensor | None, is_causal: bool | None, *size: Any) -> bool:
        if depends_on_batch(mask):
            return is_causal is True
        if mask is None or isinstance(mask, FakeTensor):
            return detect(mask, is_causal, *size)
        with unset_fake_temporarily(), disable_proxy_modes_tracing():  # kept in an attribute
            return detect(mask, is_causal, *size)

    return detected


_RULES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    # Gemma3: masks that let the tokens of one image see each other.
    ("transformers.masking_utils", "_vmap_expansion_sdpa", _broadcast),
    ("transformers.masking_utils", "TransformGetItemToIndex", lambda _: contextlib.nullcontext),
    # Masks that a call without tracing does without, as no value of the batch is in them.
    ("transformers.masking_utils", "is_torchdynamo_exporting", _never),
    ("transformers.masking_utils", "is_tracing", lambda _: depends_on_batch),
    # Encoders that make a mask where none is given, and need it, but not while they are compiled.
    *(
        (f"transformers.models.{name}.modeling_{name}", "is_torchdynamo_compiling", _never)
        for name in ("longt5", "pop2piano", "switch_transformers", "udop")
    ),
    ("torch.nn.modules.transformer", "_detect_is_causal_mask", _causal_if_known),
    ("torch.nn.functional", "ctc_loss", lambda functional: traceable(functional.ctc_loss)),
    # Order in memory of every value, which nobody reads and symbolic sizes take long to tell.
    ("torch.fx.experimental.proxy_tensor", "_extract_tensor_metadata", lambda _: lambda _: None),
)
"""Module, a name in it, and the module -> what the name stands for while a forward is traced."""


def library_rules(*, dynamic: bool = True) -> contextlib.AbstractContextManager[None]:
    """Context manager that puts code with the same values in place of library code that cannot be
    traced. Without ``dynamic``, a trace for one number of samples makes the calls of others.
    """
    loaded = [(sys.modules.get(name), key, make) for name, key, make in _RULES]
    # Other versions of a library may not have a name.
    rules: list[tuple[Any, str, Any]] = [
        (owner, key, make(owner)) for owner, key, make in loaded if hasattr(owner, key)
    ]
    for name, call in (("masked_select", _masked_select), ("bincount", _bincount)):
        rules += [(owner, name, call) for owner in (torch, torch.Tensor)]
    rules += [] if dynamic else [(torch.Tensor, "contiguous", _contiguous)]
    # transformers' own, which leaves no trace of a region that is disabled where none is around it.
    name = "maybe_autocast"
    if theirs := getattr(sys.modules.get("transformers.utils.generic"), name, None):
        modules = [*sys.modules.values()]  # some are None: those whose import is blocked
        asking = [m for m in modules if getattr(m, "__dict__", {}).get(name) is theirs]
        rules += [(module, name, torch.autocast) for module in asking]
    changed = (
        (torch.autocast, "__init__", _on_real_device),
        (nn.Module, "_apply", _unless_moved),
        (nn.AdaptiveLogSoftmaxWithLoss, "forward", without_questions),
    )
    rules += [(owner, key, make(getattr(owner, key))) for owner, key, make in changed]
    return with_attributes(rules)
