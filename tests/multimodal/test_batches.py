"""Batches of vision-language models: the same numbers as the model's own, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from anabranch.data.packed import call_module
from anabranch.errors import DataError
from anabranch.graph.tracing.library_rules import library_rules
from anabranch.multimodal import multimodal_batch
from benchmarks.architectures.multimodal import END, IMAGE, NAMES, START, ragged, small


def model(name: str) -> nn.Module:
    """A small one in double precision, so that rounding is far below any mistake."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return small(name).double()


def doubled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Numbers in double precision."""
    return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}


def gradients(module: nn.Module, loss: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """The loss and the gradients of a call."""
    module.zero_grad()
    value = loss().loss
    value.backward()
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return {"the loss": value.detach(), **found}


@pytest.mark.parametrize(
    ("name", "images"),
    [(name, (1, 4, 0, 2)) for name in NAMES]
    + [(name, (0, 0)) for name in ("Llava", "LlavaOnevision", "Idefics3", "Mistral3")]
    + [(name, (0, 0)) for name in ("Qwen2_5OmniThinker", "Qwen3VL", "Glm4v", "Ovis2")],
)
def test_loss_and_gradients_are_those_of_the_model_itself(name: str, images: list[int]) -> None:
    """Of any number of images per sample, up to the most, in several sizes; also the call that is
    traced, whose operations do not depend on the data. Slots without an image add nothing.
    """
    module = model(name)
    own = doubled(ragged(name, images, 128, seed=sum(images), mixed=True))
    batch = multimodal_batch(module, own, images=4, patches=None if name == "Llava" else 64)
    batch.tensors = doubled(batch.tensors)
    expected = gradients(module, lambda: module(**own, use_cache=False))
    plain = gradients(module, lambda: call_module(module, batch))
    with library_rules():
        traced = gradients(module, lambda: call_module(module, batch, traced=True))
    largest = max(float(g.abs().max()) for g in expected.values())
    for name_, wanted in expected.items():
        torch.testing.assert_close(plain[name_], wanted, rtol=0, atol=0)
        rounding = 1e-6 if name_ == "the loss" else 1e-9  # the loss is in single precision
        torch.testing.assert_close(traced[name_], wanted, rtol=rounding, atol=1e-12 * largest)
    assert all(not traced[other].any() for other in traced.keys() - expected.keys())


@pytest.mark.parametrize(
    "name",
    [
        *("Llava", "Qwen2_5_VL", "LlavaOnevision", "Qwen2_5OmniThinker", "Mistral3", "Glm46V"),
    ],
)
def test_a_slice_is_what_its_samples_are_alone(name: str) -> None:
    """Samples one and two of four, which have other images than the first."""
    module = model(name)
    own = doubled(ragged(name, (2, 1, 3, 1), 96, mixed=True))
    batch = multimodal_batch(module, own)
    batch.tensors = doubled({n: tensor[1:3] for n, tensor in batch.tensors.items()})
    with library_rules():
        traced = call_module(module, batch, traced=True).loss
    torch.testing.assert_close(traced, call_module(module, batch).loss, rtol=1e-12, atol=0)


def test_tokens_that_are_cut_off_are_refused_with_their_sample() -> None:
    """Otherwise features would slide into the next sample, and the totals may still agree."""
    module = model("Llava")
    own = ragged("Llava", (1, 1, 1))
    own["input_ids"][1, own["input_ids"][1] == IMAGE] = torch.tensor([IMAGE, IMAGE, 9, 9])
    says = "sample 1 has 2 image tokens but 4 image features; they would move into sample 2"
    with pytest.raises(DataError, match=says):
        multimodal_batch(module, own)
    own = ragged("Llava", (1, 1, 1))
    own["input_ids"][2, own["input_ids"][2] == IMAGE] = 9
    with pytest.raises(DataError, match="has 3 image inputs, but its tokens stand for the first 2"):
        multimodal_batch(module, own)


def test_slots_are_the_least_that_are_allowed() -> None:
    """A workload has a bucket for each of these numbers."""
    module = model("Llava")
    for images, slots in (((1, 0), 1), ((2, 1), 2), ((3, 0), 4)):
        batch = multimodal_batch(module, ragged("Llava", images), images=(1, 2, 4))
        assert batch.tensors["pixel_values"].shape[:2] == (2, slots)
    with pytest.raises(DataError, match=r"has 3 image inputs, and images=2 allows fewer"):
        multimodal_batch(module, ragged("Llava", (3, 0)), images=2)


def test_an_image_that_is_interpolated_is_refused() -> None:
    """LLaVA-OneVision makes more features of it smaller, by an operation of its own sizes."""
    module = model("LlavaOnevision")
    module.config.vision_aspect_ratio = "anyres_max_1"
    own = ragged("LlavaOnevision", (1, 1), mixed=True, seed=3)
    own["image_sizes"][:] = torch.tensor([32, 32])
    with pytest.raises(DataError, match=r"image 0 of \[32, 32\] pixels has more tiles"):
        multimodal_batch(module, own)


def test_patches_without_the_sizes_of_their_images_are_refused() -> None:
    """By name and shape, as are sizes that do not count the patches."""
    module, own = model("Qwen2VL"), ragged("Qwen2VL", (1, 1))
    grids = own.pop("image_grid_thw")
    with pytest.raises(DataError, match=r"pixel_values \[32, 96\] without image_grid_thw"):
        multimodal_batch(module, own)
    with pytest.raises(DataError, match=r"image_grid_thw \[3\]; image_grid_thw is \[images, 3\]"):
        multimodal_batch(module, {**own, "image_grid_thw": grids[0]})
    with pytest.raises(DataError, match=r"image_grid_thw \[1, 3\], which is 16 patches"):
        multimodal_batch(module, {**own, "image_grid_thw": grids[:1]})


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen3VL"])
def test_images_side_by_side_are_refused_with_their_sample(name: str) -> None:
    """Their tokens are one run, of which the library's positions are those of the first image."""
    module, own = model(name), ragged(name, (1, 2))
    own.pop("mm_token_type_ids")
    ids = own["input_ids"][1]
    ids[:11] = torch.tensor([START, *[IMAGE] * 8, END, 9])
    ids[11:][ids[11:] == IMAGE] = 9
    says = "sample 1 has 2 images, and 1 run of image tokens; .* between its start and end tokens"
    with pytest.raises(DataError, match=says):
        multimodal_batch(module, own)


