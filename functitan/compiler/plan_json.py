"""A Plan as JSON text and back: data alone, so reading it runs no code.

    {
      "functitan_plan": 2,
      "mesh": {"fsdp": 2, "tp": 2},
      "rules": {"batch": ["dp", "fsdp"], "embed": "fsdp", "mlp": "tp", "seq": "cp"},
      "uneven": [],
      "precision": {"compute": "bfloat16", "reduce": null, "output": null},
      "context": null,
      "pipeline": null,
      "params": {
        "up": {"$param": {"shape": [64, 128], "names": ["embed", "mlp"], ...}}
      }
    }

A dict is an object, a list an array, a tuple ``{"$tuple": [...]}``, a Param ``{"$param": {...}}`` on one line. A key of
a dict that starts with ``$`` has one more of them in the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from functitan import init
from functitan.compiler.pipeline.stages import Pipeline
from functitan.compiler.plan import Plan, compile_specs
from functitan.precision import Precision
from sharding_specs import ContextParallel, MeshSpec, Param, Rules
from sharding_specs.problem import did_you_mean

VERSION = 2
"""Of the text: raised whenever what is written changes."""

_VERSION_KEY = "functitan_plan"
_KEYS = (_VERSION_KEY, "mesh", "rules", "uneven", "precision", "context", "pipeline", "params")
_PARAM_KEYS = ("shape", "names", "init", "dtype", "decay", "layout")

_MAX_DEPTH = 200
"""Of a tree of parameters: far beyond any model, and well within Python's own limit, which libraries change."""

Path = tuple[str, ...]
"""The keys from the root of the tree to a node."""

_INITIALISERS: Mapping[str, type] = {
    "constant": type(init.zeros()),
    "normal": type(init.normal()),
    "uniform": type(init.uniform()),
    "truncated_normal": type(init.truncated_normal()),
    "variance_scaling": type(init.lecun_normal()),
}
"""What a text may name: the classes behind functitan.init, each of them a function of its fields alone."""


def to_json(plan: Plan) -> str:
    """The text of a plan, with one parameter a line. Equal plans have equal texts.

    Raises:
      ValueError: the tree has a node or an initialiser that JSON cannot hold; the message has its path.
    """
    body = {
        _VERSION_KEY: json.dumps(VERSION),
        "mesh": json.dumps(dict(plan.mesh)),
        "rules": json.dumps(dict(plan.rules)),
        "uneven": json.dumps(sorted(plan.rules.uneven)),
        "precision": json.dumps(attrs.asdict(plan.precision)),
        "context": json.dumps(None if plan.context is None else attrs.asdict(plan.context)),
        "pipeline": json.dumps(None if plan.pipeline is None else attrs.asdict(plan.pipeline)),
        "params": _write(plan.params, (), "  ", plan),
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {value}" for key, value in body.items())
    return f"{{\n{lines}\n}}\n"


def from_json(text: str) -> Plan:
    """The plan of a text by :func:`to_json`. Every check of ``compile_specs`` is made again.

    Raises:
      ValueError: the text is no JSON, no plan, or a plan of another version, with the place and what is legal there; a
        SpecError where it is a plan whose layout cannot work.
    """
    try:
        return _plan(_object(_parse(text), "the plan", _KEYS))
    except RecursionError:
        raise ValueError("the plan is nested too deeply to be read") from None


def _plan(whole: dict[str, Any]) -> Plan:
    version = whole[_VERSION_KEY]
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"the plan has version {_shown(version)}, but this functitan reads version {VERSION}; "
            "make it again with compile_specs"
        )
    mesh = _built("mesh", lambda: MeshSpec(**_is(whole["mesh"], dict, "mesh")))
    rules = _built("rules", lambda: Rules(**_is(whole["rules"], dict, "rules")))
    uneven = [_is(name, str, "uneven") for name in _is(whole["uneven"], list, "uneven")]
    rules = _built("uneven", lambda: rules.allow_uneven(*uneven))
    layouts: dict[str, Any] = {}
    precision = _built("precision", lambda: Precision(**_is(whole["precision"], dict, "precision")))
    context = _context(whole["context"])
    plan = compile_specs(
        _read(whole["params"], (), layouts), rules, mesh, activations=tuple(rules), precision=precision,
        context=ContextParallel() if context is None else context, pipeline=_pipeline(whole["pipeline"]),
    )  # fmt: skip
    if (plan.pipeline is None) != (whole["pipeline"] is None):
        raise ValueError(
            f"pipeline: is {_shown(whole['pipeline'])}, but by the plan's rules and mesh the layers are "
            f"{'not ' if plan.pipeline is None else ''}in stages over pp; a plan that has stages says which"
        )
    if plan.context != context:
        raise ValueError(
            f"context: is {_shown(whole['context'])}, but by the plan's rules and mesh the sequence is "
            f"{'not ' if plan.context is None else ''}split over cp; a plan that splits it says method and layout"
        )
    for path, layout in layouts.items():
        expected = _jsonable(plan.spec(path))
        if layout != expected:
            raise ValueError(
                f"{path or 'params'}: layout is {_shown(layout)}, but by the plan's rules and mesh it is "
                f"{_shown(expected)}; change the rules, which layouts follow from"
            )
    return plan


