"""Models with a loss of every kind, which the samples of a batch share in other ways.

Each entry of ``MODELS`` is (module, kind); all take ``batch(samples)``.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH, CLASSES = 6, 5, 7


class Tokens(nn.Module):
    """Scores for every token; subclasses make a loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Mean(Tokens):
    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.scores(x).square().mean()


class Bounded(Mean):
    """Weights are bounded, and brought to where they are, by the forward."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        self.to(x.device).head.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.body[0].weight.clamp_(-0.2, 0.2)
        return super().forward(x, y, label)


class Sum(Tokens):
    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.scores(x).square().sum()


class PenalisedSum(Tokens):
    """A sum and penalties on weights, before, behind, in place of its entries, and of one layer
    collected in place.
    """

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        bias, sums = self.head.bias, self.scores(x).square().sum((0, 1))
        loss = torch.where(bias > bias.mean(), sums, bias).sum()
        loss = 0.3 * sum(p.square().sum() for p in self.parameters()) + loss
        loss += 0.1 * self.head.weight.norm()
        return loss - bias.sum()


class TimesSamples(Tokens):
    """A mean that the user multiplies by the batch size."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.scores(x).square().mean() * x.shape[0]


class Masked(Tokens):
    """The mean over the labels that are not -100."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> dict[str, Tensor]:
        scores = self.scores(x)
        loss = F.cross_entropy(scores.flatten(0, 1), label.flatten())
        counts = label != -100
        right = (scores.argmax(-1) == label) & counts
        return {"loss": loss, "accuracy": right.sum() / counts.sum().clamp(min=1)}


class MaskedByHand(Tokens):
    """The same with weights and a bound, written out, and a second mean of another count."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores = self.scores(x)
        mask = (label != -100).to(x.dtype)
        entries = F.cross_entropy(scores.transpose(1, 2), label.clamp(min=0), reduction="none")
        first = (entries * mask).sum() / mask.sum().clamp(min=1.0)
        return first + 0.5 * F.cross_entropy(scores[:, 0], label[:, 0])


class ByFrequency(Tokens):
    """Classes that are rare in the batch count for more."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        counts = torch.bincount(label[label != -100], minlength=CLASSES)
        weight = 1 / counts.clamp(min=1)
        return F.cross_entropy(self.scores(x).flatten(0, 1), label.flatten(), weight=weight)


class MixedRows(Tokens):
    """Two values of each sample, stacked, that are viewed as rows of two values of two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        stacked = torch.stack([self.body(y), self.body(x.mean(1))])
        return self.head(torch.tanh(self.both(stacked.reshape(-1, 2 * WIDTH)))).square().mean()


class Chosen(Tokens):
    """The mean over the labels that a mask chooses, and sums divided by their number, one of Python
    and one of ones.
    """

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores, mask = self.scores(x), label != -100
        among = F.cross_entropy(scores[mask], label[mask])
        row, column = torch.where(mask)
        among += scores.square().mean(-1).sum() / torch.ones_like(label[mask]).sum()
        return among + scores[row, column].square().sum() / int(mask.sum())


class ChosenMeans(Tokens):
    """Means over the entries and over the rows that a mask chooses, as a student of a teacher has
    them, beside a mean over samples.
    """

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores, mask = self.scores(x), label != -100
        chosen, target = scores[mask][:, 1:], x[mask]
        alike = F.cosine_embedding_loss(chosen, target, target.new_ones(target.shape[0]))
        log, teacher = F.log_softmax(chosen, -1), F.softmax(target, -1)
        positive = x[..., 0] > 0
        return (
            F.mse_loss(chosen, target)
            + F.kl_div(log, teacher, reduction="batchmean")
            + F.kl_div(log, teacher.log(), reduction="batchmean", log_target=True)
            + alike
            + scores[..., 0][positive].abs().mean()
            + F.l1_loss(scores[..., 1].masked_select(positive), scores[..., 2][positive])
            + torch.masked_select(scores, positive[..., None]).square().mean()
            + scores.square().mean()
        )


