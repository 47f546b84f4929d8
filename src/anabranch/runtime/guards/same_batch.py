"""Checks that all ranks have the same batch, and copies of parameters the same values.

Every rank takes its slices from the same batch, and copies of a parameter get the same sums. If a
rank has other data, or a copy has drifted away, results are wrong and nothing else shows it::

    first step        digests of all ranks, gathered   refused before any message
    every batch       its digest in a few integers     compared by the watch of the ranks
    every step        (digest, its square) in the totals: all are equal if and only if
                      n * sum of squares = square of the sum
    every 100 steps   copies of parameters, gathered

A batch of another size has other messages, and ranks that wait for them never come to the totals.
So the watch (``launch``, ``StoreWatch``) sees from outside that ranks have begun different batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from anabranch.data.loaders import samples_digest
from anabranch.errors import DataError, TrainingError, some

if TYPE_CHECKING:
    from anabranch.runtime.ranks.mesh import Mesh


BatchCheck = Literal["sampled", "full"]
"""Values of a batch that ranks compare: some of each tensor on the CPU, or all."""


@dataclass(frozen=True, slots=True)
class BatchDigests:
    """Sizes of digests of batches, and of the integers that publish them.

    Attributes:
        bits: bits of a digest; the sum of its square over thousands of ranks is still exact in
            float64.
        sampled: values of each tensor of a batch in its digest, evenly spread.
        recent_ints: integers for one rank's last batches: by as many batches a rank may be ahead of
            another one and be compared.
        key_bits: bits of such an integer that identify the batch; the bits of the digest follow.
            Both are written at once; 0 stands for no batch.
        wait_s: seconds for which the watch waits for more ranks to begin a batch that differs
            between two ranks.
    """

    bits: int = 20
    sampled: int = 32
    recent_ints: int = 16
    key_bits: int = 42
    wait_s: float = 0.4


DIGESTS = BatchDigests()

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> integer type; larger elements are several integers of 8 bytes."""


def batch_digest(leaves: Mapping[str, Tensor], *, every_value: bool = False) -> bytes:
    """Return 16 bytes from names, types, sizes and some values of a batch. Values on a GPU are left
    out, because reading them would wait for it. If a rank reads only columns of a batch, sample
    numbers stand for the values.

    Args:
        every_value: include all values, also those on a GPU.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in leaves.items():
        digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)};".encode())
        if (samples := samples_digest(leaf)) is not None:
            digest.update(samples)
        elif every_value:
            values = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(bytes(values.numpy()))
        elif leaf.device.type == "cpu" and leaf.numel():
            digest.update(_some_values(leaf.detach()))
    return digest.digest()


def _some_values(leaf: Tensor) -> bytes:
    flat = leaf.view(-1) if leaf.is_contiguous() else leaf[0].flatten()
    some = flat[:: max(flat.numel() // DIGESTS.sampled, 1)].contiguous()
    return bytes(some.view(torch.uint8).numpy())


def small_digest(digest: bytes) -> int:
    """Return the ``DIGESTS.bits`` bits that stand for a digest in sums and recent batches."""
    return int.from_bytes(digest[:8], "big") >> (64 - DIGESTS.bits)


def all_alike(count: int, total: float, squares: float) -> bool:
    """Return True if numbers are equal, by their count, their sum and the sum of their squares."""
    return count * int(squares) == int(total) ** 2


def copies_digest(copies: Collection[Tensor]) -> int:
    """Return a number from all bits of some tensors, equal for equal ones, with one device read."""
    sums: list[Tensor] = []
    for copy in copies:
        words = copy.detach().contiguous().view(-1).view(_WORDS.get(copy.itemsize, torch.int64))
        sums += [part.sum(dtype=torch.int64) for part in (words, words[::3])]
    total = len(copies)
    for number in torch.stack(sums).tolist() if sums else ():
        total = (total * 1_000_003 + number) % 2**62
    return total


class RecentBatches:
    """The last batches that this process has begun, in integers that another process can read."""

    def __init__(self) -> None:
        self._ints = memoryview(bytearray(8 * DIGESTS.recent_ints)).cast("q")

    def share(self, ints: memoryview) -> None:
        """Keep the integers in memory that another process reads."""
        self._ints = ints

    def note(self, run: int, number: int, digest: bytes) -> None:
        """Note that batch ``number`` begins; ``run`` is a random number, equal on all ranks."""
        key = (run + number) % 2**DIGESTS.key_bits
        self._ints[number % DIGESTS.recent_ints] = (key << DIGESTS.bits | small_digest(digest)) + 1

    @property
    def numbers(self) -> list[int]:
        return list(self._ints.tolist())


RECENT_BATCHES = RecentBatches()
"""The last batches of this process, which is one rank."""


class BatchWatch:
    """Compares the batches that ranks have begun, from outside.

    Args:
        num_ranks: number of ranks to compare.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._seen: dict[int, dict[int, int]] = {}
        self._since = float("inf")

    def note(self, rank: int, recent: Sequence[int]) -> None:
        """Take the last batches that a rank has begun, as ``RecentBatches`` has them."""
        pairs = (divmod(number - 1, 2**DIGESTS.bits) for number in recent if number)
        self._seen[rank] = dict(pairs)

    def difference(self, now: float, *, is_over: bool = False) -> str:
        """Return the reason to stop if ranks have begun different batches; empty otherwise.

        It waits for a moment while other ranks may still begin the same batch, since only several
        ranks show which one is odd, unless the run ``is_over``.
        """
        by_batch: dict[int, dict[int, int]] = {}
        for rank, seen in self._seen.items():
            for key, digest in seen.items():
                by_batch.setdefault(key, {})[rank] = digest
        differing = [held for held in by_batch.values() if len(set(held.values())) > 1]
        if not differing:
            self._since = float("inf")
            return ""
        digests = max(differing, key=len)
        self._since = min(self._since, now)
        if len(digests) < self._num_ranks and now - self._since < DIGESTS.wait_s and not is_over:
            return ""
        ranks = sorted(digests)
        return _refusal(odd_ones([digests[rank] for rank in ranks], ranks))


