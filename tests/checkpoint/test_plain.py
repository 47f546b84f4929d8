"""Weights that something else saved."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anabranch import launch
from anabranch.checkpoint.plain import PlainWeights
from anabranch.errors import FileFormatError
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import MODELS, batch, built, plan


def other(name: str) -> dict[str, torch.Tensor]:
    """The state of a model with other weights than the one that is built, each tensor once."""
    torch.manual_seed(5)
    module = MODELS[name]()
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["Tied", "Norm"])
def test_training_begins_with_them(name: str, tmp_path: Path):
    """Each rank reads its own; the first loss is that of the module with these weights."""
    model, weights = built(name), other(name)
    save_file(weights, tmp_path / "model.safetensors")

    def rank() -> float:
        chosen = plan(model, 2)
        return Pipeline.from_weights(
            tmp_path, model.workload, chosen, captured=model.captured, exact=True
        ).step(batch(16))

    module = MODELS[name]()
    module.load_state_dict(weights, strict=False)
    expected = sum(
        module(**{k: v[i : i + 4] for k, v in batch(16).items()}).item() / 4
        for i in range(0, 16, 4)
    )
    assert launch.run(rank, 2, timeout=60.0)[0] == pytest.approx(expected, rel=1e-6)


def files(folder: Path, **named: dict[str, torch.Tensor]) -> Path:
    """A folder with several files and their index, as Hugging Face writes it."""
    table = {}
    for name, tensors in named.items():
        save_file(tensors, folder / f"{name}.safetensors")
        table |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return folder


A, B = torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)


def test_several_files_with_an_index(tmp_path: Path):
    """A narrower type is taken as it is; one of two names of a tied weight is enough."""
    weights = PlainWeights(files(tmp_path, one={"a": A}, two={"tied": B}))
    found = weights.match({"a": ["a"], "b": ["b", "tied"], "mask": ["mask"]}, ["mask"])
    assert found == {"a": "a", "b": "tied"}
    assert weights.tensor("tied", torch.zeros(3)).dtype == torch.float32


def lost(folder: Path) -> None:
    (folder / "two.safetensors").unlink()


def leads_out(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))


def cut(folder: Path) -> None:
    file = folder / "one.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lost, "two.safetensors cannot be read"),
        (leads_out, "'../one.safetensors' is no plain file name"),
        (cut, "one.safetensors cannot be read"),
    ],
)
def test_what_is_damaged_is_refused(damage: Callable[[Path], None], said: str, tmp_path: Path):
    damage(files(tmp_path, one={"a": A}, two={"b": B}))
    with pytest.raises(FileFormatError, match=said):
        PlainWeights(tmp_path)


def test_what_is_of_another_model_is_refused(tmp_path: Path):
    """With a name of each kind, both shapes, both types."""
    weights = PlainWeights(files(tmp_path, one={"a": A}, two={"b": B}))
    with pytest.raises(FileFormatError, match="lacks 1, such as c and has in addition 1"):
        weights.match({"a": ["a"], "c": ["c"]}, [])
    with pytest.raises(FileFormatError, match=r"a is float32\[2\], but .* has float32\[4\]"):
        weights.tensor("a", torch.zeros(4))
    with pytest.raises(FileFormatError, match=r"a is float32\[2\], but .* has bfloat16\[2\]"):
        weights.tensor("a", torch.zeros(2, dtype=torch.bfloat16))


def test_there_are_none(tmp_path: Path):
    with pytest.raises(FileFormatError, match="has no weights to start from"):
        PlainWeights(tmp_path)
