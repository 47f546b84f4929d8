"""Workloads of built-in models: parameters, epochs, learning rates."""

from types import SimpleNamespace

import torch
from torch import nn

from anabranch.models.workload_builders import (
    SYNTHETIC,
    class_patterns,
    dataset_workload,
    seeded_generator,
    shuffled,
    stream,
    under_noise,
    warm_up_then_cosine,
    whole_batches,
)


def test_every_number_of_a_seed_counts() -> None:
    """Neighbouring seeds, and the same numbers in another order, give other draws."""
    seeds = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    draws = [torch.rand(1, generator=seeded_generator(*seed)).item() for seed in seeds]
    assert len(set(draws)) == len(seeds)
    assert torch.rand(1, generator=seeded_generator(0, 1)).item() == draws[3]


def test_no_batch_occurs_twice_in_training_or_evaluation() -> None:
    """Not in the next epoch, and not among the held-out batches."""
    draw = lambda samples, generator: torch.rand(samples, generator=generator)  # noqa: E731
    epoch = stream(draw, 0, 8)
    batches = [*epoch(1, 0), *epoch(1, 1), *epoch(1, SYNTHETIC.eval_epoch)]
    assert len({batch.item() for batch in batches}) == len(batches)


def test_a_pattern_under_noise_has_the_stated_strength() -> None:
    """The mean over many samples is the pattern times the signal, at every place of the shape."""
    pattern = torch.tensor([[1.0, -1.0]]).expand(20_000, 2)
    mean = under_noise(pattern, (3, 2), seeded_generator(0)).mean(0)
    expected = SYNTHETIC.signal * torch.tensor([1.0, -1.0]).expand(3, 2)
    torch.testing.assert_close(mean, expected, atol=0.05, rtol=0)


def test_each_tower_shows_the_class() -> None:
    """Samples of one class are alike in every tower, apart from noise."""
    batch = class_patterns([(4, 64), (64,)], 2, seed=0)(200, seeded_generator(1))
    for inputs in batch["inputs"]:
        flat = inputs.flatten(1)
        first, second = (flat[batch["target"] == c].mean(0) for c in (0, 1))
        # Noise alone would give less than half of that.
        assert (first - second).norm() > SYNTHETIC.signal * flat.shape[1] ** 0.5


def test_a_data_set_becomes_a_workload() -> None:
    """Whole shuffled batches of the training rows, other ones each epoch; every held-out row. Its
    learning rate rises in two of 20 steps.
    """
    rows = torch.arange(10)
    workload = dataset_workload(
        "numbers",
        lambda: nn.Linear(1, 1),
        lambda chosen: chosen,
        lambda generator: shuffled(rows, generator),
        torch.arange(10, 15),
        SimpleNamespace(seed=3, learning_rate=0.5, steps=20),
        example=rows,
        meta=False,
        chance={"r2": 0.0},
    )
    epochs = [torch.cat(list(workload.data(4, epoch))) for epoch in (0, 0, 1)]
    assert [len(set(epoch.tolist())) for epoch in epochs] == [8, 8, 8]
    assert torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])
    assert [batch.tolist() for batch in workload.eval_data(4)] == [[10, 11, 12, 13], [14]]
    assert workload.example.tolist() == [0, 1]
    optimizer = workload.optimizer(list(workload.module.named_parameters()))
    assert optimizer.defaults["lr"] == 0.5
    assert workload.scheduler(optimizer).get_last_lr() == [0.25]


def test_the_learning_rate_rises_then_falls() -> None:
    """In 100 steps: ten of warm-up, the whole rate, and a hundredth of it at the end and after."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = warm_up_then_cosine(optimizer, 100)
    rates = []
    for _ in range(110):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] < rates[5] < rates[9]
    assert max(rates) > 0.95
    assert rates[20:99] == sorted(rates[20:99], reverse=True)
    assert rates[105] == 0.01


def lists(iterator):
    return [rows.tolist() for rows in iterator]


def identity(rows):
    return rows


def test_training_leaves_the_short_batch_out():
    """Unless it is all there is."""
    assert lists(whole_batches(identity, torch.arange(5), 2)) == [[0, 1], [2, 3]]
    assert lists(whole_batches(identity, torch.arange(5), 8)) == [[0, 1, 2, 3, 4]]


def test_shuffling_keeps_every_row():
    """In an order that the seed decides."""
    rows = torch.tensor([3, 5, 7, 9])
    one, two = (shuffled(rows, torch.Generator().manual_seed(4)) for _ in range(2))
    assert one.tolist() == two.tolist()
    assert sorted(one.tolist()) == [3, 5, 7, 9]
