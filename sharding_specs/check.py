"""check: everything that is wrong with a layout, found at once, before a process group or a tensor exists."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import attrs
from attrs import field, frozen

from sharding_specs.mesh import STANDARD_AXES, MeshSpec, divisors
from sharding_specs.param import Param, walk
from sharding_specs.partition import Entry, P, entry_axes
from sharding_specs.problem import Problem, did_you_mean
from sharding_specs.rules import DATA_NAMES, STANDARD_NAMES, Rules


def _is_int(_, attribute: attrs.Attribute, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"the {attribute.name} of a BatchSpec is {value!r}; it must be an int")


@frozen
class BatchSpec:
    """The sizes of what one optimizer step reads, over the whole mesh. ``check`` reports sizes below 1.

    Attributes:
      size: sequences a step, over all ranks and accumulation steps.
      seq_len: tokens a sequence.
      microbatches: parts of each accumulation step that go through the pipeline one after the other.
      accumulation: parts whose gradients are summed before the optimizer acts.
      causal_balanced: whether a sequence split over cp is dealt in 2 x cp chunks, of which rank r takes chunks r and
        2 x cp - 1 - r, so that causal attention costs every rank the same.
    """

    size: int = field(validator=_is_int)
    seq_len: int = field(validator=_is_int)
    microbatches: int = field(default=1, validator=_is_int)
    accumulation: int = field(default=1, validator=_is_int)
    causal_balanced: bool = field(default=True, validator=attrs.validators.instance_of(bool))


def check(
    params: Any,
    rules: Rules,
    mesh: MeshSpec,
    batch: BatchSpec | None = None,
    devices: int | None = None,
    *,
    activations: Collection[str] = (),
) -> list[Problem]:
    """Every problem with laying out ``params`` by ``rules`` over ``mesh``; an empty list means that it works.

    Args:
      params: a tree (dicts, lists, tuples, None) of Param.
      batch: the sizes of a step, if they are to be checked as well.
      devices: how many there are. None leaves the product of the mesh unchecked, and makes a size of -1 a problem.
      activations: logical names that activations have and no parameter, beyond "batch" and "seq".

    Raises:
      TypeError: an argument is not of its type (arguments that were swapped).
    """
    return check_leaves(walk(params), rules, mesh, batch, devices, activations=activations)


def check_leaves(
    leaves: Iterable[tuple[str, Any]],
    rules: Rules,
    mesh: MeshSpec,
    batch: BatchSpec | None = None,
    devices: int | None = None,
    *,
    activations: Collection[str] = (),
) -> list[Problem]:
    """As :func:`check`, for the ``(path, leaf)`` pairs of a tree of any kind."""
    arguments = {"rules": rules, "mesh": mesh, "batch": batch, "devices": devices}
    kinds = {"rules": Rules, "mesh": MeshSpec, "batch": BatchSpec | None, "devices": int | None}
    for name, kind in kinds.items():
        if not isinstance(arguments[name], kind):
            raise TypeError(f"{name} is {arguments[name]!r}; it must be a {getattr(kind, '__name__', kind)}")
    leaves = list(leaves)
    params = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Param)]
    mesh_problems = mesh.problems(devices)
    sound = mesh.resolve(devices) if devices is not None and not mesh_problems else _known_sizes(mesh)
    layouts = [(path, param, _spec(param.names, rules, sound)) for path, param in params]
    return [
        *mesh_problems,
        *_idle_axes(layouts, rules, sound, activations),
        *_rules(rules, mesh),
        *_unused_rules(params, rules, activations),
        *_leaves(leaves),
        *_missing_rules(params, rules),
        *_layouts(layouts, rules, sound),
        *(_batch(batch, rules, sound) if batch is not None else ()),
    ]


def _known_sizes(mesh: MeshSpec) -> MeshSpec:
    """The mesh with 1 for every size that is missing or wrong, so that it causes no further problem."""
    return MeshSpec(**{axis: max(size, 1) for axis, size in mesh.items()})


def _spec(names: Iterable[str | None], rules: Rules, mesh: MeshSpec) -> P:
    """The layout where a name without a rule, reported elsewhere, splits nothing."""
    return rules.spec([name if name in rules else None for name in names], mesh)


def _idle_axes(layouts: list, rules: Rules, mesh: MeshSpec, activations: Collection[str]) -> list[Problem]:
    """Axes that can only be a mistake: names that nothing knows, and pp or ep of a model that has nothing for them."""
    problems = []
    named = {axis for entry in rules.values() for axis in entry_axes(entry)}
    data = {axis for name in (*DATA_NAMES, *activations) for axis in entry_axes(rules.get(name))}
    used = data.union(*(spec.axes for _, _, spec in layouts))
    for axis, size in mesh.items():
        if axis not in STANDARD_AXES and axis not in named:
            hint = did_you_mean(axis, {*STANDARD_AXES, *named}) or "name it in a rule, or take it from the mesh"
            problems.append(Problem(f"mesh/{axis}", f"no rule uses axis {axis}={size}", hint=hint))
        elif axis in ("pp", "ep") and size > 1 and axis not in used:
            name = {"pp": "layers", "ep": "experts"}[axis]
            message = f"{axis}={size} splits nothing: no parameter has a dim that the rules give to it"
            hint = f'declare a "{name}" dim and add the rule {name}="{axis}"'
            problems.append(Problem(f"mesh/{axis}", message, axis, (1,), hint))
    return problems


def _rules(rules: Rules, mesh: MeshSpec) -> list[Problem]:
    problems = []
    known = tuple(dict.fromkeys((*mesh, *STANDARD_AXES)))
    for name, entry in rules.items():
        path, axes = f"rules/{name}", entry_axes(entry)
        for axis in sorted(set(axes) - set(known)):
            message = f"axis {axis!r} is neither on the mesh ({', '.join(mesh) or 'one device'}) nor a standard one"
            problems.append(Problem(path, message, "axes", known, did_you_mean(axis, known)))
        for axis in sorted({axis for axis in axes if axes.count(axis) > 1}):
            message = f"axis {axis!r} is named {axes.count(axis)} times in {axes}"
            problems.append(Problem(path, message, hint="name it once"))
        present = [axis for axis in dict.fromkeys(axes) if axis in mesh]
        split = tuple(axis for axis in present if mesh[axis] != 1)
        ordered = tuple(axis for axis in mesh if axis in split)
        if split != ordered:
            message = f"axes {axes} are not in the order of the mesh ({', '.join(mesh)})"
            problems.append(
                Problem(path, message, "order", (str(ordered),), "change the rule, or the order of the mesh's axes")
            )
        if "pp" in present and name != "layers":
            message = f"axis pp={mesh['pp']} splits layers into stages and no other dim"
            problems.append(Problem(path, message, hint="take pp out of this rule"))
        elif "pp" in present and len(present) > 1:
            message = f"layers cannot be split over {' x '.join(present)}, since stages may differ in size"
            problems.append(Problem(path, message, "rule", ("pp",)))
    return problems


def _unused_rules(params: list, rules: Rules, activations: Collection[str]) -> list[Problem]:
    names = {name for _, param in params for name in param.names if name is not None}
    known = {*names, *STANDARD_NAMES, *activations}
    return [
        Problem(
            f"rules/{name}",
            f"no parameter has a dim named {name!r}",
            "names",
            sorted(names),
            f"{did_you_mean(name, known) or 'take the rule out,'} or list the name in `activations`, if they have it",
        )
        for name in rules
        if name not in known
    ]


def _leaves(leaves: list[tuple[str, Any]]) -> list[Problem]:
    problems, seen = [], set()
    for path, leaf in leaves:
        if path in seen:
            problems.append(Problem(path, "two parameters have this path", hint="use no slash in a key"))
        seen.add(path)
        if not isinstance(leaf, Param):
            message = f"is a {type(leaf).__qualname__}, not a Param"
            problems.append(Problem(path or "params", message, hint="declare it as a Param"))
            continue
        for dim, (name, size) in enumerate(zip(leaf.names, leaf.shape)):
            if size < 1:
                message = f"dim {dim}, {name}={size}, of shape {leaf.shape} is not positive"
                problems.append(Problem(path, message, hint="use 1 or more"))
    return problems


def _missing_rules(params: list, rules: Rules) -> list[Problem]:
    if rules.replicates_parameters:
        return []
    return [
        Problem(
            path,
            f"dim {dim} of shape {param.shape} is named {name!r}, which has no rule",
            "names",
            rules.keys(),
            did_you_mean(name, rules) or f"add the rule {name}=None to leave it whole",
        )
        for path, param in params
        for dim, name in enumerate(param.names)
        if name is not None and name not in rules
    ]


_ALIGNED_NAMES = ("heads", "kv_heads")
"""Dims whose shards must go with each other rank by rank, so that uneven ones are no advice to give."""


def _layouts(layouts: list[tuple[str, Param, P]], rules: Rules, mesh: MeshSpec) -> list[Problem]:
    """Dims that do not divide and that the rules do not allow to, and layers over pp that leave a stage empty."""
    dims = [
        (path, dim, name, size, entry)
        for path, param, spec in layouts
        for dim, (name, size, entry) in enumerate(zip(param.names, param.shape, spec))
        if size >= 1 and entry is not None and ("pp" in entry_axes(entry) or name not in rules.uneven)
    ]
    problems = []
    fewest = min((size for _, _, name, size, entry in dims if name == "layers" and entry == "pp"), default=0)
    for path, dim, name, size, entry in dims:
        if "pp" in entry_axes(entry):
            if name == "layers" and entry == "pp" and size < mesh["pp"]:
                problems.append(
                    Problem(
                        path,
                        f"{size} layers over pp={mesh['pp']} leave stages without a layer",
                        "pp",
                        range(1, fewest + 1),
                    )
                )
        elif size % mesh.shards(entry):
            legal = _legal_sizes(entry, dims, mesh) if isinstance(entry, str) else divisors(size)
            subject = entry if isinstance(entry, str) else f"product of {' x '.join(entry)}"
            message = f"dim {dim}, {name}={size}, does not divide over {mesh.describe(entry)}"
            hint = "" if name in _ALIGNED_NAMES else f'or let shards be uneven: rules.allow_uneven("{name}")'
            problems.append(Problem(path, message, subject, legal, hint))
    return problems


def _legal_sizes(axis: str, dims: list, mesh: MeshSpec) -> tuple[int, ...]:
    """The sizes of one axis with which every dim that it splits divides, the other axes being as they are.

    A dim that the other axes already fail to divide is left out: no size of this one would help it.
    """
    common = 0
    for _, _, _, size, entry in dims:
        axes = entry_axes(entry)
        others = math.prod(mesh[other] for other in axes if other != axis)
        if axis in axes and size % others == 0:
            common = math.gcd(common, size // others)
    return divisors(common)


def _batch(batch: BatchSpec, rules: Rules, mesh: MeshSpec) -> list[Problem]:
    counts = {name: getattr(batch, name) for name in ("size", "seq_len", "microbatches", "accumulation")}
    problems = [
        Problem(f"batch/{name}", f"{name}={count} is not positive", hint="use 1 or more")
        for name, count in counts.items()
        if count < 1
    ]
    size, seq_len, microbatches, accumulation = (max(count, 1) for count in counts.values())
    over_batch, over_seq = rules.batch_spec(mesh)
    between_layers = _spec((*DATA_NAMES, "embed"), rules, mesh)[1]

    # Each split is checked on what the ones before it leave; one that does not divide is left out for the next.
    left, splits, shards = size, [], mesh.shards(over_batch)
    if counts["size"] >= 1 and size % shards:
        message = f"a batch of {size} does not divide over {mesh.describe(over_batch)}"
        problems.append(Problem("batch/size", message, "size", _nearest(size, shards)))
    elif shards > 1:
        left, splits = size // shards, [mesh.describe(over_batch)]
    for name, count in (("accumulation", accumulation), ("microbatches", microbatches)) if counts["size"] >= 1 else ():
        if left % count:
            over = f" over {' and '.join(splits)}, {left} in each part," if splits else ""
            message = f"a batch of {size}{over} does not divide into {name}={count}"
            problems.append(Problem(f"batch/{name}", message, name, divisors(left)))
        elif count > 1:
            left, splits = left // count, [*splits, f"{name}={count}"]

    if counts["seq_len"] >= 1:
        problems += _sequence(seq_len, over_seq, between_layers, mesh, batch.causal_balanced)
    return problems


def _sequence(
    seq_len: int, over_seq: Entry, between_layers: Entry, mesh: MeshSpec, causal_balanced: bool
) -> list[Problem]:
    """A sequence must divide as the tokens are split, and as activations between layers are.

    The balanced causal ring needs two equal chunks on each rank of cp. A rank's two chunks may then be split further
    over tp (sequence parallelism) wherever their sum divides.
    """
    of_tokens = [(mesh.shards(over_seq), f"split over {mesh.describe(over_seq)}")]
    if causal_balanced and "cp" in entry_axes(over_seq) and mesh["cp"] > 1:
        why = f"2 chunks on each rank of {mesh.describe('cp')}, for the balanced causal ring"
        of_tokens.insert(0, (2 * mesh["cp"], why))
    divisor, reasons = 1, []
    of_activations = (mesh.shards(between_layers), f"split over {mesh.describe(between_layers)} between layers")
    for need, why in (*of_tokens, of_activations):
        if divisor % need:
            divisor, reasons = math.lcm(divisor, need), [*reasons, why]
    if seq_len % divisor == 0:
        return []
    # Where the tokens divide, sequence parallelism alone is what does not.
    alone = all(seq_len % need == 0 for need, _ in of_tokens)
    hint = 'or leave sequence parallelism: rules.replace(seq="cp")' if alone else ""
    message = f"seq={seq_len} is not divisible by {divisor} ({'; '.join(reasons)})"
    return [Problem("batch/seq_len", message, "seq", _nearest(seq_len, divisor), hint)]


def _nearest(value: int, divisor: int) -> tuple[int, ...]:
    """The multiples of the divisor on both sides of a value that is none, without 0."""
    below = value // divisor * divisor
    return tuple(multiple for multiple in (below, below + divisor) if multiple > 0)
