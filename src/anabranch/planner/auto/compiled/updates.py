"""What comes with the last backward of a stage and behind it: final gradients, and the update."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.planner.auto.compiled.all_reduces import ring_bytes
from anabranch.planner.auto.compiled.in_flight import updated_trainable
from anabranch.planner.auto.compiled.jit import making, part
from anabranch.planner.auto.compiled.records import MARK, AllReduces, Layout, Marks
from anabranch.planner.auto.compiled.slices import LAST, SLICES
from anabranch.planner.auto.tables import Floats, Ints, Records, Tables


@making
def mark_gradients(layout: Layout, slices: Records, reduces: AllReduces, tables: Tables) -> Marks:
    """``simulator.program.gradient_marks`` of all slices of last micro-batches."""
    most = 0
    for s in range(len(layout.stages)):
        most += layout.stages[s].pieces
    marks = Marks(np.zeros(2 * most, MARK), np.empty(2 * most, np.int64))
    count = end = 0
    for s in range(len(layout.stages)):
        stage = layout.stages[s]
        passed = np.zeros(len(layout.home))
        pieces, times = np.empty(stage.pieces, np.int64), np.empty(stage.pieces)
        for at in range(SLICES * s + LAST, SLICES * (s + 1)):
            here = slices[at]
            if not here.lanes:
                continue
            _put_passed(layout, stage, here, tables, passed)
            here.last_s = here.backward_s + stage.summing_s
            _final_times(reduces, s, here, passed, pieces, times)
            count, end = _put_marks(here, marks, count, end, pieces, times)
    return marks


@part
def _put_passed(layout: Layout, stage: Any, here: Any, tables: Tables, passed: Floats) -> None:
    """Share of a slice's backward after which each operator of a stage has been passed."""
    row, whole, before = tables.row[stage.degree, here.samples], here.backward_s, 0.0
    for at in range(stage.first_op, stage.end_op):
        i = layout.ops[at]
        passed[i] = 1 - before / (whole if whole else 1.0)
        if whole:
            before += tables.seconds[row, i].backward


@part
def _final_times(
    reduces: AllReduces, s: int, here: Any, passed: Floats, pieces: Ints, times: Floats
) -> None:
    """Pieces of a stage in the order in which they become final in a backward, and when."""
    backward_s, count = here.last_s, 0
    for w in range(len(reduces.works)):
        work = reduces.works[w]
        held = reduces.owners[work.owners]
        for m in range(held.end_member - held.first_member):
            if reduces.members[held.first_member + m] != s:
                continue
            for piece in range(work.first_piece, work.end_piece):
                operator = reduces.finals[reduces.pieces[piece].first_final + m]
                time = min(passed[operator] * backward_s, backward_s)
                place = count
                while place > 0 and times[place - 1] > time:
                    times[place], pieces[place] = times[place - 1], pieces[place - 1]
                    place -= 1
                times[place], pieces[place] = time, piece
                count += 1


@part
def _put_marks(
    here: Any, marks: Marks, count: int, end: int, pieces: Ints, times: Floats
) -> tuple[int, int]:
    """Write the marks of a slice; how many marks and pieces there are then."""
    backward_s, passed_s = here.last_s, 0.0
    here.first_mark = count
    for i in range(len(pieces)):
        if times[i] == backward_s:
            break
        if i == 0 or times[i] != times[i - 1]:
            marks.marks[count].seconds = times[i] - passed_s
            marks.marks[count].first_piece = end
            passed_s = times[i]
            count += 1
        marks.pieces[end] = pieces[i]
        end += 1
        marks.marks[count - 1].end_piece = end
    here.end_mark, here.first_final = count, end
    summed_s = 0.0
    for i in range(here.first_mark, count):
        summed_s += marks.marks[i].seconds
    here.rest_s = backward_s - summed_s
    for i in range(len(pieces)):
        if times[i] == backward_s:
            marks.pieces[end] = pieces[i]
            end += 1
    here.end_final = end
    return count, end


@making
def price_updates(layout: Layout, tables: Tables, sharded: bool) -> float:
    """Seconds of the update of each stage; the longest of all."""
    longest, charges = 0.0, tables.charges[0]
    _put_untouched(layout, tables)
    for s in range(len(layout.stages)):
        stage = layout.stages[s]
        if stage.tensors:
            updated = stage.trainable - stage.untouched
            stage.update_s = (
                charges.update_s
                + charges.update_tensor_s * stage.tensors
                + charges.update_byte_s * updated
            )
            if sharded and stage.trainable:
                mine = updated_trainable(stage.trainable, stage.largest, stage.replicas)
                stage.update_s *= mine / stage.trainable
        longest = max(longest, stage.update_s)
    return longest


@part
def _put_untouched(layout: Layout, tables: Tables) -> None:
    """Rows of each stage's tables that an update by rows leaves alone."""
    last = np.full(len(layout.stages), -1, np.int64)
    for p in range(len(tables.parameters)):
        parameter = tables.parameters[p]
        lookups, row_bytes = parameter.lookups, parameter.row_bytes
        if not lookups:
            continue
        for at in range(parameter.first, parameter.end):
            s = layout.home[tables.parameter_readers[at]]
            stage = layout.stages[s]
            if last[s] == p or stage.tensor > 1:
                continue
            last[s] = p
            b, d = stage.microbatch, stage.replicas
            samples = -(-tables.charges[0].batch_size // b) * -(-b // d)
            if d == 1 or ring_bytes(lookups, row_bytes, samples, d) < parameter.nbytes:
                rows = lookups * samples * d
                stage.untouched += max(parameter.nbytes - rows * row_bytes, 0)
