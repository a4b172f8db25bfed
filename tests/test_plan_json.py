import collections
import copy
import json
import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functitan import init, tree
from functitan.compiler.plan import Plan, compile_specs
from models.llama import SIZES, declare
from sharding_specs import PRESETS, MeshSpec, Param, Rules, SpecError

# The first example of a test may meet a busy machine.
no_deadline = settings(deadline=None)

MESHES = [
    (PRESETS["all"], MeshSpec()),
    (PRESETS["data"], MeshSpec(dp=2, fsdp=4)),
    (PRESETS["tensor"], MeshSpec(pp=1, dp=1, fsdp=8, ep=1, cp=2, tp=2)),
    (PRESETS["all"].replace(seq="cp", embed=("dp", "fsdp")).allow_uneven("mlp"), MeshSpec(pp=4, dp=2, fsdp=3, tp=2)),
    (Rules(), MeshSpec(dp=3)),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("rules", "mesh"), MESHES, ids=lambda value: str(value)[:40])
def test_plans_of_every_llama_survive(size, rules, mesh):
    rules = rules.allow_uneven("embed") if "embed" in rules else rules
    plan = compile_specs(declare(SIZES[size]), rules, mesh)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.specs == plan.specs and list(again.specs) == list(plan.specs)
    assert again.rules.uneven == rules.uneven and str(again) == str(plan)
    assert again.to_json() == plan.to_json()


def test_the_text_has_a_parameter_a_line():
    params = {"b": [Param((4, 6), ("embed", None), init.zeros())], "a": None, "c": ()}
    text = compile_specs(params, Rules(embed=("fsdp", "tp")), MeshSpec(fsdp=2, tp=2)).to_json()
    assert text.splitlines() == [
        "{",
        '  "functitan_plan": 2,',
        '  "mesh": {"fsdp": 2, "tp": 2},',
        '  "rules": {"batch": ["dp", "fsdp"], "embed": ["fsdp", "tp"], "seq": "cp"},',
        '  "uneven": [],',
        '  "precision": {"compute": null, "reduce": null, "output": null},',
        '  "context": null,',
        '  "pipeline": null,',
        '  "params": {',
        '    "a": null,',
        '    "b": [',
        '      {"$param": {"shape": [4, 6], "names": ["embed", null], "init": {"constant": {"value": 0.0}}, '
        '"dtype": "float32", "decay": null, "layout": [["fsdp", "tp"], null]}}',
        "    ],",
        '    "c": {"$tuple": []}',
        "  }",
        "}",
    ]
    assert json.loads(text)["functitan_plan"] == 2


initialisers = st.one_of(
    st.builds(init.constant, st.floats(allow_nan=False, allow_infinity=False)),
    st.builds(init.normal, st.floats(0, 1e30)),
    st.builds(init.uniform, st.floats(0, 1e30)),
    st.builds(init.truncated_normal, st.floats(0, 9), st.floats(max_value=-1), st.floats(min_value=1)),
    st.builds(
        init.variance_scaling,
        st.floats(0.1, 9),
        st.sampled_from(["fan_in", "fan_out", "fan_avg", "fan_geo_avg"]),
        st.sampled_from(["truncated_normal", "normal", "uniform"]),
        st.integers(-3, 3) | st.tuples(st.integers(0, 3)),
        st.integers(-3, 3) | st.lists(st.integers(0, 3)),
        batch_axis=st.lists(st.integers(0, 3)),
    ),
)
parameters = st.builds(
    Param,
    st.just((2, 4)),
    st.sampled_from([("embed", "mlp"), (None, "embed")]),
    initialisers,
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.sampled_from([None, True, False]),
)
# A slash in a key could give two parameters one path, which is refused when the plan is made.
keys = st.sampled_from(["a", "b", "$param", "$tuple", "$$", "$", "", "ä", '"', "init"])
trees = st.recursive(
    st.none() | parameters,
    lambda children: (
        st.dictionaries(keys, children, max_size=3)
        | st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
    ),
    max_leaves=6,
)


@no_deadline
@given(trees)
def test_any_tree_of_any_initialisers_survives(params):
    paths = [path for path, _ in tree.leaves_with_path(params)]
    if len(set(paths)) < len(paths):
        return
    plan = compile_specs(params, Rules(embed="fsdp", mlp="tp"), MeshSpec(fsdp=2, tp=4))
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.params == params and type(again.params) is type(params)
    assert again.specs == plan.specs


def test_infinite_bounds_survive_as_standard_json():
    plan = compile_specs([Param((2,), (None,), init.truncated_normal(1.0, -math.inf, math.inf))])
    assert Plan.from_json(plan.to_json()) == plan
    assert '"lower": "-inf", "upper": "inf"' in plan.to_json()


def custom(key, shape, dtype):
    raise AssertionError("writing a plan must not make a parameter")


def test_what_is_code_is_refused_with_its_path_and_what_to_do():
    plan = compile_specs({"layers": [Param((2,), (None,), custom)]})
    with pytest.raises(ValueError, match=r"layers/0: its initialiser <function custom.*use one of functitan.init"):
        plan.to_json()

    @tree.node
    @attrs.frozen
    class Layer:
        weight: Param

    param = Param((2,), (None,), init.zeros())
    pair = collections.namedtuple("Pair", "x")
    for params, kind in [
        ({"a": Layer(param)}, "Layer"),
        ({"a": pair(param)}, "Pair"),
        ({"a": collections.OrderedDict(w=param)}, "OrderedDict"),
    ]:
        with pytest.raises(ValueError, match=rf"a: is a .*{kind}, and JSON holds trees of dicts, lists"):
            compile_specs(params).to_json()
    with pytest.raises(ValueError, match="params: key 1 is no string"):
        compile_specs({1: param}).to_json()


