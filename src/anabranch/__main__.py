"""``python -m anabranch``, also for torchrun: ``torchrun --nproc-per-node 2 -m anabranch ...``."""

from anabranch.cli import main

main()
