"""The error that a user can do something about."""


class UserError(Exception):
    """A mistake or circumstance that the user can mend: its text says what, where, and what to do.

    The command line prints it as one line, ``functitan: error: …``, and exits with status 1; no traceback is shown.
    """
