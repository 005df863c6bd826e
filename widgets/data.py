"""The arrays that the workbench's views pull: which hooks each needs, and their numbers as float32."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[np.float32]]
TOP = 6  # rows of the prediction table come from the union of both top six
THUMBNAIL = 32  # cells a side of a head shown small, at most
GRID_BYTES = 64 << 20  # what one run of the hook grid may capture
GRID_RUNS = 8  # and how many runs it may take


class Refused(Exception):
    """A view that cannot be filled, in words for the page."""


def norm(tensor: torch.Tensor) -> Array:
    """The length of each position's vector, all heads together."""
    return as_array(torch.linalg.vector_norm(tensor.float().flatten(1), dim=1))


def as_array(tensor: torch.Tensor) -> Array:
    return np.ascontiguousarray(tensor.detach().to("cpu", torch.float32).numpy())


def hooks_of(view: str, hook: str, session: Any) -> list[str]:
    """The hooks that a view has to capture."""
    if view == "norms":
        return [point.name for point in session.hooks if point.component == "resid_post" and point.available]
    point = session.hooks[hook]
    if view == "heads":
        return [other.name for other in session.hooks if other.component == point.component and other.available]
    if not point.available:
        raise Refused(f"{point.name} is not in this model: {point.reason}")
    if point.component == "logits":
        raise Refused("The logits are shown above as predictions; choose another hook to see its activations.")
    return [point.name]


def numbers(view: str, hooks: Sequence[str], run: Any, session: Any) -> Array:
    """What a view shows of one run.

    Norms (layer, position), a hook (position, dimension), attention (head, query, key) with -inf where it is masked,
    norms of the heads of every layer (layer and head, position).
    """
    if view == "norms":
        return np.stack([norm(run[name]) for name in hooks])
    if view == "heads":
        return np.concatenate([as_array(torch.linalg.vector_norm(run[name].float(), dim=-1).T) for name in hooks])
    if view == "attention":
        return masked(as_array(run[hooks[0]]), session.model.attention[session.hooks[hooks[0]].layer].window)
    return as_array(run[hooks[0]].flatten(1))


def masked(heads: Array, window: int | None = None) -> Array:
    """Attention (head, query, key) with -inf where a query cannot look: ahead of it, and further back than a window."""
    position = np.arange(heads.shape[-1])
    back = position[:, None] - position[None, :]
    return np.where((back < 0) | (back >= (window or len(position))), np.float32(-np.inf), heads)


def thumbnails(heads: Array) -> Array:
    """All heads (head, query, key) small and below each other: (heads * side, side), each cell a block's extreme."""
    count, length, _ = heads.shape
    block = -(-length // THUMBNAIL)
    side = -(-length // block)
    padded = np.full((count, side * block, side * block), -np.inf, np.float32)  # masked, where all of a block is
    padded[:, :length, :length] = np.nan_to_num(heads, nan=0.0, posinf=0.0, neginf=-np.inf)
    blocks = padded.reshape(count, side, block, side, block).transpose(0, 1, 3, 2, 4).reshape(count * side, side, -1)
    at = np.where(np.isneginf(blocks), -1, np.abs(blocks)).argmax(axis=2, keepdims=True)
    return np.ascontiguousarray(np.take_along_axis(blocks, at, axis=2)[:, :, 0])


def change(view: str, hooks: Sequence[str], clean: Any, patched: Any, session: Any) -> Array:
    """What a view shows of two runs: how far the stream moved, or patched minus clean; what is masked stays masked."""
    if view == "norms":
        return np.stack([norm(patched[name].float() - clean[name].float()) for name in hooks])
    before, after = (numbers(view, hooks, run, session) for run in (clean, patched))
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(before), before, after - before)


def grid_points(session: Any) -> list[Any]:
    """The hook points whose norm is known: all that hold one vector a token, in the catalogue's order."""
    return [
        point for point in session.hooks if point.available and not point.derived_from and point.component != "logits"
    ]


def grid_chunks(points: Sequence[Any], positions: int) -> list[list[Any]]:
    """The grid's hook points, split so that no run captures more than `GRID_BYTES`."""
    chunks: list[list[Any]] = [[]]
    size = 0
    for point in points:
        width = int(np.prod(point.shape)) * positions * 4
        if chunks[-1] and size + width > GRID_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(point)
        size += width
    if len(chunks) > GRID_RUNS:
        raise Refused("not tinted: the prompt is long")
    return chunks


def grid_norms(session: Any, prompt: Any, positions: int, step: Callable[[int, int], None]) -> Array:
    """The norm of every hook at every position: (hook points, positions)."""
    chunks = grid_chunks(grid_points(session), positions)
    rows: list[Array] = []
    for index, chunk in enumerate(chunks):
        step(index, len(chunks))
        run = session.run(prompt, capture=[point.name for point in chunk])
        rows += [norm(run[point.name]) for point in chunk]
    return np.stack(rows)


class ArrayCache:
    """The arrays last shown, so that a reload or a second view needs no run; the oldest go first."""

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit = limit
        self._arrays: OrderedDict[str, Array] = OrderedDict()
        self._lock = threading.Lock()  # the worker fills it, the kernel's main thread answers from it

    def get(self, key: str) -> Array | None:
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
            return self._arrays.get(key)

    def put(self, key: str, array: Array) -> None:
        with self._lock:
            self._arrays[key] = array
            self._arrays.move_to_end(key)
            while len(self._arrays) > 1 and sum(a.nbytes for a in self._arrays.values()) > self.limit:
                self._arrays.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._arrays.clear()


def answer(
    key: str, array: Array | None = None, *, error: str | None = None, dropped: bool = False
) -> tuple[dict[str, Any], list[memoryview]]:
    """A message to the page, and its buffers: the array that it asked for by a key, or why it gets none."""
    shape = [] if array is None else list(array.shape)
    message = {"type": "data", "key": key, "error": error, "dropped": dropped, "shape": shape}
    return message, [] if array is None else [raw(array)]


def raw(array: Array) -> memoryview:
    """The float32 of an array as the page reads them."""
    return np.ascontiguousarray(array, "<f4").data


def predictions(clean: Any, both: Any = None) -> dict[str, Any]:
    """The likeliest next tokens, [text, id, clean, patched, change] each, and the KL; of a clean run, or of both."""
    if both is None:
        rows = [[text, int(token), prob, prob, 0.0] for text, token, prob, _ in clean.top(TOP)]
        return {"rows": rows, "kl": 0.0}
    rows = [[text, int(token), *finite(numbers)] for text, token, *numbers in both.top(TOP)]
    return {"rows": rows, "kl": finite([both.kl()])[0]}


def difference(chosen: Sequence[str | None], rows: Sequence[Any], clean: Any, both: Any = None) -> dict[str, Any]:
    """The logit difference of two tokens, clean and patched; None stands for the likeliest, or the second, of `rows`.

    ValueError for a text that is not one token.
    """
    likeliest = sorted(rows, key=lambda row: row[2], reverse=True)
    tokens = [text if text is not None else rank[1] for text, rank in zip(chosen, likeliest, strict=False)]
    names = [text if text is not None else rank[0] for text, rank in zip(chosen, likeliest, strict=False)]
    values = both.logit_diff(*tokens) if both else [clean.logit_diff(*tokens)] * 2
    return {"tokens": names, "values": finite(values)}


def finite(values: Iterable[float]) -> list[float | None]:
    """Numbers for JSON, which has no NaN or infinity."""
    return [float(v) if np.isfinite(v) else None for v in values]
