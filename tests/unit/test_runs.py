"""What comes back: the views of a Run and a Comparison, and what they say when asked for what is not there."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import warnings

import numpy as np
import pytest
import torch

from explorer import Edit, NotFinite, SessionClosed, SpecError, stack
from explorer.analysis import attention

from . import fake

PROMPT = "w0 w1 w2 w3"
STREAM = "blocks.1.hook_out"


# --- captures ---------------------------------------------------------------------------------------------------------


def test_captures_by_name_and_alias(session):
    run = session.run(PROMPT, capture=[STREAM, "blocks.0.attn.hook_z", "blocks.0.mlp.hook_post"])
    assert run[STREAM].shape == (4, 8)
    assert torch.equal(run["blocks.1.hook_resid_post"], run[STREAM])
    assert run["blocks.0.attn.hook_z"].shape == (4, 4, 3)
    assert run["blocks.0.mlp.out.hook_in"].shape == (4, 10)
    assert list(run) == list(run.captured) == ["blocks.0.attn.o.hook_in", "blocks.0.mlp.out.hook_in", STREAM]
    assert len(run) == 3
    assert STREAM in run
    assert "blocks.1.hook_resid_post" in run
    assert "blocks.0.hook_out" not in run
    assert "nonsense" not in run


def test_a_hook_that_was_not_captured_says_how_to(session):
    run = session.run(PROMPT, capture=STREAM)
    with pytest.raises(KeyError) as missing:
        run["blocks.0.hook_resid_post"]
    assert missing.value.args[0] == (
        "blocks.0.hook_out was not captured; run again with capture='blocks.0.hook_resid_post' "
        "(or a list that holds it)"
    )
    with pytest.raises(SpecError, match="did you mean"):
        run["blocks.0.hook_ouut"]
    with pytest.raises(SpecError, match="the same stream"):
        run["blocks.2.ln2.hook_in"]
    with pytest.raises(SpecError, match="named by a string"):
        run[0]


def test_patterns_are_replayed(session, engine):
    run = session.run(PROMPT, capture=["blocks.*.attn.hook_pattern", "blocks.*.attn.hook_attn_scores"])
    assert set(engine.batches[0][0].capture) == {f"blocks.{i}.attn.hook_rot_{x}" for i in range(3) for x in "qk"}
    for layer in range(3):
        q, k = (run.rows_at(f"blocks.{layer}.attn.hook_rot_{x}") for x in "qk")
        how = engine.model.attention[layer]
        assert torch.equal(run.pattern(layer), attention.pattern(q, k, how))
        assert torch.equal(run[f"blocks.{layer}.attn.hook_attn_scores"], attention.scores(q, k, how))
    assert run.pattern(-1).shape == (4, 4, 4)
    assert torch.equal(run.pattern(-1), run.pattern(2))
    with pytest.raises(KeyError, match=r"blocks\.0\.attn\.hook_rot_q was not captured"):
        run["blocks.0.attn.hook_rot_q"]


@pytest.mark.parametrize("layer", [3, -4])
def test_a_layer_past_the_model(session, layer):
    with pytest.raises(IndexError, match=f"layer {layer} is past the model's 3 layers"):
        session.run(PROMPT).pattern(layer)


def test_a_pattern_that_was_not_captured(session):
    with pytest.raises(KeyError, match=r"capture='blocks\.1\.attn\.hook_pattern'"):
        session.run(PROMPT).pattern(1)


def test_logits_are_a_hook_too(session):
    run = session.run(PROMPT, capture="logits")
    assert torch.equal(run["unembed.hook_out"], run.logits)


def test_nothing_that_a_run_gives_changes_it(session):
    """Its results are the caller's own: written to, in torch or through numpy, they change no other result."""
    for prompt, new in ((PROMPT, 0), ("w0", 0), (PROMPT, 3)):
        run = session.run(prompt, capture=["blocks.*", "logits"], max_new_tokens=new, logits=True)

        every = list(range(run.rows))

        def seen(run=run, every=every):
            with torch.no_grad():
                patched = session.run(run.fed, Edit(STREAM, "patch", source=run, source_pos=every), capture=STREAM)
            stacked, _ = stack([run], STREAM)
            numbers = [*(run[name] for name in run), run.logits, run.logits_at(0), run.logits_at(-1), run.loss]
            numbers += [stacked, patched[STREAM], patched.logits]
            return [t.clone() for t in numbers], [run.top(3), run.top(3, 0), run.tokens, run.text, run.spec, repr(run)]

        before = seen()
        for name in run:
            run[name].mul_(2)
            run[name].numpy()[:] = 7
        stack([run], STREAM)[0].zero_()
        run.pattern(1).zero_(), run.logits.zero_(), run.logits_at().zero_(), run.logits_at(0).zero_(), run.loss.zero_()
        run.tokens.clear()
        after = seen()
        assert all(map(torch.equal, before[0], after[0])) and before[1] == after[1]


