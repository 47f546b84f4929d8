"""Export of a user's module, or an error that says where and why it cannot be.

``torch.export`` is tried in three ways: without Python analysis and with a symbolic batch size, the
same with the batch size fixed, and with full Python analysis. The first loses the backward of a
custom ``autograd.Function`` that is no operator (``custom_functions``), and
``torch.utils.checkpoint`` or, if reentrant, its gradients; it stops at derivatives inside of the
forward, and at ``torch.vmap``, with errors of its own. So calls are watched (``lost_calls``).
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from anabranch.data.packed import call_module, unfit_arguments
from anabranch.errors import CaptureError, shadowed, warn
from anabranch.graph.module_state import layer_dropout, without_keeping
from anabranch.graph.tracing import patches
from anabranch.graph.tracing.attributes_read import AttributesRead
from anabranch.graph.tracing.empty_selections import EmptySelections
from anabranch.graph.tracing.equal_masks import EqualMasks
from anabranch.graph.tracing.library_rules import library_rules
from anabranch.graph.tracing.lost_calls import watched
from anabranch.graph.tracing.returned_loss import fields_of, is_fraction, scalars
from anabranch.graph.user_lines import user_frame, user_line


class ReturnsLoss(nn.Module):
    """The user's module with flat inputs and ``{"loss": scalar, **scalar metrics}`` as output.

    Attributes:
        pairs: not empty if the module has returned a pair, numerator and denominator of its loss.
    """

    def __init__(self, module: nn.Module, rebuild: Any) -> None:
        super().__init__()
        self.module = module
        self._rebuild = rebuild
        self.pairs: set[str] = set()
        self.selections = EmptySelections()

    def forward(self, *leaves: torch.Tensor) -> dict[str, torch.Tensor]:
        """Call the user's module on the batch that these leaves make."""
        batch = self._rebuild(leaves)
        if torch.compiler.is_dynamo_compiling():
            return scalars(call_module(self.module, batch, traced=True))
        before = [(owner._buffers, dict(owner._buffers)) for owner in self.module.modules()]
        output = call_module(self.module, batch, traced=True)
        if (other := self.selections.other_effect(output)) is not None:
            place, reader, how = other
            raise CaptureError(
                f"{place} leaves work out where a selection is empty, and {user_line(reader)} "
                f"{how}, so the operations differ from batch to batch; compute for the selection "
                "alone (x[rows]) and write to its places (out[rows] += y, or out.index_add_(0, "
                "rows, y))"
            )
        if is_fraction(output) and "loss" not in fields_of(output):
            self.pairs.add("loss")
        result = scalars(output)
        for buffers, old in before:
            for name, now in buffers.items():
                buffer = old.get(name)
                if buffer is not None and now is not None and now is not buffer:
                    # Tracing forgets an assignment, self.count = self.count + 1, but not a copy.
                    buffer.copy_(now.detach())
                    buffers[name] = buffer
        return result


def export(
    module: ReturnsLoss,
    leaves: list[torch.Tensor],
    reads: AttributesRead,
    shown_warnings: set[str],
    *,
    dynamic: bool,
    works_with: int | None = None,
    preserve: tuple[str, ...] = (),
) -> torch.export.ExportedProgram:
    """Export with a symbolic or fixed number of samples; a CaptureError names cause and remedy,
    which concern the number if the module ``works_with`` another one. Attributes that the forward
    reads are noted in ``reads``, arguments and results of the submodules ``preserve`` in the
    exported program, and texts of warnings in ``shown_warnings``, as each is given once.
    """
    failure: Exception | None = None
    for strict in (False,) if dynamic else (False, True):
        shapes = (tuple({0: torch.export.Dim.AUTO} for _ in leaves),) if dynamic else None
        checkpoints, checks, asked = set[str](), set[str](), set[int]()
        # Inputs of a trace: parameters, which steps change, then buffers.
        parameters = [(name, None) for name, _ in module.named_parameters(remove_duplicate=False)]
        inputs = [*parameters, *module.named_buffers(remove_duplicate=False)]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(quiet())
                stack.enter_context(torch.enable_grad())  # as a capture, also in an evaluation
                stack.enter_context(without_keeping(module))
                if strict:  # the analysis hides custom gradients, which a plain call shows
                    named = (*module.named_buffers(), *module.named_parameters())
                    state = {name: t.clone() for name, t in named if not t.requires_grad}
                    call = torch.no_grad()(torch.func.functional_call)
                    calls = watched(set(), are_traced=False)
                    with reads.recording(), calls, torch.random.fork_rng():
                        call(module, state, tuple(leaves))
                else:
                    stack.enter_context(watched(checkpoints))
                    stack.enter_context(reads.recording())
                    module.selections = selections = EmptySelections()
                    known = [None if t is None or t.is_meta else t for _, t in inputs]
                    guards = patches.without_raising_guards(checks, selections, known, asked)
                    stack.enter_context(guards)
                    stack.enter_context(library_rules(dynamic=dynamic))
                    stack.enter_context(patches.NoGradDetached())
                    stack.enter_context(EqualMasks())
                exported = torch.export.export(
                    module,
                    tuple(leaves),
                    dynamic_shapes=shapes,
                    strict=strict,
                    preserve_module_call_signature=preserve,
                )
        except CaptureError:
            raise
        except Exception as error:
            # The error of the plain trace is nearer to the user's code than that of the analysis.
            failure = failure or error
        else:
            warned = {
                "torch.utils.checkpoint is not carried over; gradients are the same, and whether a "
                "stage computes its activations again is up to the plan (recompute)": checkpoints,
                "a check of the data that only raises is left out of the captured model, so a "
                "batch that would not pass it is trained on": checks,
                "this work is done also where its selection is empty: results are the same, but "
                "parameters that no sample selects have a gradient of zeros then, not none, so "
                "momentum and weight decay still move them": module.selections.places,
            }
            for text, places in warned.items():
                message = f"{', '.join(sorted(places))}: {text}"
                if places and message not in shown_warnings:
                    shown_warnings.add(message)
                    warn(message, CaptureWarning)
            _name_listed_parameters(exported, module)
            reads.keep_buffers(inputs[i][0].removeprefix("module.") for i in asked)
            return exported
    assert failure is not None
    raise _explained(module, leaves, failure, works_with) from failure


