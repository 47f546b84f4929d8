"""The inner loop of list schedules, compiled: passes begin one after the other.

Kinds of passes are numbers here: forward, gradient of inputs (or whole backward), gradient of
weights. ``zero_bubble`` says by which rules a device chooses among them, unless the order of each
stage is fixed.
"""

from __future__ import annotations

from typing import NamedTuple

from anabranch.compiled import Floats, Ints, compiled

FORWARD, GRADIENT, WEIGHTS = range(3)

GAP = 0.25
"""Share of their length that a gap must have for gradients of weights to begin in it."""

INFINITY = float("inf")


class ListProblem(NamedTuple):
    """Stages and their passes. A lane stands for all devices that have the same stages.

    Attributes:
        batch: samples of the step.
        size: samples of a micro-batch, per stage.
        microbatches: number of micro-batches, per stage.
        in_flight: micro-batches that a stage may hold.
        is_first: 1 for stages whose backwards are whole.
        weights_s: seconds of the gradients of weights of one micro-batch, per stage.
        number: number of the first pass of each stage and kind.
        seconds: length of each pass.
        first_source: start in ``source`` of the sources of each stage and direction.
        source: stages whose values (forward) or gradients (backward) a stage waits for.
        message_s: seconds of a message from each source.
        first_lane: start in ``lane`` of the lanes of each stage.
        lane: lanes of all stages, one stage after the other.
        first_beside: start in ``beside`` of the other stages on the devices of each stage.
        beside: stages that share devices, one stage after the other.
        fixed: kinds of passes in the order of each stage, padded to one length with -1; empty
            where orders are free.
    """

    batch: int
    size: Ints
    microbatches: Ints
    in_flight: Ints
    is_first: Ints
    weights_s: Floats
    number: Ints
    seconds: Floats
    first_source: Ints
    source: Ints
    message_s: Floats
    first_lane: Ints
    lane: Ints
    first_beside: Ints
    beside: Ints
    fixed: Ints


class ListState(NamedTuple):
    """A list schedule as far as it is made.

    Attributes:
        begun: number of passes begun, per stage and kind.
        ends: end of each pass that has begun.
        order: passes in the order in which they began.
        free: end of the last pass of each lane.
        start: earliest start of the next pass of each stage.
        kind: kind of that pass; -1 for none.
        stale: 1 for stages whose next pass has to be chosen anew.
    """

    begun: Ints
    ends: Floats
    order: Ints
    free: Floats
    start: Floats
    kind: Ints
    stale: Ints


@compiled
def run(problem: ListProblem, state: ListState) -> int:
    """Begin all passes; return how many could: fewer where stages wait for each other."""
    stages, total = len(problem.size), len(problem.seconds)
    for done in range(total):
        s = -1
        for t in range(stages):
            if state.stale[t]:
                state.stale[t] = 0
                _choose(t, problem, state)
            if state.kind[t] >= 0 and (s < 0 or _goes_first(t, s, problem, state)):
                s = t
        if s < 0:
            return done
        _begin(s, done, problem, state)
    return total


def _goes_first(t: int, s: int, problem: ListProblem, state: ListState) -> bool:
    """Return True if the next pass of a stage t goes before that of a stage s below it."""
    if state.start[t] != state.start[s]:
        return bool(state.start[t] < state.start[s])
    urgency, other = _urgency(t, problem, state), _urgency(s, problem, state)
    if urgency != other:
        return urgency < other
    first = state.begun[3 * t + state.kind[t]] * problem.size[t]
    return bool(first < state.begun[3 * s + state.kind[s]] * problem.size[s])


def _urgency(s: int, problem: ListProblem, state: ListState) -> int:
    """Return the place among passes that can start together: gradients of inputs, forwards, whole
    backwards, gradients of weights; of fixed orders backwards, then forwards.
    """
    if state.kind[s] == GRADIENT:
        return 2 if problem.is_first[s] and len(problem.fixed) == 0 else 0
    return 1 if state.kind[s] == FORWARD else 3


