"""What a session refuses, before anything runs, and that nothing of it stays behind; in both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import explorer
from explorer import Edit, SpecError

from .compare import idle, same

IDS = [1, 17, 45, 80, 31, 9, 120, 64]
HOOK = "blocks.0.hook_out"
Z = "blocks.0.attn.o.hook_in"

# spec -> what its message must say
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "unknown hook": ({"blocks.0.hook_outt": {"op": "suppress"}}, ("blocks.0.hook_outt", "did you mean", HOOK)),
    "layer past the model": ({"blocks.2.hook_out": {"op": "suppress"}}, ("layers 0 to 1",)),
    "not served": ({"blocks.1.attn.hook_result": {"op": "suppress"}}, ("blocks.1.attn.o.hook_in",)),
    "pattern": ({"blocks.0.attn.hook_pattern": {"op": "suppress"}}, ("edit 1", "not edited")),
    "logits": ({"logits": {"op": "suppress"}}, ("edit 1", "not edited")),
    "position past the prompt": ({HOOK: {"op": "suppress", "pos": 8}}, ("edit 1", "pos 8", "0 to 7")),
    "position before it": ({HOOK: {"op": "suppress", "pos": -9}}, ("edit 1", "pos -9", "0 to 7")),
    "slice past it": ({HOOK: {"op": "suppress", "pos": "5:9"}}, ("edit 1", "5:9")),
    "empty slice": ({HOOK: {"op": "suppress", "pos": "5:5"}}, ("edit 1", "no row")),
    "no positions": ({HOOK: {"op": "suppress", "pos": []}}, ("edit 1", "pos")),
    "bool position": ({HOOK: {"op": "suppress", "pos": True}}, ("edit 1", "pos", "True")),
    "fractional position": ({HOOK: {"op": "suppress", "pos": 1.5}}, ("edit 1", "1.5")),
    "wrong width": ({HOOK: {"op": "set", "value": [0.0] * 95}}, ("edit 1", "95", "96")),
    "wrong heads": ({Z: {"op": "set", "value": np.zeros((3, 32))}}, ("edit 1", "(3, 32)", "(4, 32)")),
    "wrong positions": (
        {HOOK: {"op": "set", "value": torch.zeros(3, 96), "pos": [0, 1]}},
        ("edit 1", "(3, 96)", "2"),
    ),
    "NaN": ({HOOK: {"op": "add", "value": float("nan")}}, ("edit 1", "NaN")),
    "infinity": ({HOOK: {"op": "set", "value": [float("inf")] * 96}}, ("edit 1", "infinity")),
    "infinite factor": ({HOOK: {"op": "scale", "factor": float("inf")}}, ("edit 1", "inf")),
    "text as value": ({HOOK: {"op": "set", "value": "big"}}, ("edit 1", "big")),
    "a hook without heads": ({HOOK: {"op": "suppress", "head": 0}}, ("edit 1", "no heads")),
    "head past its count": ({Z: {"op": "suppress", "head": 4}}, ("edit 1", "head 4", "0 to 3")),
    "key-value head": ({"blocks.0.attn.v.hook_out": {"op": "suppress", "head": 2}}, ("edit 1", "key-value", "0 to 1")),
    "unknown op": ({HOOK: {"op": "zero"}}, ("edit 1", "zero", "suppress")),
    "misspelt key": ({HOOK: {"op": "suppress", "position": 3}}, ("edit 1", "position", "did you mean 'pos'")),
    "missing value": ({HOOK: {"op": "set"}}, ("edit 1", "'value'")),
    "superfluous value": ({HOOK: {"op": "suppress", "value": 1.0}}, ("edit 1", "'value'")),
    "a callable": (lambda x: x, ("not a function",)),
    "a callable for an edit": ({HOOK: lambda x: x}, ("edit 1", "function")),
    "no edit at all": (7, ("int",)),
    "source that does not match": (
        {HOOK: {"op": "patch", "source": {"ids": [1, 2, 3]}}},
        ("edit 1", "8 positions to write", "3 positions of the source"),
    ),
    "source too short": (
        {HOOK: {"op": "patch", "source": {"ids": [1, 2, 3]}, "pos": 5}},
        ("edit 1", "5", "0 to 2", "source_pos="),
    ),
    "source with a wrong spec": (
        {HOOK: {"op": "patch", "source": {"ids": [1] * 8, "edits": {"blocks.9.hook_out": {"op": "suppress"}}}}},
        ("edit 1", "source", "layers 0 to 1"),
    ),
    "source past the vocabulary": ({HOOK: {"op": "patch", "source": {"ids": [10**6]}, "pos": 0}}, ("edit 1", "source")),
    "decode without generation": ({HOOK: {"op": "suppress", "phase": "decode"}}, ("edit 1", "no row")),
    "unknown phase": ({HOOK: {"op": "suppress", "phase": "later"}}, ("edit 1", "later")),
    "the second of two": ({HOOK: [{"op": "suppress"}, {"op": "suppress", "pos": 99}]}, ("edit 2", "99")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(either: explorer.Session, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, words = REFUSED[name]
    clean = either.run(IDS, capture="all")
    with monkeypatch.context() as patch:
        patch.setattr(type(either._engine), "execute", lambda *_: pytest.fail("something ran"))
        for call in (either.run, either.compare):
            with pytest.raises(SpecError) as error:
                call(IDS, spec)
            message = str(error.value)
            assert isinstance(error.value, ValueError) and "\n" not in message
            missing = [word for word in words if word not in message]
            assert not missing, message
    assert idle(either)
    assert same(either.run(IDS, capture="all"), clean)


@pytest.mark.parametrize(
    ("pos", "phase", "words"),
    [
        (8, "prompt", "outside the prompt, which has positions 0 to 7; phase='both' reaches generated tokens"),
        (
            7,
            "decode",
            "the generated tokens that are fed back, which have positions 8 to 11; phase='both' reaches the prompt",
        ),
        (12, "both", "pos 12 is outside the run, which has positions 0 to 11"),
        (-9, "both", r"pos -9 \(counted from the prompt's end\) is outside the run, which has positions 0 to 11"),
    ],
)
def test_positions_of_a_generation(either: explorer.Session, pos: int, phase: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        either.generate(IDS, Edit(HOOK, "suppress", pos=pos, phase=phase), max_new_tokens=5)
    assert idle(either)


def test_a_batch_names_the_prompt(either: explorer.Session) -> None:
    with pytest.raises(SpecError, match=r"^prompt 2: edit 1 .*pos 5.*0 to 2"):
        either.run([IDS, IDS[:3]], Edit(HOOK, "suppress", pos=5))
    with pytest.raises(SpecError, match="3 specs for 2 prompts"):
        either.run([IDS, IDS], [None, None, None])


PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ("", "empty|no token"),
    "empty ids": ([], "empty|no token"),
    "too long": ([5] * 257, "257"),
    "as long as the model takes, with no room to predict": ([5] * 256, "256"),
    "an id past the vocabulary": ([5, 160], "160"),
    "a negative id": ([5, -1], "-1"),
    "no prompt": (None, "prompt"),
    "a number": (3.5, "prompt"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_that_cannot_run(either: explorer.Session, name: str) -> None:
    prompt, words = PROMPTS[name]
    clean = either.run(IDS)
    with pytest.raises((ValueError, TypeError), match=words) as error:
        either.run(prompt)
    assert "\n" not in str(error.value)
    assert idle(either) and same(either.run(IDS), clean)


def test_the_longest_prompt_runs(either: explorer.Session) -> None:
    run = either.run([5] * 255, capture=HOOK)
    assert run.rows == 255 == len(run[HOOK])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": 300}, "300"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": "one"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"capture": "blocks.*.nothing"}, "matches no hook"),
        ({"capture": "blocks.0.hook_oot"}, "did you mean"),
        ({"capture": len}, "function"),
    ],
)
def test_arguments_that_make_no_sense(either: explorer.Session, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        either.run(IDS, **arguments)
    assert idle(either)


def test_reading_what_was_not_captured(either: explorer.Session) -> None:
    run = either.run(IDS, capture=HOOK)
    with pytest.raises(KeyError, match=r"capture='blocks.1.hook_in'"):
        run["blocks.1.hook_in"]
    with pytest.raises(KeyError, match="capture="):
        run.pattern(1)
    with pytest.raises(IndexError):
        run.top(3, position=8)
    with pytest.raises(SpecError, match="did you mean"):
        run["blocks.1.hook_inn"]
    assert torch.equal(run["blocks.0.hook_resid_post"], run[HOOK])


def test_a_source_from_another_model(either: explorer.Session, booted: Any) -> None:
    wide = booted("qwen2")  # d_model 128 against 96
    source = wide.run(IDS, capture=HOOK)
    with pytest.raises(SpecError, match=r"edit 1 .*128.*96"):
        either.run(IDS, Edit(HOOK, "patch", source=source))
    with pytest.raises(SpecError, match="from another session, or from before a reboot"):
        either.run(IDS, Edit(HOOK, "patch", source=wide.run(IDS)))
    same_shape = booted("qwen3").run(IDS, capture=HOOK)
    patched = either.run(IDS, Edit(HOOK, "patch", source=same_shape), capture=HOOK)
    assert torch.equal(patched[HOOK], same_shape[HOOK])
