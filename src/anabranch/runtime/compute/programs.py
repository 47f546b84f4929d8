"""Programs of the stages as they are called for each micro-batch, under the compute options::

    program --> autocast --> sparse gradients --> random numbers --> torch.compile --> call
                (precision)  (sparse_embeddings)  (dropout)          (compile)

Made once per stage and number of samples, and kept for all batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException

from anabranch.errors import TrainingError
from anabranch.graph.opgraph_builder import make_sparse
from anabranch.graph.split import Split, StageProgram
from anabranch.remembered import remembered
from anabranch.runtime.compute.bindings import fast_call
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.compute.replay import ReplayedCall
from anabranch.runtime.compute.split_backward import WeightNotes, with_notes
from anabranch.runtime.numerics.dropout import BySample, draws, without_dropout


@dataclass(frozen=True, eq=False)
class StageCall:
    """A stage for some samples: ``call`` takes ``(*inputs, *tied, *batch)``, ``by_sample`` after
    the step's key and the first sample. ``is_random``: it draws from a generator. ``notes``: calls
    whose weights can wait, of a stage with split backwards.
    """

    program: StageProgram
    call: Callable[..., tuple[Tensor, ...]]
    by_sample: bool
    is_random: bool
    notes: WeightNotes | None = None


class StagePrograms:
    """Stages of a model under compute options; a ``ProgramSource``.

    Args:
        parts: of the model without options.
    """

    def __init__(self, parts: Split, options: ComputeOptions, place: torch.device) -> None:
        self.options, self.place = options, place
        self._parts = parts.under_autocast(options.precision, place.type)
        self.captured = self._parts.captured
        self._by_sample = BySample(parts.captured, place)

    def program(self, stage: int, samples: int) -> StageProgram:
        """Return the program of a stage for a number of samples."""
        return self._parts.program(stage, samples, device=self.place)

    @remembered
    def runnable(self, stage: int, samples: int, *, split: bool = False) -> StageCall:
        """Return the call of a stage.

        Args:
            split: for backwards in two halves; of a compiled stage the first one is all.

        Raises:
            CaptureError: if a random operation cannot draw by sample.
        """
        program = self.program(stage, samples)
        if self.options.sparse_embeddings:
            program = replace(program, module=with_sparse_lookups(program.module))
        if self.options.dropout == "off" and is_random(program.module):
            program = replace(program, module=without_dropout(program.module))
        rewritten = None
        if self.options.dropout == "sample":
            rewritten = self._by_sample.rewritten(program, samples)
        module = program.module if rewritten is None else rewritten
        notes = None
        if split and self.options.backend is None:
            module, notes = with_notes(module, program.ways_back)
        drawn = rewritten is None and is_random(program.module)
        if self.options.backend is None or self.options.is_replayed:
            call = fast_call(module)
        else:
            call = torch.compile(
                module, backend=self.options.backend, fullgraph=True, dynamic=False
            )
        if self.options.is_replayed and not drawn:
            call = ReplayedCall(call, program.module)
        return StageCall(program, call, rewritten is not None, drawn, notes)

    def compiling(self, stage: int) -> AbstractContextManager[None]:
        """Say what to do when a stage, or its backward, does not compile."""
        return nullcontext() if self.options.backend is None else self._explaining(stage)

    @contextmanager
    def _explaining(self, stage: int) -> Iterator[None]:
        try:
            yield
        except TorchDynamoException as error:
            text = " ".join(str(error).split())
            raise TrainingError(
                f"stage {stage} cannot be compiled with backend {self.options.backend}: "
                f"{type(error).__name__}: {text[:300]}; choose another backend "
                '("aot_eager" needs no compiler), or leave compile out'
            ) from error


def with_sparse_lookups(module: fx.GraphModule) -> fx.GraphModule:
    """The same stage with sparse gradients of its tables."""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copied))
    make_sparse(graph)
    return fx.GraphModule(module, graph)


def is_random(module: nn.Module) -> bool:
    """Return whether a stage draws from a generator."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    return any(draws(node) for graph in graphs for node in graph.nodes)
