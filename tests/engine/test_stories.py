"""What a notebook tells: facts that SmolLM2 knows, and where it keeps them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import explorer
from explorer import Edit

from ..reference import reference
from .compare import token_ids

EIFFEL = "The Eiffel Tower is in the city of"
JOHN = "When Mary and John went to the store, John gave a drink to"
MARY = "When Mary and John went to the store, Mary gave a drink to"


def test_the_eiffel_tower_is_in_paris(smol: explorer.Session) -> None:
    best = smol.run(EIFFEL).top(1)[0]
    assert best.text == " Paris"
    assert best.prob == pytest.approx(0.66, abs=0.01)


def test_who_gets_the_drink(smol: explorer.Session) -> None:
    best = smol.run(JOHN).top(1)[0]
    assert best.text == " Mary"
    assert best.prob == pytest.approx(0.92, abs=0.01)


def test_where_the_name_lives(smol: explorer.Session) -> None:
    # patched one position at a time: the second name carries the answer early, the last token late
    ref = reference(smol.model_path)
    ids, source = token_ids(smol, MARY), token_ids(smol, JOHN)
    mary, john = (smol.run(MARY).token_id(name) for name in (" Mary", " John"))
    names = [p for p, (a, b) in enumerate(zip(ids, source, strict=True)) if a != b]
    assert len(names) == 1 and len(ids) == 14
    donor = smol.run(JOHN, capture="blocks.*.hook_out")
    clean = smol.run(MARY).logit_diff(" Mary", " John")
    assert clean == pytest.approx(-5.5, abs=0.5)
    for layer, carrier in ((3, names[0]), (27, 13)):
        hook = f"blocks.{layer}.hook_out"
        runs = smol.run([MARY] * 14, [[Edit(hook, "patch", pos=p, source=donor)] for p in range(14)])
        got = [run.logit_diff(" Mary", " John") for run in runs]
        for p in range(14):
            spec = {hook: {"op": "patch", "source": {"ids": source}, "pos": p}}
            logits = ref.run(ids, spec).logits[-1]
            assert got[p] == pytest.approx(float(logits[mary] - logits[john]), abs=1e-2), (layer, p)
            flipped = got[p] > 4.0
            assert flipped == (p == carrier), (layer, p, got[p])
        if layer == 3:
            assert got[carrier] == pytest.approx(6.0, abs=0.7)
        print(hook, [round(v, 2) for v in got])


def test_a_comparison_tells_it(smol: explorer.Session) -> None:
    name = [p for p, t in enumerate(smol.tokens(MARY)) if t.text == " Mary"]
    cmp = smol.compare(MARY, Edit("blocks.3.hook_out", "patch", pos=name[-1], source=JOHN))
    difference = cmp.logit_diff(" Mary", " John")
    assert difference.clean < -4 and difference.patched > 4
    assert cmp.clean.top(1)[0].text == " John" and cmp.patched.top(1)[0].text == " Mary"
    assert cmp.kl() > 1
    rows = {row.text: row for row in cmp.top(3)}
    assert rows[" Mary"].change == pytest.approx(rows[" Mary"].patched_prob - rows[" Mary"].clean_prob)
    assert rows[" Mary"].change > 0.5 > -0.5 > rows[" John"].change


def test_the_readmes_steering_writes_what_it_says(smol: explorer.Session) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    lines = next(part for part in readme.split("\n\n") if part.startswith("# Steer while it writes")).splitlines()
    names = {"explorer": explorer, "session": smol}
    told = [re.fullmatch(r"(session\.generate\(.+\)\.text)  # (\".+\")", line) for line in lines]
    exec("\n".join(line for line, text in zip(lines, told, strict=True) if not text), names)
    written = [(eval(text[1], names), ast.literal_eval(text[2])) for text in told if text]
    assert len(written) == 2 and written[0][1] != written[1][1]
    for text, claimed in written:
        assert text == claimed
