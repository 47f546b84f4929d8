"""What is trained, how well it does on held-out data, and what it has to beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.data.glyphs import SIZES, load_glyphs
from anabranch.models import build
from anabranch.models.glyphs import PRESETS, GlyphNamesSizes, Patches, Tower, Words
from anabranch.models.workload_builders import dataset_workload, shuffled
from anabranch.workload import Batch, Workload
from benchmarks.datasets import drugs, flights

Score = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        metric: what ``score`` tells of held-out data; more is better.
        score: workload -> how a module of it is scored.
        baselines: what has to be beaten, by what it is.
        every: steps between two scores.
        ranks: of the pipeline, one stage each.
        microbatch_size: of the pipeline.
        couples: the loss compares the samples of a batch, so that a loop which takes it of
            micro-batches trains something else.
    """

    metric: str
    make: Callable[[], Workload]
    score: Callable[[Workload], Score]
    baselines: Callable[[], Mapping[str, float]]
    batch_size: int
    steps: int
    every: int
    ranks: int
    microbatch_size: int
    couples: bool = False


def _answers(workload: Workload, module: nn.Module) -> tuple[Tensor, Tensor]:
    """What a module's last layer says of held-out samples, and what is right."""
    said: list[Tensor] = []
    right: list[Tensor] = []
    head = module.get_submodule("head")
    hook = head.register_forward_hook(lambda _, inputs, output: said.append(output.squeeze(-1)))
    assert workload.eval_data is not None
    module.eval()
    with torch.no_grad():
        for batch in workload.eval_data(2048):
            module(**batch)
            right.append(batch["target"])
    hook.remove()
    module.train()
    return torch.cat(said), torch.cat(right)


def accuracy(workload: Workload) -> Score:
    """Share of held-out samples with the right answer."""

    def score(module: nn.Module) -> float:
        logits, target = _answers(workload, module)
        return ((logits > 0) == (target > 0.5)).float().mean().item()

    return score


def area_under_curve(workload: Workload) -> Score:
    """How often a sample whose answer is yes is ranked before one whose answer is no."""
    from sklearn.metrics import roc_auc_score

    def score(module: nn.Module) -> float:
        logits, target = _answers(workload, module)
        return float(roc_auc_score(target.numpy(), logits.numpy()))

    return score


def explained(workload: Workload) -> Score:
    """Share of variance that is explained, R2, where targets have variance 1."""

    def score(module: nn.Module) -> float:
        said, target = _answers(workload, module)
        return 1 - F.mse_loss(said, target).item()

    return score


def logistic_regression() -> Mapping[str, float]:
    """AUC on the flights of a linear model of the same inputs, categories as one column each."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    table = flights.load_flights()
    rows = np.arange(len(table.late))
    ones = np.ones(len(rows), dtype=np.float32)
    columns = [csr_matrix(torch.cat([table.schedule, table.weather], 1).numpy())]
    for column, size in zip(table.sparse, table.tables, strict=True):
        columns.append(csr_matrix((ones, (rows, column[:, 0].numpy())), (len(rows), size)))
    inputs, late = hstack(columns, "csr"), table.late.numpy()
    seen, held_out = table.training.numpy(), table.held_out.numpy()
    model = LogisticRegression(max_iter=2000).fit(inputs[seen], late[seen])
    said = model.decision_function(inputs[held_out])
    return {"guessing": 0.5, "logistic regression": float(roc_auc_score(late[held_out], said))}


def mean_per_drug() -> Mapping[str, float]:
    """R2 of guessing each drug's mean over the training cell lines."""
    sizes = drugs.DrugSizes()
    table = drugs.load_responses(sizes.genes, sizes.bits)
    seen, held_out = table.training, table.held_out
    count = len(table.counts)
    sums = torch.zeros(count).index_add_(0, table.drug[seen], table.response[seen])
    means = sums / torch.bincount(table.drug[seen], minlength=count).clamp(min=1)
    error = F.mse_loss(means[table.drug[held_out]], table.response[held_out])
    return {"mean per drug": 1 - error.item()}


class Retrieval(nn.Module):
    """Image and text tower of ``glyphs`` with CLIP's loss (Radford et al., 2021).

    Every picture of a batch is to be nearer to its own name than to all the others, and every name
    to its own picture.
    """

    def __init__(self, sizes: GlyphNamesSizes) -> None:
        super().__init__()
        patches = (SIZES.side // sizes.patch) ** 2
        self.image = Tower(Patches(sizes.patch, sizes.hidden), patches, sizes)
        self.text = Tower(Words(sizes.buckets, sizes.hidden), SIZES.words, sizes)
        self.log_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, image: Tensor, name: Tensor) -> dict[str, Tensor]:
        """``image``: [samples, 32, 32]; ``name``: [samples, words, pieces]."""
        near = self.log_scale.exp() * self.image(image) @ self.text(name).T
        own = torch.arange(near.shape[0], device=near.device)
        return {"loss": (F.cross_entropy(near, own) + F.cross_entropy(near.T, own)) / 2}


def retrieval() -> Workload:
    """Pictures and their names; whole glyphs are held out."""
    sizes = replace(PRESETS["small"], layers=2, steps=400)
    glyphs = load_glyphs(sizes.buckets)

    def gather(rows: Tensor) -> Batch:
        return {"image": glyphs.images[rows], "name": glyphs.pieces[rows]}

    return dataset_workload(
        "glyph retrieval",
        lambda: Retrieval(sizes),
        gather,
        partial(shuffled, glyphs.training),
        glyphs.held_out,
        sizes,
        example=glyphs.held_out,
        meta=False,
        chance={},
    )


def recall(workload: Workload) -> Score:
    """Share of held-out pictures and names whose nearest among all held-out ones is their own."""
    assert workload.eval_data is not None
    (batch,) = workload.eval_data(10_000)

    def score(module: nn.Module) -> float:
        assert isinstance(module, Retrieval)
        with torch.no_grad():
            near = module.image(batch["image"]) @ module.text(batch["name"]).T
        own = torch.arange(len(near))
        found = [(near.argmax(dim) == own).float().mean() for dim in (0, 1)]
        return (sum(found) / 2).item()

    return score


def _chance_of_retrieval() -> Mapping[str, float]:
    return {"guessing": 1 / len(load_glyphs().held_out)}


TASKS: Mapping[str, Task] = {
    "glyphs": Task(
        metric="accuracy",
        make=partial(build, "glyphs", preset="small", options={"layers": "2", "steps": "400"}),
        score=accuracy,
        baselines=lambda: {"guessing": 0.5},
        batch_size=128,
        steps=400,
        every=50,
        ranks=2,
        microbatch_size=32,
    ),
    "retrieval": Task(
        metric="recall@1 among 718",
        make=retrieval,
        score=recall,
        baselines=_chance_of_retrieval,
        batch_size=128,
        steps=400,
        every=50,
        ranks=2,
        microbatch_size=16,
        couples=True,
    ),
    "flights": Task(
        metric="AUC",
        make=flights.workload,
        score=area_under_curve,
        baselines=logistic_regression,
        batch_size=512,
        steps=260,
        every=26,
        ranks=3,
        microbatch_size=128,
    ),
    "drugs": Task(
        metric="R2",
        make=drugs.workload,
        score=explained,
        baselines=mean_per_drug,
        batch_size=256,
        steps=660,
        every=66,
        ranks=3,
        microbatch_size=64,
    ),
}
"""By name."""