def test_a_view_is_the_runs_own_memory(session):
    run = session.run(PROMPT, capture=[STREAM, "logits", "blocks.0.attn.hook_pattern"])
    assert run.view(STREAM).data_ptr() == run.view("blocks.1.hook_resid_post").data_ptr() != run[STREAM].data_ptr()
    assert run.view("logits").data_ptr() == run.view("logits").data_ptr() != run.logits.data_ptr()
    assert torch.equal(run.view("blocks.0.attn.hook_pattern"), run.pattern(0))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_run_is_shared_and_not_copied(session, copied):
    with pytest.raises(TypeError, match=r"a Run is neither pickled nor copied .* run\.recipe\(\)"):
        copied(session.run(PROMPT))


# --- predictions ------------------------------------------------------------------------------------------------------


def test_logits_are_computed_once_and_only_when_asked(session, engine):
    run = session.run(PROMPT)
    run.top(3), run.logit_diff("w0", 5), repr(run)
    assert engine.head_calls == 0
    assert run.logits.shape == (4, 20)
    assert run.logits.dtype == torch.float32
    assert torch.equal(run.logits, run.logits)
    assert run.loss.shape == (3,)
    assert engine.head_calls == 1
    assert torch.equal(run.logits[-1], run.logits_at())
    assert torch.equal(run.logits[1], run.logits_at(1))
    assert torch.equal(run.logits[1], run.logits_at(-3))


def test_one_token(session, engine):
    run = session.run("w0")
    assert run.logits.shape == (1, 20)
    assert run.loss.shape == (0,)
    assert engine.head_calls == 0


def test_logits_of_now(session, engine):
    session.run([PROMPT, "w4"], logits=True)
    assert engine.head_calls == 1


def test_top(session):
    run = session.run(PROMPT)
    top = run.top(3)
    probs = run.logits[-1].softmax(-1)
    assert [t.id for t in top] == probs.topk(3).indices.tolist()
    assert [t.text for t in top] == session._tokenizer.convert_ids_to_tokens([t.id for t in top])
    assert top[0].prob == pytest.approx(float(probs.max()))
    assert top[0].logprob == pytest.approx(float(probs.max().log()), abs=1e-5)
    assert len(run.top()) == 10
    assert len(run.top(1000)) == 20
    assert run.top(1, position=0)[0].id == int(run.logits[0].argmax())
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        run.top(0)


