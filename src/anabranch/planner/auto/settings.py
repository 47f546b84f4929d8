"""Settings: every tuned number of the search, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Tuned numbers of the search.

    Attributes:
        evaluations: drafts that are evaluated at most from the starts. With half as many plans of
            seven hard cases were 1.2 % longer, in four fifths of the time.
        most_passes: forwards of all stages from which on an evaluation counts once for every
            ``passes`` of them: from 1,000 on a small model's plan was 3 % longer, and for every 500
            GNMT's were 1 to 2 %.
        few: on so many devices or fewer DAPPLE's plans are starts, too.
        row: share of the work on the longest path from which on a model is nearly a row: of public
            models that are called chains it is .9 to 1, of those with branches .6 or less.
        further: drafts that are evaluated in a round from the best plan on; a limit on evaluations
            beyond the default goes to more such rounds.
        more_rounds: rounds at most that follow while they find shorter plans.
        more_tries: rounds in a row that may find none before the last. With none allowed plans of
            seven hard cases were .7 % longer, with two .4 % shorter for a quarter more work.
        starts: proposals of other planners that are annealed first: the most promising, unlike each
            other. Then the better half of what that ends with, for twice as long, down to two.
        hot: temperature at the beginning of a round, as a share of the step: drafts so much slower
            are taken with probability 1/e. With 0.02 steps are .4 % longer, with 0.006 .1 %.
        hotter: where the round before found nothing better: small models are at the end of what is
            near their starts soon, and the way to a better plan leads through much slower ones.
        cold: at its end.
        worth_forking_s: seconds of a round from which on its ways go to several processes, each of
            which takes about .03 s of processor time to fork. Forked for any round, searches took a
            tenth to a quarter more of it.
        split_gain: share of the step that split backwards have to save, here and in ``solve``: each
            call with weights costs the host some 20 us more, which is not predicted.
        proposed: drafts that are proposed to the judge.
        neighbours: drafts evaluated in a round of descent, or in all after a coarser model.
        near: the best of these, which are judged.
        misled: how much slower, as a share, the best plan is than an evaluation says where the
            search is repeated for stages in a row: messages wait for each other on slow cards of
            nodes, and sums of parameters that stages share, in ways that evaluations do not know.
        most: operators and devices of a coarse problem, which is for more (or twice the devices).
        rounds: how often stages in a row pass all devices where each has several.
        fewest_each: such rows have at most so many groups of devices for each micro-batch.
        error: how much slower than the plan they may seem: about as wrong as an evaluation can be.
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
