"""A tree of attrs classes as YAML text and back, where every mistake in the text is reported with its line.

Knows nothing of the fields: :mod:`train.config` says what a configuration is.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
import yaml
from cattrs.errors import AttributeValidationNote, ClassValidationError, ForbiddenExtraKeysError

from train.errors import UserError

T = TypeVar("T")
FieldPath = tuple[str, ...]


class ConfigError(UserError):
    """A configuration that cannot be run: every problem, each one line that says what, where and what is legal.

    The command line prints one line a problem and exits with status 2.
    """

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def to_yaml(config: Any) -> str:
    """The YAML text of an attrs tree, its fields in the order of their declaration."""
    return yaml.dump(_converter().unstructure(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def load_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping that the text holds. ``source`` is what errors call the text: the file's path.

    Raises:
        ConfigError: no YAML, no mapping, or a key that is given twice (YAML would silently take the second).
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source if mark is None else f"{source}:{mark.line + 1}"
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError([f"{where}: not valid YAML: {reason}"]) from error
    except ValueError as error:  # a scalar that looks like a date, and is none
        raise ConfigError([f"{source}: not valid YAML: {error}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{source}: nested too deeply: no configuration is"]) from error
    if not isinstance(raw, dict):
        found = "empty" if raw is None else f"a {type(raw).__name__}"
        raise ConfigError([f"{source}: is {found}; expected the fields of a configuration, such as 'seed: 0'"])
    repeated = list(_repeated_keys(root, ()))
    if repeated:
        raise ConfigError([f"{source}:{line}: {'.'.join(path)} is given twice: keep one" for path, line in repeated])
    return raw


def from_yaml(text: str, cls: type[T], source: str) -> T:
    """The inverse of :func:`to_yaml`. A field that the text leaves out keeps its default.

    Raises:
        ConfigError: naming every unknown field (with near names), missing field and value of a wrong type at once.
    """
    raw = load_yaml(text, source)
    try:
        return _converter().structure(raw, cls)
    except ClassValidationError as error:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        found = [(_line(root, path), path, message) for path, message in _problems(error, ())]
        found.sort(key=lambda problem: problem[0] or 0)
        raise ConfigError(
            [
                ": ".join(filter(None, [source if line is None else f"{source}:{line}", ".".join(path), message]))
                for line, path, message in found
            ]
        ) from error


def near(word: str, known: Iterable[str]) -> str:
    """``'; did you mean "steps"?'``, or the legal names where none is near."""
    known = sorted(known)
    matches = difflib.get_close_matches(word, known, n=2, cutoff=0.6)
    if matches:
        return "; did you mean " + " or ".join(f'"{match}"' for match in matches) + "?"
    return "; legal: " + ", ".join(known)


class _Dumper(yaml.SafeDumper):
    """PyYAML's plain styles lose some line breaks ("\\x85" comes back as a space); its double quotes escape them."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, None if text.isprintable() else '"'),
)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    # cattrs converts (int("5"), int(3.7), tuple("abc")); a configuration must say what it means.
    converter.register_structure_hook(bool, _exactly(bool, "true or false"))
    converter.register_structure_hook(int, _exactly(int, "a whole number"))
    converter.register_structure_hook(str, _exactly(str, "text"))
    converter.register_structure_hook(float, _float)
    converter.register_structure_hook(Path, lambda value, _: Path(_exactly(str, "a path")(value, str)))
    converter.register_unstructure_hook(Path, str)
    converter.register_structure_hook_func(lambda t: get_origin(t) is Literal, _literal)
    converter.register_structure_hook_func(
        lambda t: get_origin(t) is tuple, lambda value, t: _tuple(converter, value, t)
    )
    converter.register_structure_hook_func(
        lambda t: get_origin(t) in (Union, types.UnionType), lambda value, t: _union(converter, value, t)
    )
    return converter


def _exactly(cls: type, what: str):
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not cls:
            raise TypeError(f"is {value!r}; expected {what}")
        return value

    return structure


def _float(value: Any, _: Any) -> float:
    # YAML 1.1 reads 3e-4 as text, as it has no point; people write it.
    if type(value) in (int, float, str):
        try:
            return float(value)
        except ValueError:
            pass  # text that is no number: refused below, like every other type
    raise TypeError(f"is {value!r}; expected a number")


def _literal(value: Any, cls: Any) -> Any:
    legal = get_args(cls)
    if value not in legal:
        hint = near(value, map(str, legal)) if isinstance(value, str) else "; legal: " + ", ".join(map(str, legal))
        raise ValueError(f"is {value!r}{hint}")
    return value


def _tuple(converter: cattrs.Converter, value: Any, cls: Any) -> tuple:
    args = get_args(cls)
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"is {value!r}; expected a list such as [a, b]")
    kinds = (args[0],) * len(value) if len(args) == 2 and args[1] is Ellipsis else args
    if len(kinds) != len(value):
        raise TypeError(f"has {len(value)} items; expected {len(kinds)}")
    return tuple(converter.structure(item, kind) for item, kind in zip(value, kinds))


def _union(converter: cattrs.Converter, value: Any, cls: Any) -> Any:
    members = get_args(cls)
    if value is None and type(None) in members:
        return None
    members = [member for member in members if member is not type(None)]
    # An exact type first, so that 1 for "float | int" stays the int that was dumped.
    for member in members:
        if type(value) is member:
            return value
    reasons = []
    for member in members:
        try:
            return converter.structure(value, member)
        except ClassValidationError:
            if len(members) == 1:
                raise
            reasons.append(f"expected the fields of {member.__name__}")
        except (TypeError, ValueError) as error:
            reasons.append(str(error).removeprefix(f"is {value!r}; "))
    nullable = " or null" if len(members) < len(get_args(cls)) else ""
    raise TypeError(f"is {value!r}; {' or '.join(reasons)}{nullable}")


def _problems(error: Exception, path: FieldPath) -> Iterable[tuple[FieldPath, str]]:
    """Every (path of the field, what is wrong with it) of a cattrs error, depth first."""
    if isinstance(error, ClassValidationError):
        for inner in error.exceptions:
            notes = [n for n in getattr(inner, "__notes__", ()) if isinstance(n, AttributeValidationNote)]
            # The innermost class adds its note first; each level of the group takes its own.
            yield from _problems(inner, (*path, notes[0].name) if notes else path)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl)]
        for key in sorted(error.extra_fields, key=str):
            yield (*path, str(key)), f"unknown field{near(str(key), known)}"
    elif isinstance(error, KeyError):
        yield path, "missing, and it has no default: add it"
    elif re.search(r"has no attribute 'keys'|is not iterable", str(error)):
        # cattrs looks for the fields of what is no mapping: Python's own words, which say nothing to a reader.
        yield path, "must be a mapping of its fields, or left out"
    else:
        yield path, " ".join(str(error).split())


def _line(node: yaml.Node | None, path: FieldPath) -> int | None:
    """The line (from 1) of the deepest key of ``path`` that the text has."""
    line = None
    for name in path:
        if not isinstance(node, yaml.MappingNode):
            break
        entry = next(((key, value) for key, value in node.value if key.value == name), None)
        if entry is None:
            break
        line, node = entry[0].start_mark.line + 1, entry[1]
    return line


def _repeated_keys(node: yaml.Node | None, path: FieldPath) -> Iterable[tuple[FieldPath, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                yield (*path, name), key.start_mark.line + 1
            seen.add(name)
            yield from _repeated_keys(value, (*path, name))
