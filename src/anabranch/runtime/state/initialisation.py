"""Values for a module that was built on the meta device, tensor by tensor, the same under any plan.

A module on the meta device has sizes but no weights, so every rank can build the whole of it and
hold only its own stages::

    with torch.device("meta"):        rank 0   embedding, blocks.0          values
        module = Model()                       blocks.1, head               none
                                      rank 1   embedding, blocks.0          none
                                               blocks.1, head               values

A constructor that ran on the meta device cannot be repeated for one layer, but layers can
initialise themselves. A tensor of layer P gets its values from

1. ``P.reset_parameters()``, as torch's own layers have it, or ``P._reset_parameters()``;
2. the same method of the modules around P, from the inner to the outer ones, which may change it;
3. ``_init_weights(P)`` of the nearest module around it, as transformers and many models have it.

All of it on the CPU, from a seed that is made of the run's and of P's name. So values depend on the
layer and on nothing else. What a constructor does to the tensors of its parts by other means is not
repeated. Of a tensor that several layers share the first one, in the model's order, decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from anabranch.errors import TrainingError
from anabranch.graph.capture import Captured

SEEDS = 2**62
"""Bound of the seeds of a run, which travel in an int64; torch's own seeds may be larger."""

_CPU = torch.device("cpu")


def meta_names(module: nn.Module) -> list[str]:
    """Return the first names of parameters and buffers without values."""
    named = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in named if tensor.is_meta]


def materialise(
    module: nn.Module,
    names: Collection[str] | None = None,
    *,
    seed: int,
    device: torch.device = _CPU,
) -> list[str]:
    """Give parameters and buffers that are on the meta device memory and values.

    The module gets other ``Parameter`` objects in their place, the same one wherever one is shared.

    Args:
        names: names among ``meta_names``; all by default.
        seed: the same on all ranks.
        device: device of the new tensors.

    Returns:
        Names of tensors that no layer has initialised; they are NaN.

    Raises:
        TrainingError: if an initialisation raised.
    """
    wanted = set(meta_names(module) if names is None else names)
    made: dict[int, Tensor] = {}
    without = []
    for path, leaves in _layers(module).items():
        names_here = {leaf: name for leaf, name in leaves.items() if name in wanted}
        if not names_here:
            continue
        layer = module.get_submodule(path)
        with _real(layer) as filled:
            _initialise(module, path, seed)
        for leaf, name in names_here.items():
            if _is_blank(filled[leaf]):
                without.append(name)
            original = getattr(layer, leaf)
            made[id(original)] = _like(original, filled[leaf].detach().to(device))
    for layer in module.modules():
        for table in (layer._parameters, layer._buffers):
            for leaf, tensor in table.items():
                if tensor is not None and id(tensor) in made:
                    table[leaf] = made[id(tensor)]  # type: ignore[assignment]
    return without


def require_values(module: nn.Module, without: Collection[str]) -> None:
    """Raise a TrainingError where ``materialise`` has left tensors without values."""
    if not without:
        return
    name = sorted(without)[0]
    path, _, leaf = name.rpartition(".")
    kind = type(module.get_submodule(path)).__name__
    raise TrainingError(
        f"the model was built on the meta device, and {len(without)} of its tensors on this rank "
        f"have no initialisation that could be repeated, such as {name}: {kind} fills {leaf} "
        f"elsewhere than in a method reset_parameters; give {kind} such a method (torch's own "
        "layers have one), or _init_weights to the model, or resume from a checkpoint, or build "
        "the model on the CPU"
    )


def require_constants(captured: Captured, device: torch.device) -> None:
    """Raise a TrainingError where the forward reads tensors that are neither parameters nor buffers
    and were made on the meta device.
    """
    programs = captured.programs
    for name, value in programs.at(programs.samples, device=device).constants.items():
        if value.is_meta:
            raise TrainingError(
                f"the model was built on the meta device, and its forward reads a tensor of shape "
                f"{list(value.shape)} ({name}) that is neither parameter nor buffer, so nothing "
                "can give it values; make it in the forward, register it as a buffer that a "
                "method reset_parameters fills, or build the model on the CPU"
            )


def _layers(module: nn.Module) -> Mapping[str, Mapping[str, str]]:
    """Return path of a layer -> name of its tensor without values -> first name in the model."""
    layers: dict[str, dict[str, str]] = {}
    for name in meta_names(module):
        path, _, leaf = name.rpartition(".")
        layers.setdefault(path, {})[leaf] = name
    return layers


@contextmanager
def _real(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield blank tensors on the CPU that stand in for a layer's tensors on the meta device inside;
    afterwards they have the values that the layer has given them.
    """
    registered = {**layer._parameters, **layer._buffers}
    real = {n: _like(t, _blank(t)) for n, t in registered.items() if t is not None and t.is_meta}
    with _reparametrize_module(layer, real):
        yield real


def _like(original: Tensor, values: Tensor) -> Tensor:
    if not isinstance(original, nn.Parameter):
        return values
    return nn.Parameter(values, requires_grad=original.requires_grad)


def _blank(like: Tensor) -> Tensor:
    """Return memory without values: NaN, or zeros where the type has none."""
    has_nan = like.is_floating_point() or like.is_complex()
    return torch.full_like(like, torch.nan if has_nan else 0, device=_CPU)


def _is_blank(tensor: Tensor) -> bool:
    """Return True if any element has never been written; of whole numbers, if none has."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor._version == 0


def _initialise(module: nn.Module, path: str, seed: int) -> None:
    """Run the initialisation of one layer, whose tensors are real."""
    parts = path.split(".") if path else []
    around = [
        module.get_submodule(".".join(parts[:length])) for length in reversed(range(len(parts) + 1))
    ]
    layer = around[0]
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Not torch.manual_seed, which would seed GPUs as well.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
        try:
            for part in around:
                reset = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
                if callable(reset):
                    with _real(part):
                        reset()
            general = next((part for part in around if hasattr(part, "_init_weights")), None)
            if general is not None:
                general._init_weights(layer)  # type: ignore[operator]
        except Exception as error:
            raise TrainingError(
                f"the initialisation of {path or 'the model'} ({type(layer).__name__}), which was "
                f"built on the meta device, raised {type(error).__name__}: {error}; it can only "
                "use tensors of the layer itself and of the module that it is a method of; correct "
                "it, or build the model on the CPU"
            ) from error