def _begin(s: int, done: int, problem: ListProblem, state: ListState) -> None:
    kind = state.kind[s]
    number = problem.number[3 * s + kind] + state.begun[3 * s + kind]
    state.begun[3 * s + kind] += 1
    if kind == GRADIENT and problem.is_first[s]:
        state.begun[3 * s + WEIGHTS] += 1
    end = state.start[s] + problem.seconds[number]
    state.ends[number] = end
    state.order[done] = number
    for i in range(problem.first_lane[s], problem.first_lane[s + 1]):
        state.free[problem.lane[i]] = end
    _mark(s, problem, state)
    # Its successors are the sources of its gradients.
    if kind != WEIGHTS:
        at = 2 * s + 1 - kind
        for i in range(problem.first_source[at], problem.first_source[at + 1]):
            _mark(problem.source[i], problem, state)


def _mark(s: int, problem: ListProblem, state: ListState) -> None:
    """Have the next passes of a stage, and of those on its devices, chosen anew."""
    state.stale[s] = 1
    for i in range(problem.first_beside[s], problem.first_beside[s + 1]):
        state.stale[problem.beside[i]] = 1


def _choose(s: int, problem: ListProblem, state: ListState) -> None:
    """Choose the pass that a stage would begin next."""
    free = 0.0
    for i in range(problem.first_lane[s], problem.first_lane[s + 1]):
        free = max(free, state.free[problem.lane[i]])
    forward, gradient = _forward(s, problem, state), _gradient(s, problem, state)
    computed, came = state.begun[3 * s + WEIGHTS], state.begun[3 * s + GRADIENT]
    if len(problem.fixed) > 0:
        forward, gradient = _as_fixed(s, forward, gradient, problem, state)
    if computed < came:  # there is a gradient of weights to compute
        earliest, size = min(forward, gradient), problem.weights_s[s]
        for i in range(problem.first_beside[s], problem.first_beside[s + 1]):
            t = problem.beside[i]
            earliest = min(earliest, _forward(t, problem, state), _gradient(t, problem, state))
        gap = earliest - free if earliest < INFINITY else size
        if gap >= GAP * size:
            ready = state.ends[problem.number[3 * s + GRADIENT] + computed]
            state.start[s], state.kind[s] = max(free, ready), WEIGHTS
            return
    forward, gradient = max(free, forward), max(free, gradient)
    is_equal = forward == gradient
    is_forward = forward < gradient or (is_equal and problem.is_first[s] == 1)
    state.start[s] = min(forward, gradient)
    state.kind[s] = FORWARD if is_forward else GRADIENT
    if state.start[s] == INFINITY:
        state.kind[s] = -1


def _as_fixed(
    s: int, forward: float, gradient: float, problem: ListProblem, state: ListState
) -> tuple[float, float]:
    """Return both starts, with infinity for the pass that is not next in the fixed order."""
    at = state.begun[3 * s] + state.begun[3 * s + GRADIENT]
    is_forward = at < problem.fixed.shape[1] and problem.fixed[s, at] == FORWARD
    return (forward, INFINITY) if is_forward else (INFINITY, gradient)


def _forward(s: int, problem: ListProblem, state: ListState) -> float:
    """Return when the next forward has all its inputs; infinity if that is not known yet."""
    number = state.begun[3 * s]
    held = number - state.begun[3 * s + WEIGHTS]
    if number == problem.microbatches[s] or held >= problem.in_flight[s]:
        return INFINITY
    return _comes(s, FORWARD, number, problem, state)


def _gradient(s: int, problem: ListProblem, state: ListState) -> float:
    """Return when the next gradient of inputs has all its inputs; infinity if not known yet."""
    number = state.begun[3 * s + GRADIENT]
    if number == state.begun[3 * s]:
        return INFINITY
    comes = _comes(s, GRADIENT, number, problem, state)
    return max(comes, float(state.ends[problem.number[3 * s] + number]))


def _comes(s: int, kind: int, number: int, problem: ListProblem, state: ListState) -> float:
    """Return when the samples of a micro-batch have come to a stage; infinity where unknown."""
    samples = min((number + 1) * problem.size[s], problem.batch)
    last = 0.0
    for i in range(problem.first_source[2 * s + kind], problem.first_source[2 * s + kind + 1]):
        t = problem.source[i]
        before = (samples + problem.size[t] - 1) // problem.size[t] - 1
        if before >= state.begun[3 * t + kind]:
            return INFINITY
        end = float(state.ends[problem.number[3 * t + kind] + before])
        last = max(last, end + float(problem.message_s[i]))
    return last