def _context(given: Any) -> ContextParallel | None:
    if given is None:
        return None
    keys = tuple(attribute.name for attribute in attrs.fields(ContextParallel))
    fields = _object(given, "context", keys)
    return _built("context", lambda: ContextParallel(**{key: _is(fields[key], str, f"context: {key}") for key in keys}))


def _pipeline(given: Any) -> Pipeline | None:
    if given is None:
        return None
    kinds = {"schedule": str, "microbatches": int, "stages_per_rank": int}
    keys = tuple(attribute.name for attribute in attrs.fields(Pipeline))
    fields = _object(given, "pipeline", keys)
    values = {key: _is(fields[key], kinds.get(key, list), f"pipeline: {key}") for key in keys}
    for key in keys:
        if key not in kinds:
            pairs = values[key] if key == "layers" else [values[key]]
            for numbers in pairs:
                for number in _is(numbers, list, f"pipeline: {key}"):
                    _is(number, int, f"pipeline: {key}")
    return _built("pipeline", lambda: Pipeline(**values))


def _write(node: Any, path: Path, indent: str, plan: Plan) -> str:
    """The text of a subtree; its first line is not indented."""
    if node is None:
        return "null"
    if isinstance(node, Param):
        return json.dumps({"$param": _param_fields(node, path, plan)})
    # A subclass, such as a namedtuple, would come back as another type.
    if type(node) is tuple:
        return f'{{"$tuple": {_write(list(node), path, indent, plan)}}}'
    inner = f"{indent}  "
    if type(node) is dict:
        for key in node:
            if not isinstance(key, str):
                raise ValueError(f"{_where(path)}: key {key!r} is no string; JSON has no other keys")
        children = [
            f"{json.dumps('$' + key if key.startswith('$') else key)}: "
            f"{_write(node[key], (*path, key), inner, plan)}"
            for key in sorted(node)
        ]
        opening, closing = "{", "}"
    elif type(node) is list:
        children = [_write(child, (*path, str(index)), inner, plan) for index, child in enumerate(node)]
        opening, closing = "[", "]"
    else:
        raise ValueError(
            f"{_where(path)}: is a {type(node).__qualname__}, and JSON holds trees of dicts, lists, tuples, None "
            "and Param; declare it so, or keep the config that declares it together with plan.rules and plan.mesh"
        )
    if not children:
        return opening + closing
    lines = ",\n".join(inner + child for child in children)
    return f"{opening}\n{lines}\n{indent}{closing}"


def _param_fields(param: Param, path: Path, plan: Plan) -> dict[str, Any]:
    return {
        "shape": list(param.shape),
        "names": list(param.names),
        "init": _init_fields(param.init, path),
        "dtype": param.dtype,
        "decay": param.decay,
        "layout": _jsonable(plan.spec("/".join(path))),
    }


def _init_fields(initialiser: Any, path: Path) -> dict[str, Any]:
    for name, cls in _INITIALISERS.items():
        if type(initialiser) is cls:
            fields = attrs.asdict(initialiser, recurse=False)
            return {name: {key: _jsonable(value) for key, value in fields.items()}}
    raise ValueError(
        f"{_where(path)}: its initialiser {initialiser!r} is code, and JSON holds data; use one of functitan.init "
        f"({', '.join(_INITIALISERS)}), or keep the config that declares it together with plan.rules and plan.mesh"
    )


