"""Tensors side by side."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.runtime.transport.packing import pack, packing_of, specs_of, unpack

DTYPES = [torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def test_tensors_begin_where_torch_would_let_them() -> None:
    """Three bytes, then the next multiple of 64; the last has no gap behind it."""
    tensors = [torch.zeros(3, dtype=torch.int8), torch.zeros(0), torch.zeros(17)]
    packing = packing_of(specs_of(tensors))
    assert packing.offsets == (0, 64, 64)
    assert packing.sizes == (3, 0, 68)
    assert packing.nbytes == 132


def test_signatures_tell_shapes_and_types_apart() -> None:
    """They cross processes, so they may not come from addresses; this one is a constant."""
    specs = [specs_of([torch.zeros(s, dtype=d)]) for s in ([6], [2, 3]) for d in DTYPES]
    assert len({packing_of(spec).signature for spec in specs}) == len(specs)
    assert packing_of(specs_of([torch.zeros(2, 3)])).signature == 0x18559C35


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=5))
def test_what_is_packed_comes_out(cases: list[tuple[list[int], torch.dtype, bool]]) -> None:
    """Any shapes and types, in memory order or transposed."""
    tensors = []
    for shape, dtype, is_transposed in cases:
        tensor = torch.randint(0, 2, shape).to(dtype)
        tensors.append(tensor.transpose(0, -1) if is_transposed and shape else tensor)
    packing = packing_of(specs_of(tensors))
    data = torch.empty(packing.nbytes, dtype=torch.uint8)
    memory = memoryview(data.numpy())
    pack(tensors, packing, memory, data.data_ptr())
    for got, sent in zip(unpack(packing, memory), tensors, strict=True):
        assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
        assert torch.equal(got, sent)