def _refusal(odd: str) -> str:
    return (
        f"{odd} another batch than the others, in its names, sizes or values; "
        "every rank has to be given the same whole batch, of which it takes its slices: give all "
        "ranks the same data, in the same order, shuffled with one seed"
    )


def require_same_batch(mesh: Mesh, digest: bytes) -> None:
    """Refuse a batch that differs between ranks; a DataError on every rank names the odd ones. All
    ranks call it together.
    """
    if mesh.size > 1 and (odd := odd_ones(mesh.gather(digest.hex()), range(mesh.size))):
        raise DataError(_refusal(odd))


def require_same_copies(
    mesh: Mesh, held: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]
) -> None:
    """Refuse parameters whose copies are not equal, bit for bit.

    Args:
        held: parameter -> the ranks that hold it, the same on all ranks.
        parameters: parameters of this rank.

    Raises:
        TrainingError: on every rank, naming the ranks whose copies differ.
    """
    copies: dict[tuple[int, ...], list[Tensor]] = {
        ranks: [] for ranks in sorted({*held.values()}) if len(ranks) > 1
    }
    if mesh.size == 1 or not copies:
        return
    for name, parameter in parameters.items():
        if held[name] in copies:
            copies[held[name]].append(parameter)
    gathered = mesh.gather([copies_digest(held) for held in copies.values()])
    for index, ranks in enumerate(copies):
        if odd := odd_ones([gathered[rank][index] for rank in ranks], ranks):
            raise TrainingError(
                f"{odd} other values of parameters that ranks {', '.join(map(str, ranks))} share: "
                "copies are updated alike and stay equal bit for bit, so memory was damaged, or "
                "something else changes parameters on some ranks only; resume from a checkpoint"
            )


def odd_ones(values: Sequence[object], ranks: Sequence[int]) -> str:
    """Name the ranks whose value is not the most frequent one; empty if all are equal."""
    groups: dict[object, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    if len(groups) == 1:
        return ""
    # Of two groups of one size the one with the first rank counts as right.
    most = max(groups.values(), key=lambda group: (len(group), -group[0]))
    return ranks_have(sorted(r for group in groups.values() if group is not most for r in group))


def ranks_have(ranks: Sequence[int]) -> str:
    """Return the beginning of a sentence on some ranks."""
    return f"ranks {some(ranks, 8)} have" if len(ranks) > 1 else f"rank {ranks[0]} has"