class ChosenPairs(Tokens):
    """Compares each row that a mask chooses with the next one, which may be of another sample."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        chosen = self.scores(x)[label != -100]
        return (chosen * chosen.roll(1, 0)).mean() + chosen.square().mean()


class ChosenMargins(Tokens):
    """A loss whose sum over no rows PyTorch leaves undefined."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores, mask = self.scores(x), label != -100
        return F.multi_margin_loss(scores[mask], label[mask])


class Fraction(Tokens):
    """Returns a numerator and a denominator."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        mask = (label != -100).to(x.dtype)
        return (self.scores(x).square().mean(-1) * mask).sum(), mask.sum()


class Aligned(Tokens):
    """A sequence to be found in a longer one, of the labels that are chosen from all samples; and
    positions of the type of what they are added to, in the sizes of the first sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0, 1, LENGTH)[:, None])

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores = self.scores(x)
        places = self.positions.type_as(scores) * torch.ones_like(scores[0])
        log = (scores + places).log_softmax(-1).transpose(0, 1)
        frames, kept = torch.full((len(x),), LENGTH), label > 0
        targets, lengths = label.masked_select(kept), kept.sum(-1)
        return F.ctc_loss(log, targets, frames, lengths, zero_infinity=True)


class WrittenInPlace(Tokens):
    """The labels of the first tokens are ignored by a write through a view, the first scores are
    squared in place, and two sums are collected in a tensor; what is counted is that of the batch
    as well.
    """

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores, target, sums = self.scores(x), label.clone(), x.new_zeros(2)
        target[:, :2] = -100
        scores[..., 0].add_(1).pow_(2)
        sums[0] = F.cross_entropy(scores.flatten(0, 1), target.flatten())
        sums[1] = scores.square().mean()
        return sums.sum()


class Spectrum(Tokens):
    """Products of low frequencies, written into a tensor of zeros, as Fourier operators have it;
    one factor is kept without its gradient, and the loss has one entry.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factors = [self.head.bias.detach()]

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.scores(x))
        kept = torch.zeros_like(frequencies)
        kept[..., :2] = frequencies[..., :2] * torch.complex(
            self.head.bias[:2], self.factors[0][2:4]
        )
        kept.diagonal(dim1=1, dim2=2).mul_(2)
        kept[:, 0, 3] = frequencies[:, 1, 3].conj()
        return torch.fft.irfft(kept).square().mean().reshape(1)


class MeansCompared(Tokens):
    """Means over the batch, collected through a view that was there before."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores, means = self.scores(x), x.new_zeros(2, CLASSES)
        first = means[0]
        means[0] = scores[:, 0].mean(0)
        means[1] = scores[:, 1].mean(0)
        return (first - means[1]).square().sum() + scores.square().mean()


class Weighed(Tokens):
    """Weights that are divided by the batch size before they meet what they weigh."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return (self.scores(x).square().mean(-1) * (x[..., 0].abs() / len(x))).sum()


class Saturated(Tokens):
    """A power of the batch size inside of a function that is not linear."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return (self.scores(x) / len(x)).exp().sum()


class KnownBefore(Tokens):
    """Weights that are made of the batch alone, and that a slice of it has otherwise: some are
    normalised or sorted over the samples, some count these; the first are written.
    """

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        n, first = len(x), torch.zeros(len(x), LENGTH, device=x.device)
        first[:, 0], first[0] = 1 / n, 2
        by_token = first + x[..., 0].softmax(0) + (x[..., 1] / n).exp() + x[..., 2].sort(0).values
        by_sample = torch.linspace(0, 1, n) + torch.arange(n) / n + torch.full((n,), 1 / n).square()
        by_token += torch.eye(n, LENGTH) + torch.ones(n, LENGTH).tril()
        by_sample += torch.linspace(0, 1, 32)[:n] + torch.zeros(1).repeat_interleave(n)
        same = label[:, None, 1] == label[None, :, 1]
        weight = by_token + (by_sample + (torch.arange(n) < 3) + 1 / same.sum(1))[:, None]
        return (self.scores(x).square().mean(-1) * weight).sum()


