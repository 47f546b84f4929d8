"""The port or alias through which each use of a value or of a tied parameter goes.

Autograd adds the gradients of a tensor with uses 1 .. m as (((g_m + g_m-1) + ...) + g_1). A run is
a set of uses on one stage that share an alias. Any set may share one, unless the sum has to be
bitwise that of one process; then only the first uses of the sum may::

    stage of the use   m: 1   m-1: 1   m-2: 0   m-3: 1   1: 0
    runs               [--------]      [--]     [--]     [--]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from anabranch.graph.call_traits import node_arguments
from anabranch.graph.capture import Captured
from anabranch.graph.flat_program import FlatProgram, gradient_calls, requires_grad
from anabranch.graph.group import FREE
from anabranch.graph.opgraph import BATCH

Use = tuple[int, int]
"""Position of the reading call in the program, and which of its node arguments, from 0."""


@dataclass(frozen=True, slots=True)
class Port:
    """A value's way from stage ``source`` to ``target``. ``value`` is its index in the captured
    graph, ``order`` its place in the sum of the value's gradient (0 is added first), ``grad``
    whether one comes back.
    """

    value: int
    source: int
    target: int
    order: int
    grad: bool = True


@dataclass(frozen=True, slots=True)
class TiedUse:
    """A use of a shared parameter; ``order`` is its place in the gradient's sum, 0 first."""

    name: str
    order: int


class PortMap:
    """The port or alias of every use of a value or of a tied parameter.

    Attributes:
        port_of: (call that makes a value, use on another stage) -> its port.
        local: call -> use on the call's own stage -> order of its run.
        summands: call -> number of runs, where the call's stage adds their gradients in order.
        tied_of: (parameter, use) -> its alias.
    """

    def __init__(
        self, captured: Captured, program: FlatProgram, stage_of: Sequence[int], exact: bool
    ) -> None:
        self.stage_of = stage_of
        self.exact = exact
        self.calls = program.calls
        self.position = {node: i for i, node in enumerate(self.calls)}
        self.owners = captured.programs.grouping.owner_of(program)
        self.carriers = gradient_calls(program) if captured.training else set()
        self.port_of: dict[tuple[int, Use], Port] = {}
        self.fallback: dict[tuple[int, int], Port] = {}
        self.local: dict[int, dict[Use, int]] = {}
        self.summands: dict[int, int] = {}
        self.tied_of: dict[tuple[str, Use], TiedUse] = {}
        self.last_writes = program.last_writes()
        ports: list[Port] = []
        for index, value in enumerate(captured.graph.values):
            if value.producer != BATCH:
                ports += self.add_value(index, captured.value_calls[index])
        self.ports = tuple(ports)
        self.tied: tuple[tuple[int, TiedUse], ...] = ()
        if exact:
            self.add_tied(program)

    def stage(self, call: int) -> int:
        return self.stage_of[self.owners[self.calls[call]]]

    def uses(self, node: fx.Node) -> tuple[list[Use], list[Use]]:
        """Uses of a node: with a gradient, in the order in which autograd adds them; and others."""
        after = -1
        if node.op != "placeholder":
            after = self.last_writes.get(node.meta.get("storage"), -1)
        with_grad: list[Use] = []
        without: list[Use] = []
        for user in node.users:
            if user.op != "call_function" or self.owners[user] == FREE:
                continue
            at = self.position[user]
            slots = [k for k, source in enumerate(node_arguments(user)) if source is node]
            for slot in slots:
                carries = user in self.carriers and requires_grad(node) and at > after
                (with_grad if carries else without).append((at, slot))
        # The latest call first; within one call its arguments from first to last.
        return sorted(with_grad, key=lambda use: (-use[0], use[1])), without

    def runs(self, uses: list[Use]) -> list[tuple[int, list[Use]]]:
        """Uses that share an alias, by stage, in the order of the sum where that is kept."""
        if not self.exact:
            by_stage: dict[int, list[Use]] = defaultdict(list)
            for use in uses:
                by_stage[self.stage(use[0])].append(use)
            return list(by_stage.items())
        result: list[tuple[int, list[Use]]] = []
        for use in uses:
            stage = self.stage(use[0])
            if len(result) == 1 and result[0][0] == stage:
                result[0][1].append(use)
            else:
                result.append((stage, [use]))
        return result

    def add_value(self, index: int, call: int) -> list[Port]:
        node = self.calls[call]
        home = self.stage(call)
        with_grad, without = self.uses(node)
        ports: list[Port] = []
        runs = self.runs(with_grad)
        if self.exact and len(runs) > 1 and any(stage != home for stage, _ in runs):
            self.summands[call] = len(runs)
        for order, (stage, uses) in enumerate(runs):
            if stage == home:
                self.local.setdefault(call, {}).update(dict.fromkeys(uses, order))
                continue
            port = Port(index, home, stage, order)
            ports.append(port)
            self.fallback.setdefault((call, stage), port)
            for use in uses:
                self.port_of[call, use] = port
        for at, slot in without:
            stage = self.stage(at)
            if stage != home:
                if (call, stage) not in self.fallback:
                    port = Port(index, home, stage, len(runs), grad=False)
                    ports.append(port)
                    self.fallback[call, stage] = port
                self.port_of[call, (at, slot)] = self.fallback[call, stage]
        return ports

    def add_tied(self, program: FlatProgram) -> None:
        tied: list[tuple[int, TiedUse]] = []
        for node, source in program.sources.items():
            if source.kind != "parameter" or not requires_grad(node):
                continue
            runs = self.runs(self.uses(node)[0])
            if len({stage for stage, _ in runs}) < 2:
                continue
            for order, (stage, uses) in enumerate(runs):
                alias = TiedUse(source.name, order)
                tied.append((stage, alias))
                for use in uses:
                    self.tied_of[source.name, use] = alias
        self.tied = tuple(tied)