def _name_listed_parameters(exported: torch.export.ExportedProgram, module: nn.Module) -> None:
    """Make parameters that a module also keeps elsewhere, as in a list, inputs under their names: a
    trace takes them for constants without gradients, as which detached ones stay.
    """

    def memory(tensor: torch.Tensor) -> tuple[Any, ...]:
        if tensor.layout is not torch.strided:
            return (id(tensor),)
        place = tensor.untyped_storage()._cdata, tensor.storage_offset()
        return *place, tensor.shape, tensor.stride()

    kinds = torch.export.graph_signature.InputKind
    names = {memory(parameter): name for name, parameter in module.named_parameters()}
    for part in module.modules():
        kept = [value for name, value in vars(part).items() if name != "_buffers"]
        for leaf in tree_leaves(kept):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter):
                names.pop(memory(leaf), None)
    for spec in exported.graph_signature.input_specs:
        if spec.kind is kinds.CONSTANT_TENSOR:
            name = names.get(memory(exported.constants[str(spec.target)]))
            if name is not None:
                spec.kind, spec.target = kinds.PARAMETER, name


class CaptureWarning(UserWarning):
    """Something in the model is not carried over, and the gradients are not affected."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress logs and warnings of PyTorch during a trace; show printed text on success."""
    parts = ("export", "_export", "fx", "_dynamo", "_subclasses", "fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(f"torch.{part}") for part in parts]
    before = [logger.level for logger in loggers]
    printed = io.StringIO()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _explained(
    module: ReturnsLoss, leaves: list[torch.Tensor], error: Exception, works_with: int | None
) -> CaptureError:
    where, why = user_frame(traceback.extract_tb(error.__traceback__)), shadowed(error)
    name, kind, text = type(module.module).__name__, type(error).__name__, str(error)
    if re.search(r"Eq\(u\d+, u\d+\)", text):
        why = (
            f"{where} joins values that two masks have chosen, which a trace does not know to be "
            "as many: compute the mask once, name it, and choose by it in both places"
        )
    elif "DataDependent" in kind or "data-dependent" in text:
        option = layer_dropout(module)
        counts = any(getattr(part, "momentum", 0) is None for part in module.modules())
        why = (
            f"{where} needs the value of a tensor in Python, as a branch or a number that depends "
            "on the data does, so the operations differ from batch to batch; "
            + f"{option} leaves out layers at random: set it to 0, or " * bool(option)
            + "a norm with momentum=None divides by its count of batches: give it a number, or "
            * counts
            + "take parts by masks (y[group == i] = layer(x[group == i])), not by tolist(), or "
            * (".tolist()" in where)
            + "use torch.where or torch.cond, or decide before the forward and pass the decision "
            "in the batch; torch._check can promise a size that depends on the data"
        )
    elif ".numpy()" in text:
        why = (
            f"{where} computes with numpy, and a captured model has torch operations alone; write "
            "that line with those, or do it where the data is made and pass the result in the batch"
        )
    elif submodule := re.match(r"submodule `module\.(.*)`: <bound method", text):
        why = (
            f"its submodule {submodule[1]} has the name of a method of torch.nn.Module, which "
            "Python finds in its place; give it another name"
        )
    elif "DynamicOutputShape" in kind:
        why = (
            f"{where} calls {text}, the size of whose result depends on the values of its "
            "arguments; take an operation whose result has one size, such as a mask in place of a "
            "choice of entries"
        )
    elif kind == "TypeError" and not why:
        why = unfit_arguments(module.module, module._rebuild(leaves))
    if why:
        return CaptureError(f"{name} cannot be captured: {why} ({kind})")
    samples = f"{leaves[0].shape[0]} samples" if leaves[0].shape[0] != 1 else "1 sample"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if works_with is not None:
        return CaptureError(
            f"{name} works with {works_with} samples but not with {samples}: {where} raised "
            f"{kind}: {first}; a stage's pass has the samples of a micro-batch divided by the "
            "stage's replicas: let it have more of them, by a larger batch, fewer micro-batches or "
            "fewer replicas, or take layers that any number will do for, such as GroupNorm instead "
            "of BatchNorm"
        )
    return CaptureError(
        f"{name} cannot be captured with {samples}: {where} raised {kind}: {first}; if the same "
        "happens without anabranch, when the module is called on the example batch, correct it "
        "there; otherwise write that line with tensor operations"
    )
