"""Options of the computation of micro-batches; the same on every rank.

They change speed, memory and rounding, never what is trained, except ``dropout``, which chooses the
random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from anabranch.device.kinds import GRAPHS
from anabranch.graph.opgraph import OpGraph, Precision
from anabranch.graph.tracing.autocast import HALF

Dropout = Literal["stage", "sample", "off"]


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Options of the computation of stages.

    Attributes:
        precision: ``fp32`` leaves every operation as the model has it. ``bf16`` and ``fp16`` are
            ``torch.autocast`` around the forward: products and convolutions in half precision,
            parameters, their gradients and the optimizer as they are. Activations and messages
            between stages take up to half of the bytes; every micro-batch casts the weights once
            more. ``fp16`` scales the loss by the rules of ``torch.amp.GradScaler``, one scale for
            all ranks; a step in which a gradient overflows on any rank is skipped on all. Both need
            the ranks to agree before any optimizer step. By default that of the plan. Not with
            ``exact`` where operators share parameters: one process adds such gradients in half
            precision.
        compile: False, True for ``torch.compile`` with its own default backend (inductor, which
            needs a C++ compiler, on a GPU Triton), or the name of another backend. Each stage is
            compiled for every number of samples when it first meets it: seconds to minutes, on
            every rank and in every new process. Results equal uncompiled ones up to rounding. A
            recomputed stage holds one micro-batch's activations during its first forward.
            ``device.kinds.GRAPHS`` compiles nothing: what the passes of a stage launch is recorded,
            once for each micro-batch in flight, and replayed with one call (torch 2.13), which
            takes the host no time; memory is that of the recordings. Stages that draw from a
            generator run as ever. On a CPU the passes are run in the place of recordings. Not
            without a flush.
        offload: keep what backward needs on the host between forward and backward, except
            parameters and what arrived from other stages. Device memory of a stage falls to about
            two micro-batches' activations; each byte crosses the bus twice, in pinned memory. Pays
            where a micro-batch takes longer than these copies, not for stages with recomputation,
            which keep nothing, and not on the CPU.
        dropout: where random numbers come from. ``stage``: each micro-batch of a stage draws from a
            generator of its own; fast, repeatable, but another plan draws other numbers.
            ``sample``: each number is a hash of seed, step, operation in the model, sample of the
            batch and place within the sample, so that any plan, replica count and micro-batch size
            draws the same. On a CPU a small mask costs some 50 us more; on a GPU some fifteen
            element-wise kernels, which ``compile`` joins; attention with dropout does without fused
            kernels, so its weights take memory quadratic in the length. Operations that draw in
            another way (multinomial, randperm, dropout within nn.LSTM) are refused. ``off``:
            nothing is dropped, for comparisons; other random numbers as with ``stage``.
        sparse_embeddings: tables of ``nn.Embedding`` and ``nn.EmbeddingBag`` (sum, mean) have
            sparse gradients, as with their own ``sparse=True``: rows that were looked up instead of
            whole tables; by default where the plan has it. With optimizers that take them only:
            SparseAdam, SGD and Adagrad without momentum, weight decay and fused updates, and those
            that are not PyTorch's. Not with ``compile``, under which gradients are whole.

    Raises:
        ValueError: for a value that is not listed, or options that exclude each other.
    """

    precision: Precision | None = None
    compile: bool | str = False
    offload: bool = False
    dropout: Dropout = "stage"
    sparse_embeddings: bool | None = None

    def __post_init__(self) -> None:
        if self.sparse_embeddings and self.compile:
            raise ValueError(
                "compiled stages give whole gradients of embeddings: leave out one of compile and "
                "sparse_embeddings"
            )
        if self.offload and self.is_replayed:
            raise ValueError(
                f"compile {self.compile} replays passes in fixed memory, which is not offloaded: "
                "leave out one of compile and offload"
            )
        if self.precision not in (None, "fp32", *HALF):
            raise ValueError(f"precision {self.precision!r} is none of fp32, bf16, fp16")
        if self.dropout not in ("stage", "sample", "off"):
            raise ValueError(f"dropout {self.dropout!r} is none of stage, sample, off")
        backends = torch.compiler.list_backends(()) if isinstance(self.compile, str) else ()
        if backends and self.compile not in backends:
            raise ValueError(
                f"compile {self.compile!r} is no backend of torch.compile; known are "
                f"{', '.join(sorted(map(str, backends)))}"
            )

    @property
    def half(self) -> torch.dtype | None:
        """The element type of autocast, None without it."""
        return HALF.get(self.precision or "fp32")

    @property
    def is_replayed(self) -> bool:
        """Return True if stages are replayed instead of compiled."""
        return self.compile == GRAPHS

    @property
    def backend(self) -> str | None:
        """The backend of torch.compile, None without it."""
        if isinstance(self.compile, str):
            return self.compile
        return "inductor" if self.compile else None


PLAIN = ComputeOptions()
"""Defaults: the computation of one process."""


def require_exact(options: ComputeOptions, graph: OpGraph) -> None:
    """Accept options under which gradients are those of one process, bit for bit; or ValueError."""
    if options.half is not None and graph.tied:
        name, readers = next(iter(graph.tied.items()))
        raise ValueError(
            f"under {options.precision} gradients cannot be bitwise those of one process, which "
            f"adds those of {name} in half precision; operators {', '.join(graph.names(readers))} "
            "read it: leave exact out"
        )
