"""Generation in both engines: greedy, sampled and stopped; edits and captures of the tokens that are fed back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import explorer
from explorer import Edit, SpecError

from ..reference import reference
from .compare import as_alone, before_each_pass, core, in_transformers, relative, same, token_ids

EIFFEL = "The Eiffel Tower is in the city of"
STORY = "Once upon a time, there was a little"
FRANCE = "What is the capital of France?"
IDS = [1, 17, 45, 80, 31, 9, 120, 64]
HOOK = "blocks.0.hook_out"


def test_greedy_as_transformers(either_smol: explorer.Session) -> None:
    for prompt, run in zip((EIFFEL, STORY), either_smol.generate([EIFFEL, STORY], max_new_tokens=16), strict=True):
        want = reference(either_smol.model_path).greedy(token_ids(either_smol, prompt), 16)
        assert list(run.generated) == want
    run = either_smol.generate(EIFFEL)
    assert len(run.generated) == 40 and run.text.startswith(" Paris.")


def test_every_fed_token_has_a_row(either: explorer.Session) -> None:
    run = either.generate(IDS, max_new_tokens=6, capture="all")
    assert len(run.generated) == 6 and run.ids[:8] == tuple(IDS) and run.rows == 13
    want = reference(either.model_path).run(run.ids[:-1])
    for name in run.captured:
        assert run[name].shape == want[name].shape, name
        if either.hooks[name].component not in ("pattern", "scores"):
            assert relative(run[name], want[name]) <= 1e-4, name
    # each generated token is what the row before it predicts
    assert run.logits[7:].argmax(-1).tolist() == list(run.generated)
    torch.testing.assert_close(run.loss, want.loss, atol=1e-4, rtol=0)


def test_one_token_feeds_nothing_back(either: explorer.Session) -> None:
    run = either.generate(IDS, max_new_tokens=1, capture=HOOK)
    clean = either.run(IDS, capture=HOOK)
    assert run.rows == 8 and torch.equal(run[HOOK], clean[HOOK]) and torch.equal(run.logits, clean.logits)
    assert run.generated == (clean.top(1)[0].id,)


def test_captures_and_edits_take_no_pass_of_their_own(either: explorer.Session) -> None:
    passes: list[None] = []
    with before_each_pass(either, lambda: passes.append(None)):
        run = either.generate(IDS, Edit(HOOK, "scale", factor=0.5, phase="both"), max_new_tokens=5, capture="all")
        assert len(run[HOOK]) == 12 and len(passes) == 5
        either.compare(IDS, Edit(HOOK, "suppress"), capture="all")
    assert len(passes) == 6  # clean and patched are one batch


def test_pattern_of_generated_tokens(either: explorer.Session) -> None:
    run = either.generate(IDS, max_new_tokens=7, capture=["blocks.*.attn.hook_pattern"])
    whole = either.run(list(run.ids[:-1]), capture="blocks.*.attn.hook_pattern")
    for layer in (0, 1):
        assert run.pattern(layer).shape == (4, 14, 14)
        assert float((run.pattern(layer) - whole.pattern(layer)).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("phase", "pos", "rows"),
    [
        ("prompt", None, range(8)),
        ("prompt", "last", [7]),
        ("decode", None, range(8, 13)),
        ("decode", [9, 12], [9, 12]),
        ("decode", "9:11", [9, 10]),
        ("both", None, range(13)),
        ("both", [0, -1, 10], [0, 7, 10]),
        ("both", "6:10", [6, 7, 8, 9]),
    ],
)
def test_phases(either: explorer.Session, phase: str, pos: Any, rows: Any) -> None:
    value = torch.linspace(-2, 2, 96)
    run = either.generate(IDS, Edit(HOOK, "add", value=value, pos=pos, phase=phase), max_new_tokens=6, capture="all")
    assert len(run.generated) == 6
    spec = {HOOK: {"op": "add", "value": value.tolist(), "pos": list(rows)}}
    want = reference(either.model_path).run(run.ids[:-1], spec)  # adding twice, or not at all, would show
    for name in ("blocks.0.hook_out", "blocks.1.attn.k.hook_out", "blocks.1.hook_out"):
        assert relative(run[name], want[name]) <= 1e-4, name
    assert want.logits[7:].argmax(-1).tolist() == list(run.generated)


def test_steering_needs_both(either: explorer.Session) -> None:
    # the first generated token comes from the prompt's last row, which phase="decode" leaves alone
    steer = {"op": "set", "value": torch.linspace(-3, 5, 96).tolist()}
    clean = either.generate(IDS, max_new_tokens=3)
    decode = either.generate(IDS, {"blocks.1.hook_out": steer | {"phase": "decode"}}, max_new_tokens=3)
    both = either.generate(IDS, {"blocks.1.hook_out": steer | {"phase": "both"}}, max_new_tokens=3)
    assert decode.generated[0] == clean.generated[0] != both.generated[0]
    assert decode.generated[1:] == both.generated[1:] == both.generated[:1] * 2


def test_decode_edits_of_a_patch(either: explorer.Session) -> None:
    source = either.generate(IDS, max_new_tokens=5, capture=HOOK)
    run = either.generate(IDS[::-1], Edit(HOOK, "patch", source=source, phase="decode"), max_new_tokens=5, capture=HOOK)
    assert torch.equal(run[HOOK][8:], source[HOOK][8:])
    rounding = 1e-5 if in_transformers(either) else 0  # it runs the whole text for each token: sums of another length
    assert relative(run[HOOK][:8], either.run(IDS[::-1], capture=HOOK)[HOOK]) <= rounding


def test_an_edit_of_no_row_is_refused(either: explorer.Session) -> None:
    for tokens in (0, 1):
        with pytest.raises(SpecError, match="would match no row"):
            either.run(IDS, Edit(HOOK, "suppress", phase="decode"), max_new_tokens=tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_generation_that_overflows_says_so(either: explorer.Session, temperature: float) -> None:
    huge = Edit(HOOK, "scale", factor=3e38, phase="both")
    run = either.generate(IDS, huge, max_new_tokens=3, temperature=temperature, seed=1)
    with pytest.raises(explorer.NotFinite, match="not finite: with this run's edits"):
        _ = run.text
    assert either.generate(IDS, max_new_tokens=3).text  # what the cache keeps of it reaches nobody


def test_sampling_repeats_with_its_seed(either: explorer.Session) -> None:
    hot = {"max_new_tokens": 12, "temperature": 1.5}
    first = either.generate(IDS, seed=7, **hot)
    assert same(either.generate(IDS, seed=7, **hot), first)
    assert as_alone(either.generate([IDS[:3], IDS, IDS], seed=7, **hot)[1], first)  # whatever shares the batch
    others = {either.generate(IDS, seed=seed, **hot).generated for seed in range(5)}
    assert len(others) > 1
    assert either.generate(IDS, **hot).generated != either.generate(IDS, **hot).generated  # another seed each time


def test_sampling_leaves_the_random_numbers_of_the_user_alone(either: explorer.Session) -> None:
    # vLLM's V2 runner would seed from numpy's. PyTorch's are drawn from by its V1 sampler on a CPU, seed or no seed.
    before = repr(np.random.get_state()), random.getstate()
    either.generate(IDS, max_new_tokens=8, temperature=1.5)
    assert (repr(np.random.get_state()), random.getstate()) == before


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_temperature_next_to_zero_is_greedy(either: explorer.Session, temperature: float) -> None:
    greedy = either.generate(IDS, max_new_tokens=6)
    assert either.generate(IDS, max_new_tokens=6, temperature=temperature, seed=1).generated == greedy.generated


def test_stop_strings(either_smol: explorer.Session) -> None:
    free = either_smol.generate(STORY, max_new_tokens=30)
    stop = " who"
    assert stop in free.text and not free.text.startswith(stop), free.text
    run = either_smol.generate(STORY, max_new_tokens=30, stop=["\n\n\n", stop], capture="blocks.0.hook_out")
    assert run.generated == free.generated[: len(run.generated)]
    assert stop in run.text and stop not in either_smol.generate(STORY, max_new_tokens=len(run.generated) - 1).text
    assert run.rows == run.prompt_length + len(run.generated) - 1 == len(run["blocks.0.hook_out"])
    together = either_smol.generate([STORY, EIFFEL], max_new_tokens=30, stop=stop)
    assert together[0].generated == run.generated
    assert together[1].generated == either_smol.generate(EIFFEL, max_new_tokens=30).generated


def test_the_end_of_a_turn_ends_it(either_smol: explorer.Session) -> None:
    run = either_smol.generate(FRANCE, max_new_tokens=60, chat=True, capture="blocks.3.hook_out")
    assert len(run.generated) < 60 and run.tokens[-1].special
    assert run.rows == len(run.ids) - 1 == len(run["blocks.3.hook_out"])
    assert run.text == "The capital of France is Paris."


def test_the_tokenizers_own_end_counts(either: explorer.Session, tmp_path: Path) -> None:
    # the checkpoint says that </s> ends a text, this tokenizer another word
    free = either.generate(IDS, max_new_tokens=6)
    end = next(n for n in range(1, 6) if free.generated[n] not in free.generated[:n] and free.generated[n] > 2)
    tokenizer = AutoTokenizer.from_pretrained(either.model_path)
    tokenizer.eos_token = f"w{free.generated[end] - 3}"
    tokenizer.save_pretrained(tmp_path)
    engine = "transformers" if in_transformers(either) else "vllm"
    with explorer.boot(str(either.model_path), engine=engine, tokenizer=str(tmp_path), max_model_len=64) as session:
        assert session.generate(IDS, max_new_tokens=6).generated == free.generated[: end + 1]


def test_edits_with_positions_a_stopped_run_never_reached(either_smol: explorer.Session) -> None:
    free = either_smol.generate(FRANCE, max_new_tokens=60, chat=True)
    edit = Edit("blocks.3.hook_out", "scale", factor=1.0, phase="decode")
    run = either_smol.generate(FRANCE, edit, max_new_tokens=60, chat=True)
    assert run.generated == free.generated
    recipe = run.recipe()
    assert recipe["edits"]["blocks.3.hook_out"]["pos"] == list(range(run.prompt_length, run.rows))


# vLLM's alone: the transformers engine has no key-value cache.
def test_a_cache_too_small_for_all(llama: explorer.Session, booted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM takes a running request's cache away and feeds its tokens again: rows must not double, edits not add up
    small = booted("llama", max_num_batched_tokens=256, max_model_len=256, kv_cache_memory_bytes=4 * 128 * 1024)
    preempted: list[object] = []
    scheduler = core(small).scheduler
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), preempt(*a, **k))[1])
    ids = [[3 + n, *range(20, 139)] for n in range(3)]  # 120 tokens each, then past one block of 128
    edit = {HOOK: {"op": "add", "value": 0.5, "phase": "both"}}
    got = small.generate(ids, edit, max_new_tokens=20, capture=HOOK)
    want = llama.generate(ids, edit, max_new_tokens=20, capture=HOOK)
    assert preempted, "no cache was taken away: this test shows nothing"
    for g, w in zip(got, want, strict=True):
        assert g.ids == w.ids and g.rows == 139
        assert relative(g[HOOK], w[HOOK]) <= 1e-4 and relative(g.logits, w.logits) <= 1e-4


def test_an_edit_that_the_generation_never_came_to_is_an_error(either: explorer.Session) -> None:
    free = either.generate(IDS, max_new_tokens=9)
    word = free.text.split()[2]
    late = explorer.Edit("blocks.0.hook_out", "suppress", pos=len(IDS) + 6, phase="decode")
    assert either.generate(IDS, late, max_new_tokens=9).rows == len(IDS) + 8
    with pytest.raises(SpecError, match=r"edit 1 \(blocks\.0\.hook_out, suppress\): it matched no row") as refused:
        either.generate(IDS, late, max_new_tokens=9, stop=word)
    assert refused.value.edit_index == 0
    with pytest.raises(SpecError, match=r"prompt 2: edit 1 .* it matched no row"):
        either.generate([IDS, IDS], [None, late], max_new_tokens=9, stop=word)
    assert same(either.generate(IDS, max_new_tokens=9), free)


def test_an_end_of_text_by_keyword(llama: explorer.Session) -> None:
    written = llama.generate(IDS, max_new_tokens=6).generated
    end = next(token for token in written[1:] if token != written[0])
    first = written.index(end)
    with explorer.boot(llama.model_path, max_model_len=64, override_generation_config={"eos_token_id": end}) as session:
        assert session.generate(IDS, max_new_tokens=6).generated == written[: first + 1]
