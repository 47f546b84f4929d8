"""Every built-in model: what the table promises, whatever the model."""

from functools import cache

import pytest
import torch

from anabranch import models
from anabranch.data.glyphs import load_glyphs
from anabranch.workload import Workload

SLOW = ("two-branch", "transformer")
FEW_SAMPLES = {"mmt": 4, "transformer": 16}
"""Models that learn as well from smaller batches."""
SYNTHETIC = ("mmt", "dlrm", "candle-uno", "two-branch", "transformer")


glyphs_once = cache(load_glyphs)


@pytest.fixture(autouse=True)
def _data(monkeypatch):
    """The glyphs are drawn once."""
    monkeypatch.setattr("anabranch.models.glyphs.load_glyphs", glyphs_once)


def size(batch):
    """Samples in a batch, which all its tensors agree on."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0]
    values = batch.values() if isinstance(batch, dict) else batch
    (samples,) = {size(value) for value in values}
    return samples


def flat(batch):
    """All tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch
    return [tensor for value in values for tensor in flat(value)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


def train(workload: Workload, steps: int, batch_size: int = 32) -> list[float]:
    """Losses of a plain loop in one process."""
    optimizer = workload.optimizer(list(workload.module.named_parameters()))
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for batch in workload.data(batch_size, epoch):
            loss = workload.module(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            losses.append(loss.item())
        epoch += 1
    return losses[:steps]


@pytest.mark.parametrize("name", models.MODELS)
def test_the_example_is_a_batch_that_the_module_takes(name):
    """Capture calls the module with the example; it returns a loss and metrics, all scalars."""
    workload = models.build(name, preset="small")
    result = workload.module(**workload.example)
    assert size(workload.example) >= 2
    assert all(value.shape == () for value in result.values())
    assert set(result) == {"loss", *workload.chance}
    assert workload.name == name


@pytest.mark.parametrize("name", models.MODELS)
def test_data_and_example_agree_in_all_but_samples(name):
    """The example fixes the sizes of every dimension but the first, and the types."""
    workload = models.build(name, preset="small")
    for batch in (next(iter(workload.data(5, 0))), next(iter(workload.eval_data(5)))):
        assert size(batch) == 5
        for x, example in zip(flat(batch), flat(workload.example), strict=True):
            assert x.shape[1:] == example.shape[1:]
            assert x.dtype == example.dtype


@pytest.mark.parametrize("name", models.MODELS)
def test_two_ranks_see_the_same(name):
    """Each rank builds the workload for itself: parameters and batches must come out equal."""
    one, two = models.build(name, preset="small"), models.build(name, preset="small")
    assert all(map(torch.equal, one.module.parameters(), two.module.parameters()))
    first, again = next(iter(one.data(8, 1))), next(iter(two.data(8, 1)))
    assert same(first, again)
    assert not same(first, next(iter(one.data(8, 2))))
    assert same(next(iter(one.eval_data(8))), next(iter(two.eval_data(8))))


@pytest.mark.parametrize("name", models.MODELS)
def test_the_loss_is_a_mean_over_samples(name):
    """Otherwise micro-batches would change it: 3 and 5 samples must weigh as 8 do."""
    workload = models.build(name, preset="small")
    workload.module.double()

    def cut(batch, part):
        if isinstance(batch, torch.Tensor):
            return batch[part].double() if batch.is_floating_point() else batch[part]
        if isinstance(batch, dict):
            return {key: cut(value, part) for key, value in batch.items()}
        return [cut(value, part) for value in batch]

    batch = next(iter(workload.data(8, 0)))
    whole, left, right = (
        workload.module(**cut(batch, part)) for part in (slice(8), slice(3), slice(3, 8))
    )
    for key in whole:
        expected = (3 * left[key].double() + 5 * right[key].double()) / 8
        torch.testing.assert_close(whole[key].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", models.MODELS)
def test_meta_models_have_the_same_sizes_without_memory(name):
    """Planning captures a published size without allocating it; nothing of it may be real."""
    real, meta = (models.build(name, preset="small", meta=m) for m in (False, True))
    shapes = [{key: p.shape for key, p in w.module.named_parameters()} for w in (real, meta)]
    assert shapes[0] == shapes[1]
    assert all(tensor.is_meta for tensor in [*meta.module.parameters(), *flat(meta.example)])


@pytest.mark.parametrize("name", SYNTHETIC)
def test_small_presets_learn(name):
    """Whoever tries a model sees its loss fall within a dozen steps or two."""
    workload = models.build(name, preset="small")
    losses = train(workload, 25 if name in SLOW else 12, FEW_SAMPLES.get(name, 32))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_building_leaves_the_random_state_alone():
    """A script that seeds once gets its own numbers, whether it builds a model or not."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    models.build("two-branch", preset="small")
    assert torch.equal(torch.rand(3), expected)


LAYER = 12 * 1024**2 + 13 * 1024
"""Parameters of a transformer layer: 12 h^2 of weights, 9 h of biases, 4 h of norms."""
DENSE = 4096 * 4096 + 4096


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # 4 branches of 8 layers; a norm and a classifier of 10 on 4 x 1024.
        ("mmt", 32 * LAYER + 2 * 4096 + 4096 * 10 + 10),
        # 7 branches of 4; 7 x 4096 -> 4096 and three more; one number.
        ("candle-uno", 28 * DENSE + (7 * 4096 * 4096 + 4096) + 3 * DENSE + 4097),
        # 7 branches of 4; 7 tables of 10^6 x 64; 7 x (4096 + 6400) -> 4096, two more; one number.
        ("dlrm", 28 * DENSE + 7 * 64_000_000 + (7 * 10_496 * 4096 + 4096) + 2 * DENSE + 4097),
        # 2 branches of 4 x (attention with four matrices, two linear layers); a classifier.
        ("two-branch", 8 * 6 * (1024**2 + 1024) + 2048 * 10 + 10),
        # 32 layers; tokens, positions, norm, output.
        ("transformer", 32 * LAYER + 1024 * 1024 + 256 * 1024 + 2048 + 1024 * 1024),
    ],
)
def test_published_sizes(name, parameters):
    """The parameter counts that the papers' sizes give, worked out by hand."""
    module = models.build(name, meta=True).module
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


def test_branches_are_named_by_their_place():
    """Operators are named after modules, so a plan can be read."""
    names = dict(models.build("mmt", preset="small").module.named_modules())
    assert {"branches.0.layers.1.attention", "branches.3.layers.0.widen", "head"} <= set(names)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mmt", {"branches": "2", "layers": "3"}, {"branches.1.layers.2.widen.weight"}),
        ("candle-uno", {"branches": "16"}, {"branches.15.layers.3.weight"}),
        ("transformer", {"tied": "yes"}, {"embedding.weight"}),
    ],
)
def test_options_change_sizes(name, options, expected):
    """As in Figure 7 of the paper, which varies the number of branches."""
    module = models.build(name, preset="small", options=options).module
    parameters = {key for key, _ in module.named_parameters()}
    assert expected <= parameters
    assert ("head.weight" not in parameters) == ("tied" in options)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_dlrm_can_add_up_a_bag(pooling):
    """As EmbeddingBag does; the join is narrower then."""
    workload = models.build("dlrm", preset="small", options={"pooling": pooling})
    assert workload.module.top.layers[0].in_features == 7 * 128 + 7 * 8
    assert workload.module(**workload.example)["loss"].isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet"}, "no built-in model resnet; there are mmt, dlrm"),
        ({"name": "mmt", "preset": "tiny"}, "no preset tiny; it has published, small"),
        (
            {"name": "mmt", "options": {"depth": "3"}},
            "no option depth; it has branches=4, layers=8",
        ),
        ({"name": "mmt", "options": {"layers": "0"}}, "layers=0; at least 1"),
        ({"name": "mmt", "options": {"heads": "3"}, "meta": True}, "hidden=1024 is not divisible"),
        ({"name": "dlrm", "options": {"pooling": "max"}, "meta": True}, "pooling=max; concat, sum"),
        ({"name": "glyphs", "options": {"patch": "5"}}, "patch=5 does not divide"),
    ],
)
def test_wrong_arguments_name_the_right_ones(arguments, message):
    """The message says what there is instead."""
    with pytest.raises(ValueError, match=message):
        models.build(**arguments)
