import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding_specs import PRESETS, STANDARD_AXES, STANDARD_NAMES, MeshSpec, P, Rules
from sharding_specs.partition import entry_axes

# The first example of a test may meet a busy machine.
no_deadline = settings(deadline=None)

names_of_rules = st.sampled_from(["batch", "seq", "embed", "mlp", "heads"])
rule_values = st.lists(st.sampled_from(STANDARD_AXES), max_size=3, unique=True).map(tuple)


def test_reading():
    rules = Rules(embed="fsdp", mlp=("tp",), heads=None)
    assert rules["mlp"] == "tp" and rules["heads"] is None and rules["batch"] == ("dp", "fsdp")
    assert "mlp" in rules and "vocab" not in rules
    assert dict(rules) == {"batch": ("dp", "fsdp"), "embed": "fsdp", "heads": None, "mlp": "tp", "seq": "cp"}
    assert rules.get("vocab") is None and len(rules) == 5
    assert eval(repr(rules)) == rules


def test_the_order_of_rules_does_not_matter_and_replace_changes_a_copy():
    rules = Rules(embed="fsdp", mlp="tp")
    assert rules == Rules(mlp="tp", embed="fsdp") and hash(rules) == hash(Rules(mlp="tp", embed="fsdp"))
    assert rules.replace(mlp=None, vocab="tp") == Rules(embed="fsdp", mlp=None, vocab="tp")
    assert rules["mlp"] == "tp"


def test_one_entry_a_dim_and_none_is_never_split():
    rules = Rules(embed="fsdp", mlp="tp", head_dim=None)
    assert rules.spec(("embed", "head_dim", None, "mlp")) == P("fsdp", None, None, "tp")
    assert rules.spec(()) == P()


def test_of_a_parameters_dims_the_first_that_asks_for_an_axis_gets_it():
    rules = Rules(embed=("fsdp", "tp"), mlp="tp")
    assert rules.spec(("embed", "embed")) == P(("fsdp", "tp"), None)
    assert rules.spec(("mlp", "embed")) == P("tp", "fsdp")
    assert rules.spec(("batch", "seq", "embed")) == P(("dp", "fsdp"), "cp", "tp")


def test_batch_comes_first_then_the_context_of_seq_then_other_dims_then_the_rest_of_seq():
    rules = Rules(seq=("cp", "tp"), embed="fsdp", mlp="tp", wide=("cp", "tp"), deep="dp")
    assert rules.spec(("batch", "seq", "embed")) == P(("dp", "fsdp"), ("cp", "tp"), None)
    assert rules.spec(("batch", "seq", "mlp")) == P(("dp", "fsdp"), "cp", "tp")
    assert rules.spec(("batch", "seq", "wide")) == P(("dp", "fsdp"), "cp", "tp")
    # The turns do not depend on where the dims stand.
    assert rules.spec(("mlp", "seq", "batch")) == P("tp", "cp", ("dp", "fsdp"))
    assert rules.spec(("deep", "embed", "batch")) == P(None, None, ("dp", "fsdp"))
    assert rules.spec(("wide", "mlp", "seq")) == P("tp", None, "cp")
    assert rules.spec(("wide", "embed")) == P(("cp", "tp"), "fsdp")


def test_the_axes_of_seq_keep_the_order_of_its_rule():
    assert Rules(seq=("tp", "cp")).spec(("batch", "seq")) == P(("dp", "fsdp"), ("tp", "cp"))


def test_sequence_parallelism_is_a_rule():
    mesh = MeshSpec(fsdp=2, tp=2)
    for preset in ("tensor", "all"):
        rules = PRESETS[preset]
        assert rules.spec(("batch", "seq", "embed"), mesh) == P("fsdp", "tp", None)
        assert rules.spec(("batch", "seq", "mlp"), mesh) == P("fsdp", None, "tp")
        assert rules.replace(seq="cp").spec(("batch", "seq", "embed"), mesh) == P("fsdp", None, None)
    assert PRESETS["data"].spec(("batch", "seq", "embed"), mesh) == P("fsdp", None, None)


def test_a_batch_is_laid_out_as_the_logits_are():
    rules = PRESETS["tensor"]
    assert rules.batch_spec() == P(("dp", "fsdp"), "cp")
    assert rules.batch_spec(MeshSpec(fsdp=2, tp=2)) == P("fsdp", None)
    assert rules.replace(vocab=None).batch_spec() == P(("dp", "fsdp"), ("cp", "tp"))
    assert Rules(embed="fsdp").batch_spec(MeshSpec(cp=2)) == P(None, "cp")
    assert Rules().batch_spec() == P(("dp", "fsdp"), "cp")


def test_axes_that_the_mesh_lacks_split_nothing():
    rules = Rules(embed="fsdp", mlp="tp")
    assert rules.spec(("batch", "embed"), MeshSpec(fsdp=2)) == P("fsdp", None)
    assert rules.spec(("batch", "mlp"), MeshSpec(dp=2, tp=2)) == P("dp", "tp")
    assert rules.spec(("batch", "mlp"), ()) == P(None, None)


@no_deadline
@given(
    st.dictionaries(names_of_rules, rule_values),
    st.lists(names_of_rules, max_size=5),
    st.sets(st.sampled_from(STANDARD_AXES)),
)
def test_a_spec_uses_no_axis_twice_and_loses_none_that_was_asked_for(table, names, mesh):
    rules = Rules(**{"embed": None, "mlp": None, "heads": None, **table})
    spec = rules.spec(names, mesh)
    asked = {axis for name in names for axis in entry_axes(rules[name])}
    assert len(spec) == len(names)
    assert sorted(spec.axes) == sorted(asked & mesh)


