"""Bytes that the stages of a layout hold and send each other.

What ``CostModel.weights`` and ``ModelCosts.message_bytes`` say, for all stages at once.
"""

from __future__ import annotations

import numpy as np

from anabranch.planner.auto.compiled.jit import compiled, making
from anabranch.planner.auto.compiled.records import Layout
from anabranch.planner.auto.tables import Tables


@compiled
def weigh_operators(layout: Layout, tables: Tables) -> None:
    """What operators bring to their stages."""
    for s in range(len(layout.stages)):
        stage = layout.stages[s]
        for at in range(stage.first_op, stage.end_op):
            i = layout.ops[at]
            stage.parameters += tables.operators[stage.degree, i].parameters
            stage.trainable += tables.operators[stage.degree, i].trainable
            stage.kept += tables.operators[stage.degree, i].kept
            stage.largest = max(stage.largest, tables.operators[stage.degree, i].largest)


@making
def weigh_parameters(layout: Layout, tables: Tables) -> None:
    """Count tensors, and put in the bytes of those that several operators read, and of rows."""
    last = np.full(len(layout.stages), -1, np.int64)
    for p in range(len(tables.parameters)):
        parameter = tables.parameters[p]
        for at in range(parameter.first, parameter.end):
            s = layout.home[tables.parameter_readers[at]]
            if last[s] == p:
                continue
            last[s] = p
            stage = layout.stages[s]
            stage.tensors += parameter.trainable
            if stage.tensor > 1:
                continue
            if parameter.end - parameter.first > 1:
                stage.parameters += parameter.nbytes
                stage.trainable += parameter.nbytes * parameter.trainable
            if parameter.trainable:
                gradient = parameter.rows if parameter.rows else parameter.nbytes
                stage.largest_gradient = max(stage.largest_gradient, gradient)
                stage.tables += parameter.nbytes * (parameter.rows > 0)
                stage.rows += parameter.rows


@making
def weigh_values(layout: Layout, tables: Tables) -> None:
    """What crosses from stage to stage, each value once."""
    last = np.full(len(layout.stages), -1, np.int64)
    for v in range(len(tables.values)):
        value = tables.values[v]
        x = layout.home[value.producer]
        last[x] = v
        leaves = False
        for at in range(value.first, value.end):
            y = layout.home[tables.value_readers[at]]
            if last[y] == v:
                continue
            last[y] = v
            leaves = True
            layout.stages[y].entering += value.per_sample
            layout.stages[y].entering_fixed += value.fixed
            edge = layout.edges[layout.edge[x, y]]
            edge.values += 1
            edge.forward += value.per_sample
            edge.forward_fixed += value.fixed
            if value.grad:
                edge.gradients += 1
                edge.back += value.per_sample
                edge.back_fixed += value.fixed
        if leaves and value.grad:
            layout.stages[x].returning += value.per_sample
            layout.stages[x].returning_fixed += value.fixed
