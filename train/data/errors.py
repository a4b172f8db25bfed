"""The error of the data part: one line that says what, where, the legal values, and what to do."""

from train.errors import UserError


class DataError(UserError):
    """Text, a tokenizer or a data option that cannot be used, in words a user can act on."""
