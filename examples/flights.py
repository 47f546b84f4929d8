"""A built-in model from Python: will this flight be late? DLRM on the flights of New York, 2013.

    python examples/flights.py

The same on the command line: ``anabranch train flights --preset small --devices 2 --steps 600``.
"""

import anabranch
from anabranch import models

BATCH_SIZE, STEPS, DEVICES = 256, 600, 2


def train(workload, captured, plan):
    """Runs on every rank."""
    pipe = anabranch.Pipeline(workload, plan, captured=captured)
    for step, batch in enumerate(pipe.batches(), start=1):
        loss = pipe.step(batch)
        if pipe.rank == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
        if step == STEPS:
            break
    return pipe.evaluate()


def main():
    workload = models.build("flights", preset="small")  # downloads the table the first time
    captured = anabranch.capture(workload.module, workload.example)
    profile = anabranch.measure(captured, [32, 64, 128, 256])
    plan = anabranch.plan(profile, anabranch.load_cluster(f"local:{DEVICES}"), BATCH_SIZE)
    print(plan.summary())
    metrics = anabranch.run(train, DEVICES, workload, captured, plan)[0]
    for name, chance in workload.chance.items():
        print(f"held-out {name} {metrics[name]:.3f}, by chance {chance:.3f}")


if __name__ == "__main__":
    main()
