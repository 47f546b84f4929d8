"""Checkpoints: training goes on bit for bit under any plan, and a damaged file is named."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch import launch
from anabranch.checkpoint import Checkpoint
from anabranch.checkpoint.manifest import file_checksum, sealed
from anabranch.errors import FileFormatError, TrainingError
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import NamedParameters, Workload
from tests.runtime.small import Built, batch, built, num_ranks, plan, with_options, with_programs

pytestmark = pytest.mark.dist

LIMIT_S = 60.0
SHARD = "rank-0.safetensors"


def sgd(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def amsgrad(parameters: NamedParameters) -> torch.optim.Optimizer:
    """Three tensors and a count per parameter, two groups with options of their own."""
    weights = [(n, p) for n, p in parameters if n.endswith("weight")]
    others = [(n, p) for n, p in parameters if not n.endswith("weight")]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": others, "betas": (0.8, 0.99)}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, amsgrad=True)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def data(batch_size: int, epoch: int) -> list[dict[str, torch.Tensor]]:
    """Three batches per epoch, the last one short."""
    return [batch(n, 10 * epoch + i) for i, n in enumerate((batch_size, batch_size, 6))]


def steps(pipeline: Pipeline, count: int, saved_at: int = -1, folder: Path = Path()) -> list[float]:
    """Losses of some steps, after one of which a checkpoint may be saved; training goes on."""
    losses: list[float] = []
    for each, _ in zip(pipeline.batches(), range(count), strict=False):
        losses.append(pipeline.step(each))
        if len(losses) == saved_at:
            pipeline.save(folder)
    return losses


Result = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def run(
    model: Built, workload: Workload, chosen: Plan, work: Callable[[Callable[..., Pipeline]], Any]
) -> list[Any]:
    """Call a function in every rank with a maker of pipelines: fresh, or resumed from a folder."""

    def make(folder: Path | None = None) -> Pipeline:
        options: dict[str, Any] = {"captured": model.captured, "exact": True, "timeout": 20.0}
        if folder is None:
            return Pipeline(workload, chosen, **options)
        return Pipeline.resume(folder, workload, chosen, **options)

    return launch.run(lambda: work(make), num_ranks(chosen), timeout=LIMIT_S)


def final(pipeline: Pipeline, losses: Sequence[float]) -> Result:
    state = pipeline._state
    return (
        list(losses),
        {n: p.detach() for n, p in state.parameters.items()},
        {n: b.clone() for n, b in state.buffers.items()},
    )


def joined(results: list[Result]) -> Result:
    parameters = {n: p for _, held, _ in results for n, p in held.items()}
    buffers = {n: b for _, _, held in results for n, b in held.items()}
    return results[0][0], parameters, buffers


@pytest.mark.parametrize("name", ["TwoBranch", "Tied", "Norm", "Dropout"])
def test_resuming_under_another_plan_changes_no_bit(name: str, tmp_path: Path) -> None:
    """Four steps, a checkpoint, and three more, which are also made under other plans: losses,
    parameters, running means. The break is inside an epoch. Dropout repeats where the stages are
    the same.
    """
    model = with_programs(built(name), 6)
    workload = with_options(model, optimizer=amsgrad, scheduler=cosine, data=data, clip_norm=1.0)
    first = plan(model, 2)
    folder = tmp_path / "run" / "step-4"

    def whole(make: Callable[..., Pipeline]) -> Result:
        pipeline = make()
        return final(pipeline, steps(pipeline, 7, 4, folder)[4:])

    def rest(make: Callable[..., Pipeline]) -> Result:
        pipeline = make(folder)
        assert (pipeline.step_number, pipeline.epoch, pipeline.position) == (4, 1, 1)
        return final(pipeline, steps(pipeline, 3))

    losses, parameters, buffers = joined(run(model, workload, first, whole))
    one, three = plan(model, 1), plan(model, 3, schedule="gpipe")
    other = {"TwoBranch": three, "Tied": three, "Norm": one, "Dropout": first}[name]
    again, found, means = joined(run(model, workload, other, rest))
    assert again == losses
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[n], parameters[n]) for n in parameters)
    assert all(torch.equal(means[n], buffers[n]) for n in buffers)


def per_layer(parameters: NamedParameters) -> torch.optim.Optimizer:
    """A group per parameter, each with a rate of its own, so every rank has other groups."""
    groups = [{"params": [(n, p)], "lr": 0.1 / (1 + len(n))} for n, p in parameters]
    return torch.optim.SGD(groups, lr=0.1)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    rates = torch.optim.lr_scheduler
    parts = [rates.LinearLR(optimizer, 0.1, total_iters=3), rates.CosineAnnealingLR(optimizer, 9)]
    return rates.SequentialLR(optimizer, parts, milestones=[3])


def test_schedulers_made_of_schedulers_resume(tmp_path: Path) -> None:
    """Their parts keep a rate per group as well; this rank has other groups than the one that
    saved.
    """
    model = with_programs(built("TwoBranch"), 6)
    workload = with_options(model, optimizer=per_layer, scheduler=warm_up_then_cosine, data=data)
    folder = tmp_path / "saved"

    def whole(make: Callable[..., Pipeline]) -> Result:
        pipeline = make()
        return final(pipeline, steps(pipeline, 6, 2, folder)[2:])

    def rest(make: Callable[..., Pipeline]) -> Result:
        pipeline = make(folder)
        return final(pipeline, steps(pipeline, 4))

    losses, parameters, _ = joined(run(model, workload, plan(model, 2), whole))
    again, found, _ = joined(run(model, workload, plan(model, 1), rest))
    assert again == pytest.approx(losses, rel=1e-6)
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value)


Saved = tuple[Built, Workload, Path]


def trained(folder: Path, name: str) -> Saved:
    """A checkpoint of one rank after one step."""
    model = built(name)
    workload = with_options(model, optimizer=sgd, data=data)
    run(model, workload, plan(model, 1), lambda make: steps(make(), 1, 1, folder))
    return model, workload, folder


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint, made once for all tests."""
    return trained(tmp_path_factory.mktemp("chain") / "saved", "Chain")


