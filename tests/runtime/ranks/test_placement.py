"""The device of a rank: which it is, and what of the model comes to it."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch import launch
from anabranch.device import accelerator
from anabranch.errors import TrainingError
from anabranch.runtime import assignment
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.ranks.placement import own_device, roomy_home
from anabranch.runtime.state import model_state
from tests.runtime.small import batch, built, plan


@pytest.mark.parametrize(("local_rank", "gpus", "index"), [(0, 4, 0), (3, 4, 3), (3, 2, 1)])
def test_a_rank_has_the_gpu_of_its_number(
    local_rank: int, gpus: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are fewer GPUs than ranks of the host, they share them in turn."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert own_device("cuda") == torch.device("cuda", index)
    assert own_device("cuda:1") == torch.device("cuda", 1)
    assert own_device("cpu") == torch.device("cpu")


def test_a_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TrainingError, match="no CUDA device here; leave the device out"):
        own_device("cuda")


@pytest.mark.dist
def test_only_the_stages_of_a_rank_come_to_its_device() -> None:
    """A GPU must not even for a moment hold the whole model, which may be larger than it; and the
    rank has its device before anything else is done.
    """
    model = built("TwoBranch")
    chosen = plan(model, 2)
    names = {id(p): name for name, p in model.module.named_parameters()}

    def rank() -> tuple[list[torch.device], set[str], set[str]]:
        claimed: list[torch.device] = []
        moved: set[str] = set()

        def noted(tensors: Iterable[Tensor], device: torch.device) -> None:
            moved.update(names[id(tensor)] for tensor in tensors)

        def claim(device: torch.device) -> None:
            assert not moved
            claimed.append(device)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_state, "move", noted)
            patch.setattr(assignment, "claim", claim)
            pipe = Pipeline(model.workload, chosen, captured=model.captured, device="cpu")
            pipe.step(batch(16))
        return claimed, moved, set(pipe._state.parameters)

    results = launch.run(rank, 2, timeout=60.0)
    for claimed, moved, own in results:
        assert claimed == [torch.device("cpu")]
        assert moved == own
    assert results[0][1] | results[1][1] == set(names.values())
    assert not results[0][1] & results[1][1]


@pytest.mark.dist
def test_local_ranks_know_their_number() -> None:
    """As under torchrun."""

    def rank() -> bool:
        import os

        return os.environ["LOCAL_RANK"] == str(dist.get_rank())

    assert launch.run(rank, 2, timeout=60.0) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_of_the_cpu_trains_on_a_gpu() -> None:
    """With the comparison of gradients, which runs the whole module where it was built; evaluation
    captures it there once more.
    """
    model = built("TwoBranch")
    leaves = batch(16)
    losses = {}
    for device in ("cpu", "cuda"):
        workload = replace(model.workload, module=deepcopy(model.module))
        pipe = Pipeline(workload, plan(model, 1), device=device)
        losses[device] = [pipe.step(leaves), pipe.step(leaves), pipe.evaluate([leaves])["loss"]]
        assert {p.device.type for p in workload.module.parameters()} == {device}
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)


def test_a_whole_model_runs_on_its_gpu_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are elsewhere, and gradients, in half of what is free; 20 bytes each here."""
    module, gpu = nn.Linear(4, 1), torch.device("cuda", 0)

    def home(free_bytes: int) -> torch.device:
        monkeypatch.setattr(accelerator, "free_bytes", lambda _: free_bytes)
        return roomy_home(module, gpu)

    assert home(80) == gpu
    assert home(79) == torch.device("cpu")
    module.requires_grad_(False)
    assert home(40) == gpu
    assert roomy_home(module, torch.device("cpu")) == torch.device("cpu")
