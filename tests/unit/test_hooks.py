"""Hook points: names, aliases, globs, and what is said about a name that is not one."""

from __future__ import annotations

import dataclasses

import pytest

from explorer.catalogue import Catalogue
from explorer.errors import SpecError
from explorer.hooks import KINDS, NOT_SERVED, canonical

from .fake import CATALOGUE, MISSING, SHAPE

SMOL = Catalogue(dataclasses.replace(SHAPE, layers=30))

# canonical name, alias, shape a token, editable: the table of names that users rely on
TABLE = [
    ("embed.hook_out", "hook_embed", (8,), True),
    ("blocks.1.hook_in", "blocks.1.hook_resid_pre", (8,), True),
    ("blocks.1.ln2.hook_in", "blocks.1.hook_resid_mid", (8,), True),
    ("blocks.1.hook_out", "blocks.1.hook_resid_post", (8,), True),
    ("blocks.1.attn.hook_out", None, (8,), True),
    ("blocks.1.mlp.hook_out", None, (8,), True),
    ("blocks.1.attn.q.hook_out", "blocks.1.attn.hook_q", (4, 3), True),
    ("blocks.1.attn.k.hook_out", "blocks.1.attn.hook_k", (2, 3), True),
    ("blocks.1.attn.v.hook_out", "blocks.1.attn.hook_v", (2, 3), True),
    ("blocks.1.attn.hook_rot_q", None, (4, 3), True),
    ("blocks.1.attn.hook_rot_k", None, (2, 3), True),
    ("blocks.1.attn.o.hook_in", "blocks.1.attn.hook_z", (4, 3), True),
    ("blocks.1.attn.hook_pattern", None, (4,), False),
    ("blocks.1.attn.hook_attn_scores", None, (4,), False),
    ("blocks.1.mlp.out.hook_in", "blocks.1.mlp.hook_post", (10,), True),
    ("ln_final.hook_normalized", None, (8,), False),
    ("unembed.hook_out", "logits", (20,), False),
]


@pytest.mark.parametrize(("name", "alias", "shape", "editable"), TABLE)
def test_each_name_has_its_alias_shape_and_say(name, alias, shape, editable):
    point = CATALOGUE[name]
    assert (point.name, point.shape, point.editable) == (name, shape, editable)
    assert point.heads == (shape[0] if len(shape) == 2 or "pattern" in name or "scores" in name else None)
    if alias is not None:
        assert CATALOGUE[alias] is point
        assert alias in CATALOGUE
        assert canonical(alias) == name
    assert canonical(name) == name


def test_the_table_is_complete():
    table = {name.replace(".1.", ".{i}.") for name, *_ in TABLE}
    assert table == {kind.name for kind in KINDS if kind.one_with is None}
    assert {kind.one_with for kind in KINDS if kind.one_with} < table


@pytest.mark.parametrize("branch", ["attn", "mlp"])
def test_what_is_added_to_the_stream_is_one_hook_with_the_output_unless_something_comes_between(branch):
    out, added = f"blocks.1.{branch}.hook_out", f"blocks.1.hook_{branch}_out"
    assert CATALOGUE[added] is CATALOGUE[out] and CATALOGUE[out].aliases == (added,)
    apart = Catalogue(SHAPE, apart=True)
    assert [apart[name].name for name in (out, added)] == [out, added]
    assert apart[out].aliases == () and apart[added].editable and apart[added].shape == (8,)
    names = [point.name for point in apart]
    assert names.index(added) == names.index(out) + 1
    assert canonical(added) == added  # in one model they are one, in the next they are two


def test_the_catalogue_is_in_forward_order():
    names = [point.name for point in CATALOGUE]
    assert len(names) == len(set(names)) == len(CATALOGUE) == 3 + 14 * SHAPE.layers
    assert names[0] == "embed.hook_out"
    assert names[-2:] == ["ln_final.hook_normalized", "unembed.hook_out"]
    for layer in range(SHAPE.layers):
        order = [
            f"blocks.{layer}.{n}" for n in ("hook_in", "attn.o.hook_in", "ln2.hook_in", "mlp.hook_out", "hook_out")
        ]
        assert order == sorted(order, key=names.index)
        assert {CATALOGUE[name].layer for name in order} == {layer}


def test_width_is_the_numbers_of_a_token():
    assert CATALOGUE["blocks.0.attn.hook_z"].width == 12
    assert CATALOGUE["blocks.0.mlp.hook_post"].width == 10


def test_canonical_leaves_unknown_names():
    assert canonical("blocks.1.nothing") == "blocks.1.nothing"
    assert canonical("blocks.12.hook_resid_post") == "blocks.12.hook_out"
    assert canonical("") == ""


