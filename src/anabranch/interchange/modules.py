"""The user's own submodules that lie in one stage."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from anabranch.graph.flat_program import frame
from anabranch.graph.slices import whole_name
from anabranch.graph.split import Split


@dataclass(frozen=True)
class StageModules:
    """Submodules per stage.

    Attributes:
        names: of each stage the largest submodules that lie in it as a whole; modules without
            parameters are in each stage that calls them.
        opened: modules that several stages hold parts of.
        loose: of each stage parameters that belong to opened modules themselves.
    """

    names: tuple[tuple[str, ...], ...]
    opened: tuple[str, ...]
    loose: tuple[tuple[str, ...], ...]


def stage_modules(split: Split) -> StageModules:
    """Return the submodules of every stage."""
    module = split.captured.module
    program = split.captured.programs.example
    homes: dict[str, set[int]] = defaultdict(set)
    for s in range(split.num_stages):
        paths = {frame(node) for node in split.needed(program, s) if node.op == "call_function"}
        for name in split.parameters(s):
            paths.add(whole_name(name).rpartition(".")[0])
        for path in paths:
            while path:
                homes[path].add(s)
                path = path.rpartition(".")[0]
    names: list[list[str]] = [[] for _ in range(split.num_stages)]
    loose: list[list[str]] = [[] for _ in range(split.num_stages)]
    opened = []
    held = [set(map(whole_name, split.parameters(s))) for s in range(split.num_stages)]

    def visit(path: str, part: nn.Module) -> None:
        has_parameters = next(part.parameters(), None) is not None
        if path and (len(homes[path]) < 2 or not has_parameters):
            for s in sorted(homes[path]):
                names[s].append(path)
            return
        opened.append(path)
        start = f"{path}." if path else ""
        for name, _ in part.named_parameters(recurse=False):
            for s, own in enumerate(held):
                loose[s] += [start + name] if start + name in own else []
        for name, child in part.named_children():
            visit(start + name, child)

    visit("", module)
    return StageModules(tuple(map(tuple, names)), tuple(opened), tuple(map(tuple, loose)))
