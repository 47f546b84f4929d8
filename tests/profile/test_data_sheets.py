"""Data sheets: peaks, waves of tiles, small products, memory-bound kernels."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.profile.data_sheets import DATA_SHEETS, DataSheet

V100 = DATA_SHEETS["v100"]
# Ten processors that reach 10 GFLOP/s together (at 0.9: 9), and memory that never limits.
TOY = DataSheet("toy", {"float32": 10e9}, 1e30, processors=10, launch_s=0.0)


def matmul_s(
    sheet: DataSheet, m: float, n: float, k: float, batch: float = 1, precision: str = "float32"
) -> float:
    sizes = (np.array([float(size)]) for size in (m, n, k, batch))
    return float(sheet.matmul_s(*sizes, precision)[0])


def test_one_full_wave() -> None:
    """Ten 256 x 128 tiles on ten processors: 2 * 2560 * 128 * 1000 operations at 9 GFLOP/s."""
    assert matmul_s(TOY, 2560, 128, 1000) == pytest.approx(2 * 2560 * 128 * 1000 / 9e9)


def test_one_tile_more_is_a_wave_more() -> None:
    """An eleventh deep tile costs more than its share; a batch of ten is the same as ten rows."""
    full = matmul_s(TOY, 2560, 128, 32)
    assert matmul_s(TOY, 256, 128, 32, batch=10) == pytest.approx(full)
    assert matmul_s(TOY, 2816, 128, 32) > 1.1 * full


def test_inner_dimension_is_split_for_few_tiles() -> None:
    """One tile with a deep inner dimension is cut in 8 or more parts that run at once."""
    work = 2 * 256 * 128 * 32000
    alone = work / 0.9e9  # one of the ten processors
    assert alone / 10 < matmul_s(TOY, 256, 128, 32000) <= 1.001 * alone / 8


@pytest.mark.parametrize("device", DATA_SHEETS)
def test_large_products_come_close_to_the_peak(device: str) -> None:
    """A product of 16384 cubed reaches between 0.65 and 0.9 of the data sheet, and never more."""
    sheet = DATA_SHEETS[device]
    for precision, peak in sheet.flops.items():
        peak_s = 2 * 16384**3 / peak
        assert 0.65 <= peak_s / matmul_s(sheet, *[16384] * 3, precision=precision) <= 0.9


def test_formats_that_a_device_lacks() -> None:
    """A V100 has neither TF32 nor bfloat16; both run as float32."""
    float32 = matmul_s(V100, 512, 512, 512)
    assert matmul_s(V100, 512, 512, 512, precision="tf32") == float32
    assert matmul_s(V100, 512, 512, 512, precision="bfloat16") == float32
    assert matmul_s(V100, 512, 512, 512, precision="float16") < float32


def test_small_products_do_not() -> None:
    """The share of the peak falls with the size: 4096, 1024, 256, 64 cubed."""
    shares = [
        2 * n**3 / V100.flops["float32"] / matmul_s(V100, n, n, n) for n in (4096, 1024, 256, 64)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8
    assert shares[-1] < 0.1


@given(
    st.tuples(*[st.integers(1, 3000)] * 3, st.integers(1, 64)),
    st.integers(0, 3),
    st.integers(1, 1000),
    st.sampled_from(sorted(DATA_SHEETS)),
)
def test_more_work_is_never_faster(
    sizes: tuple[int, ...], which: int, more: int, device: str
) -> None:
    """Growing one size of a product never saves time, so neither does a larger micro-batch."""
    larger = [size + (more if i == which else 0) for i, size in enumerate(sizes)]
    assert matmul_s(DATA_SHEETS[device], *sizes) <= matmul_s(DATA_SHEETS[device], *larger)


def test_kernel_is_bound_by_memory_or_by_compute() -> None:
    """820 GB at 0.82 of 1 TB/s take a second; compute beneath that is hidden, above it counts."""
    sheet = replace(V100, bandwidth=1e12, launch_s=1e-3)
    nbytes, one = np.full(3, 820e9), np.ones(3)
    seconds = sheet.kernel_s(nbytes, np.array([0.0, 0.5, 2.0]), one)
    assert seconds == pytest.approx([1.001, 1.001, 2.001])
    assert sheet.kernel_s(np.zeros(1), np.zeros(1), np.array([4.0])) == pytest.approx([4e-3])


def test_newer_is_faster() -> None:
    """V100, A100, H100: each better than the one before in every respect."""
    v100, a100, h100 = (DATA_SHEETS[name] for name in ("v100", "a100", "h100"))
    for older, newer in ((v100, a100), (a100, h100)):
        assert older.bandwidth < newer.bandwidth
        assert older.launch_s > newer.launch_s
        assert all(
            older.flops[number_format] < newer.flops[number_format] for number_format in older.flops
        )


def test_nothing_to_multiply() -> None:
    """An empty product takes no time."""
    assert matmul_s(V100, 0, 10, 10) == 0.0
