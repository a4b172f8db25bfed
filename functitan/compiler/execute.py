"""Turns a captured graph into a Python function with nothing in its way.

One line a node, operators bound once, every value dropped at its last use, and the inputs taken from a list that is
emptied: the function holds the only reference to what was donated to it.
"""

from __future__ import annotations

import itertools
import linecache
import operator
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from functitan._torch import OpOverload, mark_of

_names = itertools.count()


def compile_graph(module: GraphModule) -> tuple[Callable[[list[Tensor]], list[Any]], str]:
    """``(run, source)``: ``run(inputs)`` empties the list ``inputs`` and gives the graph's outputs as a list."""
    constants: dict[str, Any] = {}
    lines = ["def run(inputs):"]
    last_uses = _last_uses(module)
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    if names:
        lines.append(f"    {', '.join(names)}, = inputs")
    lines.append("    inputs.clear()")
    if unused := last_uses.get(None):
        lines.append(f"    del {', '.join(unused)}")
    for node in module.graph.nodes:
        if node.op == "get_attr":
            constants[node.name] = getattr(module, node.target)
        elif node.op == "call_function":
            lines.append(f"    {node.name} = {_call(node, constants)}{_comment(node)}")
            if dead := last_uses.get(node, ()):
                lines.append(f"    del {', '.join(dead)}")
        elif node.op == "output":
            lines.append(f"    return {_text(list(node.args[0]), constants)}")
    source = "\n".join(lines) + "\n"
    filename = f"<functitan graph {next(_names)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(constants)
    exec(compile(source, filename, "exec"), namespace)
    run = namespace["run"]
    weakref.finalize(run, linecache.cache.pop, filename, None)
    return run, source


def _call(node: Node, constants: dict[str, Any]) -> str:
    if node.target is operator.getitem:
        return f"{_text(node.args[0], constants)}[{node.args[1]!r}]"
    function = node.target
    if isinstance(function, OpOverload):
        name = f"{function.namespace}_{function.overloadpacket.__name__}_{function._overloadname}"
    else:
        name = f"run_{getattr(function, '__name__', 'function')}"  # a node is called as its function is
    if constants.setdefault(name, function) is not function:
        name = f"{name}_{id(function)}"
        constants[name] = function
    arguments = [_text(argument, constants) for argument in node.args]
    arguments += [f"{key}={_text(argument, constants)}" for key, argument in node.kwargs.items()]
    return f"{name}({', '.join(arguments)})"


def _text(argument: Any, constants: dict[str, Any]) -> str:
    if isinstance(argument, Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_text(a, constants) for a in argument) + "]"
    if argument is None or type(argument) in (bool, int, str) or (type(argument) is float and argument - argument == 0):
        return repr(argument)
    for known, value in constants.items():
        if value is argument:
            return known
    name = f"const_{type(argument).__name__}_{len(constants)}"
    constants[name] = argument
    return name


def _comment(node: Node) -> str:
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return ""
    region = mark_of(node, "remat")
    shape = ", ".join(map(str, val.shape))
    return f"  # {str(val.dtype).removeprefix('torch.')}[{shape}]" + (" (remat)" if region else "")


def _last_uses(module: GraphModule) -> dict[Node | None, list[str]]:
    """The names that die behind each node; under None, the inputs that nobody reads."""
    seen: set[Node] = set()
    dead: dict[Node | None, list[str]] = {}
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and node not in seen:
            seen.add(node)
            dead.setdefault(node, []).append(node.name)  # its own result, unread
        if node.op == "placeholder" and node not in seen:
            dead.setdefault(None, []).append(node.name)
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                if node.op != "output" and source.op != "get_attr":
                    dead.setdefault(node, []).append(source.name)
    return dead
