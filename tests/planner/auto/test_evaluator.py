"""An evaluation is about what the simulator says, and knows what cannot run."""

import math
from dataclasses import replace
from statistics import correlation, median

import numpy as np
import pytest

from anabranch.cost import CostModel
from anabranch.planner.auto.draft import Draft, draft_of
from anabranch.planner.auto.evaluator import Evaluator
from anabranch.planner.auto.settings import SETTINGS
from anabranch.planner.auto.space import Space
from anabranch.planner.auto.stage_clock import step_s
from anabranch.profile.profile import UpdateCost
from tests.calibration.examples import calibration
from tests.planner import shapes
from tests.planner.auto.random_drafts import random_draft
from tests.planner.auto.simulated import simulated_s
from tests.planner.auto.test_moves import CHAIN, draft, space
from tests.planner.helpers import cluster, cost_model, linked_model
from tests.solve.helpers import two_stages

TOWERS = shapes.towers("towers", 3, 1, layers=3, top=2)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "any"])
@pytest.mark.parametrize("node", [None, 2], ids=["one node", "nodes of 2"])
def test_it_is_about_what_the_simulator_says(plain, node):
    """Of random drafts the median is within .5 %, most of the plain ones within 1 %, and the order
    nearly the same; where every stage has one device an evaluation follows each message, and is
    within 2 %.
    """
    cost = cost_model(TOWERS, 8, node=node, memory=2**40, bandwidth=5e9, latency_s=1e-5)
    evaluate = Evaluator(cost, 64)
    found, single = [], []
    for seed in range(120):
        drawn = random_draft(cost, 64, seed, plain=plain)
        seconds = evaluate(drawn), simulated_s(cost, 64, drawn)
        if all(map(math.isfinite, seconds)):
            found.append(seconds)
            single += [seconds] * (drawn.num_stages == 8)
    assert len(found) > 40
    assert len(single) > 10
    errors = [abs(ours / theirs - 1) for ours, theirs in found]
    assert median(errors) < 0.005
    assert np.quantile(errors, 0.9) < (0.01 if plain else 0.06)
    assert max(abs(ours / theirs - 1) for ours, theirs in single) < 0.02
    ours, theirs = (np.argsort(np.argsort(column)).tolist() for column in zip(*found, strict=True))
    assert correlation(ours, theirs) > 0.9


@pytest.mark.parametrize("cards", [1, 2, 3, 4])
def test_devices_share_cards_or_have_their_own(cards):
    """On nodes of 4 with slow cards; cards of one device each are no ports besides their links."""
    cost = cost_model(TOWERS, 8, node=4, cards=cards, memory=2**40, bandwidth=5e9, card=5e8)
    evaluate, errors = Evaluator(cost, 64), []
    for seed in range(40):
        drawn = random_draft(cost, 64, seed, plain=True)
        ours, theirs = evaluate(drawn), simulated_s(cost, 64, drawn)
        errors += [abs(ours / theirs - 1)] * math.isfinite(theirs)
    assert len(errors) > 20
    assert median(errors) < 0.005


@pytest.mark.parametrize(
    ("node", "cards", "alike"),
    [(None, 1, 8), (2, 1, 2), (4, 1, 4), (4, 2, 2), (4, 3, 1), (4, 4, 4)],
)
def test_drafts_with_one_key_take_equally_long(node, cards, alike):
    """Which devices of a node a stage has does not matter, to the last bit; on which node does. Of
    a card that some devices of a node share, likewise.
    """
    links = {"bandwidth": 5e9, "card": 1e9, "latency_s": 1e-5}
    cost = cost_model(TOWERS, 8, node=node, cards=cards, memory=2**40, **links)
    evaluate, where, others = Evaluator(cost, 64), Space(cost, 64, (8,)), 0
    for seed in range(60):
        drawn, rng = random_draft(cost, 64, seed), np.random.default_rng(seed)
        nodes = drawn.device_stage.reshape(-1, alike)
        inside = drawn._replace(device_stage=rng.permuted(nodes, axis=1).ravel())
        assert where.key(inside) == where.key(drawn)
        assert evaluate(inside) == evaluate(drawn)
        anywhere = drawn._replace(device_stage=rng.permutation(drawn.device_stage))
        if evaluate(anywhere) != evaluate(drawn):
            others += 1
            assert where.key(anywhere) != where.key(drawn)
    assert (others > 10) == (node is not None)