# --- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("blocks.1.hook_ouT", "blocks.1.hook_out"),
        ("blocks.1.hook_resid", "blocks.1.hook_resid_pre"),
        ("blocks.1.attn.hookz", "blocks.1.attn.hook_z"),
        ("blocks.01.hook_out", "blocks.1.hook_out"),
        ("blocks.--1.hook_out", "blocks.1.hook_out"),
        ("blocks.².hook_out", "blocks.2.hook_out"),
        ("logit", "logits"),
        ("embed.hook", "embed.hook_out"),
    ],
)
def test_an_unknown_name_gives_the_closest(name, closest):
    with pytest.raises(SpecError, match="there is no hook") as refused:
        CATALOGUE.find(name)
    assert closest in str(refused.value)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("name", ["zzz", "", "."])
def test_a_name_like_nothing_points_to_the_catalogue(name):
    with pytest.raises(SpecError, match=r"session\.hooks lists them"):
        CATALOGUE.find(name)


@pytest.mark.parametrize("layer", ["3", "99", "-1", "9" * 5000])
def test_a_layer_past_the_model_names_the_layers(layer):
    with pytest.raises(SpecError, match="this model has layers 0 to 2"):
        CATALOGUE.find(f"blocks.{layer}.hook_out")


@pytest.mark.parametrize("rest", sorted(NOT_SERVED))
def test_names_not_served_give_the_nearest_that_is(rest):
    name = rest if rest.startswith(("ln_final", "unembed", "embed", "hook_pos")) else f"blocks.1.{rest}"
    with pytest.raises(SpecError, match="is not served here; the nearest one that is: ") as refused:
        CATALOGUE.find(name)
    nearest = str(refused.value).rsplit(" ", 1)[1]
    assert nearest in CATALOGUE
    assert CATALOGUE[nearest].layer in (None, 1, SHAPE.layers - 1)


def test_a_name_not_served_without_a_layer_number():
    with pytest.raises(SpecError, match=r"nearest one that is: blocks\.0\.hook_in"):
        CATALOGUE.find("blocks.{i}.attn.hook_in")


@pytest.mark.parametrize("name", [5, None, b"logits", ["logits"]])
def test_a_name_is_a_string(name):
    with pytest.raises(SpecError, match="named by a string"):
        CATALOGUE.find(name)


def test_a_hook_point_is_as_good_as_its_name():
    for point in CATALOGUE:
        assert point in CATALOGUE and CATALOGUE[point] is point


def test_a_hook_that_cannot_fire_is_listed_and_refused_with_the_reason():
    point = CATALOGUE.find("blocks.2.hook_resid_mid")
    assert not point.available
    assert not point.editable
    with pytest.raises(SpecError, match="not available in this model: attention and MLP read the same stream here"):
        CATALOGUE.require("blocks.2.hook_resid_mid")


# --- what a capture asks for ------------------------------------------------------------------------------------------


def test_match_takes_names_and_aliases_once_each_in_forward_order():
    asked = ["logits", "blocks.1.hook_resid_post", "blocks.1.hook_out", "hook_embed"]
    assert CATALOGUE.match(asked) == ("embed.hook_out", "blocks.1.hook_out", "unembed.hook_out")
    assert CATALOGUE.match(tuple(asked)) == CATALOGUE.match(iter(asked)) == CATALOGUE.match(asked)
    assert CATALOGUE.match("logits") == ("unembed.hook_out",)
    assert CATALOGUE.match(()) == CATALOGUE.match(None) == ()
    assert CATALOGUE.match(CATALOGUE["logits"]) == CATALOGUE.match([CATALOGUE["logits"]]) == ("unembed.hook_out",)


def test_all_is_all_that_is_available():
    names = CATALOGUE.match("all")
    assert len(names) == len(CATALOGUE) - len(MISSING)
    assert not set(names) & set(MISSING)


@pytest.mark.parametrize(
    ("glob", "count"),
    [
        ("blocks.*.hook_out", 30),  # the stream alone, not attn.hook_out
        ("blocks.*.attn.hook_z", 30),  # an alias
        ("blocks.1*.hook_out", 11),
        ("blocks.[0-3].hook_out", 4),
        ("blocks.?.hook_out", 10),
        ("blocks.*.*.hook_out", 5 * 30),
        ("blocks.5.*", 14),
        ("blocks.*", 14 * 30),
        ("*.hook_out", 2 + 6 * 30),
        ("*", 3 + 14 * 30),
    ],
)
def test_globs(glob, count):
    assert len(SMOL.match(glob)) == count


