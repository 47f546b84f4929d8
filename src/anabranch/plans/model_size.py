"""Size of a model, to detect a plan made for another model with the same operator names."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.graph.opgraph import OpGraph


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model's parameters and values.

    Attributes:
        parameter_bytes: bytes of all parameters, tied ones counted once.
        value_bytes: bytes of the batch and of all operator outputs, for one sample.
    """

    parameter_bytes: int
    value_bytes: int

    @staticmethod
    def of(graph: OpGraph) -> ModelSize:
        """Compute the size of a model from its graph."""
        return ModelSize(
            sum(graph.parameter_bytes.values()),
            sum(value.nbytes for value in graph.values),
        )