class Mixed(Tokens):
    """Samples mixed with those at the other end of the batch, and their labels likewise; entries of
    the samples' own by their places.
    """

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        log = self.scores(0.7 * x + 0.3 * x.flip(0))[:, 1].log_softmax(-1)
        own, place = label[:, 1].clamp(min=0), torch.arange(len(x), device=x.device)
        alike = log[place[:, None], own[:, None]].mean()
        return 0.3 * F.nll_loss(log, own.roll(1, 0)) - 0.7 * alike


class Numbers(Tokens):
    """Numbers that depend on that of the samples, in every place, and those of a count."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores, n, count = self.scores(x), len(x), (label != -100).sum().item()
        bounded = scores.clamp(max=1 / n) + (scores / (n // 2)).relu() * torch.full((), 1 / n)
        power = (scores.abs() + 1 / float(count)).pow(1 / n) + self.head.bias * n
        total = bounded.square().sum() / torch.tensor(float(n))
        return total + power.mean() * (n + 1) ** 0.5 + 1 / n


class SortedScores(Tokens):
    """Scores by their rank in the batch."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        ranked = self.scores(x).mean((1, 2)).sort(0).values
        return (ranked * torch.linspace(0, 1, len(x), device=x.device)).sum()


class Neighbours(Tokens):
    """Compares each sample with the next one of the batch, by an index along the samples."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores = self.scores(x)
        following = (torch.arange(len(x), device=x.device) + 1) % len(x)
        return (scores - scores[following]).square().mean()


class FirstSampleWritten(Tokens):
    """A write to the first sample of the batch."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        scores = self.scores(x) * 1.0
        scores[0] = 0.0
        return scores.square().mean()


class Towers(nn.Module):
    """Two towers; subclasses compare what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def sides(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x.mean(1)), dim=-1), F.normalize(self.right(y), dim=-1)


class Contrastive(Towers):
    """CLIP's loss."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> dict[str, Tensor]:
        a, b = self.sides(x, y)
        scores = a @ b.T * self.scale.exp()
        own = torch.arange(len(a), device=a.device)
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        return {"loss": loss, "found": (scores.argmax(1) == own).float().mean()}


class Sigmoid(Towers):
    """SigLIP's loss."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        a, b = self.sides(x, y)
        scores = a @ b.T * self.scale.exp()
        signs = 2 * torch.eye(len(a), device=a.device) - 1
        return -F.logsigmoid(scores * signs).sum(-1).mean()


class Centred(Tokens):
    """What each sample has more than the mean of the batch, then a layer."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h - h.mean(0)).square().mean()


class NormedTogether(Tokens):
    """Statistics of the whole batch, in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(WIDTH, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        h = self.norm(self.body(x).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(h)).square().mean()


class RootMean(Tokens):
    """A root of a mean is no mean of roots."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.scores(x).square().mean().sqrt()


class AcrossSamples(Tokens):
    """A recurrent layer that takes the samples for steps, and rows of a table by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.table = nn.RNN(WIDTH, WIDTH), nn.Parameter(torch.eye(16, WIDTH))

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        h, _ = self.steps(self.body(x + self.table[: len(x), None]))
        return self.head(h).square().mean()


class CountedColumn(Tokens):
    """Scores at a place that a count of the batch tells."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.scores(x)[:, (label != -100).sum() % LENGTH].square().mean()