@pytest.mark.parametrize("given", ["3", 2.0, True, None, [1]])
def test_what_is_no_whole_number(session, given):
    run, comparison = session.run(PROMPT), session.compare(PROMPT, None)
    for ask, name in (
        (lambda: run.top(given), "k"),
        (lambda: comparison.top(given), "k"),
        (lambda: run.pattern(given), "layer"),
        (lambda: run.top(3, given), "position"),
        (lambda: run.logit_diff(3, 4, position=given), "position"),
        (lambda: run.logits_at(given), "position"),
        (lambda: comparison.kl(given), "position"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be a whole number, not "):
            ask()


def test_numbers_of_other_libraries(session):
    run = session.run(PROMPT, capture="blocks.1.attn.hook_pattern")
    assert run.top(np.int64(2), torch.tensor(1)) == run.top(2, 1)
    assert torch.equal(run.pattern(np.int8(1)), run.pattern(1))


HUGE = Edit(STREAM, "scale", factor=3e38, pos=2)  # of fp32, which ends at 3.4e38


def test_logits_that_are_not_finite_are_not_counted_with(session):
    cmp = session.compare(PROMPT, HUGE)
    run = cmp.patched
    says = r"^the logits at position 3 are not finite: with this run's edits, .* past what float32 holds"
    for ask in (run.top, cmp.top, cmp.kl, run.logits_at, lambda: run.logit_diff(3, 4), lambda: cmp.logit_diff(3, 4)):
        with pytest.raises(NotFinite, match=says):
            ask()
    assert "position 3 are not finite" in repr(run) and "position 3 are not finite" in repr(cmp)
    assert cmp.clean.top(1) == session.run(PROMPT).top(1)
    with pytest.warns(RuntimeWarning, match=r"the logits at 2 positions \(the first is 2\) are not finite: with"):
        logits = run.logits
    assert logits[:2].isfinite().all() and not logits[2:].isfinite().any()
    assert run.top(1, 1) == cmp.clean.top(1, 1)
    written = session.generate(PROMPT, HUGE, 3)
    assert "are not finite" in repr(written)
    with pytest.raises(NotFinite, match="the logits at position 5 are not finite: with"):
        _ = written.text


@pytest.mark.parametrize(("dtype", "advice"), [("float32", "weights may be damaged"), ("bfloat16", "boot with dtype=")])
def test_a_model_that_overflows_by_itself_is_told_from_edits(dtype, advice):
    engine = fake.FakeEngine(getattr(torch, dtype))
    engine._embedding[5] *= 1e38
    with fake.session(engine) as session:
        run = session.run(PROMPT)
    with pytest.raises(NotFinite, match=f"not finite in {dtype}, and no edit did it, .*; .*{advice}"):
        run.top(1)


def test_a_token_that_is_ruled_out_is_no_overflow(session, engine):
    engine._unembedding[:, 4] = -torch.inf
    engine._embedding.abs_()
    with warnings.catch_warnings(action="error"):
        assert session.run([3], logits=True).top(20)[-1].prob == 0


def test_logit_diff(session):
    run = session.run(PROMPT)
    expected = float(run.logits[-1, 3] - run.logits[-1, 8])
    assert run.logit_diff("w0", "w5") == run.logit_diff(3, 8) == pytest.approx(expected)
    assert run.logit_diff(3, 8, position=0) == pytest.approx(float(run.logits[0, 3] - run.logits[0, 8]))
    with pytest.raises(ValueError, match="2 tokens"):
        run.logit_diff("w0 w1", 3)
    with pytest.raises(ValueError, match="20"):
        run.logit_diff(20, 3)


@pytest.mark.parametrize("position", [4, -5])
def test_a_position_past_the_run(session, position):
    run = session.run(PROMPT)
    for ask in (run.logits_at, lambda p: run.top(1, p), lambda p: run.logit_diff(3, 4, p)):
        with pytest.raises(IndexError, match=f"position {position} is past the run's 4 rows"):
            ask(position)


def test_after_close_runs_stay_readable_but_for_logits_not_read(session):
    read, unread = session.run([PROMPT, PROMPT], capture=STREAM)
    assert read.logits.shape == (4, 20)
    session.close()
    assert read.loss.shape == (3,)
    assert unread[STREAM].shape == (4, 8)
    assert unread.top(1)
    with pytest.raises(SessionClosed, match="logits that were not read are gone"):
        _ = unread.logits


# --- what was run -----------------------------------------------------------------------------------------------------


def test_what_was_run(session):
    run = session.run(PROMPT, {STREAM: {"op": "suppress", "pos": 1}})
    assert run.ids == (3, 4, 5, 6)
    assert (run.prompt_length, run.rows, run.generated, run.text) == (4, 4, (), "")
    assert [t.text for t in run.tokens] == PROMPT.split()
    assert run.spec == {STREAM: {"op": "suppress", "pos": 1}}
    assert run.recipe() == {"ids": [3, 4, 5, 6], "edits": run.spec}
    assert session.run(PROMPT).spec == {}
    assert session.run(PROMPT).recipe() == {"ids": [3, 4, 5, 6]}


def test_a_spec_stays_what_was_run(session):
    value = torch.ones(8)
    run = session.run(PROMPT, Edit(STREAM, "set", value=value))
    value.zero_()
    assert run.spec[STREAM]["value"] == [1.0] * 8


def test_a_generated_run(session):
    run = session.generate(PROMPT, max_new_tokens=3, capture=STREAM)
    assert (run.prompt_length, run.rows, len(run.ids)) == (4, 6, 7)
    assert run[STREAM].shape == (6, 8)
    assert run.logits.shape == (6, 20)
    assert run.generated == run.ids[4:]
    assert [int(i) for i in run.logits[3:].argmax(-1)] == list(run.generated)
    assert run.text == session._tokenizer.decode(run.generated, skip_special_tokens=True)
    assert len(run.tokens) == 7
    assert run.recipe() == {"ids": list(run.ids[:6])}


@pytest.mark.parametrize(
    "edit",
    [
        Edit(STREAM, "scale", factor=3, phase="both"),
        Edit(STREAM, "add", value=2.0, pos="last"),
        Edit("blocks.0.hook_out", "set", value=torch.arange(16.0).reshape(2, 8), phase="decode"),
        Edit("blocks.0.attn.hook_z", "suppress", head=[1, 3], phase="decode", pos=4),
        Edit(STREAM, "patch", source="w7 w8", pos="last"),
        Edit("blocks.0.hook_out", "patch", source=[9, 10, 11, 12, 13, 14], phase="both", pos=[3, 5], source_pos=[0, 1]),
    ],
    ids=lambda e: f"{e.op}-{e.phase}",
)
def test_the_recipe_of_a_generated_run_makes_its_activations_again(session, edit):
    run = session.generate(PROMPT, edit, max_new_tokens=3, capture=[STREAM])
    recipe = json.loads(json.dumps(run.recipe()))
    again = session.run(recipe["ids"], recipe["edits"], capture=STREAM)
    torch.testing.assert_close(again[STREAM], run[STREAM])


def test_the_recipe_of_a_run_patched_from_a_run(session):
    source = session.run("w7 w8", capture=STREAM)
    run = session.generate(PROMPT, Edit(STREAM, "patch", source=source, pos="last"), max_new_tokens=3, capture=[STREAM])
    edit = run.recipe()["edits"][STREAM]
    assert (edit["pos"], edit["source_pos"]) == ([3], [1])
    again = session.run(run.recipe()["ids"], run.recipe()["edits"], capture=STREAM)
    torch.testing.assert_close(again[STREAM], run[STREAM])


@pytest.mark.parametrize("source_pos", ["last", -1, "-1:3", None])
def test_a_spec_that_patches_from_a_generated_run_counts_from_its_prompt(session, source_pos):
    # the recipe of the source is a prompt of all its tokens, longer than the one that positions counted from
    source = session.generate("w1 w2 w3", max_new_tokens=4)
    run = session.run(PROMPT, Edit(STREAM, "patch", source=source, pos=-1, source_pos=source_pos))
    assert run.spec[STREAM]["source_pos"] == [2]
    assert torch.equal(session.run(PROMPT, json.loads(json.dumps(run.spec))).logits, run.logits)
    assert not torch.equal(
        session.run(PROMPT, Edit(STREAM, "patch", source=source.recipe(), pos=-1)).logits, run.logits
    )


def test_the_recipe_of_a_run_that_stopped_early(session):
    first = session.generate(PROMPT, max_new_tokens=1).text
    run = session.generate(PROMPT, Edit(STREAM, "scale", factor=1.0, phase="both"), 5, stop=first)
    assert run.rows == 4
    recipe = run.recipe()
    assert recipe["ids"] == [3, 4, 5, 6]
    session.run(recipe["ids"], run.recipe().get("edits"))


def test_runs_read_well(session):
    text = repr(session.run("w0 " * 8, Edit(STREAM, "suppress"), capture="blocks.*.hook_out"))
    assert text.startswith("Run of 'w0w0w0")
    assert "8 rows, 0 generated tokens, 1 edit, 3 hooks captured" in text
    assert "next: '<pad>' 5.0%, '<s>' 5.0%" in text  # all are alike
    assert len(repr(session.run([3] * 15)).splitlines()[0]) < 80
    written = session.generate("w0 w1", max_new_tokens=3)
    assert f"3 generated tokens, 0 edits, 0 hooks captured\n  text: {written.text!r}" in repr(written)


# --- comparisons ------------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(session):
    return session.compare(PROMPT, Edit(STREAM, "add", value=[3.0, -3.0] * 4))


def test_top_is_the_union(comparison):
    clean, patched = ({t.id: t for t in run.top(3)} for run in (comparison.clean, comparison.patched))
    rows = comparison.top(3)
    assert {r.id for r in rows} == set(clean) | set(patched)
    assert [max(r.clean_prob, r.patched_prob) for r in rows] == sorted(
        (max(r.clean_prob, r.patched_prob) for r in rows), reverse=True
    )
    for row in rows:
        assert row.change == pytest.approx(row.patched_prob - row.clean_prob)
        if row.id in clean:
            assert row.clean_prob == pytest.approx(clean[row.id].prob)


def test_logit_diff_of_both(comparison):
    difference = comparison.logit_diff("w0", "w1")
    assert difference.clean == comparison.clean.logit_diff("w0", "w1")
    assert difference.patched == comparison.patched.logit_diff("w0", "w1")
    assert difference == (difference.clean, difference.patched)


def test_kl(comparison):
    p, q = (r.logits[-1].double().softmax(-1) for r in (comparison.clean, comparison.patched))
    assert comparison.kl() == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-4)
    assert comparison.kl(position=0) > 0
    with pytest.raises(IndexError):
        comparison.kl(position=9)


def test_nothing_changed_is_zero(session):
    same = session.compare(PROMPT, None)
    assert same.kl() == 0.0
    assert {r.change for r in same.top()} == {0.0}


def test_comparisons_read_well(comparison):
    text = repr(comparison)
    assert text.startswith("Comparison, clean -> patched\n  'w")
    assert text.endswith(" nats")


def test_runs_do_not_keep_the_model_of_a_dropped_session(engine):
    """Booting again in a notebook must free the old model, though old outputs still hold its runs."""
    session = fake.session(engine)
    run, read = session.run(PROMPT), session.run(PROMPT, logits=True)
    del session
    gc.collect()
    assert engine.closed == 1
    assert read.logits.shape == (4, 20)
    assert run.top(1)
    with pytest.raises(SessionClosed, match="logits that were not read are gone"):
        _ = run.logits


def test_a_notebook_shows_a_refusal_in_one_line(session):
    with pytest.raises(SpecError) as refused:
        session.run(PROMPT, {STREAM: {"op": "supress"}})
    assert refused.value._render_traceback_() == [f"SpecError: {refused.value}"]
