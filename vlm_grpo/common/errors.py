"""The exceptions by which an entry point ends without a traceback."""


class UserError(Exception):
    """Bad input: the message says what was wrong, what is accepted and which setting to change.

    Entry points print the message without a traceback and exit with status 2.
    """


class PeerError(RuntimeError):
    """A collective call failed: another process of the run has ended, and has said why."""