class Experts(Tokens):
    """Sorts tokens by expert, counts those of each, and puts them back, as Mixtral does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.linspace(0.5, 2, 4 * WIDTH).view(4, WIDTH))

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor | dict[str, Tensor]:
        h = self.body(x).flatten(0, 1)
        choice, order = h[:, :4].argmax(-1).sort()
        ends = torch.histc(choice.float(), 4, 0, 3).cumsum(0)
        expert = torch.bucketize(torch.arange(len(h), device=x.device), ends, right=True)
        rows = h[order] * self.experts[expert]
        scores = self.head(torch.zeros_like(rows).index_copy(0, order, rows))
        hits = (scores.argmax(-1) == label.flatten()).sum()
        return {"loss": scores.square().mean(), "accuracy": hits / (label >= 0).sum()}


class Balanced(Experts):
    """Two such layers, and the balance of their experts, as a router's auxiliary loss has it: the
    share of the tokens that each expert has, times its probability, both of the whole batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> dict[str, Tensor]:
        h, balance = self.body(x), x.new_zeros(())
        for gate in self.gates:
            tokens = h.flatten(0, 1)
            probabilities = gate(tokens).softmax(-1)
            weight, choice = probabilities.max(-1)
            count = torch.histc(choice.float(), 4, 0, 3)
            if gate is self.gates[1]:  # of a size that the trace learns from what reads it
                count = torch.bincount(choice, minlength=4)
            share = count / len(tokens)
            balance = balance + 4 * (share * probabilities.mean(0)).sum()
            h = h + (tokens * self.experts[choice] * weight[:, None]).unflatten(0, h.shape[:2])
        loss = F.cross_entropy(self.head(h).flatten(0, 1), label.flatten())
        return {"loss": loss + balance, "balance": balance}


class Captioned(Towers):
    """A contrastive loss, and beside it one by token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        a, b = self.sides(x, y)
        own = torch.arange(len(a), device=a.device)
        scores = self.head(self.left(x)).flatten(0, 1)
        return F.cross_entropy(a @ b.T, own) + F.cross_entropy(scores, label.flatten())


MODELS: dict[str, tuple[type[nn.Module], str]] = {
    "mean": (Mean, "mean"),
    "bounded": (Bounded, "mean"),
    "experts": (Experts, "mean"),
    "sum": (Sum, "sum"),
    "penalised sum": (PenalisedSum, "sum"),
    "times samples": (TimesSamples, "mean"),
    "masked": (Masked, "weighted mean"),
    "masked by hand": (MaskedByHand, "weighted mean"),
    "by frequency": (ByFrequency, "weighted mean"),
    "chosen": (Chosen, "weighted mean"),
    "means of the chosen": (ChosenMeans, "weighted mean"),
    "pairs of the chosen": (ChosenPairs, "coupled"),
    "margins of the chosen": (ChosenMargins, "coupled"),
    "written in place": (WrittenInPlace, "weighted mean"),
    "spectrum": (Spectrum, "mean"),
    "means compared": (MeansCompared, "coupled"),
    "weighed": (Weighed, "sum"),
    "saturated": (Saturated, "sum"),
    "aligned": (Aligned, "mean"),
    "known before": (KnownBefore, "sum"),
    "mixed": (Mixed, "weighted mean"),
    "numbers": (Numbers, "weighted mean"),
    "sorted scores": (SortedScores, "coupled"),
    "neighbours": (Neighbours, "coupled"),
    "first sample written": (FirstSampleWritten, "coupled"),
    "fraction": (Fraction, "weighted mean"),
    "contrastive": (Contrastive, "coupled"),
    "sigmoid": (Sigmoid, "coupled"),
    "centred": (Centred, "coupled"),
    "normed together": (NormedTogether, "coupled"),
    "across samples": (AcrossSamples, "coupled"),
    "mixed rows": (MixedRows, "coupled"),
    "counted column": (CountedColumn, "coupled"),
    "root mean": (RootMean, "coupled"),
    "balanced": (Balanced, "coupled"),
    "captioned": (Captioned, "coupled"),
}


def batch(samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Labels are ignored here and there, of the first samples all but one."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (samples, LENGTH), generator=generator)
    label = label.masked_fill(torch.rand(label.shape, generator=generator) < 0.5, -100)
    label[: samples // 4] = -100
    label[0, 1], label[-1, 0] = 1, 2
    return {
        "x": torch.randn(samples, LENGTH, WIDTH, generator=generator),
        "y": torch.randn(samples, WIDTH, generator=generator),
        "label": label,
    }
