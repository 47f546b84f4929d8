"""One micro-batch of a stage: recomputation, random numbers, losses."""

import pytest
import torch
from torch import Tensor

from anabranch.device.accelerator import with_seed
from anabranch.runtime.compute.programs import is_random
from anabranch.runtime.plan_parts import parts_of
from tests.runtime.small import batch, built, plan
from tests.runtime.threads import CPU, gradients, run


def test_recomputation_leaves_running_means_as_one_forward_does() -> None:
    """The second forward of a micro-batch must not count the samples again."""
    model = built("Norm")
    before = {n: b.clone() for n, b in model.module.named_buffers()}
    after = []
    for recompute in (False, True):
        run(model, plan(model, 2, recompute=recompute), batch(16))
        after.append({n: b.clone() for n, b in model.module.named_buffers()})
        for name, buffer in model.module.named_buffers():
            buffer.copy_(before[name])
    plain, recomputed = after
    assert plain["norm.num_batches_tracked"] == before["norm.num_batches_tracked"] + 4
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_random_numbers_follow_seed_and_samples_and_nothing_else() -> None:
    """Dropout repeats with the seed, and a recomputed forward draws what the first one drew. The
    user's own generator, from which data loaders shuffle on every rank, stays where it was.
    """
    model = built("Dropout")
    leaves = batch(16)
    state = torch.get_rng_state()

    def step(seed: int, recompute: bool = False) -> tuple[float, Tensor]:
        # On one device: threads share a generator, which ranks do not.
        outcomes = run(model, plan(model, 1, recompute=recompute), leaves, seed=seed)
        return sum(o.loss for o in outcomes), gradients(model)["head.weight"].clone()

    loss, gradient = step(1)
    again, same = step(1)
    assert (again, True) == (loss, torch.equal(same, gradient))
    recomputed, equal = step(1, recompute=True)
    assert (recomputed, True) == (loss, torch.equal(equal, gradient))
    assert step(2)[0] != loss
    assert torch.equal(torch.get_rng_state(), state)


def test_each_microbatch_draws_for_itself() -> None:
    with with_seed(1, CPU):
        first = torch.rand(3)
    with with_seed(2, CPU):
        assert not torch.equal(first, torch.rand(3))


def test_only_stages_that_draw_are_seeded() -> None:
    """Seeding costs some ten microseconds and a stage without dropout need not pay them."""
    for name, expected in (("Dropout", True), ("Chain", False)):
        model = built(name)
        parts = parts_of(model.captured, plan(model, 1), exact=False)
        assert is_random(parts.program(0, 4).module) is expected


def test_the_first_bad_loss_is_noted() -> None:
    """Sample 9 is in micro-batch 2 of the last stage."""
    model = built("TwoBranch")
    leaves = batch(16)
    leaves["x"][9] = float("nan")
    bad = [outcome.bad for outcome in run(model, plan(model, 3), leaves)]
    assert bad == [None, None, (2, 2)]


def test_the_generator_of_the_place_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of cuda:1 for a stage on cuda:1, whatever the current device is: recomputation has to
    draw the same masks again. All generators are afterwards as before.
    """
    generators = tuple(torch.Generator().manual_seed(device) for device in range(2))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    before = [generator.get_state() for generator in generators]
    drawn = []
    for _ in range(2):
        with with_seed(7, torch.device("cuda", 1)):
            assert torch.equal(generators[0].get_state(), before[0])
            drawn.append(torch.rand(3, generator=generators[1]))
    assert torch.equal(*drawn)
    assert all(map(torch.equal, before, (generator.get_state() for generator in generators)))
