"""Runs an entry point and turns its errors into one message and an exit status: 2 for a mistake of the user."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers.utils.logging import disable_progress_bar

from vlm_grpo.common.errors import PeerError, UserError

OTHERS_WAIT_S = 2.0  # other ranks wait this long, so that rank 0 prints a common error first


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main` on the command line's arguments.

    The process exits with status 0, 2 after a UserError, 1 after a PeerError, or 130 after Ctrl-C.
    """
    _silence_bars()
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.stdout.flush()
        if rank > 0:  # the launcher ends this process meanwhile if rank 0 has failed too
            time.sleep(OTHERS_WAIT_S)
        print(f"error: {error}", file=sys.stderr, flush=True)
        if count > 1:
            os._exit(2)  # other ranks may wait in a collective call, where an orderly exit would wait for them
        raise SystemExit(2) from None
    except PeerError as error:
        print(f"process {rank} ends, since it lost another one, whose message says why: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    except KeyboardInterrupt:
        ways = "resume_from_checkpoint=true goes on from the newest checkpoint; an evaluation goes on by itself"
        print(f"interrupted: {ways}", file=sys.stderr)
        raise SystemExit(130) from None


def _silence_bars() -> None:
    """Turn off progress bars for reading and writing weights; downloads can take long and keep theirs."""
    downloads = not are_progress_bars_disabled()
    disable_progress_bar()
    if downloads:
        enable_progress_bars()