@pytest.fixture
def saved(chain: Saved, tmp_path: Path) -> Saved:
    """A copy of it, to be damaged."""
    model, workload, folder = chain
    return model, workload, Path(shutil.copytree(folder, tmp_path / "saved"))


def resume(model: Built, workload: Workload, folder: Path) -> None:
    run(model, workload, plan(model, 1), lambda make: make(folder).step_number)


def test_a_checkpoint_is_one_manifest_and_a_file_per_rank(tmp_path: Path) -> None:
    """Keys are the model's own names; nothing else stays in the parent folder."""
    model = built("Tied")
    workload = with_options(model, optimizer=sgd, data=data)
    folder = tmp_path / "c"

    def work(make: Callable[..., Pipeline]) -> None:
        pipeline = make()
        steps(pipeline, 2)
        pipeline.save(folder)

    run(model, workload, plan(model, 3), work)
    names = ["manifest.json", *(f"rank-{r}.safetensors" for r in range(3))]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["schema"], manifest["step"]) == ("anabranch.checkpoint/1", 2)
    expected = [n for n, _ in model.module.named_parameters()]
    tensors = {key for file in folder.glob("*.safetensors") for key in load_file(file)}
    assert tensors == {f"{p}/{n}" for n in expected for p in ("model", "optimizer/momentum_buffer")}
    assert set(manifest["tensors"]) == tensors
    (group,) = manifest["optimizer"]["groups"]
    assert sorted(group["parameters"]) == sorted(expected)
    assert group["options"]["momentum"] == 0.9


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    """Neither over a checkpoint nor over anything else, and nothing half-written stays."""
    folder = tmp_path / "taken"
    folder.mkdir()
    model = built("Chain")
    with pytest.raises(TrainingError, match="taken exists"):
        run(model, model.workload, plan(model, 2), lambda make: make().save(folder))
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == []


