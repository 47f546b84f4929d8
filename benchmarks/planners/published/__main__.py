"""Turn a published profile into one that ``anabranch plan`` reads.

python -m benchmarks.planners.published FILE -o OURS [--samples N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from anabranch.files import save_profile
from benchmarks.planners.published import read_profile


def main() -> None:
    """Read one file, write the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a published profile")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--samples", type=int, help="samples of the profiled mini-batch")
    arguments = parser.parse_args()
    save_profile(read_profile(arguments.file, arguments.samples), arguments.output)


if __name__ == "__main__":
    main()
