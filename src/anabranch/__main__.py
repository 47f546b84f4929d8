"""``python -m anabranch``, also for torchrun: ``torchrun --nproc-per-node 2 -m anabranch ...``."""

import atexit
import gc
import signal


def main() -> None:
    """The command line, which Ctrl-C ends without a traceback while it is loaded as well."""
    # Else Python looks through all of PyTorch for garbage at its end: 1.4 s of processor time.
    atexit.register(gc.freeze)
    try:
        from anabranch.cli import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
