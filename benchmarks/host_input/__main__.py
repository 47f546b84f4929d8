"""Share of a data set's bytes that each rank reads, for two towers with an image and a text.

python -m benchmarks.host_input
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anabranch
from anabranch.training import train

BATCH, STEPS, SAMPLES, HEIGHT, WORDS, WIDTH = 32, 50, 512, 64, 64, 128
RANKS = (2, 3, 4)


class TwoTowers(nn.Module):
    """An image of 64 x 64 x 3 and 64 words; do they belong together?"""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(1024, WIDTH),
            nn.ReLU(), nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip
        self.words = nn.Embedding(1000, WIDTH)
        self.text = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(2 * WIDTH, 2))

    def forward(self, pixels: Tensor, words: Tensor, label: Tensor) -> Tensor:
        text = self.text(self.words(words)).mean(1)
        joined = torch.cat([self.image(pixels), text], -1)
        return F.cross_entropy(self.head(joined), label)


class Counted:
    """A column that counts the bytes that are read of it here."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.read_bytes = values, 0

    def __call__(self, samples: Tensor) -> Tensor:
        found = self.values[samples]
        self.read_bytes += found.nbytes
        return found


def columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixels": torch.randn(SAMPLES, 3, HEIGHT, HEIGHT, generator=generator),
        "words": torch.randint(1000, (SAMPLES, WORDS), generator=generator),
        "label": torch.randint(2, (SAMPLES,), generator=generator),
    }


def main() -> None:
    torch.manual_seed(0)
    values, module = columns(), TwoTowers()
    captured = anabranch.capture(module, {name: value[:8] for name, value in values.items()})
    profile = anabranch.measure(captured, [8, 16, 32])
    total = STEPS * BATCH * sum(value[0].nbytes for value in values.values())
    for devices in RANKS:
        plan = anabranch.plan(
            profile,
            anabranch.load_cluster(f"local:{devices}"),
            BATCH,
            planner="even",
            max_replicas=1,
        )

        def rank(plan: anabranch.Plan = plan) -> list[int]:
            counted = {name: Counted(value) for name, value in values.items()}
            workload = anabranch.Workload(
                module,
                {name: value[:8] for name, value in values.items()},
                data=anabranch.Columns(counted, length=SAMPLES),
            )
            # The check would have the first rank read one batch whole.
            train(workload, plan, steps=STEPS, captured=captured, check_gradients=False)
            return [column.read_bytes for column in counted.values()]

        print(f"\n{devices} ranks, {len(plan.stage_graph.stages)} stages")
        print(f"{'rank':>4} " + " ".join(f"{name:>8}" for name in values) + f" {'share':>8}")
        found = anabranch.run(rank, devices)
        for number, read in enumerate(found):
            cells = " ".join(f"{count / 2**20:8.2f}" for count in read)
            print(f"{number:>4} {cells} {sum(read) / total:8.1%}")
        every = sum(map(sum, found))
        print(f" all ranks together {every / total / devices:.1%} of what reading it whole takes")


if __name__ == "__main__":
    main()
