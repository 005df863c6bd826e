"""Edits and specs: what a user writes, its JSON form, and whether it is well-formed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from .catalogue import Catalogue
from .errors import SpecError
from .given import Once, integers, plain, plural, short
from .hooks import canonical, one_in_some_models
from .positions import Extent, source_positions

OPS: dict[str, tuple[str, ...]] = {  # op -> the fields it needs
    "suppress": (),
    "scale": ("factor",),
    "add": ("value",),
    "set": ("value",),
    "patch": ("source",),
}
PHASES = ("prompt", "decode", "both")
KEYS = ("op", "pos", "head", "value", "factor", "source", "source_pos", "phase")
SOURCE_KEYS = ("prompt", "ids", "edits")
_FIELDS = frozenset(KEYS)


@runtime_checkable
class SourceRun(Protocol):
    """What a patch needs of a Run."""

    prompt_length: int
    rows: int

    @property
    def fed(self) -> tuple[int, ...]:
        """Ids of the tokens that were fed."""

    @property
    def fed_edits(self) -> tuple[Edit, ...]:
        """The edits as they act on those."""

    def rows_at(self, hook: str) -> torch.Tensor | None:
        """What it captured at a hook, None when it did not."""

    def made_in(self, catalogue: Catalogue) -> bool:
        """Whether the session with this catalogue ran it."""

    def recipe(self) -> dict[str, Any]:
        """How to make the fed tokens' activations again, plain JSON."""


