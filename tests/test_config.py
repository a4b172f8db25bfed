"""Configurations: text and back, everything wrong at once, and the command line that makes them."""

import ast
import inspect
import math
import os
import re
import subprocess
import sys
import textwrap
import types
import typing
from pathlib import Path

import attrs
import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharding_specs import PRESETS, STANDARD_NAMES
from train import cli, options, recipes
from train.build import build
from train.config import (
    OptimConfig,
    RunConfig,
    TrainConfig,
    dump,
    parse,
    unsupported,
    validate,
)
from train.config_text import ConfigError
from train.errors import UserError
from train.layout_config import MeshConfig, RulesConfig
from train.recipes import RECIPES, recipe

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def values(kind):
    """A strategy for every value that a field of this type may have."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return values(args[0])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if attrs.has(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        # A configuration of another version is another test.
        return st.builds(kind, **{f.name: values(hints[f.name]) for f in attrs.fields(kind) if f.name != "version"})
    simple = {
        int: st.integers(1, 2**40),  # what every field with a validator allows
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: TEXT,
        Path: TEXT.map(lambda text: Path(text.replace("\0", "0"))),
        type(None): st.none(),
    }
    return simple[kind]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values(RunConfig))
def test_parse_is_the_inverse_of_dump(config):
    assert parse(dump(config)) == config


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_its_text_and_can_run(name):
    config = recipe(name)
    assert parse(dump(config)) == config
    assert validate(config, devices=8 if "70b" in name or "405b" in name else 1) == []


def test_published_learning_rates():
    """Table 3 of arXiv:2407.21783."""
    rates = [recipe(f"llama3-{size}").optim.learning_rate for size in ("8b", "70b", "405b")]
    assert rates == [3e-4, 1.5e-4, 8e-5]


def test_text_is_readable_and_complete():
    lines = dump(recipe("debug")).splitlines()
    assert lines[1] == "version: 1"
    assert [line for line in lines[2:] if not line.startswith((" ", "-"))] == [
        "model:", "data:", "train:", "optim:", "mesh:", "rules:", "pipeline:", "context:", "jit:", "checkpoint:",
        "out: runs/debug", "seed: 0",
    ]  # fmt: skip
    assert "  learning_rate: 0.004" in lines


def test_a_rate_without_a_point_is_a_number():
    text = dump(recipe("debug")).replace("learning_rate: 0.004", "learning_rate: 3e-4")
    assert parse(text).optim.learning_rate == 3e-4


def problems_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text, "run.yaml")
    return list(caught.value.problems)


def test_a_part_that_is_no_mapping():
    assert problems_of("model: foo\noptim:\n") == [
        "run.yaml:1: model: must be a mapping of its fields, or left out",
        "run.yaml:2: optim: must be a mapping of its fields, or left out",
    ]


def test_every_mistake_in_a_file_is_reported_with_its_line():
    text = textwrap.dedent("""\
        version: 1
        model: {}
        train:
          step: 5
          batch_size: 2.5
          remat: ful
        optim:
          clip_norm: much
          learning_rate: true
        jit:
          passes: cse
        sede: 1
        """)
    assert problems_of(text) == [
        'run.yaml:4: train.step: unknown field; did you mean "steps"?',
        'run.yaml:5: train.batch_size: is 2.5; expected a whole number',
        'run.yaml:6: train.remat: is \'ful\'; did you mean "full"?',
        "run.yaml:8: optim.clip_norm: is 'much'; expected a number or null",
        "run.yaml:9: optim.learning_rate: is True; expected a number",
        "run.yaml:11: jit.passes: is 'cse'; expected a list such as [a, b]",
        'run.yaml:12: sede: unknown field; did you mean "seed"?',
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "run.yaml: is empty"),
        ("- 1", "run.yaml: is a list"),
        ("a: [1", "run.yaml:1: not valid YAML"),
        ("seed: 1\nmodel: {}\nseed: 2\n", "run.yaml:3: seed is given twice"),
        ("seed: 1", "run.yaml: model: missing, and it has no default"),
        ("model: {}\nversion: 7", "version: is 7, but this functitan reads version 1: run it with"),
    ],
)
def test_text_that_is_no_configuration(text, expected):
    (problem,) = problems_of(text)
    assert expected in problem


# What is wrong with a configuration -----------------------------------------------------------------------------


def changed(**parts):
    """The default recipe with fields of its parts changed: ``changed(mesh={"tp": 4})``."""
    config = recipe("debug")
    return attrs.evolve(config, **{name: attrs.evolve(getattr(config, name), **new) for name, new in parts.items()})


def test_c1_key_value_heads_over_tensor_parallel():
    found = validate(changed(mesh={"tp": 4}), devices=4)
    assert any("kv_heads=2, does not divide over tp=4; legal tp: 1, 2" in problem for problem in found)


def test_c2_mesh_against_devices_together_with_everything_else():
    found = validate(
        changed(mesh={"dp": 2, "tp": 3}, train={"steps": -1, "log_every": 0}, optim={"learning_rate": math.nan}),
        devices=8,
    )
    assert any(problem.startswith("mesh: ") and "= 6, but there are 8 devices" in problem for problem in found)
    for start in ("train.steps: is -1", "train.log_every: is 0", "optim.learning_rate: is nan", "layers/wk: "):
        assert any(problem.startswith(start) for problem in found), start


def test_only_axes_that_can_run_are_offered_for_a_mesh_that_does_not_fit():
    (problem,) = validate(changed(mesh={"fsdp": 2}), devices=4)
    assert problem.endswith("one change that fits: pp=2 or dp=2 or fsdp=4 or cp=2 or tp=2")


def test_c6_batch_that_does_not_divide_into_micro_steps():
    (problem,) = validate(changed(train={"batch_size": 6, "accumulation": 4}))
    assert problem.startswith("train.accumulation: ") and problem.endswith("legal accumulation: 1, 2, 3, 6")


def test_s2_sequence_over_context_parallel():
    (problem,) = validate(changed(train={"seq_len": 10}, mesh={"cp": 4}), devices=4)
    assert problem.startswith("train.seq_len: seq=10 is not divisible by 8") and "legal seq: 8, 16" in problem


@pytest.mark.parametrize(
    "part, field, value",
    [
        ("train", "batch_size", 0),
        ("train", "seq_len", -4),
        ("train", "accumulation", 0),
        ("train", "eval_every", -1),
        ("train", "eval_batches", 0),
        ("optim", "learning_rate", 0.0),
        ("optim", "b2", 1.0),
        ("optim", "min_ratio", 1.5),
        ("optim", "weight_decay", -0.1),
        ("optim", "clip_norm", 0.0),
        ("optim", "eps", math.inf),
        ("optim", "warmup_steps", -1),
        ("optim", "decay_steps", 481),
        ("mesh", "fsdp", 0),
    ],
)
def test_a_value_out_of_range_is_named_with_its_option(part, field, value):
    (problem,) = validate(changed(**{part: {field: value}}), devices=1)
    assert problem.startswith(f"{part}.{field}: ")


def test_problems_of_model_and_data():
    found = validate(changed(model={"n_heads": 5}, data={"held_out": 2.0}))
    assert any(problem.startswith("model: n_kv_heads=2 must divide n_heads=5") for problem in found)
    assert any(problem.startswith("data.held_out: is 2.0") for problem in found)


def test_rules_are_a_preset_and_changes_of_it():
    assert RulesConfig().rules() == PRESETS["all"]
    assert RulesConfig(preset="data").rules() == PRESETS["data"]
    changed = RulesConfig(seq="cp", mlp="none", embed="fsdp, tp", uneven=("mlp",)).rules()
    assert changed == PRESETS["all"].replace(seq="cp", mlp=None, embed=("fsdp", "tp")).allow_uneven("mlp")


def test_every_standard_name_has_an_option():
    assert {field.name for field in attrs.fields(RulesConfig)} == {"preset", "uneven", *STANDARD_NAMES}


@pytest.mark.parametrize(
    "rules, expected",
    [
        ({"mlp": "pt"}, "rules.mlp: axis 'pt' is neither on the mesh"),
        ({"mlp": ""}, "rules.mlp: is ''; give axes such as fsdp or fsdp,tp, or none"),
        ({"mlp": "tp,"}, "rules.mlp: is 'tp,'; give axes"),
        ({"embed": "tp,fsdp"}, "rules.embed: axes ('tp', 'fsdp') are not in the order of the mesh"),
        ({"embed": "tp,tp"}, "rules.embed: axis 'tp' is named 2 times"),
        ({"uneven": ("vocb",)}, 'rules.uneven: unknown name \'vocb\'; did you mean "vocab"?'),
        ({"uneven": ("batch",)}, "rules.uneven: unknown name 'batch'; legal: embed, experts, "),
    ],
)
def test_rules_that_cannot_be_meant(rules, expected):
    (problem,) = validate(changed(rules=rules, mesh={"tp": 2, "fsdp": 2}), devices=4)
    assert problem.startswith(expected)


def test_rules_decide_what_divides():
    uneven = changed(model={"hidden_dim": 345}, mesh={"tp": 2})
    found = [problem for problem in validate(uneven, devices=2) if "mlp=345, does not divide over tp=2" in problem]
    assert found and all("let shards be uneven: --rules.uneven mlp" in problem for problem in found)
    for rules in ({"uneven": ("mlp",)}, {"mlp": "none"}):
        assert validate(attrs.evolve(uneven, rules=RulesConfig(**rules)), devices=2) == [], rules
    # Sequence parallelism splits the sequence over tp too, and can be switched off.
    odd = changed(train={"seq_len": 255}, mesh={"tp": 2})
    (problem,) = validate(odd, devices=2)
    assert problem.startswith("train.seq_len: ") and problem.endswith("--rules.seq cp")
    assert validate(attrs.evolve(odd, rules=RulesConfig(seq="cp")), devices=2) == []
    assert build(attrs.evolve(odd, rules=RulesConfig(seq="cp")), 2).plan.rules["seq"] == "cp"


def test_a_file_of_before_the_rules_is_read():
    text = dump(recipe("debug"))
    old = re.sub(r"^rules:\n(?:[ -].*\n)*", "", text, flags=re.MULTILINE).replace("  timeout_s: 600\n", "")
    assert "rules" not in old and parse(old) == recipe("debug")


def test_axes_that_this_version_does_not_run():
    (problem,) = unsupported(changed(mesh={"cp": 2, "ep": 2, "tp": 2, "dp": -1}), 8)
    assert problem.startswith("mesh.ep: is 2, but this version runs pp, dp, fsdp, cp and tp")
    assert unsupported(changed(mesh={"pp": 2, "dp": 2, "fsdp": -1, "cp": 2, "tp": 2}), 16) == []


def test_a_free_axis_takes_what_the_devices_leave():
    assert validate(changed(mesh={"fsdp": -1, "tp": 2}), devices=4) == []
    assert validate(changed(mesh={"fsdp": -1, "tp": 2})) == []
    (problem,) = validate(changed(mesh={"fsdp": -1, "dp": -1}), devices=4)
    assert problem.startswith("mesh: 2 axes are -1: dp, fsdp")


def test_mesh_order_is_outermost_first():
    assert MeshConfig(fsdp=-1, tp=8).spec().keys() == ("pp", "dp", "fsdp", "ep", "cp", "tp")


# The command line -----------------------------------------------------------------------------------------------


def parse_run(*args):
    return options.parse_train(args).job.run


def test_options_win_over_the_recipe():
    line = "small --train.steps 20 --model.n-layers 2 --mesh.fsdp -1 --data.path a b --out o"
    config = parse_run(*line.split())
    base = recipe("small")
    assert config == attrs.evolve(
        base,
        train=attrs.evolve(base.train, steps=20),
        model=attrs.evolve(base.model, n_layers=2),
        mesh=attrs.evolve(base.mesh, fsdp=-1),
        data=attrs.evolve(base.data, path=("a", "b")),
        out=Path("o"),
    )


def test_no_recipe_is_debug_and_a_recipe_may_come_last():
    assert parse_run() == recipe("debug")
    assert parse_run("--seed", "3", "small") == attrs.evolve(recipe("small"), seed=3)


def test_a_file_runs_again_and_options_win_over_it(tmp_path):
    written = attrs.evolve(recipe("llama3-8b"), seed=11, optim=OptimConfig(name="lion"), train=TrainConfig(steps=7))
    path = tmp_path / "config.yaml"
    path.write_text(dump(written), encoding="utf-8")
    assert parse_run("--config", str(path)) == written
    assert parse_run("--seed", "12", "--config", str(path)) == attrs.evolve(written, seed=12)


def status(*args):
    """The exit status of a command, however it leaves."""
    try:
        return cli.main(args)
    except SystemExit as leaving:
        return leaving.code


def test_c3_a_misspelt_option_is_refused_and_the_near_one_named(capsys):
    assert status("train", "--train.step", "5") == 2
    said = capsys.readouterr().err
    assert "--train.step, 5" in said and "--train.steps INT" in said


@pytest.mark.parametrize(
    "args, expected",
    [
        (["train", "dbug"], 'unknown recipe \'dbug\'; did you mean "debug"?'),
        (["trian"], 'unknown command \'trian\'; did you mean "train"?'),
        (["train", "--config", "no/such.yaml"], "--config no/such.yaml: No such file or directory"),
        (["train", "small", "--config", "x.yaml"], "give the recipe small or --config x.yaml, not both"),
        (["train", "--checkpoint.keep", "0"], "checkpoint.keep: is 0; give 1 or more"),
        (["train", "--train.accumulation", "3"], "legal accumulation: 1, 2, 4, 8, 16"),
        (["check", "--devices", "8"], "there are 8 devices"),
        (["train", "--mesh.fsdp", "2"], "mesh: fsdp=2 needs 2 ranks, and this is one process: add --nproc 2"),
        (["train", "--nproc", "0"], "--nproc: is 0; give 1 or more"),
        (["train", "--nproc", "4", "--mesh.fsdp", "2"], "fsdp=2 x cp=1 x tp=1 = 2, but there are 4 devices"),
        (["train", "--nproc", "2", "--mesh.ep", "2"], "mesh.ep: is 2, but this version runs pp, dp, fsdp, cp and tp"),
        (["train", "--jit.inductor", "--jit.no-enabled"], "jit.inductor: is on, but jit.enabled is off"),
        (["sample", ".", "--tokens", "0", "--temperature", "-1"], "--temperature: is -1.0; give 0 or more"),
        (["bench", "stp"], 'unknown bench \'stp\'; did you mean "step"?'),
    ],
)
def test_a_mistake_is_one_line_and_status_2(args, expected, capsys):
    assert status(*args) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.out == ""
    assert all(line.startswith("functitan: error: ") for line in said.err.splitlines())


def test_c2_ranks_are_held_against_the_mesh(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert status("train", "--mesh.dp", "2", "--mesh.tp", "3", "--train.log-every", "0") == 2
    said = capsys.readouterr().err
    assert "= 6, but there are 8 devices" in said and "train.log_every: is 0" in said and "legal tp: 1, 2" in said
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert status("train") == 2
    assert "WORLD_SIZE='many'" in capsys.readouterr().err


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process a rank of two that torchrun has started."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in (job | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)

    def become(rank):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    yield become
    del store  # which is a server until here


MISTAKES = {
    "a value": (["--mesh.dp", "2", "--train.log-every", "0"], "train.log_every: is 0"),
    "an option": (["--mesh.dp", "2", "--train.stepss", "9"], "--train.stepss"),
    "a file": (["--config", "nowhere.yaml"], "--config nowhere.yaml: No such file"),
}


@pytest.mark.parametrize(("options", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_several_ranks_is_told_by_the_first_of_them_alone(as_rank, capsys, options, expected):
    for rank, told in ((1, 1), (0, 0), (1, 1)):
        as_rank(rank)
        assert status("train", *options) == 2
        assert min(capsys.readouterr().err.count(expected), 1) == told
    # Another mistake of rank 0 is another thing to say.
    as_rank(0)
    assert status("train", "--mesh.dp", "2", "--optim.b2", "7") == 2
    assert "optim.b2: is 7.0" in capsys.readouterr().err


def test_help_of_several_ranks_is_printed_once(as_rank, capsys):
    for rank in (0, 1):
        as_rank(rank)
        assert status("train", "--help") == 0
    assert capsys.readouterr().out.count("usage: functitan train") == 1


def test_ranks_without_a_store_say_it_each(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert status("train", "--train.log-every", "0", "--mesh.dp", "2") == 2
    assert "train.log_every: is 0" in capsys.readouterr().err


def test_ranks_do_not_start_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert status("train", "--nproc", "2", "--mesh.dp", "2") == 2
    assert "--nproc: is 2, but 2 ranks are started already (WORLD_SIZE)" in capsys.readouterr().err


def test_check_says_what_would_run_and_what_train_refuses(capsys):
    assert status("check", "--mesh.fsdp", "-1", "--mesh.tp", "2", "--devices", "4") == 0
    assert capsys.readouterr() == ("no problems found; it needs 4 ranks\n", "")
    assert status("check", "--mesh.ep", "2") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("functitan: error: train refuses it: mesh.ep: is 2")


@pytest.fixture
def loop(monkeypatch):
    """A stand-in for train.loop, whose run does what the test says."""
    module = types.ModuleType("train.loop")
    monkeypatch.setitem(sys.modules, "train.loop", module)
    monkeypatch.setattr("train.loop", module, raising=False)
    return module


def raiser(error):
    def run(config):
        raise error

    return run


def test_exit_statuses(loop, capsys):
    ran = []
    loop.run = lambda config: ran.append(config) or 0
    assert status("train", "--seed", "9") == 0
    assert ran == [attrs.evolve(recipe("debug"), seed=9)]

    loop.run = raiser(UserError("data.path: nothing.txt: no such file"))
    assert status("train") == 1
    assert capsys.readouterr().err == "functitan: error: data.path: nothing.txt: no such file\n"

    loop.run = raiser(KeyboardInterrupt())
    assert status("train") == 130

    loop.run = raiser(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_help_documents_every_field_and_every_recipe(capsys):
    assert status("train", "small", "--help") == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in RECIPES:
        assert RECIPES[name].summary in said
    assert "(default: 12000)" in said, "the values are those of the recipe that was named"
    for name, kind in configured_classes(RunConfig):
        for field in attrs.fields(kind):
            if field.name != "version" and not attrs.has(field.type):
                option = "rope-scaling.factor" if field.name == "rope_scaling" else field.name.replace("_", "-")
                assert f"--{name}{option}" in said


def configured_classes(kind, prefix=""):
    yield prefix, kind
    for field in attrs.fields(attrs.resolve_types(kind)):
        if attrs.has(field.type):
            yield from configured_classes(field.type, f"{prefix}{field.name}.")


@pytest.mark.parametrize("kind", [kind for _, kind in configured_classes(RunConfig)] + [cli.SampleOptions])
def test_every_field_has_a_docstring_beneath_it(kind):
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    documented = {
        field.target.id
        for field, below in zip(tree.body, tree.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    assert documented == {field.name for field in attrs.fields(kind)}


def test_module_runs_as_the_command(tmp_path):
    """``python -m train OPTIONS`` is ``functitan train OPTIONS``; a mistake there has status 2 and no traceback."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "train", "--train.accumulation", "3"]
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("functitan: error: train.accumulation: ") and len(run.stderr.splitlines()) == 1


def test_usage_needs_no_torch():
    code = "import sys; from train.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()[2 : 2 + len(cli.COMMANDS)]] == list(cli.COMMANDS)


def test_recipes_are_what_help_offers():
    assert typing.get_args(options.RecipeName) == tuple(RECIPES)
    assert recipes.DEFAULT in RECIPES
