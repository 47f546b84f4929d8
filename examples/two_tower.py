"""A model of your own in a training loop of your own: what do two handwritten digits add up to?

python examples/two_tower.py                                    # three local ranks
torchrun --nproc-per-node 3 examples/two_tower.py plan.json     # with the plan that it left
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import anabranch

BATCH_SIZE, STEPS = 64, 600
images, digit = load_digits(return_X_y=True)
images, digit = torch.tensor(images / 16).float(), torch.tensor(digit)
held_out = torch.arange(len(digit)) % 5 == 0
TRAINING, HELD_OUT = (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


class Adder(nn.Module):
    """One tower per picture; each becomes a stage of its own."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
        self.right = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 19))

    def forward(self, left, right, total):
        logits = self.head(torch.cat([self.left(left), self.right(right)], dim=-1))
        accuracy = (logits.argmax(-1) == total).float().mean()
        return {"loss": F.cross_entropy(logits, total), "accuracy": accuracy}


def pairs(rows, seed):
    """Batches of random pairs of these digits."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        one, two = rows[torch.randint(len(rows), (2, BATCH_SIZE), generator=draw)]
        yield {"left": images[one], "right": images[two], "total": digit[one] + digit[two]}


def train(plan):
    """Runs on every rank; each sees the same batches and takes the slices that it needs."""
    torch.manual_seed(0)
    workload = anabranch.Workload(module=Adder(), example=next(pairs(TRAINING, 0)))
    pipe = anabranch.Pipeline(workload, plan)
    for _, batch in zip(range(STEPS), pairs(TRAINING, 1), strict=False):
        loss = pipe.step(batch)
        if pipe.rank == 0 and pipe.step_number % 100 == 0:
            print(f"step {pipe.step_number}: loss {loss:.3f}", flush=True)
    batches = (batch for _, batch in zip(range(8), pairs(HELD_OUT, 2), strict=False))
    accuracy = pipe.evaluate(batches)["accuracy"]
    if pipe.rank == 0:
        print(f"held-out accuracy {accuracy:.3f}, by chance about 0.1", flush=True)
    return accuracy


def main():
    if len(sys.argv) > 1:  # under torchrun, where every rank needs the same plan
        train(anabranch.load_plan(sys.argv[1]))
        return
    captured = anabranch.capture(Adder(), next(pairs(TRAINING, 0)))
    profile = anabranch.measure(captured, [8, 16, 32, 64])
    plan = anabranch.plan(profile, anabranch.load_cluster("local:3"), BATCH_SIZE)
    print(plan.summary())
    anabranch.save_plan(plan, "plan.json")
    anabranch.run(train, 3, plan)


if __name__ == "__main__":
    main()
