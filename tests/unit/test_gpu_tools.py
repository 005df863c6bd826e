"""What takes the GPU suite to its machine and judges there: pruned libraries, a model in pieces, distances, tables."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import torch

from explorer.models import BUNDLED

from ..gpu import models
from ..gpu.measure import bound, joined, shown, swept
from ..gpu.numbers import off, on_average
from ..gpu.prune import MACHINE, PTX, pruned


def element(kind: int, arch: int, body: bytes) -> bytes:
    """As CUDA writes them: a header of 64 bytes, and the code."""
    return struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(body), 0, 0, 0, 0, arch).ljust(64, b"\0") + body


def library(*elements: bytes) -> bytes:
    """Bytes that look like the beginning of a fat binary, and one."""
    body = b"".join(elements)
    return b"ELF" + struct.pack("<IHH", 0xBA55ED50, 7, 9) + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_only_other_chips_code_is_zeroed() -> None:
    mine, theirs = element(MACHINE, 90, b"m" * 40), element(MACHINE, 80, b"t" * 24)
    old, new = element(PTX, 75, b"o" * 16), element(PTX, 100, b"n" * 8)
    whole = library(mine, theirs, old, new)
    kept = bytes(pruned(whole, 90))
    assert len(kept) == len(whole)
    assert kept == whole.replace(b"t" * 24, bytes(24)).replace(b"n" * 8, bytes(8))


def test_a_fat_binary_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="kind 9"):
        pruned(library(element(9, 90, b"x")), 90)


def test_a_model_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PIECES", tmp_path / "pieces")
    monkeypatch.setenv("EXPLORER_CACHE", str(tmp_path / "cache"))
    model = BUNDLED["smollm2-135m"]
    target = tmp_path / "cache" / "downloads" / Path(model.gguf).name
    models.join_pieces(model)
    assert not target.exists()
    (tmp_path / "pieces").mkdir()
    for number, data in enumerate((b"one", b"two", b"three")):  # they arrive one at a time
        (tmp_path / "pieces" / f"model.{number:02}").write_bytes(data)
        models.join_pieces(model)
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(b"onetwothree").digest()


def test_distances() -> None:
    want = torch.tensor([[3.0, 4.0], [0.0, 10.0], [float("-inf"), 1.0]])
    got = want.clone()
    assert off(got, want) == on_average([(got, want)]) == 0
    got[0, 0] += 1
    assert off(got, want) == pytest.approx(0.2)  # of the first row's 5
    assert on_average([(got, want)]) == pytest.approx(0.2 / 3)  # however long the others are
    got[1, 0] = float("nan")
    assert off(got, want) == on_average([(got, want)]) == float("inf")
    with pytest.raises(AssertionError, match="masked"):
        off(torch.zeros(3, 2), want)


def test_a_sweep_of_any_depth() -> None:
    for layers in (3, 16, 30):
        cells = swept(layers)
        assert len(cells) == 256 and {layer for layer, _ in cells} <= set(range(layers))
        assert {pos for _, pos in cells} == set(range(16))


def test_the_table_says_what_is_past_its_bound() -> None:
    what = "forward, 64 tokens"
    rows = joined(
        [
            {"what": what, "unit": "ms", "plain": 4.0, "ours": 5.0, "ratio": 1.25},
            {"what": "second boot", "unit": "s", "plain": 10.0, "ours": 11.0, "ratio": 1.1},
            {"what": what, "unit": "ms", "transformers": 10.5},
        ]
    )
    assert bound(what, "compiled") == 1.05 and bound(what, "eager") == 1.03 and bound("something else", "eager") is None
    head, rule, forward, boot = shown(rows, "compiled").splitlines()
    assert forward == "| forward, 64 tokens (ms) | 4 | 5 |  | 10.5 | 1.25 PAST IT | 1.05 |"
    assert boot == "| second boot (s) | 10 | 11 |  |  | 1.1 | 1.15 |" and head.count("|") == rule.count("|")