def _jsonable(value: Any) -> Any:
    """Tuples (and P) as lists, and infinities as text, since JSON has neither."""
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return [_jsonable(part) for part in value] if not isinstance(value, (str, float, int, type(None))) else value


def _parse(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} is there twice")
            found[key] = value
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"the plan is no readable JSON: {error}") from None


def _read(node: Any, path: Path, layouts: dict[str, Any]) -> Any:
    """The tree of a node; the layouts that the text gives are put into ``layouts``, by path."""
    if node is None:
        return None
    if len(path) > _MAX_DEPTH:
        raise ValueError(f"the plan is nested too deeply to be read: more than {_MAX_DEPTH} levels")
    if isinstance(node, list):
        return [_read(child, (*path, str(index)), layouts) for index, child in enumerate(node)]
    where = _where(path)
    if not isinstance(node, dict):
        raise ValueError(f"{where}: is {_shown(node)}; legal are an object, an array and null")
    tags = [key for key in node if key.startswith("$") and not key.startswith("$$")]
    if not tags:
        plain = {key.removeprefix("$"): child for key, child in node.items()}
        return {key: _read(child, (*path, key), layouts) for key, child in plain.items()}
    if tags == ["$tuple"] and len(node) == 1:
        return tuple(_read(_is(node["$tuple"], list, where), path, layouts))
    if tags == ["$param"] and len(node) == 1:
        fields = dict(_object(node["$param"], where, _PARAM_KEYS))
        layouts["/".join(path)] = fields.pop("layout")
        for name in ("shape", "names"):
            _is(fields[name], list, f"{where}: {name}")
        _is(fields["dtype"], str, f"{where}: dtype")
        fields["init"] = _read_init(fields["init"], f"{where}: init")
        return _built(where, lambda: Param(**fields))
    raise ValueError(
        f"{where}: has the keys {', '.join(node)}; an object is a dict, or has $param or $tuple as its only key"
    )


def _read_init(value: Any, where: str) -> init.Initializer:
    named = _is(value, dict, where)
    if len(named) != 1:
        raise ValueError(f"{where}: names {len(named)} initialisers; give one of {', '.join(_INITIALISERS)}")
    [(name, fields)] = named.items()
    if name not in _INITIALISERS:
        hint = did_you_mean(name, _INITIALISERS)
        raise ValueError(f"{where}: unknown initialiser {name!r}; {hint} legal: {', '.join(_INITIALISERS)}")
    cls, where = _INITIALISERS[name], f"{where}: {name}"
    fields = _object(fields, where, tuple(attribute.name for attribute in attrs.fields(cls)))
    made = _built(where, lambda: cls(**fields))
    for key, given in fields.items():
        # Fields are converted when they are made (1 is 1.0, "0.5" is 0.5, "ab" is a tuple); only the first is meant.
        axes = isinstance(given, list) and all(type(axis) is int for axis in given)
        if _jsonable(getattr(made, key)) != given or not (axes or type(given) in (int, float, str)):
            raise ValueError(f"{where}: {key} is {_shown(given)}, which is no value of it")
    return made


def _built(where: str, make: Callable[[], Any]) -> Any:
    """What ``make()`` makes, its error one of the text at this place."""
    try:
        return make()
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from error


_KINDS = {dict: "an object", list: "an array", str: "a string"}


def _is(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where}: is {_shown(value)}, not {_KINDS[kind]}")
    return value


def _object(value: Any, where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The value, an object that has these keys and no other."""
    value = _is(value, dict, where)
    missing = [key for key in keys if key not in value]
    unknown = [key for key in value if key not in keys]
    if missing or unknown:
        parts = ([f"lacks {', '.join(missing)}"] if missing else []) + (
            [f"has the unknown {', '.join(unknown)}"] if unknown else []
        )
        raise ValueError(f"{where}: {' and '.join(parts)}; it has exactly {', '.join(keys) or 'no key'}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _where(path: Path) -> str:
    return "/".join(path) or "params"
