"""Every captured hook of every layer, logits and loss, against transformers in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import explorer

from .. import tiny
from ..reference import Reference, reference
from .compare import relative, token_ids
from .conftest import ENGINES, SMOL, SMOL_LENGTH

TINY_IDS = [1, *range(5, 150, 9), 7, 7, 3]  # 21 tokens: longer than Mistral's window
Pair = tuple[explorer.Session, Reference]
PROMPTS = ["The Eiffel Tower is in the city of", "def add(a, b):\n    return a +", "日本の首都は 🗼"]


@pytest.fixture(scope="module", params=[f"{engine} {name}" for engine in ENGINES for name in (*tiny.FAMILIES, SMOL)])
def pair(request: pytest.FixtureRequest, booted: Callable[..., explorer.Session]) -> Iterator[Pair]:
    engine, name = request.param.split()
    as_elsewhere = {"dtype": "float32", "max_model_len": SMOL_LENGTH} if name == SMOL else {}
    session = booted(name, engine=engine, **as_elsewhere)
    yield session, reference(session.model_path, engine)


def prompts(session: explorer.Session) -> list[list[int]]:
    if session.name == SMOL:
        return [token_ids(session, p) for p in PROMPTS]
    return [TINY_IDS, TINY_IDS[:1], TINY_IDS[::-1]]


def test_catalogue_and_reference_know_the_same_hooks(pair: Pair) -> None:
    session, ref = pair
    assert sorted(p.name for p in session.hooks if p.available) == sorted(ref.names)


def test_every_hook_of_every_layer(pair: Pair) -> None:
    session, ref = pair
    ids = prompts(session)
    worst: dict[str, float] = {}
    for i, run in zip(ids, session.run(ids, capture="all"), strict=True):
        want = ref.run(i)
        for name in run.captured:
            got = run[name]
            assert got.dtype == torch.float32 and got.device.type == "cpu"
            assert got.shape == want[name].shape, name
            component = session.hooks[name].component
            if component == "pattern":
                error = float((got - want[name]).abs().max()) * 10  # held to 1e-5, absolute
            elif component == "scores":
                seen = torch.isfinite(want[name])
                assert torch.equal(torch.isfinite(got), seen) and bool((got[~seen] == float("-inf")).all()), name
                error = relative(*(x.masked_fill(~seen, 0).transpose(0, 1) for x in (got, want[name])))
            else:
                error = relative(got, want[name])
            worst[component] = max(error, worst.get(component, 0.0))
    print(session.name, {k: f"{v:.1e}" for k, v in worst.items()})
    assert max(worst.values()) <= 1e-4, worst


def test_logits_and_loss(pair: Pair) -> None:
    session, ref = pair
    ids = prompts(session)
    for i, run in zip(ids, session.run(ids), strict=True):
        want = ref.run(i)
        assert run.logits.shape == want.logits.shape
        assert relative(run.logits, want.logits) <= 1e-4
        torch.testing.assert_close(run.loss, want.loss, atol=1e-4, rtol=0)
        top = run.top(5)
        torch.testing.assert_close(
            torch.tensor([t.logprob for t in top]),
            want.logits[-1].log_softmax(-1)[[t.id for t in top]],
            atol=1e-4,
            rtol=0,
        )
        assert top[0].id == int(want.logits[-1].argmax())
