"""``python -m anabranch``, also for torchrun: ``torchrun --nproc-per-node 2 -m anabranch train``."""

from anabranch.cli import main

main()
