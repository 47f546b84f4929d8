"""Kernels of a model on a GPU at two sample counts, from which a data sheet makes a profile.

Nothing here runs the model: sizes of a kernel are affine functions of the samples, so two counts
give every other, and the data sheet turns sizes into seconds. ``estimate`` makes the traces.

Kernels of a backward that compute gradients of weights are recognised by how their sizes grow: a
matrix product whose k grows with the samples while m and n do not, as the second one of a
convolution; a sum over the samples, whose result does not grow; an addition to a gradient that is
there; and the gradient of a table. Others compute gradients of inputs, if the operator sends any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from anabranch.compiled import Floats
from anabranch.graph.opgraph import OpGraph
from anabranch.profile.data_sheets import DATA_SHEETS, DataSheet
from anabranch.profile.profile import OpCost, Profile, bytes_per_sample, fixed_bytes

MatmulPrecision = Literal["float32", "tf32"]

FEW, MANY = 2, 4
"""Sample counts of the traces. Not 1: a dimension of one sample may vanish."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One tensor operation on the device.

    Attributes:
        name: name of the ATen operation.
        nbytes: bytes read and written.
        products: matrix products in it, each (m, n, k, batch).
        dtype: torch's name of the type of the numbers that are multiplied, such as ``float32``.
        launches: number of kernels of which it is made.
    """

    name: str
    nbytes: float
    products: tuple[tuple[float, float, float, float], ...]
    dtype: str
    launches: int = 1


@dataclass(frozen=True)
class KernelTrace:
    """All kernels of a step, in order, with the operator and the pass of each.

    Attributes:
        passes: 0 (forward) or 1 (backward), per kernel.
        ops: operator of each kernel.
        kept: bytes kept for the backward, per operator.
        working: bytes that one of its passes takes besides, per operator.
        waiting: bytes of gradients held until those of weights are computed, per operator.
    """

    kernels: tuple[Kernel, ...]
    passes: tuple[int, ...]
    ops: tuple[int, ...]
    kept: tuple[int, ...]
    working: tuple[int, ...]
    waiting: tuple[int, ...]

    @property
    def nbytes(self) -> Floats:
        return np.array([k.nbytes for k in self.kernels], dtype=np.float64)

    @property
    def products(self) -> Floats:
        """(m, n, k, batch) of each matrix product; shape (products, 4)."""
        products = [p for k in self.kernels for p in k.products]
        return np.array(products, dtype=np.float64).reshape(-1, 4)

    def seconds(
        self,
        nbytes: Floats,
        products: Floats,
        sheet: DataSheet,
        precision: MatmulPrecision,
        waiting: Waiting | None = None,
    ) -> Floats:
        """Return forward and backward seconds of every operator if its kernels have these sizes,
        and with ``waiting`` the part of the backward that can wait; shape (2 or 3, operators).

        Args:
            nbytes: bytes of each kernel.
            products: (m, n, k, batch) of each matrix product.
        """
        kernel_of = np.repeat(np.arange(len(self.kernels)), [len(k.products) for k in self.kernels])
        formats = np.array([_number_format(self.kernels[i], precision) for i in kernel_of])
        compute, second = np.zeros((2, len(self.kernels)))
        for number_format in set(formats.tolist()):
            chosen = formats == number_format
            m, n, k, batch = products[chosen].T
            product_s = sheet.matmul_s(m, n, k, batch, number_format)
            np.add.at(compute, kernel_of[chosen], product_s)
            if waiting is not None:
                np.add.at(second, kernel_of[chosen], product_s * waiting.products[chosen])
        launches = np.array([k.launches for k in self.kernels], dtype=np.float64)
        result = np.zeros((2, len(self.kept)))
        kernel_s = sheet.kernel_s(nbytes, compute, launches)
        ops = np.array(self.ops)
        np.add.at(result, (np.array(self.passes), ops), kernel_s)
        if waiting is None:
            return result
        shares = np.where(compute > 0, second / np.where(compute > 0, compute, 1), waiting.kernels)
        weight_s = np.zeros(len(self.kept))
        np.add.at(weight_s, ops, kernel_s * shares * np.array(self.passes))
        return np.stack([*result, np.minimum(weight_s, result[1])])


@dataclass(frozen=True)
class Waiting:
    """Shares of gradients of weights in kernels without matrix products, and in each product."""

    kernels: Floats
    products: Floats


@dataclass(frozen=True)
class TracedModel:
    """A captured model and its kernels at ``FEW`` and ``MANY`` samples."""

    graph: OpGraph
    few: KernelTrace
    many: KernelTrace

    @property
    def is_affine(self) -> bool:
        """True if the same kernels run at both sample counts; sizes at other counts then follow."""
        few, many = (
            (t.ops, t.passes, [(k.name, k.dtype, len(k.products), k.launches) for k in t.kernels])
            for t in (self.few, self.many)
        )
        return few == many

    @cached_property
    def waiting(self) -> Waiting:
        """Kernels that compute gradients of weights, by their sizes at both sample counts."""
        few, ops = self.few, list(self.few.ops)
        weights = {p.name for p in self.graph.parameters if p.trainable}
        trains = np.array([not weights.isdisjoint(op.parameters) for op in self.graph.ops])
        sends = np.array([targets > 0 for targets in self.graph.gradient_targets])
        inside = trains[ops] & np.array(few.passes, dtype=np.bool_)
        slope = (self.many.nbytes - few.nbytes) / (MANY - FEW)
        names = np.array([kernel.name for kernel in few.kernels])
        kernels = ~sends[ops] | (np.char.find(names, "embedding") >= 0)
        kernels |= (names == "sum") & (few.nbytes > FEW * slope)
        kernels |= (names == "add_") & (slope == 0)
        larger = self.many.products - few.products
        products = (larger[:, 2] > 0) & (larger[:, [0, 1, 3]] == 0).all(axis=1)
        kernel_of = np.repeat(np.arange(len(ops)), [len(k.products) for k in few.kernels])
        products |= ~sends[ops][kernel_of]
        products &= inside[kernel_of]
        return Waiting((kernels & inside).astype(np.float64), products.astype(np.float64))

    def profile(self, device: str, samples: Sequence[int], precision: MatmulPrecision) -> Profile:
        """Return the profile of an affine model, as ``estimate`` does.

        Raises:
            ValueError: see ``checked_counts``.
        """
        counts = checked_counts(device, samples, precision)
        sheet = DATA_SHEETS[device]
        nbytes, products = self.few.nbytes, self.few.products
        more_bytes = self.many.nbytes - nbytes
        larger = self.many.products - products
        seconds = []
        for count in counts:
            t = (count - FEW) / (MANY - FEW)
            sizes = np.maximum(nbytes + t * more_bytes, 0), np.maximum(products + t * larger, 0)
            seconds.append(self.few.seconds(*sizes, sheet, precision, self.waiting))
        return self.with_seconds(counts, seconds, device, precision)

    def with_seconds(
        self,
        counts: Sequence[int],
        seconds: Sequence[Floats],
        device: str,
        precision: MatmulPrecision,
    ) -> Profile:
        """Return the profile, from ``KernelTrace.seconds`` for each sample count."""
        kept = bytes_per_sample(self.few.kept, self.many.kept, (FEW, MANY))
        fixed = fixed_bytes(self.few.kept, kept, FEW)
        working = bytes_per_sample(self.few.working, self.many.working, (FEW, MANY))
        waiting = bytes_per_sample(self.few.waiting, self.many.waiting, (FEW, MANY))
        costs = tuple(
            OpCost(
                tuple(float(s[0, op]) for s in seconds),
                tuple(float(s[1, op]) for s in seconds),
                kept[op],
                working[op],
                tuple(float(s[2, op]) for s in seconds if len(s) > 2),
                fixed[op],
                waiting[op],
            )
            for op in range(len(self.graph))
        )
        name = device if precision == "float32" else f"{device} ({precision})"
        return Profile(self.graph, tuple(counts), costs, device=name, source="estimated")


def checked_counts(device: str, samples: Sequence[int], precision: MatmulPrecision) -> list[int]:
    """Return the sample counts of an estimate, ascending.

    Raises:
        ValueError: for an unknown device or precision, or sample counts that are not positive.
    """
    if device not in DATA_SHEETS:
        raise ValueError(f"no data sheet for {device!r}; there is one for {', '.join(DATA_SHEETS)}")
    if precision not in ("float32", "tf32"):
        raise ValueError(f"precision {precision!r} is neither float32 nor tf32")
    counts = sorted(set(samples))
    if not counts or counts[0] < 1:
        raise ValueError(f"cannot estimate at {counts} samples")
    return counts


def _number_format(kernel: Kernel, precision: MatmulPrecision) -> str:
    if kernel.dtype != "float32":
        return kernel.dtype
    # torch.backends.cudnn.allow_tf32 is on by default, unlike the setting for matrix products.
    return "tf32" if "convolution" in kernel.name else precision
