"""Operators that have to be in one stage, planned as one operator.

Without a flush each stage updates its own weights at its own time, so operators that read one
trainable parameter must share a stage. Operators on a path between two of them come along, because
stages are convex, and so do all others that would otherwise close a cycle of stages::

    embedding --> layer --> head              two towers with one embedding:
        `--------tied--------'                embedding.a --> tower.a --+
                                                  | tied                +--> join
    all three are one operator                embedding.b --> tower.b --+
                                              the embeddings are one operator, the towers are not

All stage graphs that may run asynchronously are stage graphs of the smaller model, at equal cost.
"""

from __future__ import annotations

from anabranch.errors import some
from anabranch.plans.contraction import Contracted, contract
from anabranch.profile.profile import Profile


def contract_tied(profile: Profile) -> Contracted:
    """Return the profile with operators that share a trainable parameter as one operator."""
    return contract(profile, [*profile.graph.tied.values()])


def because(contracted: Contracted) -> str:
    """Return a sentence on the parameters that keep operators in one stage; empty if none does."""
    several = [mask for mask in contracted.masks if mask.bit_count() > 1]
    parameters: dict[int, list[str]] = {}
    for name, mask in contracted.whole.graph.tied.items():
        parameters.setdefault(mask, []).append(name)
    sentences = []
    for mask, names in parameters.items():
        around = next(part for part in several if part & mask)
        others = around.bit_count() - mask.bit_count()
        between = f" with the {others} operators around them" if others else ""
        sentences.append(
            f"{' and '.join(contracted.whole.graph.names(mask))} read "
            f"parameter{'s' * (len(names) > 1)} {some(names)} and are in one stage{between}"
        )
    rest = [f"{len(sentences) - 3} more groups share parameters"] if len(sentences) > 4 else []
    return "; ".join([*sentences[: 3 if rest else 4], *rest])
