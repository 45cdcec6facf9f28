"""What would fail silently, without a run: `bash launch.sh check [flags of train.py]`, in seconds.

The same checks as at the start of a run (`plumbing/checks.py`): settings, data, gold answers,
tokenizer, template, weights. Exit code 2, and one line, for what a run would refuse.
"""

import sys

import torch
import transformers

from plumbing.policy import load_policy
from plumbing.settings import notes, parse
from plumbing.start import prepare


def main() -> int:
    settings = parse(sys.argv[1:], "check")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        start = prepare(settings)
        load_policy(start.base, start.ranks, getattr(torch, start.dtype), start.probe)
    except ValueError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    said = [*notes(settings), *start.notes]
    for note in said:
        print(f"note: {note}", file=sys.stderr)
    task, complete = start.task, start.settings
    print(
        f"{complete.model} on {complete.env}: {len(start.rows):,} rows to train on, "
        f"{len(task.test):,} held out, up to {complete.max_tokens} tokens a turn, a turn ends at "
        f"{', '.join(map(repr, start.tokenizer.convert_ids_to_tokens(start.turn_ends)))}; "
        f"{'nothing' if not said else 'nothing but the above'} to say against it"
    )
    task.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