def whole():
    params = {"w": Param((4, 6), ("embed", "mlp"), init.lecun_normal()), "b": (Param((6,), ("mlp",), init.zeros()),)}
    rules = Rules(embed="fsdp", mlp="tp").allow_uneven("mlp")
    return json.loads(compile_specs(params, rules, MeshSpec(fsdp=2, tp=2)).to_json())


def put(data, path, value):
    *parents, last = path
    for key in parents:
        data = data[key]
    data[last] = value


PARAM = ("params", "w", "$param")
INIT = (*PARAM, "init", "variance_scaling")


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (["functitan_plan"], 1, "has version 1, but this functitan reads version 2"),
        (["functitan_plan"], True, "has version true"),
        (["more"], 1, "the plan: has the unknown more; it has exactly functitan_plan, mesh"),
        (["mesh"], [2], r"mesh: is \[2\], not an object"),
        (["mesh", "tp"], "2", "mesh: the size of mesh axis 'tp' is '2'"),
        (["rules", "mlp"], 3, "rules: rule 'mlp'"),
        (["uneven"], ["mpl"], "uneven: no rule for the logical name 'mpl'; did you mean 'mlp'"),
        (["uneven"], [3], "uneven: is 3, not a string"),
        (["params", "w"], 3, "w: is 3; legal are an object, an array and null"),
        (["params", "b"], {"$tuple": 3}, "b: is 3, not an array"),
        (["params", "b"], {"$tuple": [], "x": None}, r"b: has the keys \$tuple, x"),
        (["params", "b"], {"$set": []}, r"b: has the keys \$set"),
        ([*PARAM, "shape"], [4.5, 6], "w: a Param's shape"),
        ([*PARAM, "shape"], "46", 'w: shape: is "46", not an array'),
        ([*PARAM, "names"], ["embed"], "w: a Param of shape .* 1 names"),
        ([*PARAM, "dtype"], "float31", "w: unknown dtype 'float31'"),
        ([*PARAM, "decay"], 1, "w: .*decay"),
        ([*PARAM, "layout"], [None, "tp"], r'w: layout is \[null, "tp"\], but .* it is \["fsdp", "tp"\]'),
        ([*PARAM, "code"], "print()", "w: has the unknown code"),
        ([*PARAM, "init"], {}, "w: init: names 0 initialisers"),
        ([*PARAM, "init"], {"os.system": {}}, "w: init: unknown initialiser 'os.system'.*legal: constant"),
        ([*PARAM, "init"], {"normal": {}}, "w: init: normal: lacks stddev"),
        ([*PARAM, "init"], {"normal": {"stddev": "0.5"}}, 'normal: stddev is "0.5", which is no value of it'),
        ([*PARAM, "init"], {"normal": {"stddev": True}}, "normal: stddev is true, which is no value of it"),
        ([*PARAM, "init"], {"normal": {"stddev": -1}}, "normal: init: stddev must be finite and not negative"),
        ([*PARAM, "init"], {"normal": {"stddev": None}}, "normal: .*NoneType"),
        ([*PARAM, "init"], {"normal": {"stddev": 10**400}}, "normal: int too large"),
        ([*INIT, "in_axis"], "ab", 'in_axis is "ab", which is no value of it'),
        ([*INIT, "in_axis"], [[0]], r"in_axis is \[\[0\]\], which is no value of it"),
        ([*INIT, "mode"], "fan", "mode must be one of fan_in"),
    ],
)
def test_malformed_plans_are_refused_with_the_place(path, value, match):
    data = whole()
    put(data, path, value)
    with pytest.raises(ValueError, match=match):
        Plan.from_json(json.dumps(data))


def test_a_plan_that_was_changed_is_checked_again():
    data = whole()
    data["mesh"]["fsdp"] = 3
    with pytest.raises(SpecError, match=r"w: dim 0, embed=4, does not divide over fsdp=3"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no readable JSON: Expecting value"),
        ('{"mesh": {}, "mesh": {}}', "no readable JSON: the key 'mesh' is there twice"),
        ('{"mesh": NaN}', "no readable JSON: NaN is no JSON"),
        ("[]", r"the plan: is \[\], not an object"),
        ("{}", "the plan: lacks functitan_plan, mesh, rules, uneven, precision, context, pipeline, params"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_plan_is_refused(text, match):
    with pytest.raises(ValueError, match=match):
        Plan.from_json(text)


def test_trees_that_are_too_deep_are_refused():
    data = whole()
    for _ in range(600):
        data["params"] = [data["params"]]
    with pytest.raises(ValueError, match="nested too deeply"):
        Plan.from_json(json.dumps(data))


def places(node, path=()):
    """The path of every value within a JSON value."""
    yield path
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(child, (*path, key))


WHOLE = whole()
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.sampled_from(["tp", "mlp", ""]),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(keys, children, max_size=2),
    max_leaves=3,
)


@no_deadline
@given(st.sampled_from([path for path in places(WHOLE) if path]), values)
def test_a_value_put_anywhere_gives_a_plan_or_a_value_error(path, value):
    data = copy.deepcopy(WHOLE)
    put(data, path, value)
    try:
        plan = Plan.from_json(json.dumps(data))
    except ValueError as error:
        assert str(error)
    else:
        assert Plan.from_json(plan.to_json()) == plan