def test_globs_leave_out_what_cannot_fire():
    assert CATALOGUE.match("blocks.*.ln2.hook_in") == ("blocks.0.ln2.hook_in", "blocks.1.ln2.hook_in")


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(SpecError, match=r"'blocks\.\*\.hook_outt' matches no hook"):
        CATALOGUE.match("blocks.*.hook_outt")
    with pytest.raises(SpecError, match=r"did you mean blocks\.\*\.hook_out, "):
        CATALOGUE.match("blocks.*.hook_oot")
    with pytest.raises(SpecError, match="this model has layers 0 to 2"):
        CATALOGUE.match("blocks.[3-9].hook_out")
    with pytest.raises(SpecError, match=r"not served here; the nearest one that is: blocks\.\*\.attn\.o\.hook_in"):
        CATALOGUE.match("blocks.*.attn.hook_result")
    with pytest.raises(SpecError, match=r"matches no hook of this model; session\.hooks lists them"):
        CATALOGUE.match("*zzzz*")


def test_a_glob_of_what_cannot_fire_gives_the_reason():
    for glob in ("blocks.2.ln2.*", "blocks.[2-9].hook_resid_mid"):
        with pytest.raises(SpecError, match="is available in this model: attention and MLP read the same stream here"):
            CATALOGUE.match(glob)


@pytest.mark.parametrize("glob", ["blocks.*.hook_out", "blocks.?.hook_resid_post", "*", "all"])
def test_where_one_hook_is_named_a_glob_is_refused(glob):
    with pytest.raises(SpecError) as refused:
        CATALOGUE.find(glob)
    assert f"{glob!r} stands for several hooks" in str(refused.value)
    assert f"session.hooks.match({glob!r})" in str(refused.value)
    assert CATALOGUE.match(glob)
    with pytest.raises(SpecError, match="is available in this model: attention and MLP"):
        CATALOGUE.find("blocks.2.ln2.*")
    with pytest.raises(SpecError, match="did you mean"):
        CATALOGUE.find("blocks.*.hook_oot")


@pytest.mark.parametrize("asked", [5, len, lambda name: True])
def test_capture_takes_names(asked):
    with pytest.raises(SpecError, match="capture takes hook names or globs"):
        CATALOGUE.match(asked)


@pytest.mark.parametrize("asked", [[5], [None], [len], b"logits"])
def test_capture_takes_a_list_of_names(asked):
    with pytest.raises(SpecError, match="named by a string"):
        CATALOGUE.match(asked)


def test_patterns_come_from_the_projections_where_there_is_no_rotary():
    lacking = {f"blocks.1.attn.hook_rot_{x}": "no rotary" for x in "qk"}
    catalogue = Catalogue(SHAPE, lacking)
    for name in ("hook_pattern", "hook_attn_scores"):
        sources = [catalogue[f"blocks.{i}.attn.{name}"].derived_from for i in (0, 1)]
        assert sources[0] == ("blocks.0.attn.hook_rot_q", "blocks.0.attn.hook_rot_k")
        assert sources[1] == ("blocks.1.attn.q.hook_out", "blocks.1.attn.k.hook_out")


def test_capturing_what_cannot_fire_gives_the_reason():
    with pytest.raises(SpecError, match="the same stream"):
        CATALOGUE.match(["blocks.2.ln2.hook_in"])


def test_the_catalogue_reads_well():
    text = repr(CATALOGUE)
    assert "blocks.{0..2}.hook_out" in text
    assert "heads x query x key" in text
    assert len(text.splitlines()) == len(TABLE) + 1
    assert Catalogue(SHAPE, {"blocks.0.hook_in": "<why>"})._repr_html_().count("&lt;why&gt;") == 1


def test_what_cannot_fire_is_said_by_layer():
    missing = {
        "blocks.1.mlp.out.hook_in": "<sparse>",
        "blocks.2.mlp.out.hook_in": "<sparse>",
        "blocks.1.attn.hook_rot_q": "<latent>",
        "blocks.1.attn.hook_rot_k": "<latent>",
        "ln_final.hook_normalized": "<elsewhere>",
    }
    catalogue = Catalogue(SHAPE, missing)
    assert catalogue.report() == [
        f"{len(catalogue) - 5} of {len(catalogue)} hook points can fire",
        "attn.hook_rot_q, attn.hook_rot_k cannot fire in layer 1: <latent>",
        "mlp.out.hook_in cannot fire in layers 1, 2: <sparse>",
        "ln_final.hook_normalized cannot fire in this model: <elsewhere>",
    ]
    lines = {line.split()[0]: line for line in repr(catalogue).splitlines()}
    assert lines["blocks.{0..2}.mlp.out.hook_in"].endswith("activation function. Not in layers 1, 2: <sparse>")
    assert lines["ln_final.hook_normalized"].endswith("not available: <elsewhere>")
    assert "Not in" not in lines["blocks.{0..2}.hook_in"]