def test_machine_code_does_the_same_as_python(monkeypatch):
    """To the last bit."""
    towers = shapes.towers("towers", 2, 1, layers=3, top=2)
    cost = cost_model(towers, 8, node=4, cards=2, memory=2**40, bandwidth=5e9, latency_s=1e-5)
    evaluate = Evaluator(cost, 8)
    drafts = [random_draft(cost, 8, seed, plain=False) for seed in range(12)]
    compiled = [evaluate(drawn) for drawn in drafts]
    assert sum(map(math.isfinite, compiled)) > 4
    monkeypatch.setattr(step_s, "for_types_of", lambda *_: step_s.py_func)
    evaluate = Evaluator(cost, 8)
    assert [evaluate(drawn) for drawn in drafts] == compiled


def test_two_stages_by_hand():
    """Micro-batches of 4 of 8 samples, 3 operators of 1 s per sample each: 12 s forward; backwards
    take no time.
    """
    where = space(CHAIN, 2)
    evaluate = Evaluator(where.cost, 8)
    assert evaluate(draft("000111", "01")) == pytest.approx(36.0)
    assert evaluate(draft("000000", "00")) == pytest.approx(24.0)
    assert evaluate(draft("000000", "00", microbatch=8)) == pytest.approx(24.0)
    assert evaluate(draft("000111", "01"), 35.9) == math.inf


def test_micro_batches_of_any_size():
    """6 of 8 samples, then the other 2: 18 s forward and 6 s on each of two stages in a row."""
    where = space(CHAIN, 2)
    mixed = draft("000111", "01", microbatch=6)
    assert simulated_s(where.cost, 8, mixed) == pytest.approx(18 + 18 + 6)
    assert Evaluator(where.cost, 8)(mixed) == pytest.approx(18 + 18 + 6)


def test_what_cannot_run_takes_for_ever():
    """A circle, a stage without operators or devices, more replicas than samples or allowed."""
    where = space(CHAIN, 4)
    evaluate = Evaluator(where.cost, 8, max_replicas=3)
    assert evaluate(draft("000111", "0011")) < math.inf
    assert evaluate(draft("001011", "0011")) == math.inf
    assert (
        evaluate(draft("000111", "0000")._replace(op_stage=draft("000000", "0").op_stage))
        == math.inf
    )
    assert evaluate(draft("000111", "0011", microbatch=1)) == math.inf
    assert evaluate(draft("000000", "0000")) == math.inf
    assert Evaluator(where.cost, 8)(draft("000000", "0000")) < math.inf


