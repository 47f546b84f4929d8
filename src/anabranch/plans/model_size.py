"""How large a model is, by which a plan tells another one whose operators have the same names."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.graph.opgraph import OpGraph


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a plan keeps of the model that it was made for.

    Attributes:
        parameter_bytes: of all parameters, each once.
        value_bytes: of the batch and of what operators hand on, for one sample.
    """

    parameter_bytes: int
    value_bytes: int

    @staticmethod
    def of(graph: OpGraph) -> ModelSize:
        """The size of a captured model, or of a profile's."""
        return ModelSize(
            sum(graph.parameter_bytes.values()),
            sum(value.nbytes for value in graph.values),
        )