def test_no_such_checkpoint(tmp_path: Path) -> None:
    model = built("Chain")
    with pytest.raises(FileFormatError, match="nowhere is no checkpoint"):
        resume(model, model.workload, tmp_path / "nowhere")


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """With the right checksum: by somebody who knows how to make one."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    del manifest["checksum"]
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def cut_short(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-8])


def removed(folder: Path) -> None:
    (folder / SHARD).unlink()


def forgotten(folder: Path) -> None:
    edited(folder, lambda m: m["tensors"].pop("model/head.bias"))


def of_another_shape(folder: Path) -> None:
    tensors = load_file(folder / SHARD)
    tensors["model/head.bias"] = torch.zeros(5)
    told = json.loads((folder / "manifest.json").read_text())
    save_file(tensors, folder / SHARD, {"checkpoint": told["id"]})

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][SHARD] = (folder / SHARD).stat().st_size
        manifest["checksums"][SHARD] = file_checksum(folder / SHARD)
        manifest["tensors"]["model/head.bias"]["shape"] = [5]

    edited(folder, change)


def lied_about(folder: Path) -> None:
    edited(folder, lambda m: m["tensors"]["model/head.bias"].update(shape=[4]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"rank-0.safetensors has \d+ bytes, but \d+ were written"),
        (removed, r"rank-0.safetensors is missing"),
        (forgotten, r"lacks 1 of the tensors that the model has: model/head.bias"),
        (of_another_shape, r"head.bias is float32\[5\].*has float32\[3\]"),
        (lied_about, r"float32\[3\], but the manifest says float32\[4\]"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    damage: Callable[[Path], None], message: str, saved: Saved
) -> None:
    """With the file, sizes and shapes; ``test_damage.py`` has damages that are drawn."""
    model, workload, folder = saved
    damage(folder)
    with pytest.raises(FileFormatError, match=message):
        resume(model, workload, folder)


@pytest.mark.parametrize("name", ["../rank-0.safetensors", "/etc/passwd", "model.pt"])
def test_only_our_own_files_are_opened(name: str, saved: Saved) -> None:
    """A manifest cannot lead out of its folder."""
    _, _, folder = saved
    edited(folder, lambda m: m["tensors"]["model/head.bias"].update(file=name))
    with pytest.raises(FileFormatError, match=r"model/head.bias"):
        Checkpoint(folder)


@pytest.mark.filterwarnings("ignore:no gradient reaches")
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """One with more tensors than the model, as much as one with fewer."""
    _, _, folder = trained(tmp_path / "saved", "Unused")
    chain = built("Chain")
    with pytest.raises(FileFormatError, match="tensors that the model lacks, such as cut"):
        resume(chain, with_options(chain, optimizer=sgd), folder)


def test_the_state_of_another_optimizer_is_refused(saved: Saved) -> None:
    model, _, folder = saved
    with pytest.raises(FileFormatError, match=r"resumes with AdamW, but .* that of SGD"):
        resume(model, with_options(model, optimizer=amsgrad), folder)


def test_a_scheduler_that_was_not_there_is_refused(saved: Saved) -> None:
    model, workload, folder = saved
    with pytest.raises(FileFormatError, match="scheduler is null"):
        resume(model, with_options(model, optimizer=workload.optimizer, scheduler=cosine), folder)


@pytest.mark.filterwarnings("ignore:Odd is not of torch.optim")
def test_a_state_that_is_no_tensor_and_no_number_is_refused(tmp_path: Path) -> None:
    """It is named, and no folder is left behind."""
    model = built("Chain")

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["history"] = [1, 2]
            return None

    workload = with_options(model, optimizer=lambda named: Odd(named, lr=0.1), data=data)

    def work(make: Callable[..., Pipeline]) -> None:
        pipeline = make()
        steps(pipeline, 1)
        pipeline.save(tmp_path / "odd")

    with pytest.raises(TrainingError, match="keeps a list as 'history' of"):
        run(model, workload, plan(model, 2), work)
    assert list(tmp_path.iterdir()) == []
