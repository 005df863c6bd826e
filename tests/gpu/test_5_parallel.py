"""Several GPUs: every hook, edits and generation as on one, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

import explorer

from .numbers import CLOSE, off
from .test_2_edits import specs_at

ALONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
Booted = Callable[..., explorer.Session]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module", params=["eager", "compiled"])
def pair(
    request: pytest.FixtureRequest, booted: Booted, parallel: dict[str, int]
) -> tuple[explorer.Session, explorer.Session]:
    """The model on several workers, and on one."""
    if not parallel:
        pytest.skip("asked for with --tensor-parallel or --pipeline-parallel")
    return booted(dtype="float32", mode=request.param), booted(dtype="float32", **ALONE)


def test_every_hook(
    pair: tuple[explorer.Session, explorer.Session], prompts: Sequence[tuple[int, ...]], record_property: Record
) -> None:
    several, one = (session.run(prompts, capture="all") for session in pair)
    errors = [off(got[name], want[name]) for got, want in zip(several, one, strict=True) for name in want.captured]
    record_property("hooks", max(errors))
    assert max(errors) <= CLOSE


def test_every_edit(
    pair: tuple[explorer.Session, explorer.Session], prompts: Sequence[tuple[int, ...]], record_property: Record
) -> None:
    ids, layers = prompts[0], pair[0].model.shape.layers
    specs = list(specs_at(pair[0], (0, layers - 1), ids).values())  # each stage has one of them
    several, one = (session.run([ids] * len(specs), specs) for session in pair)
    errors = [off(got.logits, want.logits) for got, want in zip(several, one, strict=True)]
    record_property("logits", max(errors))
    assert max(errors) <= CLOSE


def test_generation(pair: tuple[explorer.Session, explorer.Session], prompts: Sequence[tuple[int, ...]]) -> None:
    edit = {"blocks.1.hook_out": {"op": "scale", "factor": 0.5, "phase": "both"}}
    for spec in (None, edit):
        several, one = (session.generate(prompts, spec, max_new_tokens=12) for session in pair)
        assert [run.ids for run in several] == [run.ids for run in one]