def test_other_models_are_refused() -> None:
    """With the reason and the way on: models without encoded images, whose images come with more
    than pixels, or that are given something else to encode.
    """
    with pytest.raises(DataError, match=r"does not know Linear .* Workload rows="):
        multimodal_batch(nn.Linear(2, 2), {})
    module: Any = model("Llava")
    plain = type(module.model)

    class Optional(plain):  # type: ignore[misc, valid-type]
        def get_image_features(self, pixel_values: Any, sizes: Any = None, **rest: Any) -> Any:
            return super().get_image_features(pixel_values, **rest)

    class Required(plain):  # type: ignore[misc, valid-type]
        def get_image_features(self, pixel_values: Any, sizes: Any) -> None: ...

    module.model.__class__ = Optional
    own = ragged("Llava", (1, 1))
    with pytest.raises(DataError, match=r"was given sizes, which .* it takes pixel_values"):
        multimodal_batch(module, own | {"sizes": torch.ones(2)})
    module = model("Llava")
    module.model.__class__ = Required
    with pytest.raises(DataError, match="its images come with sizes"):
        multimodal_batch(module, own)
    with pytest.raises(DataError, match="takes images; give a video as images"):
        multimodal_batch(model("Qwen2VL"), {"pixel_values_videos": torch.zeros(1)})


@pytest.mark.parametrize("name", ["Llava", "LlavaOnevision", "Qwen2_5_VL", "SmolVLM"])
def test_shared_slots_change_neither_loss_nor_gradients(name: str) -> None:
    """Two samples have three slots each on average, so one may have four images. What a slice of
    two samples computes is what the model makes of these two.
    """
    module = model(name)
    own = doubled(ragged(name, (4, 1, 3, 2), 128, mixed=True))
    batch = multimodal_batch(module, own, share=2)
    batch.tensors = doubled(batch.tensors)
    assert batch.tensors["image_counts"].tolist() == [4, 1, 3, 2]
    assert batch.tensors["pixel_values"].shape[1] == 3
    expected = gradients(module, lambda: module(**own, use_cache=False))
    with library_rules():
        traced = gradients(module, lambda: call_module(module, batch, traced=True))
    largest = max(float(g.abs().max()) for g in expected.values())
    for key, wanted in expected.items():
        torch.testing.assert_close(traced[key], wanted, rtol=1e-9, atol=1e-12 * largest)
    batch.tensors = {key: tensor[2:] for key, tensor in batch.tensors.items()}
    with library_rules():
        part = call_module(module, batch, traced=True).loss
    torch.testing.assert_close(part, call_module(module, batch).loss, rtol=1e-12, atol=0)


def test_samples_are_dealt_out_by_their_cost() -> None:
    """The batch is in another order, every two samples have five images, three slots each do."""
    module = model("Llava")
    own = ragged("Llava", (4, 4, 1, 1), 128)
    batch = multimodal_batch(module, own, share=2)
    assert batch.tensors["image_counts"].tolist() == [4, 1, 4, 1]
    order = [0, 2, 1, 3]
    assert torch.equal(batch.tensors["input_ids"], own["input_ids"][order])
    as_it_is = multimodal_batch(module, own, share=2, balance="none")
    slots = [b.tensors["pixel_values"].shape[1] for b in (batch, as_it_is)]
    assert slots == [3, 4]
    with pytest.raises(DataError, match=r"a batch of 3 is no multiple .* drop_last=True"):
        multimodal_batch(module, ragged("Llava", (1, 1, 1)), share=2)
