"""What a call will run: prompts and edits turned into engine requests, with the patch sources they need before them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .catalogue import Catalogue, HookPoint
from .engine.protocol import Request
from .errors import SpecError
from .given import Once
from .positions import Extent
from .resolve import RowEdit, resolve
from .specs import Edit, Source

_counter = itertools.count()


@dataclass
class _Planned:
    """A patch source: run before whatever patches from it, its captures held meanwhile."""

    ids: tuple[int, ...]
    edits: tuple[RowEdit, ...]
    depth: int
    key: str = field(default_factory=lambda: f"source-{next(_counter)}")
    capture: dict[str, None] = field(default_factory=dict)


class Plan:
    """Requests of one call. Sources that several edits share are run once."""

    def __init__(
        self, catalogue: Catalogue, dtype: torch.dtype, encode: Callable[[str | Sequence[int]], tuple[int, ...]]
    ) -> None:
        """`encode` turns a source's prompt or ids into checked ids; it raises ValueError."""
        self.requests: list[Request] = []
        self._catalogue = catalogue
        self._dtype = dtype
        self._encode = encode
        self._sources: dict[str, _Planned] = {}  # by recipe
        self._once = Once()

    def add(self, ids: tuple[int, ...], edits: Sequence[Edit], capture: tuple[str, ...] = (), **sampling: Any) -> None:
        """Add a request for `ids` under `edits`, capturing tapped hook points. Raises `SpecError` naming the edit."""
        generated = max(0, sampling.get("max_new_tokens", 0) - 1)  # the last one is never fed
        resolved, _ = self._resolve(edits, Extent(len(ids), len(ids) + generated))
        self.requests.append(Request(f"run-{next(_counter)}", ids, resolved, capture, **sampling))

    def waves(self) -> list[list[Request]]:
        """Batches of source requests in the order they must run, each to be held until the call is over."""
        depths = sorted({s.depth for s in self._sources.values()})
        return [
            [
                Request(s.key, s.ids, s.edits, tuple(s.capture), hold=True)
                for s in self._sources.values()
                if s.depth == depth
            ]
            for depth in depths
        ]

    def _resolve(self, edits: Sequence[Edit], extent: Extent) -> tuple[tuple[RowEdit, ...], int]:
        """Resolved edits, and the depth of the deepest source they patch from (0 without one)."""
        deepest = 0

        def source(origin: Source, point: HookPoint) -> tuple[Extent, str | torch.Tensor]:
            nonlocal deepest
            run, extent = origin.run, None
            if run is not None:
                extent = Extent(run.prompt_length, run.rows)
                rows = run.rows_at(point.name)
                if rows is not None:
                    theirs = tuple(rows.shape[1:])
                    if theirs != point.shape:
                        raise SpecError(
                            f"the source run holds {theirs} a token at {point.name}, this model {point.shape}"
                        )
                    return extent, rows
                if not run.made_in(self._catalogue):
                    raise SpecError(
                        f"the source run is from another session, or from before a reboot, and did not "
                        f"capture {point.name}; run it again with capture={point.name!r}"
                    )
            planned = self._source(origin)
            planned.capture[point.name] = None
            deepest = max(deepest, planned.depth)
            return extent or Extent(len(planned.ids), len(planned.ids)), planned.key

        return resolve(edits, self._catalogue, extent, self._dtype, source, self._once), deepest

    def _source(self, origin: Source) -> _Planned:
        try:
            recipe = self._once(_recipe, origin)
            if recipe not in self._sources:
                ids = self._encode(origin.ids or origin.prompt or "")
                edits, depth = self._resolve(origin.edits, Extent(len(ids), len(ids)))
                self._sources[recipe] = _Planned(ids, edits, depth + 1)
        except ValueError as error:
            raise SpecError(f"source: {error}") from None
        return self._sources[recipe]


def _recipe(origin: Source) -> str:
    return json.dumps(origin.to_json(), default=repr)  # what is no JSON is refused where it is run


def tapped(catalogue: Catalogue, names: Sequence[str]) -> tuple[str, ...]:
    """What an engine must capture so that `names` can be read: derived hook points become those they derive from."""
    out: dict[str, None] = {}
    for name in names:
        point = catalogue.find(name)
        if point.component != "logits":
            out.update(dict.fromkeys(point.derived_from or (name,)))
    return tuple(out)
