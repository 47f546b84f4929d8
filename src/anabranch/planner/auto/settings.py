"""Settings: every tuned number of the search, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Tuned numbers of the search.

    Attributes:
        evaluations: most drafts to evaluate from the starts. With half as many, plans of seven hard
            cases were 1.2 % longer, in four fifths of the time.
        most_passes: with this many forwards of all stages, an evaluation counts once for every
            ``passes`` of them. From 1,000 on a small model's plan was 3 % longer, and counted for
            every 500 GNMT's were 1 to 2 %.
        few: most devices of a cluster for which DAPPLE's plans are starts, too.
        row: share of the work on the longest path from which on a model is nearly a row. It is .9
            to 1 for public models that are called chains, .6 or less for those with branches.
        further: drafts to evaluate in a round from the best plan on; a limit on evaluations beyond
            the default goes to more such rounds.
        more_rounds: most rounds that follow while they find shorter plans.
        more_tries: rounds in a row that may find none and are followed by another. With 0 plans of
            seven hard cases were .7 % longer, with 2 .4 % shorter for a quarter more work.
        starts: most starts of the first round, the most promising of different shapes. Each round
            continues with the better half of the last one's results for twice as long, down to two.
        hot: temperature at the beginning of a round, as a share of the step: drafts slower by this
            share are taken with probability 1/e. With 0.02 steps are .4 % longer, with 0.006 .1 %.
        hotter: the same where the round before found nothing faster. Small models soon have no
            better plans near their starts; the way to one leads through much slower drafts.
        cold: temperature at the end of a round.
        worth_forking_s: seconds from which on the walks of a round run in several processes; each
            takes about .03 s of processor time to fork. If all rounds forked, searches took a tenth
            to a quarter more of it.
        split_gain: least share of the step that split backwards must save, here and in ``solve``:
            each call with weights costs the host some 20 us more, which is not predicted.
        proposed: drafts to simulate after annealing.
        neighbours: drafts to evaluate in a round of descent, or in all after a coarser model.
        near: the fastest of these neighbours, to simulate.
        misled: share by which the simulated step of the best plan exceeds its evaluation where the
            search is repeated for stages in a row. Evaluations leave out some waits of messages on
            slow cards, and sums of parameters that stages share.
        most: operators and devices of a coarse problem; a smaller one, or one with less than twice
            the devices, stays as it is.
        rounds: how often the stages of a loop pass all devices.
        fewest_each: most groups of devices in a loop per micro-batch.
        error: share by which a neighbour may seem slower than the plan: about the error of an
            evaluation.
    """

    evaluations: int = 40_000
    further: int = 6_000
    more_rounds: int = 5
    more_tries: int = 1
    most_passes: int = 2_000
    passes: int = 1_000
    few: int = 16
    row: float = 0.9
    starts: int = 8
    hot: float = 0.01
    hotter: float = 0.2
    cold: float = 0.001
    worth_forking_s: float = 0.25
    split_gain: float = 0.02
    proposed: int = 20
    neighbours: int = 500
    near: int = 6
    error: float = 0.05
    misled: float = 0.1
    most: int = 128
    rounds: tuple[int, ...] = (2, 3, 4)
    fewest_each: int = 2


SETTINGS = Settings()
