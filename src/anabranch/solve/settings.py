"""Settings: every tuned number that joins planners and the simulator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Tuned numbers of searches, of changes to a run and of what-ifs.

    Attributes:
        worth_sharing: share of the step that sharing the optimizer's state among replicas has to
            save.
        share_proposals: proposals that are simulated with shared state at the end of a search: half
            the most promising by its estimate, half the best without sharing. Without the latter a
            plan of GraphPipe's for candle-uno on 256 devices was 3 % ahead of the search.
        split_near: proposals whose steps are within this factor of the shortest are tried with
            split backwards, ``split_proposals`` of them. With 1.2 and 8 two of 20 plans for mmt
            were 3 and 13 % longer; with 12 one of 40 was .6 % longer, with 24 none is shorter.
        schedules_near: further schedules with split backwards are tried for a proposal if its step
            under an earlier one is within this factor of the shortest, and rows of stages with
            shared state if theirs without is; with 1.1 two of 80 drawn cases were 3 and 5 % longer.
            Of 344 lists the one with more memory was .2 % shorter in the mean, 20 % at most.
        list_spread: list schedules are tried if the steps with split backwards under deep and
            minimal warm-up are within this factor of each other: lists have few micro-batches in
            flight to hide messages with. Of 40 public plans none is longer for it, and GNMT's take
            a third less time.
        loop_gain: share of the step that several stages on each device have to save: messages and
            passes cost the host some time that is not predicted.
        most_loops: rows of stages that pass the devices several times and are simulated, the most
            promising ones; with 8, three of nine plans for transformer and mmt were 3 % longer.
        loop_passes: most passes in list schedules of such rows, all together: a second or two.
        near_passes: most passes in list schedules of neighbours of the best row, in each turn.
        loop_turns: turns of simulation: of the rows first, then of neighbours of the best.
        split_passes: most passes of one list schedule; each takes 15 us.
        most_tried: most pairs of a partition and a micro-batch size that are tried; some twenty
            seconds.
        most_proposed: most stage graphs that ``every_partition`` proposes.
        worth: share of the step that another plan has to gain by prediction: errors of
            predictions are as large.
        even: devices whose speeds differ by less than this share count as equal: a busy machine
            changes a piece of work of some milliseconds by as much.
        turns: most searches after each other where devices differ; two or three find nothing more.
        least_gain: share of the step that a rewrite has to save; less is within the error
            of measured operators.
        heavy: share of the step that a table has to take by itself for ``splits_of_tables`` to cut
            it. With 26 tables on 64 devices, each of them 89 % of the step, two parts make the step
            1.35x shorter; for dlrm's tables, 5 to 21 % of the step, parts are worth nothing.
        straggler_share: least share of the step that a straggler costs.
        most_computes: most computes of all changed steps together, some two seconds; other changes
            are left out.
        turns_gain: share of the period that replicas which take mini-batches in turn have to save,
            as they make fewer updates; for the whole model see ``ShortestPeriod.weighs_updates``.
        as_fast: share of the speed that fewer devices have to reach for a plan to say so.
        fewer_bound: power of bound / step in ``with_fewer_devices``, up to which fewer devices are
            tried; .5 lost plans that were 4 to 60 % shorter, of one in 70 models.
        fewer_effort: share of a search's evaluations for each smaller number of devices.
        bound_met: share of the bound by which a step may be longer for a search to end.
        bound_rounding: share by which the bound may be too low, at which the search for it ends.
    """

    worth_sharing: float = 0.001
    share_proposals: int = 6
    split_near: float = 1.6
    split_proposals: int = 16
    schedules_near: float = 1.2
    list_spread: float = 1.1
    loop_gain: float = 0.02
    most_loops: int = 16
    loop_passes: int = 4_500
    near_passes: int = 800
    loop_turns: int = 6
    split_passes: int = 30_000
    most_tried: int = 150_000
    most_proposed: int = 24
    worth: float = 0.05
    even: float = 0.15
    turns: int = 4
    least_gain: float = 0.02
    heavy: float = 0.5
    straggler_share: float = 0.05
    most_computes: int = 100_000
    turns_gain: float = 0.02
    as_fast: float = 0.97
    fewer_bound: float = 0.25
    fewer_effort: float = 0.25
    bound_met: float = 0.003
    bound_rounding: float = 1e-4


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """Limits of the simulation in a search, in micro-batches times devices.

    On 1,024 devices a simulation costs 5,000 to 30,000 and some tenths of a second. With half the
    budgets candle-uno with 32,768 samples on 256 devices ends up to a fifth slower, depending on
    the seed, and a search takes a twentieth less time.

    Attributes:
        simulation: limit for judging proposals. Only plans for many hundred devices come near it.
        likely: part of that for proposals that a search thinks best, in its order, before others:
            with all of it, planners were ahead of the search that began with their plans.
        enough: limit for judging proposals as they come, to see whether one is short enough to end
            the search.
        improvement: limit for improving the best proposal.
        patience: rounds of improvement without success until it ends; each sees other neighbours.
    """

    simulation: int = 150_000
    likely: int = 50_000
    enough: int = 10_000
    improvement: int = 150_000
    patience: int = 2


SETTINGS = Settings()