def test_storage_axes_are_those_that_activations_need_for_other_dims():
    rules, mesh = PRESETS["all"], MeshSpec(pp=2, dp=2, fsdp=2, ep=2, cp=2, tp=2)
    assert rules.compute_spec(("layers", "embed", "heads", None), mesh) == P("pp", None, "tp", None)
    assert rules.compute_spec(("vocab", "embed"), mesh) == P("tp", None)
    assert rules.compute_spec(("experts", "embed", "mlp"), mesh) == P("ep", None, "tp")
    assert rules.compute_spec((), mesh) == P()
    assert rules.compute_spec(("embed",), MeshSpec(tp=2)) == P(None)
    assert Rules().compute_spec(("embed", "mlp")) == P(None, None)


@no_deadline
@given(
    st.dictionaries(names_of_rules, rule_values),
    st.lists(st.sampled_from(["embed", "mlp", "heads", None]), max_size=4),
    st.sets(st.sampled_from(STANDARD_AXES)),
)
def test_what_stays_in_compute_does_not_split_the_batch_nor_its_context(table, names, mesh):
    rules = Rules(**{"embed": None, "mlp": None, "heads": None, **table})
    stored, computed = rules.spec(names, mesh), rules.compute_spec(names, mesh)
    assert len(stored) == len(computed)
    for name, before, after in zip(names, stored, computed):
        at_use = rules.spec(("batch", "seq", name), mesh)
        kept = [axis for axis in entry_axes(before) if axis in entry_axes(after)]
        assert entry_axes(after) == tuple(kept)
        assert not set(kept) & {*entry_axes(at_use[0]), *entry_axes(at_use[1])}
        assert set(entry_axes(before)) - set(kept) <= {*entry_axes(at_use[0]), *entry_axes(at_use[1])}


def test_one_dim_can_have_storage_and_compute_axes():
    rules = Rules(embed=("fsdp", "cp", "tp"), mlp="tp")
    assert rules.spec(("embed", "mlp")) == P(("fsdp", "cp", "tp"), None)
    assert rules.compute_spec(("embed", "mlp")) == P("tp", None)
    assert rules.compute_spec(("mlp", "embed")) == P("tp", None)
    # An axis that seq has left over stays with the parameter, and one that splits the sequence does not.
    assert rules.replace(seq=("cp", "tp")).compute_spec(("embed",)) == P("tp")
    assert Rules(seq=("cp", "tp"), embed=None).compute_spec(("seq", "embed")) == P(("cp", "tp"), None)


def test_names_may_be_uneven_where_the_rules_say_so():
    rules = Rules(vocab="tp", embed="fsdp")
    uneven = rules.allow_uneven("vocab")
    assert rules.uneven == frozenset() and uneven.uneven == {"vocab"}
    assert uneven != rules and hash(uneven) == hash(rules.allow_uneven("vocab"))
    assert dict(uneven) == dict(rules) and Rules(**uneven) == rules
    assert uneven.spec(("vocab", "embed")) == rules.spec(("vocab", "embed"))
    both = uneven.allow_uneven("embed", "vocab")
    assert both.uneven == {"vocab", "embed"} and both == rules.allow_uneven("embed").allow_uneven("vocab")
    assert uneven.replace(embed="tp") == rules.replace(embed="tp").allow_uneven("vocab")
    assert eval(repr(both)) == both and pickle.loads(pickle.dumps(both)) == both
    assert repr(both).endswith(".allow_uneven('embed', 'vocab')")
    for preset in PRESETS.values():
        assert preset.uneven == {"vocab"}


@pytest.mark.parametrize("name", ["batch", "seq"])
def test_a_batch_can_not_be_uneven(name):
    with pytest.raises(ValueError, match=f"'{name}' can not be uneven"):
        PRESETS["all"].allow_uneven("mlp", name)


def test_only_names_with_a_rule_can_be_uneven():
    with pytest.raises(ValueError, match="'vocb'; did you mean 'vocab'"):
        PRESETS["all"].allow_uneven("vocb")


def test_without_rules_parameters_are_replicated_and_the_batch_is_split():
    assert Rules().spec(("embed", "mlp")) == P(None, None)
    assert Rules().spec(("batch", "seq", "embed"), MeshSpec(dp=2, cp=2)) == P("dp", "cp", None)


def test_a_name_without_a_rule_is_an_error_that_names_near_ones():
    with pytest.raises(ValueError, match="'emebd'; did you mean 'embed'"):
        Rules(embed="fsdp").spec(("emebd",))
    with pytest.raises(ValueError, match="'qqq'; rules exist for batch, embed, seq"):
        Rules(embed="fsdp").spec(("qqq",))


def test_values_that_are_no_axes_are_refused():
    with pytest.raises(TypeError, match=r"'mlp'.*not by 3"):
        Rules(mlp=3)


def test_presets_know_every_standard_name_and_only_standard_axes():
    assert set(PRESETS) == {"data", "tensor", "all"}
    for rules in PRESETS.values():
        assert set(rules) == set(STANDARD_NAMES)
        assert set(rules.spec(STANDARD_NAMES).axes) <= set(STANDARD_AXES)
    weight = ("layers", "embed", "heads", "head_dim")
    assert PRESETS["data"].spec(weight) == P(None, "fsdp", None, None)
    assert PRESETS["tensor"].spec(weight) == P(None, "fsdp", "tp", None)
    assert PRESETS["all"].spec(weight) == P("pp", "fsdp", "tp", None)
    assert PRESETS["all"].spec(("experts", "embed", "mlp")) == P("ep", "fsdp", "tp")
