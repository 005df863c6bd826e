"""The catalogue of one model: which hook points it has, how wide they are, and what finds them by name."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import html
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import SpecError
from .given import short
from .hooks import KINDS, NOT_SERVED, Kind, ModelShape


@dataclass(frozen=True)
class HookPoint:
    """A named place in the forward pass of one model.

    `shape` is per token: `(d_model,)`, `(d_mlp,)`, `(d_vocab,)` or `(heads, d_head)`. For patterns and scores, which
    are `(heads, query, key)`, it is `(heads,)`. `available` is False when this model has no such place; `reason` says
    why.
    """

    name: str
    aliases: tuple[str, ...]
    component: str
    group: str
    about: str
    layer: int | None
    shape: tuple[int, ...]
    heads: int | None
    editable: bool
    derived_from: tuple[str, ...] = ()
    available: bool = True
    reason: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def width(self) -> int:
        """Numbers a token: the product of `shape`."""
        return self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]


class Catalogue:
    """Every hook point of one model, by canonical name or alias.

    Iterating gives `HookPoint`s in the order of the forward pass, those that are not available included.
    """

    def __init__(self, shape: ModelShape, missing: Mapping[str, str] | None = None, *, apart: bool = False) -> None:
        """`missing` maps the canonical names that cannot fire in this model to the reason.

        `apart`: something (a norm, a multiplier) comes between the outputs of attention and MLP and the stream, so that
        `hook_attn_out` and `hook_mlp_out` are hook points of their own.
        """
        self.shape = shape
        missing = missing or {}
        self._points: dict[str, HookPoint] = {}
        self._aliases: dict[str, str] = {}
        self._kinds = [kind for kind in KINDS if apart or kind.one_with is None]
        more = {} if apart else {kind.one_with: kind.name for kind in KINDS if kind.one_with}
        for kind, layer in _in_forward_order(self._kinds, shape.layers):
            point = _point(kind, layer, shape, missing, more.get(kind.name))
            self._points[point.name] = point
            self._aliases.update(dict.fromkeys(point.aliases, point.name))

    def __iter__(self) -> Iterator[HookPoint]:
        return iter(self._points.values())

    def __len__(self) -> int:
        return len(self._points)

    def __contains__(self, name: object) -> bool:
        name = name.name if isinstance(name, HookPoint) else name
        return name in self._points or name in self._aliases

    def __getitem__(self, name: str) -> HookPoint:
        return self.find(name)

    def find(self, name: object) -> HookPoint:
        """The hook point of that name or alias, available or not; `SpecError` with the closest names otherwise."""
        if isinstance(name, HookPoint):
            name = name.name
        if not isinstance(name, str):
            raise SpecError(f"a hook is named by a string such as 'blocks.0.hook_out', not by {type(name).__name__}")
        point = self._points.get(self._aliases.get(name, name))
        if point is None and (_is_glob(name) or name == "all"):
            self.match(name)  # which says what is wrong with it, if anything is
            raise SpecError(
                f"{name!r} stands for several hooks, and one is named here; session.hooks.match({name!r}) gives the "
                "names of all"
            )
        if point is None:
            raise SpecError(self._unknown(name))
        return point

    def require(self, name: object) -> HookPoint:
        """Like `find`, and refuses a hook point that cannot fire in this model, with the reason."""
        point = self.find(name)
        if not point.available:
            raise SpecError(f"{point.name} is not available in this model: {point.reason}")
        return point

    def match(self, patterns: Any) -> tuple[str, ...]:
        """Canonical names for what a `capture=` asks: names, aliases, globs, or `"all"`, each once, in forward order.

        Globs (`*`, `?`, `[0-4]`) and `"all"` take what is available; a glob of which nothing is, is a `SpecError`. In
        `blocks.*.hook_out` the `*` stands for the layer alone: this is the stream after each layer and nothing else.
        None asks for nothing.
        """
        if patterns is None:
            return ()
        if isinstance(patterns, (str, HookPoint)):
            patterns = [patterns]
        if not isinstance(patterns, Iterable):
            kind = "a function" if callable(patterns) else short(patterns)
            raise SpecError(f"capture takes hook names or globs such as capture='blocks.*.hook_out', not {kind}")
        wanted: set[str] = set()
        for pattern in patterns:
            if pattern == "all":
                wanted.update(p.name for p in self if p.available)
            elif isinstance(pattern, str) and _is_glob(pattern):
                hits = [p for p in self if any(_matches(name, pattern) for name in (p.name, *p.aliases))]
                if not hits:
                    raise SpecError(self._unknown(pattern))
                if not any(p.available for p in hits):
                    raise SpecError(f"nothing that {pattern!r} matches is available in this model: {hits[0].reason}")
                wanted.update(p.name for p in hits if p.available)
            else:
                wanted.add(self.require(pattern).name)
        return tuple(name for name in self._points if name in wanted) if wanted else ()

    def _unknown(self, name: str) -> str:
        """What to say of a name or a glob that no hook point has."""
        layers, glob = self.shape.layers, _is_glob(name)
        parts = name.split(".")
        layer, rest = "0", name
        if parts[0] == "blocks" and len(parts) > 2:
            rest = ".".join(parts[2:])
            if glob or re.fullmatch("-?(0|[1-9][0-9]*)", parts[1]):
                layer = parts[1]
                if not any(fnmatch.fnmatchcase(str(i), layer) for i in range(layers)):
                    return f"there is no hook {name!r}: this model has layers 0 to {layers - 1}"
        nearest = NOT_SERVED.get(rest)
        if nearest is not None:
            nearest = nearest.replace("{i}", layer).replace("{last}", str(layers - 1))
            return f"hook {name!r} is not served here; the nearest one that is: {nearest}"
        names = [*self._points, *self._aliases]
        if glob:
            names = list(dict.fromkeys(re.sub(r"^blocks\.[0-9]+\.", f"blocks.{layer}.", n) for n in names))
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(close)}?" if close else "; session.hooks lists them"
        return (
            f"{name!r} matches no hook of this model{hint}"
            if glob
            else f"there is no hook {name!r} in this model{hint}"
        )

    def __repr__(self) -> str:
        rows = [("hook", "shape a token", "edit", "about")]
        for kind in self._kinds:
            points = [self._points[kind.name.replace("{i}", str(i))] for i in range(self.shape.layers)]
            point = next((p for p in points if p.available), points[0])
            name = kind.name.replace("{i}", "{0.." + str(self.shape.layers - 1) + "}")
            shape = (
                "heads x query x key" if kind.component in ("pattern", "scores") else " x ".join(map(str, point.shape))
            )
            about = point.about if point.available else f"not available: {point.reason}"
            lacking = [p for p in points if not p.available]
            if point.available and lacking:
                about += f" Not in {_layers([p.layer for p in lacking])}: {lacking[0].reason}"
            rows.append((name, shape, "yes" if point.editable else "no", about))
        widths = [max(len(r[c]) for r in rows) for c in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(r[:3], widths, strict=True)), r[3]]) for r in rows
        )

    def report(self) -> list[str]:
        """One line on how many hook points can fire, and one a reason on those that cannot."""
        layers: dict[tuple[str, str], list[int | None]] = {}
        for point in self:
            if point.reason is not None:
                family = re.sub(r"^blocks\.[0-9]+\.", "", point.name)
                layers.setdefault((point.reason, family), []).append(point.layer)
        families: dict[tuple[str, str], list[str]] = {}
        for (reason, family), at in layers.items():
            families.setdefault((reason, _layers(at)), []).append(family)
        fire = sum(point.available for point in self)
        lines = [f"{', '.join(names)} cannot fire in {at}: {reason}" for (reason, at), names in families.items()]
        return [f"{fire} of {len(self)} hook points can fire", *lines]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _layers(numbers: Sequence[int | None]) -> str:
    """Layers in words: `layer 3`, `layers 1, 2, 5`; what is in no layer is `this model`."""
    if numbers[0] is None:
        return "this model"
    return ("layer " if len(numbers) == 1 else "layers ") + ", ".join(map(str, numbers))


def _is_glob(name: str) -> bool:
    return any(character in name for character in "*?[")


@functools.lru_cache(maxsize=2**14)  # else it takes longer than capturing what matches
def _matches(name: str, glob: str) -> bool:
    """Whether a glob matches. In `blocks.<layer>.<rest>` layer and rest are matched apart."""
    pair = (name.split(".", 2), glob.split(".", 2))
    if glob.startswith("blocks.") and len(pair[1]) == 3:
        return len(pair[0]) == 3 and all(map(fnmatch.fnmatchcase, *pair))
    return fnmatch.fnmatchcase(name, glob)


def _in_forward_order(kinds: Sequence[Kind], layers: int) -> Iterator[tuple[Kind, int | None]]:
    per_layer = [k for k in kinds if "{i}" in k.name]
    yield kinds[0], None
    for layer in range(layers):
        for kind in per_layer:
            yield kind, layer
    for kind in kinds[1:]:
        if kind not in per_layer:
            yield kind, None


def _point(
    kind: Kind, layer: int | None, shape: ModelShape, missing: Mapping[str, str], alias: str | None
) -> HookPoint:
    def fill(text: str) -> str:
        return text.replace("{i}", str(layer))

    name = fill(kind.name)
    heads = getattr(shape, kind.heads) if kind.heads else None
    width = getattr(shape, kind.width) if kind.width else None
    reason = missing.get(name)
    derived = tuple(map(fill, kind.derived_from))
    if any(source in missing for source in derived):
        derived = tuple(map(fill, kind.else_from))
    return HookPoint(
        name=name,
        aliases=tuple(map(fill, (*kind.aliases, *((alias,) if alias else ())))),
        component=kind.component,
        group=kind.group,
        about=kind.about,
        layer=layer,
        shape=tuple(n for n in (heads, width) if n is not None),
        heads=heads,
        editable=kind.edit and reason is None,
        derived_from=derived,
        available=reason is None,
        reason=reason,
    )
