"""The exceptions that end an entry point with a message and no traceback."""


class UserError(Exception):
    """Bad input. The message says what was wrong, what is accepted and which setting to change.

    Entry points print the message without a traceback and exit with status 2.
    """


class PeerError(RuntimeError):
    """A collective call failed because another process of the run has ended; that process printed the reason."""