def test_memory_decides():
    """What the simulator's memory does not hold, an evaluation does not take; some drafts fit."""
    costs = tuple(
        replace(cost, working_bytes=cost.kept_bytes // 2, kept_fixed_bytes=cost.kept_bytes)
        for cost in TOWERS.costs
    )
    profile = replace(TOWERS, costs=costs)
    for memory in (2**31, 3 * 2**30, 2**32):
        cost = cost_model(profile, 4, memory=memory)
        evaluate = Evaluator(cost, 64)
        drafts = [random_draft(cost, 64, seed, plain=True) for seed in range(40)]
        fits = [math.isfinite(simulated_s(cost, 64, d)) for d in drafts]
        assert 0 < sum(fits) < len(fits)
        assert [math.isfinite(evaluate(d)) for d in drafts] == fits


def test_without_a_flush_the_slowest_stage_counts():
    """A mini-batch of 8 samples: 24 s in each of two stages, however deep the pipeline is; and
    every version of the weights takes memory.
    """
    where = space(CHAIN, 2)
    two = draft("000111", "01", microbatch=8)
    assert Evaluator(where.cost, 8, versions=(0.0, 0.0))(two) == pytest.approx(24.0)
    cost = cost_model(TOWERS, 2, memory=2**32)
    held = draft("0" * 6 + "1" * (len(cost.graph) - 6), "01", microbatch=8)
    assert Evaluator(cost, 8, versions=(0.0, 0.0))(held) < math.inf
    assert Evaluator(cost, 8, versions=(1000.0, 0.0))(held) == math.inf


@pytest.mark.parametrize("device_stage", ["0101", "0011", "0111", "0001"])
def test_messages_go_where_replicas_have_samples_in_common(device_stage):
    """Replicas of two stages on two nodes that meet inside of both or neither, and three for one: a
    hundredth of the bandwidth between nodes makes that the difference.
    """
    cost = cost_model(TOWERS, 4, node=2, memory=2**40, bandwidth=1e10, card=1e8)
    half = len(cost.graph) // 2
    mixed = draft("0" * half + "1" * (len(cost.graph) - half), device_stage, microbatch=8)
    assert Evaluator(cost, 32)(mixed) == pytest.approx(simulated_s(cost, 32, mixed), rel=0.02)


@pytest.mark.parametrize("node", [2, 4])
@pytest.mark.parametrize("branches", [2, 3])
def test_branches_that_meet_wait_for_each_other_on_cards(branches, node):
    """Branches on a node each, joined on as many others: gradients to several nodes take turns on a
    card, and the node that receives waits for all that send. On nodes of 4 that takes twice as long
    as if cards were always busy.
    """
    linked = linked_model(branches + 1, [(b, branches) for b in range(branches)]).profile
    values = tuple(replace(value, nbytes=100) for value in linked.graph.values)
    profile = replace(linked, graph=replace(linked.graph, values=values))
    digits = "0123"[: branches + 1]
    device_stage = "".join(digit * node for digit in digits[:-1]) + digits[-1] * branches * node
    machine = cluster(len(device_stage), node=node, memory=2**40, bandwidth=1e6, card=10.0)
    cost = CostModel(profile, machine)
    joined = draft(digits, device_stage, microbatch=branches * node)
    batch_size = 16 * branches * node
    simulated = simulated_s(cost, batch_size, joined)
    assert Evaluator(cost, batch_size)(joined) == pytest.approx(simulated, rel=0.04)


@pytest.mark.parametrize("card", [200, 100, 50])
@pytest.mark.parametrize(("branches", "node"), [(3, 2), (4, 4)])
def test_cards_are_full_where_receives_are_posted_at_once(branches, node, card):
    """Branches of a row on a node each, whose join has replicas beside them: while branches compute
    for longer than they wait, messages of all are on the way at once, and where cards are slow they
    take turns. If they always did, a step would seem 1.4 times as long in between.
    """
    count, rows = branches * node, [range(b * node, (b + 1) * node) for b in range(branches)]
    edges = [(i, i + 1 if i + 1 in row else count) for row in rows for i in row]
    linked = linked_model(count + 1, edges, [1] * count + [0]).profile
    values = tuple(replace(value, nbytes=100) for value in linked.graph.values)
    profile = replace(linked, graph=replace(linked.graph, values=values))
    stages, settings = (
        np.arange(count + 1, dtype=np.int32),
        [(n,) * (count + 1) for n in (count, 1, 0)],
    )
    device_stage = np.minimum(np.arange(2 * count, dtype=np.int32), count)
    machine = cluster(len(device_stage), node=node, memory=2**40, bandwidth=1e6, card=card)
    joined = Draft(stages, device_stage, *settings, deep=True, chained=False, sharded=False)
    cost, batch_size = CostModel(profile, machine), 16 * count
    simulated = simulated_s(cost, batch_size, joined)
    assert Evaluator(cost, batch_size)(joined) == pytest.approx(simulated, rel=0.06)


def test_devices_that_share_cores_have_equal_parts_of_them():
    """Two operators of 1 s per sample side by side, as one micro-batch of 8 on a device each: 8 s,
    but 16 s where both devices have one core.
    """
    profile = linked_model(3, [(0, 2), (1, 2)], [1, 1, 0]).profile
    apart = CostModel(profile, cluster(3))
    shared = replace(apart, cluster=replace(apart.cluster, cores=1))
    both = draft("012", "012", microbatch=8)
    assert Evaluator(apart, 8)(both) == pytest.approx(simulated_s(apart, 8, both))
    assert Evaluator(shared, 8)(both) == pytest.approx(simulated_s(shared, 8, both))
    assert Evaluator(shared, 8)(both) == pytest.approx(2 * Evaluator(apart, 8)(both))


@pytest.mark.parametrize(
    ("cores", "slowdown", "seconds"), [(4, (1.0, 1.5, 2.0), 12.0), (2, (1.0, 1.0, 3.0), 8.0)]
)
def test_devices_slow_each_other_as_calibrated(cores, slowdown, seconds):
    """The same operators where two devices slow each other although each has a core, and where two
    do not, though all three would do less at once than one alone.
    """
    none = dict.fromkeys(("message_s", "pass_s", "step_s"), 0.0)
    found = calibration(slowdown=slowdown, **none)
    profile = linked_model(3, [(0, 2), (1, 2)], [1, 1, 0]).profile
    machine = replace(cluster(3), cores=cores, calibration=found)
    cost, both = CostModel(profile, machine), draft("012", "012", microbatch=8)
    assert simulated_s(cost, 8, both) == pytest.approx(seconds)
    assert Evaluator(cost, 8)(both) == pytest.approx(seconds)


def test_nobody_updates_before_all_have_their_sums():
    """Stage 0 sums for long and has little to update, stage 1 the other way round: the step has
    the long sum and then the long update.
    """
    cost = cost_model(TOWERS, 4, memory=2**40, bandwidth=1e9)
    slow = replace(cost, profile=replace(cost.profile, update=UpdateCost(0.0, 0.0, 1e-6)))
    half = len(cost.graph) // 2
    mixed = draft("0" * half + "1" * (len(cost.graph) - half), "0001", microbatch=8)
    seconds = Evaluator(slow, 8)(mixed)
    assert seconds == pytest.approx(simulated_s(slow, 8, mixed), rel=0.02)


def test_a_sum_waits_for_messages_on_the_same_links():
    """A stage on two devices of a node of its own, which sends its gradients to another node."""
    cost = cost_model(TOWERS, 4, node=2, memory=2**40, bandwidth=1e9)
    half = len(cost.graph) // 2
    mixed = draft("0" * half + "1" * (len(cost.graph) - half), "0011", microbatch=8)
    assert Evaluator(cost, 8)(mixed) == pytest.approx(simulated_s(cost, 8, mixed), rel=0.01)


@pytest.mark.parametrize("device_stage", ["0101", "0011", "01"])
def test_gathers_of_shared_state_take_turns_on_cards(device_stage):
    """Two stages whose replicas are on both nodes send each other what they have updated through
    the same cards, one after the other; on a node each, at once.
    """
    node = 2 if len(device_stage) == 4 else None
    cost = cost_model(TOWERS, len(device_stage), node=node, memory=2**40, bandwidth=1e9, card=1e9)
    half = len(cost.graph) // 2
    mixed = draft("0" * half + "1" * (len(cost.graph) - half), device_stage, microbatch=8)
    mixed = mixed._replace(sharded=True)
    assert Evaluator(cost, 8)(mixed) == pytest.approx(simulated_s(cost, 8, mixed), rel=0.02)


def test_many_micro_batches_of_several_sizes():
    """2,048 micro-batches of one sample beside 512 of four: some are run, and the others take as
    long each.
    """
    where = space(CHAIN, 2)
    mixed = draft("000111", "01")._replace(microbatch=(1, 4))
    seconds = Evaluator(where.cost, 2048)(mixed)
    assert seconds == pytest.approx(simulated_s(where.cost, 2048, mixed), rel=1e-3)


def test_gradients_of_weights_wait_where_backwards_are_split():
    """Two stages of 1 + 1 s and 4 micro-batches: 10 s, or 9 s where the way back takes half of a
    backward; and so much of it as has to be saved is no gain.
    """
    cost, graph = two_stages(4)
    whole = draft_of(graph, cost)
    evaluate = Evaluator(cost, 4)
    assert evaluate(whole) == pytest.approx(10.0)
    gain = 1 + SETTINGS.split_gain
    assert evaluate(whole._replace(split=True)) == pytest.approx(9.0 * gain)
    assert evaluate(whole._replace(split=True), 9.0) == math.inf
