"""The one exception that is meant for the user's eyes."""


class UserError(Exception):
    """Bad input: the message says what was wrong, what is accepted and which setting to change.

    Entry points print the message without a traceback and exit with status 2.
    """