@dataclass(frozen=True)
class Source:
    """Where a patch takes its values from: a prompt under a spec, and the Run that may already hold them."""

    prompt: str | None = None
    ids: tuple[int, ...] | None = None
    edits: tuple[Edit, ...] = ()
    run: SourceRun | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The recipe, never tensors."""
        if self.run is not None:
            return self.run.recipe()
        out: dict[str, Any] = {"prompt": self.prompt} if self.ids is None else {"ids": list(self.ids)}
        if self.edits:
            out["edits"] = to_json(self.edits)
        return out


@dataclass(frozen=True, eq=False)
class Edit:
    """One intervention at one hook point.

    Args:
        hook: canonical name or alias.
        op: `suppress` (zero), `scale` (`factor`), `add` (`value`), `set` (`value`), `patch` (`source`, `source_pos`).
        pos: int, list, tuple, slice text (`"3:7"`), `"last"` or `"all"`; None is all. Negative ints and `"last"` count
            from the end of the prompt.
        head: int or list; query heads on q, rot_q and z, key-value heads on k, rot_k and v.
        value: scalar; `(width,)`; on head hooks `(heads, d_head)` or, with `head`, `(d_head,)` or
            `(chosen heads, d_head)`. An array with one more leading axis as long as the chosen positions gives one
            value a position.
        factor: what `scale` multiplies with.
        source: for `patch`: a Run, a prompt, a list of token ids, or a recipe `{"prompt" | "ids": ..., "edits": ...}`.
        source_pos: positions in the source, one for each of `pos`, what it generated included; one may be read more
            than once. None repeats `pos`, in the source's prompt.
        phase: `"prompt"`, `"decode"` (generated tokens that are fed back) or `"both"`.

    Nothing is checked here: `SpecError` comes from the call that runs it, which knows the model and the prompt.
    """

    hook: str
    op: str
    pos: Any = field(default=None, kw_only=True)
    head: Any = field(default=None, kw_only=True)
    value: Any = field(default=None, kw_only=True)
    factor: Any = field(default=None, kw_only=True)
    source: Any = field(default=None, kw_only=True)
    source_pos: Any = field(default=None, kw_only=True)
    phase: str = field(default="prompt", kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """`{"hook", "op", ...}` without the fields that are at their default."""
        out: dict[str, Any] = {"hook": self.hook, "op": self.op}
        for key in ("pos", "head", "value", "factor", "source_pos"):
            if getattr(self, key) is not None:
                out[key] = plain(getattr(self, key))
        if self.source is not None:

            def refuse(problem: str) -> SpecError:
                return SpecError(f"({self.hook}, {self.op}): {problem}")

            try:
                source = as_source(self.source)
            except SpecError as error:
                raise refuse(str(error)) from None
            out["source"] = source.to_json()
            run = source.run
            if run is not None and run.rows > run.prompt_length:
                # its recipe is a prompt of all its tokens: what counted from the end of the shorter one is pinned
                extent = Extent(run.prompt_length, run.rows)
                out["source_pos"] = list(source_positions(self.pos, self.source_pos, self.phase, extent, refuse))
        if self.phase != "prompt":
            out["phase"] = self.phase
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edit) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # its value may be a tensor


def parse(edits: Any) -> tuple[Edit, ...]:
    """A spec as the user wrote it, as a tuple of Edits: None, an Edit, a list of Edits, or the JSON form.

    Raises `SpecError` for anything else, for unknown ops and keys, and for a missing or superfluous field. The result
    shares no memory with what was given: it stays what was run.
    """
    return _parse(edits, Once())


def _parse(edits: Any, once: Once) -> tuple[Edit, ...]:
    if edits is None:
        return ()
    if isinstance(edits, Edit):
        edits = [edits]
    if callable(edits):
        raise SpecError("a spec is data, not a function: write an Edit(hook, op, ...) or {hook: {'op': ...}}")
    if isinstance(edits, Mapping):
        edits = _from_json(edits)
    if not isinstance(edits, Sequence) or isinstance(edits, str):
        raise SpecError(f"a spec is a dict or a list of Edits, not {type(edits).__name__}")
    parsed = []
    for i, edit in enumerate(edits):
        if not isinstance(edit, Edit):
            raise SpecError(f"edit {i + 1} is {short(edit)}, not an Edit; a list of specs needs a list of prompts", i)
        parsed.append(_snapshot(edit, i, once))
    return tuple(parsed)


def parse_batch(edits: Any, prompts: int) -> list[tuple[Edit, ...]]:
    """One spec a prompt: `edits` is one spec for all, or a list with one spec (dict, list of Edits, None) a prompt."""
    if isinstance(edits, (list, tuple)) and not all(isinstance(e, Edit) for e in edits):
        if len(edits) != prompts:
            raise SpecError(f"{plural(len(edits), 'spec')} for {plural(prompts, 'prompt')}; give one, or one a prompt")
        specs: list[tuple[Edit, ...]] = []
        once = Once()
        for i, spec in enumerate(edits):
            try:
                specs.append(_parse(spec, once))
            except SpecError as error:
                raise SpecError(f"prompt {i + 1}: {error}", error.edit_index) from None
        return specs
    return [parse(edits)] * prompts


def to_json(edits: Sequence[Edit], hook_of: Callable[[str], str] | None = None) -> dict[str, Any]:
    """The spec as plain JSON: `{hook: {"op": ...}}`, or `{hook: [edit, ...]}` where a hook has several.

    Edits of one hook stay together and in order, under the name that the first of them uses. `hook_of` says which names
    are one hook in the model. Without it, edits that go back and forth between two names which are one hook in some
    models are a `SpecError`: their order would be lost there.
    """
    names: dict[str, str] = {}
    grouped: dict[str, list[dict[str, Any]]] = {}
    stretches: dict[str, list[str]] = {}  # what is one hook in some models: the names used for it, in turn
    for edit in edits:
        body = edit.to_json()
        name = body.pop("hook")
        hook = (hook_of or canonical)(name)
        if hook_of is None:
            used = stretches.setdefault(one_in_some_models(hook), [])
            if hook in used[:-1]:
                raise SpecError(
                    f"edits go back and forth between {hook} and {used[-1]}, which are one hook in some models; "
                    "use one of the two names"
                )
            used += [hook] if hook not in used else []
        grouped.setdefault(names.setdefault(hook, name), []).append(body)
    return {hook: bodies[0] if len(bodies) == 1 else bodies for hook, bodies in grouped.items()}


def as_source(source: Any) -> Source:
    """A patch source in any of its forms. Raises `SpecError`, which does not name the edit."""
    if isinstance(source, Source):
        return source
    if isinstance(source, str):
        return Source(prompt=source)
    if isinstance(source, Mapping):
        unknown = [key for key in source if key not in SOURCE_KEYS]
        if unknown or ("prompt" in source) == ("ids" in source):
            problem = f"unknown key {unknown[0]!r}" if unknown else "it needs exactly one of 'prompt' and 'ids'"
            raise SpecError(
                f"source: {problem}; write {{'prompt': ...}} or {{'ids': [...]}}, with 'edits' if it has any"
            )
        try:
            edits = parse(source.get("edits"))
        except SpecError as error:
            raise SpecError(f"source: {error}") from None
        if "ids" in source:
            return Source(ids=_token_ids(source["ids"]), edits=edits)
        if not isinstance(source["prompt"], str):
            raise SpecError(f"source: 'prompt' is {short(source['prompt'])}, not a string")
        return Source(prompt=source["prompt"], edits=edits)
    if isinstance(source, (list, tuple, range)):
        return Source(ids=_token_ids(source))
    if isinstance(source, SourceRun):
        return Source(ids=source.fed, edits=source.fed_edits, run=source)
    if "float" in str(getattr(source, "dtype", "")):
        raise SpecError("source is an array of numbers; write them with op 'set' and value=")
    if hasattr(source, "tolist"):
        return Source(ids=_token_ids(source))
    raise SpecError(f"source is {short(source)}; it must be a Run, a prompt or a list of token ids")


def describe(edit: Edit, index: int) -> str:
    """How errors name an edit: `edit 1 (blocks.5.hook_out, scale)`."""
    return f"edit {index + 1} ({edit.hook}, {edit.op})"


def _from_json(spec: Mapping[Any, Any]) -> list[Edit]:
    out: list[Edit] = []
    for hook, bodies in spec.items():
        if not isinstance(hook, str):
            raise SpecError(
                f"edit {len(out) + 1}: a hook is named by a string; {short(hook)} is no hook name", len(out)
            )
        if isinstance(bodies, (list, tuple)) and not bodies:
            raise SpecError(f"edit {len(out) + 1} ({hook}): there is no edit in the list; remove the hook", len(out))
        for body in bodies if isinstance(bodies, (list, tuple)) else (bodies,):
            if not isinstance(body, Mapping) or callable(body) or not _FIELDS.issuperset(body) or "op" not in body:
                raise _no_edit(hook, body, len(out))
            out.append(Edit(hook, **body))
    return out


def _no_edit(hook: str, body: Any, index: int) -> SpecError:
    """What is wrong with the JSON form of an edit."""
    where = f"edit {index + 1} ({hook})"
    if isinstance(body, Edit):
        return SpecError(f"{where}: an Edit already names its hook; give a list of Edits instead of a dict", index)
    if callable(body):
        return SpecError(f"{where} is a function; an edit is data such as {{'op': 'scale', 'factor': 0.5}}", index)
    if not isinstance(body, Mapping):
        if hook in ("hook", *KEYS):
            return SpecError(f"a spec is written {{hook: {{'op': ...}}}}; {hook!r} is no hook name", index)
        return SpecError(f"{where} is {short(body)}; it must be a dict such as {{'op': 'suppress'}}", index)
    for key in body:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(KEYS)}"
            return SpecError(f"{where}: unknown key {key!r}{hint}", index)
    return SpecError(f"{where}: it names no op; the ops are {', '.join(OPS)}", index)


def _check(edit: Edit, index: int) -> None:
    """Raises `SpecError` for an edit that is not well-formed, whatever the model."""

    def refuse(problem: str) -> SpecError:
        return SpecError(f"{describe(edit, index)}: {problem}", index)

    if not isinstance(edit.hook, str):
        raise SpecError(f"edit {index + 1}: a hook is named by a string, not by {short(edit.hook)}", index)
    if not isinstance(edit.op, str) or edit.op not in OPS:
        close = difflib.get_close_matches(str(edit.op), OPS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise refuse(f"unknown op {edit.op!r}; {hint}the ops are {', '.join(OPS)}")
    if not isinstance(edit.phase, str) or edit.phase not in PHASES:
        raise refuse(f"unknown phase {edit.phase!r}; it is one of {', '.join(PHASES)}")
    needed = OPS[edit.op]
    for key in needed:
        if getattr(edit, key) is None:
            raise refuse(f"{edit.op} needs {key!r}")
    for key in ("value", "factor", "source", "source_pos"):
        if getattr(edit, key) is not None and key not in needed and (key, edit.op) != ("source_pos", "patch"):
            raise refuse(f"{edit.op} takes no {key!r}; remove it")


def _snapshot(edit: Edit, index: int, once: Once) -> Edit:
    """The edit, checked, with memory of its own. What several edits share stays one."""
    _check(edit, index)
    try:
        source = None if edit.source is None else once(as_source, edit.source)
    except SpecError as error:
        raise SpecError(f"{describe(edit, index)}: {error}", index) from None
    return Edit(
        edit.hook,
        edit.op,
        pos=_copy(edit.pos),
        head=_copy(edit.head),
        value=None if edit.value is None else once(_copy, edit.value),
        factor=_copy(edit.factor),
        source=source,
        source_pos=_copy(edit.source_pos),
        phase=edit.phase,
    )


def _copy(value: Any) -> Any:
    if value is None or type(value) in (int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_copy(v) for v in value] if isinstance(value, (list, tuple)) else value


def _token_ids(ids: Any) -> tuple[int, ...]:
    return integers(ids, "ids", lambda problem: SpecError(f"source: {problem}"))
