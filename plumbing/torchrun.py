"""torchrun, whose last line is the first cause, and whose exit code is that of the rank it is of.

    python -m plumbing.torchrun --nproc_per_node 2 train.py --alpha 1     what launch.sh calls
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run


def first_cause(failures: dict[int, ProcessFailure]) -> tuple[int, str]:
    """Exit code, and a line unless the rank has said it itself: a rank that was killed is the cause
    of what happens to others, whoever is seen to end first."""
    killed = [(rank, f) for rank, f in failures.items() if f.exitcode < 0]
    rank, failure = min(killed or failures.items(), key=lambda found: found[1].timestamp)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return 128 - failure.exitcode, f"trainer rank {rank} died (killed by {name})"
    # Local rank 0 says in one line what it knows of; others leave a traceback further up.
    said = failure.local_rank == 0
    return failure.exitcode, "" if said else f"trainer rank {rank} failed first, see above"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the run."""
    # Its own account of what its ranks have said.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        code, line = first_cause(error.failures)
        if line:
            print(f"train.py: {line}", file=sys.stderr)
        return code
    except SignalException as error:  # it was passed on, and the ranks have ended
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
