"""Problems as values: what is wrong, where, with which sizes, what would be legal, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from attrs import field, frozen

_SHOWN = 8


@frozen
class Problem:
    """One thing that is wrong with a layout. ``str(problem)`` is one line.

    Attributes:
      path: where: a parameter's path (``layers/wk``), or ``mesh/tp``, ``rules/mlp``, ``batch/seq_len``, ``devices``.
      message: what is wrong, with the sizes.
      subject: what the legal values are values of, such as ``tp`` or ``seq_len``; empty where none are listed.
      legal: every legal value of the subject, or the nearest ones where they have no end.
      hint: what to do; may be empty.
    """

    path: str
    message: str
    subject: str = ""
    legal: tuple[int | str, ...] = field(default=(), converter=tuple)
    hint: str = ""

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.message}"]
        if self.legal:
            shown = [str(value) for value in self.legal]
            if len(shown) > _SHOWN:
                shown = [*shown[: _SHOWN - 1], "...", shown[-1]]
            parts.append(f"legal {self.subject}: {', '.join(shown)}")
        if self.hint:
            parts.append(self.hint)
        return "; ".join(parts)


class SpecError(ValueError):
    """Layouts that cannot work. ``problems`` holds every :class:`Problem`; the text has one a line."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        return "\n".join([f"{count} problem{'s' if count != 1 else ''} with the layout:", *map(str, self.problems)])


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A question that names the words nearest to a misspelt one, or an empty string where none is near."""
    near = difflib.get_close_matches(word, sorted(set(words) - {word}), n=3)
    return f"did you mean {' or '.join(repr(match) for match in near)}?" if near else ""
