"""Trained models in other programs, plain transformers and plain torch, and weights of theirs."""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from anabranch import launch
from anabranch.checkpoint import Checkpoint, load_state_dict
from anabranch.checkpoint.export import WEIGHTS, export, written_whole
from anabranch.checkpoint.plain import PlainWeights
from anabranch.errors import FileFormatError, TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import Workload
from benchmarks.architectures.models import SAMPLES, build
from tests.captured_models import captured_model
from tests.runtime.small import MODELS, Built, batch, built, plan
from tests.runtime.training import sgd

pytestmark = pytest.mark.dist


def trained(model: Built, example: Any, folder: Path, num_stages: int = 2) -> None:
    """A checkpoint after a step as a pipeline, which changes every weight."""
    samples = len(model.captured.layout.flatten(example).popitem()[1])
    chosen = plan(model, num_stages, batch_size=samples, microbatch_size=samples // 2)

    def rank() -> None:
        pipe = Pipeline(
            model.workload, chosen, captured=model.captured, check_gradients=False
        )  # fmt: skip
        pipe.step(example)
        pipe.save(folder)

    launch.run(rank, num_stages, timeout=60.0)


class Wrapped(nn.Module):
    """A model of Hugging Face inside of a module of the user's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        return {"loss": self.model(input_ids, attention_mask, labels=labels).loss}


@cache
def hugging_face(is_wrapped: bool) -> tuple[Built, Any]:
    captured, example = captured_model("Bert")
    if is_wrapped:
        captured = capture(Wrapped(build("Bert")[0]), example)
    return Built(captured, Workload(captured.module, example, optimizer=sgd)), example


def logits(model: nn.Module, example: Any) -> dict[str, Tensor]:
    """Everything that a model of Hugging Face computes for a batch."""
    model.eval()
    with torch.no_grad():
        out = model(**example)
    return {key: value for key, value in out.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_trained_model_reloads_in_plain_transformers(is_wrapped: bool, tmp_path: Path):
    """Nothing is missing, nothing unexpected, and its outputs are bit for bit those of the trained
    module. The file does not have the prefix of a wrapper around the model. The folder is the one
    that ``save_pretrained`` writes of the trained module, file by file.
    """
    model, example = hugging_face(is_wrapped)
    trained(model, example, tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "ours")
    assert made.architecture == "BertForMaskedLM"
    assert made.prefix == ("model." if is_wrapped else "")
    loaded, info = transformers.BertForMaskedLM.from_pretrained(made.path, output_loading_info=True)
    assert not any(info.values()), info
    module = copy.deepcopy(model.module)
    module.load_state_dict(load_state_dict(tmp_path / "run"))
    inner = module.model if is_wrapped else module
    expected, found = logits(inner, example), logits(loaded, example)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    inner.save_pretrained(tmp_path / "theirs")
    files = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in made.path.iterdir()} == files
    tensors, others = (load_file(tmp_path / f / WEIGHTS) for f in ("ours", "theirs"))
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], value) for key, value in others.items())
    for file in files - {WEIGHTS}:
        ours, theirs = (json.loads((tmp_path / f / file).read_text()) for f in ("ours", "theirs"))
        assert ours == theirs


def test_a_single_file_reloads_strictly_in_plain_torch(tmp_path: Path):
    """With its tied weight once; like the checkpoint, for all who may read a new file."""
    model = built("Tied")
    trained(model, batch(16), tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "out" / "tied.safetensors")
    (tmp_path / "new").touch()
    for file in (tmp_path / "run" / "rank-0.safetensors", made.path):
        assert file.stat().st_mode == (tmp_path / "new").stat().st_mode
    assert (made.prefix, made.left_out, made.architecture) == ("", 0, "")
    module = type(model.module)()
    load_model(module, str(made.path), strict=True)
    expected = load_state_dict(tmp_path / "run")
    assert all(torch.equal(t, expected[name]) for name, t in module.state_dict().items())


def test_a_part_of_a_module(tmp_path: Path):
    """By its prefix, which has to be there; a folder without a model of Hugging Face has weights
    alone; nothing is ever replaced.
    """
    trained(built("TwoBranch"), batch(16), tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "left", prefix="left.")
    assert [path.name for path in made.path.iterdir()] == ["model.safetensors"]
    assert set(load_file(made.path / "model.safetensors")) == {
        "0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias",
    }  # fmt: skip
    assert made.left_out == 7
    with pytest.raises(TrainingError, match=r"no tensor of .* has a name with 'middle\.' first"):
        export(tmp_path / "run", tmp_path / "middle", prefix="middle.")
    with pytest.raises(TrainingError, match="never replaces anything"):
        export(tmp_path / "run", tmp_path / "left")
    with pytest.raises(FileFormatError, match="no such folder"):
        export(tmp_path / "none", tmp_path / "out")
    with pytest.raises(FileFormatError, match="is no checkpoint, which is a folder: it is a file"):
        export(made.path / "model.safetensors", tmp_path / "out")


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path):
    """Neither a file nor a folder, as on a full disk."""

    def fill(write: Callable[[Path], None]) -> None:
        with written_whole(tmp_path / "out", OSError) as partial:
            write(partial)
            raise OSError("full")

    for write in (Path.touch, Path.mkdir):
        with pytest.raises(TrainingError, match="out cannot be written: full"):
            fill(write)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with (
        pytest.raises(TrainingError, match="out cannot be written"),
        written_whole(tmp_path / "file" / "out", OSError),
    ):
        pass


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_transformers_saved_is_trained_on(is_wrapped: bool, tmp_path: Path):
    """``save_pretrained`` -> ``--weights``, also where the module wraps the model."""
    model, example = hugging_face(is_wrapped)
    module, _ = build("Bert", seed=7)
    module.save_pretrained(tmp_path / "pretrained")
    samples = SAMPLES
    chosen = plan(model, 2, batch_size=samples, microbatch_size=samples)

    def rank() -> float:
        options = {"captured": model.captured, "check_gradients": False}
        return Pipeline.from_weights(
            tmp_path / "pretrained", model.workload, chosen, **options
        ).step(example)

    loss = launch.run(rank, 2, timeout=60.0)[0]
    assert loss == pytest.approx(module(**example).loss.item(), rel=1e-5)


def test_checkpoints_from_before_the_descriptions_are_read(tmp_path: Path):
    """Their manifests lack the key, and their checksums are of what they have."""
    from anabranch.checkpoint.manifest import sealed
    from anabranch.files.jsonfile import parse, write_document

    trained(built("Chain"), batch(16), tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    document = parse(path.read_text(), str(path))
    del document["pretrained"]
    write_document(path, sealed(document))
    assert Checkpoint(tmp_path / "run").manifest.pretrained == []


def test_other_weights_are_not_taken_for_a_part(tmp_path: Path):
    """Names that fit one prefix only in part, or several, are refused as before."""
    save_file({"weight": torch.ones(1)}, tmp_path / "one.safetensors")
    names = {name: [name] for name in ("a.weight", "b.weight")}
    with pytest.raises(FileFormatError, match="lacks 2"):
        PlainWeights(tmp_path / "one.safetensors").match(names, ())


class Magnitude(nn.Module):
    """What DoRA multiplies each output of a layer with."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Adapted(nn.Module):
    """A layer with a low-rank adapter and DoRA's magnitudes, under the names of peft."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict({"default": Magnitude(layer.out_features)})

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return result * self.lora_magnitude_vector["default"].weight


def test_a_lora_adapter_is_written_as_peft_reads_it(tmp_path: Path):
    """The adapter alone under peft's names, with its configuration; the whole model has no
    ``config.json``, by which transformers would look for layers without adapters. One that has
    other names in the files of peft is written as it is, without ``adapter_config.json``, so that
    peft does not take its tensors for missing.
    """
    module, example = build("Llama")
    module.requires_grad_(False)
    attention: Any = module.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    model = Built(capture(module, example), Workload(module, example, optimizer=sgd))
    config = {"peft_type": "LORA", "r": 2, "target_modules": {"v_proj", "q_proj"}}
    for folder, more in (("dora", {"use_dora": True}), ("other", {"trainable_token_indices": [1]})):
        module.peft_config = {"default": config | more}
        trained(model, example, tmp_path / folder, num_stages=1)

    made = export(tmp_path / "dora", tmp_path / "adapter", trained=True)
    names = {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in made.path.iterdir()} == names
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    expected = {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"}
    expected.add(f"{layer}.lora_magnitude_vector")
    assert load_file(made.path / "adapter_model.safetensors").keys() == expected
    read = json.loads((made.path / "adapter_config.json").read_text())
    config |= {"use_dora": True, "target_modules": ["q_proj", "v_proj"], "inference_mode": True}
    assert read == config
    made = export(tmp_path / "dora", tmp_path / "whole")
    assert [path.name for path in made.path.iterdir()] == [WEIGHTS]
    made = export(tmp_path / "other", tmp_path / "as it is", trained=True)
    assert [path.name for path in made.path.iterdir()] == [WEIGHTS]


# Weights that something else saved


def other(name: str) -> dict[str, torch.Tensor]:
    """The state of a model with other weights than the one that is built, each tensor once."""
    torch.manual_seed(5)
    module = MODELS[name]()
    return {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}


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
