"""PyTorch's distributed checkpoints, bit by bit in both directions."""

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from anabranch import launch
from anabranch.checkpoint import Checkpoint, load_state_dict
from anabranch.checkpoint.distributed import from_distributed, is_distributed, to_distributed
from anabranch.errors import FileFormatError, TrainingError
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Workload
from tests.runtime.small import Built, batch, built, plan
from tests.runtime.training import begin_again

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9))


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Built:
    """With a tied weight, or as a test asks."""
    found = built(getattr(request, "param", "Tied"))
    return Built(found.captured, Workload(found.module, batch(4), optimizer=adamw))


def losses(model: Built, *begins: Path | None, save: Path | None = None) -> list[list[float]]:
    """Two steps on two ranks, each time from a checkpoint or from the start."""
    chosen = plan(model, 2)
    start = {name: value.clone() for name, value in model.module.state_dict().items()}

    def from_there(begin: Path | None) -> list[float]:
        begin_again(model.module, start)
        options: dict[str, Any] = {"captured": model.captured, "check_gradients": False}
        if begin is None:
            pipe = Pipeline(model.workload, chosen, **options)
        else:
            pipe = Pipeline.resume(begin, model.workload, chosen, **options)
        values = [pipe.step(batch(16, seed)) for seed in range(2)]
        if save is not None:
            pipe.save(save)
        return values

    return launch.run(lambda: [from_there(begin) for begin in begins], 2, timeout=60.0)[0]


def same(one: Path, other: Path) -> None:
    """All that a training resumes from is equal."""
    first, second = Checkpoint(one), Checkpoint(other)
    for prefix in ("model", "optimizer"):
        assert sorted(first.keys(prefix)) == sorted(second.keys(prefix))
        for key in first.keys(prefix):
            assert torch.equal(first.tensor(f"{prefix}/{key}"), second.tensor(f"{prefix}/{key}"))
    assert first.progress == second.progress
    assert first.manifest.aliases == second.manifest.aliases
    options = [
        {
            name: group.options
            for group in saved.manifest.optimizer.groups
            for name in group.parameters
        }
        for saved in (first, second)
    ]
    assert options[0] == options[1]


@pytest.mark.parametrize("model", ["Tied", "Shared"], indirect=True)
def test_there_and_back_is_the_same_training(model: Built, tmp_path: Path):
    """Every tensor bit by bit, position and options; the losses after it are the same."""
    losses(model, None, save=tmp_path / "run")
    made = to_distributed(tmp_path / "run", tmp_path / "dcp")
    assert is_distributed(made.path)
    assert made.tensors == len(load_state_dict(tmp_path / "run"))
    back = from_distributed(tmp_path / "dcp", tmp_path / "back")
    same(tmp_path / "run", back.path)
    one, other = losses(model, tmp_path / "run", tmp_path / "back")
    assert one == other


@pytest.mark.parametrize("model", ["Tied", "Shared"], indirect=True)
def test_plain_torch_reads_it(model: Built, tmp_path: Path):
    """Module and optimizer of the user's get what dcp.load finds by their full names."""
    losses(model, None, save=tmp_path / "run")
    to_distributed(tmp_path / "run", tmp_path / "dcp")
    module = copy.deepcopy(model.module)
    optimizer = adamw(module.parameters())
    weights, state = get_state_dict(module, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(
        module, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT
    )
    saved = Checkpoint(tmp_path / "run")
    expected = load_state_dict(tmp_path / "run")
    assert module.state_dict().keys() == expected.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name])
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, saved.tensor(f"optimizer/{key}/{name}"))
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("flat", [True, False])
def test_what_plain_torch_wrote_is_resumed_from(model: Built, tmp_path: Path, flat: bool):
    """With the kind of its optimizer, which DCP does not say; losses go on as those of torch."""
    module = copy.deepcopy(model.module)
    optimizer = adamw(module.parameters())

    def step(seed: int) -> float:
        optimizer.zero_grad()
        loss = module(**batch(16, seed))
        loss.backward()
        optimizer.step()
        return loss.item()

    step(7)
    options = FLAT if flat else StateDictOptions()
    weights, state = get_state_dict(module, optimizer, options=options)
    document = {"model": weights, "optimizer": state}
    dcp.save(document, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(FileFormatError, match="--optimizer AdamW"):
        from_distributed(tmp_path / "dcp", tmp_path / "none")
    made = from_distributed(tmp_path / "dcp", tmp_path / "run", optimizer="AdamW")
    assert made.optimizer_tensors == 3 * len(list(module.parameters()))
    found = load_state_dict(tmp_path / "run")
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())
    assert losses(model, tmp_path / "run")[0] == pytest.approx([step(0), step(1)], rel=1e-5)


def test_a_pickle_is_not_obeyed(tmp_path: Path):
    """A list of tensors that asks for anything else is refused, and nothing of it runs."""
    folder = tmp_path / "dcp"
    dcp.save({"weight": nn.Linear(2, 2).weight.detach()}, checkpoint_id=folder, no_dist=True)

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FileFormatError, match=r"asks for posix\.mkdir"):
        from_distributed(folder, tmp_path / "run")
    dotted = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    (folder / ".metadata").write_bytes(dotted)
    with pytest.raises(FileFormatError, match=r"os\.system"):
        from_distributed(folder, tmp_path / "run")
    assert not (tmp_path / "made").exists()


def test_nothing_is_replaced_and_damage_is_named(model: Built, tmp_path: Path):
    """As everywhere."""
    losses(model, None, save=tmp_path / "run")
    to_distributed(tmp_path / "run", tmp_path / "dcp")
    with pytest.raises(TrainingError, match="dcp exists"):
        to_distributed(tmp_path / "run", tmp_path / "dcp")
    with pytest.raises(TrainingError, match="run exists"):
        from_distributed(tmp_path / "dcp", tmp_path / "run")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(FileFormatError, match="cannot be read as a distributed checkpoint"):
        from_distributed(tmp_path / "dcp", tmp_path / "other")
