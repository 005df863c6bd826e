"""Random specs agree between the engines and with transformers' own hooks; 1,000 wrong ones leave no trace.

A failing example names its seed: `Author(session, kept, generated, seed).example()` writes it again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

import explorer
from explorer import SpecError

from .. import tiny
from ..random_specs import WRONG, Author, Kept, spoilt
from ..reference import Pass, reference
from .compare import idle, relative, same
from .conftest import ENGINES

IDS = [1, 17, 45, 80, 31, 9, 120]
BATCH = 50
TOLERANCE = 1e-4  # of a row's largest number

# model family, tokens to generate, boot keywords: 20 batches of 50
BATCHES = [
    *[("llama", n, {}) for n in (0, 0, 1, 2, 3, 4)],
    *[("llama", n, {"max_num_batched_tokens": 32, "max_num_seqs": 4}) for n in (0, 4)],  # prompts in chunks
    *[("mistral", n, {}) for n in (0, 2, 4)],
    *[("qwen2", n, {}) for n in (0, 3)],
    *[("qwen3", n, {}) for n in (0, 0, 3, 4)],
    *[("phi3", n, {}) for n in (0, 2, 4)],
]
# and one batch of each other family
BATCHES += [(family, 3, {}) for family in tiny.FAMILIES if family not in {batch[0] for batch in BATCHES}]


# A LayerNorm without a bias: of a row that is one number throughout it leaves rounding errors alone.
DIRECTIONS_ONLY = ("cohere",)


class Prepared(NamedTuple):
    """A session of a model whose texts never end by themselves, and the Runs that its specs patch from."""

    session: explorer.Session
    kept: list[Kept]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Prepared]]:
    """`prepared(family, engine, **keywords)`; the same call gives the same session."""
    made: dict[str, Prepared] = {}
    folders: dict[str, Path] = {}

    def prepare(family: str, engine: str, **keywords: Any) -> Prepared:
        key = repr((family, engine, keywords))
        if key not in made:
            if family not in folders:
                model_type, sizes = tiny.FAMILIES[family]
                folder = tmp_path_factory.mktemp("endless") / family
                folders[family] = tiny.make(folder, model_type, **(sizes | {"eos_token_id": None}))
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folders[family])
            tokenizer.eos_token = None
            session = explorer.boot(folders[family], engine=engine, tokenizer=tokenizer, **keywords)
            made[key] = Prepared(session, keep(session))
        return made[key]

    yield prepare
    for one in made.values():
        one.session.close()


def keep(session: explorer.Session) -> list[Kept]:
    """Runs to patch from: with and without captures, edits and generated tokens."""
    halved = {"blocks.0.hook_out": {"op": "scale", "factor": 0.5, "pos": [1, 2]}}
    raised = {"blocks.1.hook_in": {"op": "add", "value": 0.3, "phase": "both"}}
    runs = [
        session.run(IDS[::-1], capture="all"),
        session.run(IDS + IDS[:3], halved),
        session.generate(IDS[1:4], raised, max_new_tokens=6, capture="all"),
        session.generate(IDS[2:], raised, max_new_tokens=4),
    ]

    def plain(run: explorer.Run, hook: str, body: dict[str, Any]) -> dict[str, Any]:
        return {hook: [{"pos": list(range(run.rows))} | {k: v for k, v in body.items() if k != "phase"}]}

    meanings = [{}, *({h: [b]} for h, b in halved.items())]
    meanings += [plain(run, *next(iter(raised.items()))) for run in runs[2:]]
    return [Kept(run, meaning) for run, meaning in zip(runs, meanings, strict=True)]


def worst(session: explorer.Session, got: explorer.Run, want: explorer.Run | Pass) -> tuple[float, str]:
    """The largest relative error of logits and captures, and where it is."""
    errors = [(relative(got.logits, want.logits), "logits")]
    for name in got.captured:
        if session.hooks[name].component == "pattern":
            errors.append((float((got[name] - want[name]).abs().max()), name))  # rows sum to one
        elif session.hooks[name].component != "scores":  # patterns before the softmax, -inf where masked
            errors.append((relative(got[name], want[name]), name))
    return max(errors)


@pytest.mark.parametrize("number", range(len(BATCHES)), ids=lambda n: f"{n}-{BATCHES[n][0]}-{BATCHES[n][1]}")
def test_valid_specs_agree(prepared: Callable[..., Prepared], number: int) -> None:
    family, generated, keywords = BATCHES[number]
    vllm, other = prepared(family, "vllm", **keywords), prepared(family, "transformers")
    assert [k.run.ids for k in vllm.kept] == [k.run.ids for k in other.kept]
    clean = vllm.session.run(IDS, capture="all")
    seeds = [f"{number}.{i}" for i in range(BATCH)]
    prompts: list[list[int]] = []
    ran: dict[str, list[explorer.Run]] = {}
    for session, kept in (vllm, other):
        authors = [Author(session, kept, generated, seed, family not in DIRECTIONS_ONLY) for seed in seeds]
        examples = [author.example() for author in authors]
        prompts = [example.ids for example in examples]
        specs = [author.written(e.edits) for author, e in zip(authors, examples, strict=True)]
        ran[session.info["engine"]] = session.run(prompts, specs, capture="all", max_new_tokens=generated)
    written = [json.loads(json.dumps(run.spec)) for run in ran[vllm.session.info["engine"]]]
    ran["vllm, from JSON"] = vllm.session.run(prompts, written, capture="all", max_new_tokens=generated)
    refs = {name: reference(vllm.session.model_path, re.split("[ ,]", name)[0]) for name in ran}
    wrong: list[str] = []
    shown = 0
    for seed, example, *runs in zip(seeds, examples, *ran.values(), strict=True):
        for (name, ref), run in zip(refs.items(), runs, strict=True):
            want = ref.run(run.fed, example.meaning)
            predicted = tuple(want.logits[len(example.ids) - 1 :].argmax(-1).tolist()[:generated])
            error, where = worst(vllm.session, run, want)
            if error > TOLERANCE or run.generated != predicted:
                wrong.append(f"seed {seed}, {name}: {where} off by {error:.1e}, generated {run.generated}; {example}")
        shown += relative(want.logits, ref.run(run.fed).logits) > 1e-3
    assert not wrong, "\n".join(wrong)
    assert shown >= 0.9 * BATCH, "edits that change nothing hide what is wrong"
    assert idle(vllm.session) and same(vllm.session.run(IDS, capture="all"), clean)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_wrong_specs_are_refused_and_leave_no_trace(
    prepared: Callable[..., Prepared], engine: str, family: str
) -> None:
    session, kept = prepared(family, engine)
    clean = session.run(IDS, capture="all")
    headed = any(p.heads for p in session.hooks if p.editable)
    kinds = [kind for kind, (_, heads, *_) in WRONG.items() if not heads or headed]
    families = list(tiny.FAMILIES)
    share = math.ceil(500 / len(families))
    first = families.index(family) * share
    for number in range(first, first + share):
        seed = f"{engine}.{number}"
        author = Author(session, kept, 0, seed)
        wrong = spoilt(author, kinds[number % len(kinds)])
        named = rf"edit {wrong.index + 1}\b"
        told = f"seed {seed}, {wrong.kind}: {wrong.spec}"
        ask: Sequence[Any] = (wrong.ids, wrong.spec)
        if author.rng.random() < 0.3:  # among valid ones
            others = [author.example() for _ in range(3)]
            at = author.rng.randint(0, 3)
            prompts, specs = [e.ids for e in others], [author.written(e.edits) for e in others]
            prompts.insert(at, wrong.ids)
            specs.insert(at, wrong.spec)
            ask, named = (prompts, specs), f"prompt {at + 1}: {named}"
        call = author.rng.choice((session.run, session.compare))
        with pytest.raises(SpecError, match=f"^{named}") as refused:
            pytest.fail(f"{told}: ran, {call(*ask)}")
        assert refused.value.edit_index == wrong.index, told
        assert wrong.word in str(refused.value) and "\n" not in str(refused.value), f"{told}: {refused.value}"
        assert idle(session) and same(session.run(IDS, capture="all"), clean), f"after {told}"
