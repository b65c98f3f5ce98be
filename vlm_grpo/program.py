"""How an entry point ends: the user's mistakes are one message and status 2, never a traceback."""

import os
import sys
from collections.abc import Callable, Sequence

from vlm_grpo.errors import UserError


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Run an entry point on the command line's arguments and exit with 0, or with 2 after a UserError."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os._exit(2)  # other ranks may wait in a collective call, where an orderly exit would wait for them
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted: resume_from_checkpoint=true goes on from the newest checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
