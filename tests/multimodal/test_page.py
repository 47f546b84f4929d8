"""The file of docs/multimodal.md, word for word."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from anabranch.data.packed import PackedBatch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "multimodal.md"


@pytest.mark.parametrize(("train", "trained"), [("all", 98), ("frozen", 43), ("lora", 16)])
def test_the_file_of_the_page_makes_a_workload(train: str, trained: int) -> None:
    """With zero to two images per sample; what is trained is what the option says."""
    (code, *_) = re.findall(r"```python\n(# vision.py\n.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    workload = names["workload"](train)
    parameters = list(workload.module.parameters())
    assert sum(p.requires_grad for p in parameters) == trained
    batch = next(iter(workload.data(16, 0)))
    for some in (workload.example, batch):
        assert isinstance(some, PackedBatch)
        assert some.tensors["pixel_values"].shape == (16, 2, 3, 32, 32)
        assert set(some.tensors["image_counts"].tolist()) <= {0, 1, 2}
