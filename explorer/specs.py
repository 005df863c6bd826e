"""Edits and specs: what a user writes, checked and turned into rows, heads and values before anything runs."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from .errors import SpecError
from .hooks import Catalogue, HookPoint, canonical

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


@dataclass(frozen=True)
class Source:
    """Where a patch takes its values from: a prompt under a spec, and the Run that may already hold them."""

    prompt: str | None = None
    ids: tuple[int, ...] | None = None
    edits: tuple[Edit, ...] = ()
    run: SourceRun | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """The recipe, never tensors."""
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
        source_pos: positions in the source, one for each of `pos`; None repeats `pos`.
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
                out[key] = _plain(getattr(self, key))
        if self.source is not None:
            out["source"] = as_source(self.source, f"({self.hook}, {self.op})").to_json()
        if self.phase != "prompt":
            out["phase"] = self.phase
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edit) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # its value may be a tensor


@dataclass(frozen=True)
class RowEdit:
    """An edit as an engine applies it: everything resolved to numbers.

    `rows` are absolute positions; `value` is `(positions | 1, heads | 1, width | 1)`; `source` is the key of a request
    whose captures are held, and its absolute positions, one for each of `rows`.
    """

    hook: str
    op: str
    rows: range | tuple[int, ...]
    heads: tuple[int, ...] | None = None
    factor: float | None = None
    value: torch.Tensor | None = None
    source: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Extent:
    """How long a run is: `prompt` tokens, and `rows` rows in all (more than `prompt` when it generates)."""

    prompt: int
    rows: int


def parse(edits: Any) -> tuple[Edit, ...]:
    """A spec as the user wrote it, as a tuple of Edits: None, an Edit, a list of Edits, or the JSON form.

    Raises `SpecError` for anything else, for unknown ops and keys, and for a missing or superfluous field. The result
    shares no memory with what was given: it stays what was run.
    """
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
    for i, edit in enumerate(edits):
        if not isinstance(edit, Edit):
            raise SpecError(f"edit {i + 1} is {_short(edit)}, not an Edit; a list of specs needs a list of prompts", i)
        _check_fields(edit, i)
    return tuple(map(_snapshot, edits))


def parse_batch(edits: Any, prompts: int) -> list[tuple[Edit, ...]]:
    """One spec a prompt: `edits` is one spec for all, or a list with one spec (dict, list of Edits, None) a prompt."""
    if isinstance(edits, (list, tuple)) and not all(isinstance(e, Edit) for e in edits):
        if len(edits) != prompts:
            raise SpecError(f"{plural(len(edits), 'spec')} for {plural(prompts, 'prompt')}; give one, or one a prompt")
        specs = []
        for i, spec in enumerate(edits):
            try:
                specs.append(parse(spec))
            except SpecError as error:
                raise SpecError(f"prompt {i + 1}: {error}", error.edit_index) from None
        return specs
    return [parse(edits)] * prompts


def to_json(edits: Sequence[Edit]) -> dict[str, Any]:
    """The spec as plain JSON: `{hook: {"op": ...}}`, or `{hook: [edit, ...]}` where a hook has several.

    Edits of one hook stay together and in order, under the name that the first of them uses.
    """
    names: dict[str, str] = {}
    grouped: dict[str, list[dict[str, Any]]] = {}
    for edit in edits:
        body = edit.to_json()
        name = body.pop("hook")
        grouped.setdefault(names.setdefault(canonical(name), name), []).append(body)
    return {hook: bodies[0] if len(bodies) == 1 else bodies for hook, bodies in grouped.items()}


def as_source(source: Any, where: str) -> Source:
    """A patch source in any of its forms. `where` names the edit in the error."""
    if isinstance(source, Source):
        return source
    if isinstance(source, str):
        return Source(prompt=source)
    if isinstance(source, SourceRun):
        return Source(ids=source.fed, edits=source.fed_edits, run=source)
    if isinstance(source, Mapping):
        unknown = [key for key in source if key not in SOURCE_KEYS]
        if unknown or ("prompt" in source) == ("ids" in source):
            problem = f"unknown key {unknown[0]!r}" if unknown else "it needs exactly one of 'prompt' and 'ids'"
            raise SpecError(
                f"{where}: source: {problem}; write {{'prompt': ...}} or {{'ids': [...]}}, with 'edits' if it has any"
            )
        try:
            edits = parse(source.get("edits"))
        except SpecError as error:
            raise SpecError(f"{where}: source: {error}") from None
        if "ids" in source:
            return Source(ids=_token_ids(source["ids"], where), edits=edits)
        if not isinstance(source["prompt"], str):
            raise SpecError(f"{where}: source: 'prompt' is {_short(source['prompt'])}, not a string")
        return Source(prompt=source["prompt"], edits=edits)
    if "float" in str(getattr(source, "dtype", "")):
        raise SpecError(f"{where}: source is an array of numbers; write them with op 'set' and value=")
    if isinstance(source, (list, tuple, range)) or hasattr(source, "tolist"):
        return Source(ids=_token_ids(source, where))
    raise SpecError(f"{where}: source is {_short(source)}; it must be a Run, a prompt or a list of token ids")


def resolve(
    edits: Sequence[Edit],
    catalogue: Catalogue,
    extent: Extent,
    dtype: torch.dtype,
    source: Callable[[Source, HookPoint, str], tuple[Extent, str | torch.Tensor]],
) -> tuple[RowEdit, ...]:
    """Check every edit against the model and the prompt and turn it into rows, heads and values.

    `source` says how long a patch source is and where its values are: the key of a held request, or the hook's rows
    themselves as a `(rows, ...)` tensor. Raises `SpecError` naming the edit.
    """
    return tuple(_resolve(edit, i, catalogue, extent, dtype, source) for i, edit in enumerate(edits))


def _resolve(
    edit: Edit,
    index: int,
    catalogue: Catalogue,
    extent: Extent,
    dtype: torch.dtype,
    source: Callable[[Source, HookPoint, str], tuple[Extent, str | torch.Tensor]],
) -> RowEdit:
    where = describe(edit, index)

    def refuse(problem: str) -> SpecError:
        return SpecError(f"{where}: {problem}", index)

    try:
        point = catalogue.require(edit.hook)
    except SpecError as error:
        raise refuse(str(error)) from None
    if not point.editable:
        raise refuse(f"{point.name} can be captured but not edited: {_read_only(point)}")
    heads = _heads(edit.head, point, refuse)
    rows = _positions(edit.pos, edit.phase, extent, "pos", "prompt", refuse)
    shape = (point.heads if heads is None else len(heads), point.shape[-1]) if point.heads else (1, point.width)
    if edit.op in ("add", "set"):
        value = _value(edit.value, point, heads, shape, len(rows), dtype, refuse)
        return RowEdit(point.name, edit.op, rows, heads, value=value)
    if edit.op == "scale":
        return RowEdit(point.name, edit.op, rows, heads, factor=_factor(edit.factor, dtype, refuse))
    if edit.op == "suppress":
        return RowEdit(point.name, edit.op, rows, heads)
    origin = as_source(edit.source, where)
    try:
        source_extent, values = source(origin, point, where)
    except SpecError as error:
        raise SpecError(str(error), index) from None
    source_rows = tuple(_source_positions(edit, source_extent, refuse))
    if len(source_rows) != len(rows):
        raise refuse(
            f"pos chooses {plural(len(rows), 'position')} of the prompt but {plural(len(source_rows), 'position')} "
            "of the source; give pos and source_pos of equal count"
        )
    if isinstance(values, str):
        return RowEdit(point.name, "patch", rows, heads, source=(values, source_rows))
    block = values[list(source_rows)].reshape(len(rows), point.heads or 1, point.shape[-1])
    return RowEdit(point.name, "set", rows, heads, value=block if heads is None else block[:, list(heads)])


def pin(edit: Edit, resolved: RowEdit, rows: int) -> Edit | None:
    """The edit as it acted on the first `rows` rows, written for a prompt of that many tokens; None if on none."""
    kept = [i for i, position in enumerate(resolved.rows) if position < rows]
    if not kept:
        return None
    changes: dict[str, Any] = {"pos": [resolved.rows[i] for i in kept], "phase": "prompt"}
    if edit.op == "patch":
        if resolved.source is not None:
            source_rows: Sequence[int] = resolved.source[1]
        else:  # values that a Run held
            run = as_source(edit.source, describe(edit, 0)).run
            assert run is not None
            source_rows = _source_positions(edit, Extent(run.prompt_length, run.rows), SpecError)
        changes["source_pos"] = [source_rows[i] for i in kept]
    elif resolved.value is not None and resolved.value.shape[0] > 1:
        value = resolved.value[kept]
        if resolved.heads is not None:
            value = value.expand(-1, len(resolved.heads), -1)
        elif value.shape[1] == 1:
            value = value[:, 0]
        changes["value"] = value
    return replace(edit, **changes)


def describe(edit: Edit, index: int) -> str:
    """How errors name an edit: `edit 1 (blocks.5.hook_out, scale)`."""
    return f"edit {index + 1} ({edit.hook}, {edit.op})"


def _from_json(spec: Mapping[Any, Any]) -> list[Edit]:
    out: list[Edit] = []
    for hook, bodies in spec.items():
        if not isinstance(hook, str):
            raise SpecError(f"a spec maps hook names to edits; {_short(hook)} is no hook name", len(out))
        if isinstance(bodies, (list, tuple)) and not bodies:
            raise SpecError(f"edit {len(out) + 1} ({hook}): there is no edit in the list; remove the hook", len(out))
        for body in bodies if isinstance(bodies, (list, tuple)) else [bodies]:
            where = f"edit {len(out) + 1} ({hook})"
            if isinstance(body, Edit):
                raise SpecError(
                    f"{where}: an Edit already names its hook; give a list of Edits instead of a dict", len(out)
                )
            if callable(body):
                raise SpecError(
                    f"{where} is a function; an edit is data such as {{'op': 'scale', 'factor': 0.5}}", len(out)
                )
            if not isinstance(body, Mapping):
                if hook in ("hook", *KEYS):
                    raise SpecError(f"a spec is written {{hook: {{'op': ...}}}}; {hook!r} is no hook name", len(out))
                raise SpecError(f"{where} is {_short(body)}; it must be a dict such as {{'op': 'suppress'}}", len(out))
            for key in body:
                if key not in KEYS:
                    close = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.4)
                    hint = f"; did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(KEYS)}"
                    raise SpecError(f"{where}: unknown key {key!r}{hint}", len(out))
            if "op" not in body:
                raise SpecError(f"{where}: it names no op; the ops are {', '.join(OPS)}", len(out))
            out.append(Edit(hook, body["op"], **{k: v for k, v in body.items() if k != "op"}))
    return out


def _check_fields(edit: Edit, index: int) -> None:
    where = describe(edit, index)
    if not isinstance(edit.hook, str):
        raise SpecError(f"edit {index + 1}: a hook is named by a string, not by {_short(edit.hook)}", index)
    if not isinstance(edit.op, str) or edit.op not in OPS:
        close = difflib.get_close_matches(str(edit.op), OPS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise SpecError(f"{where}: unknown op {edit.op!r}; {hint}the ops are {', '.join(OPS)}", index)
    if not isinstance(edit.phase, str) or edit.phase not in PHASES:
        raise SpecError(f"{where}: unknown phase {edit.phase!r}; it is one of {', '.join(PHASES)}", index)
    needed = OPS[edit.op]
    for key in needed:
        if getattr(edit, key) is None:
            raise SpecError(f"{where}: {edit.op} needs {key!r}", index)
    allowed = {*needed, *(("source_pos",) if edit.op == "patch" else ())}
    for key in ("value", "factor", "source", "source_pos"):
        if getattr(edit, key) is not None and key not in allowed:
            raise SpecError(f"{where}: {edit.op} takes no {key!r}; remove it", index)
    if edit.op == "patch":
        try:
            as_source(edit.source, where)
        except SpecError as error:
            raise SpecError(str(error), index) from None


def _snapshot(edit: Edit) -> Edit:
    fields = ("pos", "head", "value", "factor", "source_pos")
    copies = {key: _copy(getattr(edit, key)) for key in fields}
    return replace(edit, **copies, source=None if edit.source is None else as_source(edit.source, ""))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_copy(v) for v in value] if isinstance(value, (list, tuple)) else value


Refuse = Callable[[str], SpecError]


def _heads(head: Any, point: HookPoint, refuse: Refuse) -> tuple[int, ...] | None:
    if head is None:
        return None
    if point.heads is None:
        raise refuse(
            f"{point.name} has no heads; remove head, or choose a hook that has them, such as attn.o.hook_in (z)"
        )
    heads = _integers(head, "head", refuse)
    for h in heads:
        if not 0 <= h < point.heads:
            kind = "key-value heads" if point.component in ("k", "rot_k", "v") else "heads"
            raise refuse(f"head {h} is past its count: {point.name} has {kind} 0 to {point.heads - 1}")
    return _distinct(heads, "head", refuse)


def _positions(pos: Any, phase: str, extent: Extent, name: str, whose: str, refuse: Refuse) -> range | tuple[int, ...]:
    """The absolute positions that an expression chooses, in the order given."""
    first = extent.prompt if phase == "decode" else 0
    stop = extent.prompt if phase == "prompt" else extent.rows
    if first >= stop:
        raise refuse(
            "it would match no row: no generated token is fed back; generate at least 2 tokens, or use phase='both'"
        )
    if _everywhere(pos):
        return range(first, stop)
    if isinstance(pos, str) and pos != "last":
        chosen = _slice(pos, first, extent.prompt, stop, name, whose, refuse)
        if not chosen:
            raise refuse(f"{name} {pos!r} would match no row")
        return chosen
    given = (-1,) if isinstance(pos, str) else _integers(pos, name, refuse)
    rows = tuple(p + extent.prompt if p < 0 else p for p in given)
    for g, p in zip(("last",) if isinstance(pos, str) else given, rows, strict=True):
        if not 0 <= p < extent.rows:
            counted = extent.prompt if p < 0 else extent.rows  # what negative ones count from
            tokens = plural(counted, "token" if counted == extent.prompt else "row")
            raise refuse(f"{name} {g} is past the {whose}, which has {tokens} (0 to {counted - 1})")
        if not first <= p < stop:
            part = "the generated tokens have" if phase == "decode" else "the prompt has"
            raise refuse(f"{name} {g} is outside phase={phase!r}: {part} positions {first} to {stop - 1}")
    return _distinct(rows, name, refuse)


def _source_positions(edit: Edit, extent: Extent, refuse: Refuse) -> range | tuple[int, ...]:
    """Where a patch reads: `source_pos` anywhere in the source; without it what `pos` chooses, there."""
    if edit.source_pos is not None:
        return _positions(edit.source_pos, "both", extent, "source_pos", "source", refuse)
    phase = edit.phase
    if phase == "decode" and not (_everywhere(edit.pos) and extent.rows > extent.prompt):
        phase = "both"  # ints are absolute; the source may be longer or shorter than the prompt
    return _positions(edit.pos, phase, extent, "pos", "source", refuse)


def _everywhere(pos: Any) -> bool:
    return pos is None or (isinstance(pos, str) and pos == "all")


def _slice(text: str, first: int, prompt: int, stop: int, name: str, whose: str, refuse: Refuse) -> range:
    parts = text.split(":")
    try:
        numbers = [int(p) if p.strip() else None for p in parts]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 3:
        raise refuse(f"{name} {text!r} is not understood; write an int, a list, a slice such as '3:7', 'last' or 'all'")
    step = 1 if len(numbers) < 3 or numbers[2] is None else numbers[2]
    if step < 1:
        raise refuse(f"{name} {text!r}: the step must be at least 1")
    begin, end = (None if n is None else n + prompt if n < 0 else n for n in numbers[:2])
    begin = first if begin is None else begin
    end = stop if end is None else end
    if begin < first or end > stop:
        raise refuse(f"{name} {text!r} goes past the {whose}, which has positions {first} to {stop - 1} here")
    return range(begin, end, step)


def _integers(given: Any, name: str, refuse: Refuse) -> tuple[int, ...]:
    given = _plain(given)
    items = given if isinstance(given, list) else [given]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise refuse(f"{name} takes whole numbers, not {_short(item)}")
    if not items:
        raise refuse(f"{name} is empty: it would match nothing")
    return tuple(items)


def _distinct(items: tuple[int, ...], name: str, refuse: Refuse) -> tuple[int, ...]:
    if len(set(items)) < len(items):
        raise refuse(f"{name} names {next(i for i in items if items.count(i) > 1)} twice")
    return items


def _factor(factor: Any, dtype: torch.dtype, refuse: Refuse) -> float:
    number = _plain(factor)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise refuse(f"factor must be one number, not {_short(factor)}")
    largest = torch.finfo(dtype).max
    if number != number or number in (math.inf, -math.inf):
        raise refuse(f"factor is {number}; it must be finite")
    if abs(number) > largest:
        raise refuse(f"factor is {_short(factor)}, too large for the model's {_name(dtype)} (at most {largest:.4g})")
    return float(number)


def _value(
    value: Any,
    point: HookPoint,
    heads: tuple[int, ...] | None,
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    refuse: Refuse,
) -> torch.Tensor:
    """The value as `(rows | 1, heads | 1, width | 1)`, in a float dtype that holds it exactly."""
    tensor = _numbers(value, refuse)
    if not torch.isfinite(tensor).all():
        raise refuse("value holds NaN or infinity; use 'suppress' to zero")
    if not torch.isfinite(tensor.to(dtype)).all():
        largest = torch.finfo(dtype).max
        reach = float(tensor.abs().max())
        raise refuse(f"value holds {reach:.4g}, too large for the model's {_name(dtype)} (at most {largest:.4g})")
    if tensor.dim() == 0:
        return tensor.reshape(1, 1, 1)
    count, width = shape
    # accepted shapes of one position's value -> (heads | 1, width)
    single: dict[tuple[int, ...], tuple[int, int]] = {}
    if point.heads is None:
        single[(width,)] = (1, width)
    elif heads is None:
        single[(count * width,)] = (count, width)
        single[(count, width)] = (count, width)
    else:
        single[(width,)] = (1, width)
        single[(count, width)] = (count, width)
    given = tuple(tensor.shape)
    if given in single:
        return tensor.reshape(1, *single[given])
    if given[0] == rows and given[1:] in single:
        return tensor.reshape(rows, *single[given[1:]])
    one = ", ".join(map(str, single))
    each = " or ".join(str((rows, *shape)) for shape in single)
    raise refuse(
        f"value has shape {given} but {point.name} takes a number, {one}, or {each} for the {plural(rows, 'position')} "
        "that pos chooses"
    )


def _numbers(value: Any, refuse: Refuse) -> torch.Tensor:
    """An array of numbers in any form, as a CPU tensor of a float dtype that holds it exactly."""
    if isinstance(value, (str, bytes, Mapping)) or callable(value):
        raise refuse(f"value must be a number or an array of numbers, not {_short(value)}")
    try:
        if isinstance(value, np.ndarray):
            value = value.copy(order="C")  # torch reads no reversed arrays
        elif not isinstance(value, torch.Tensor):
            value = _plain(value)
        tensor = torch.as_tensor(value).detach().cpu()
        if isinstance(value, (int, float, list)) and tensor.dtype != torch.bool and not tensor.is_complex():
            tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise refuse(f"value is no array of numbers: {error}") from None
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise refuse(f"value must hold real numbers, not {_name(tensor.dtype)}")
    return tensor if tensor.is_floating_point() and tensor.itemsize > 1 else tensor.to(torch.float64)


def _read_only(point: HookPoint) -> str:
    editable = {"pattern": "edit q, k or z of the layer", "scores": "edit q, k or z of the layer"}
    return editable.get(point.component, "edit the last layer's hook_out")


def _token_ids(ids: Any, where: str) -> tuple[int, ...]:
    def refuse(problem: str) -> SpecError:
        return SpecError(f"{where}: source: {problem}")

    return _integers(ids, "ids", refuse)


def _plain(value: Any) -> Any:
    """Arrays, ranges and numbers of other libraries as lists, ints and floats; anything else unchanged."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [_plain(v) for v in value]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if hasattr(value, "__index__"):
        return operator.index(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plural(n: int, noun: str) -> str:
    """`1 edit`, `2 edits`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
