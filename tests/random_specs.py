"""Random specs: what a user may write, in every form, beside what it means; and the same with one thing wrong in it.

Written from the documentation of specs, not from their code: the meaning is worked out here a second time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from explorer import Edit, Run, Session
from explorer.catalogue import HookPoint

# canonical hook -> edits in order, with `pos` and `head` as lists of ints and `source` as ids and edits
Meaning = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Length:
    """How many tokens a prompt has, and how many rows its run has (more when it generates)."""

    prompt: int
    rows: int


@dataclass(frozen=True)
class Kept:
    """A Run that specs patch from, and the edits it was made with."""

    run: Run
    meaning: Meaning


@dataclass(frozen=True)
class Example:
    """A prompt, and a spec as parallel lists: the edits as written, and what each means."""

    ids: list[int]
    edits: list[Edit]
    meanings: list[tuple[str, dict[str, Any]]]  # (canonical hook, edit)

    @property
    def meaning(self) -> Meaning:
        """The meaning by hook, in the order of the edits."""
        out: Meaning = {}
        for hook, edit in self.meanings:
            out.setdefault(hook, []).append(edit)
        return out


class Author:
    """Writes specs for one session. The same seed writes the same for every session of one model."""

    def __init__(
        self, session: Session, kept: Sequence[Kept], generated: int, seed: str, constant: bool = True
    ) -> None:
        """`kept` are Runs to patch from; runs generate `generated` tokens.

        Without `constant`, `set` gives no row one number throughout.
        """
        self.points = [p for p in session.hooks if p.editable]
        self.read_only = [p.name for p in session.hooks if p.available and not p.editable]
        self.vocabulary = session.model.shape.d_vocab
        self.kept = kept
        self.generated = generated
        self.rng = random.Random(seed)
        self.constant = constant

    def example(self) -> Example:
        """A valid spec of one to four edits, some of them at one hook, and a prompt for it."""
        ids = self.ids(self.rng.randint(1, 12))
        length = Length(len(ids), len(ids) + max(0, self.generated - 1))
        edits: list[tuple[Edit, tuple[str, dict[str, Any]]]] = []
        for _ in range(self.rng.choice((1, 1, 2, 3, 4))):
            again = edits and self.rng.random() < 0.4
            name = self.rng.choice(edits)[1][0] if again else None
            edits.append(self.edit(length, self.point(name)))
        if self.rng.random() < 0.5:  # the order that a dict by hook will have
            names = list(dict.fromkeys(edit.hook for edit, _ in edits))
            edits.sort(key=lambda both: names.index(both[0].hook))
        return Example(ids, [edit for edit, _ in edits], [meaning for _, meaning in edits])

    def written(self, edits: Sequence[Edit]) -> Any:
        """The edits in one of the forms of a spec; as a dict only where that keeps their order."""
        forms: list[Any] = [list(edits), tuple(edits)]
        by_hook = as_dict(edits)
        if by_hook is not None:
            forms += [by_hook] * 2
        if len(edits) == 1:
            forms.append(edits[0])
        return self.rng.choice(forms)

    def ids(self, count: int) -> list[int]:
        """A prompt."""
        return [self.rng.randrange(3, self.vocabulary) for _ in range(count)]

    def point(self, name: str | None = None) -> HookPoint:
        """A hook point that can be edited: each kind as often as any other."""
        if name is not None:
            return next(p for p in self.points if p.name == name)
        kind = self.rng.choice(sorted({p.component for p in self.points}))
        return self.rng.choice([p for p in self.points if p.component == kind])

    def edit(
        self, length: Length, point: HookPoint, op: str = "", depth: int = 0
    ) -> tuple[Edit, tuple[str, dict[str, Any]]]:
        """An edit at a hook point, and what it means."""
        rng = self.rng
        op = op or rng.choice(("suppress", "scale", "add", "set", "patch"))
        phases = ["prompt", "prompt", "both"] + ["decode"] * 2 * (length.rows > length.prompt)
        phase = rng.choice(phases)
        first = length.prompt if phase == "decode" else 0
        stop = length.prompt if phase == "prompt" else length.rows
        rows = self.choose(range(first, stop))
        pos = self.spell(rows, range(first, stop), length.prompt, default=True)
        heads, head = None, None
        if point.heads is not None and rng.random() < 0.6:
            heads = rng.sample(range(point.heads), rng.randint(1, point.heads))
            head = self.container(heads)
        fields: dict[str, Any] = {}
        means: dict[str, Any] = {"op": op, "pos": rows} | ({} if heads is None else {"head": heads})
        if op == "scale":
            fields["factor"], means["factor"] = self.factor()
        elif op in ("add", "set"):
            fields["value"], means["value"] = self.value(point, heads, len(rows), op == "add" or self.constant)
        elif op == "patch":
            source, source_length, means["source"] = self.source(length, point, depth)
            fields["source"] = source
            repeated = repeat(pos, phase, length, source_length)
            if repeated is not None and len(repeated) == len(rows) and rng.random() < 0.6:
                means["source_pos"] = repeated
            else:
                while source_length.rows < len(rows):  # a source that is long enough
                    source = self.ids(len(rows) + rng.randint(0, 3))
                    source_length = Length(len(source), len(source))
                    fields["source"], means["source"] = source, {"ids": source}
                from_rows = self.choose(range(source_length.rows), len(rows))
                fields["source_pos"] = self.spell(from_rows, range(source_length.rows), source_length.prompt)
                means["source_pos"] = from_rows
        name = rng.choice((point.name, *point.aliases))
        return Edit(name, op, pos=pos, head=head, phase=phase, **fields), (point.name, means)

    def choose(self, among: range, count: int | None = None) -> list[int]:
        """Distinct positions: all of them, a stretch with a step, or some in any order."""
        rng = self.rng
        if count is None:
            count = rng.choice((1, 1, rng.randint(1, len(among)), len(among)))
        if rng.random() < 0.5:
            step = rng.randint(1, max(1, (len(among) - 1) // max(1, count - 1)))
            start = rng.randint(0, len(among) - 1 - step * (count - 1)) if step * (count - 1) < len(among) else None
            if start is not None:
                return list(among[start : start + step * (count - 1) + 1 : step])
        return rng.sample(among, count)

    def spell(self, rows: list[int], among: range, prompt: int, default: bool = False) -> Any:
        """Positions as a user may write them. `default`: leaving them out means all."""
        rng = self.rng
        spellings: list[Any] = [self.container([r - prompt if r < prompt and rng.random() < 0.4 else r for r in rows])]
        if rows == list(among):
            spellings += ["all", ":", "::1"] + [None] * 2 * default
        if rows == [prompt - 1]:
            spellings += ["last", "last"]
        steps = {b - a for a, b in pairwise(rows)} or {1}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            begin = "" if rows[0] == among[0] and rng.random() < 0.5 else rows[0]
            end: Any = rows[-1] + 1
            if isinstance(begin, int) and begin < prompt and rng.random() < 0.3:
                begin -= prompt
            if end == among[-1] + 1 and rng.random() < 0.5:
                end = ""
            elif end < prompt and rng.random() < 0.3:
                end -= prompt
            spellings += [f"{begin}:{end}" if step == 1 else f"{begin}:{end}:{step}"] * 2
            spellings.append(range(rows[0], rows[-1] + 1, step))
        return rng.choice(spellings)

    def container(self, numbers: list[int]) -> Any:
        """Whole numbers as a list, or what stands for one; one of them also bare."""
        forms: list[Callable[[list[int]], Any]] = [list, tuple, np.array, torch.tensor]
        if len(numbers) == 1:
            forms = [lambda n: n[0]] * 3 + [lambda n: np.int64(n[0]), lambda n: torch.tensor(n[0]), *forms]
        return self.rng.choice(forms)(numbers)

    def factor(self) -> tuple[Any, float]:
        """What `scale` multiplies with: at most 2, so that rounding errors do not grow by more."""
        number = self.rng.choice((-1, 1)) * self.rng.choice((0.0, 0.25, 0.5, 1.5, 2.0, self.rng.uniform(0.1, 2)))
        form = self.rng.choice((float, np.float32, np.float64, torch.tensor, Fraction, round))
        written = form(number)
        return written, float(written)

    def value(self, point: HookPoint, heads: list[int] | None, rows: int, scalar: bool) -> tuple[Any, Any]:
        """A value in any form, and `(rows, heads, d_head)` or `(rows, width)` of float32."""
        rng = self.rng
        if scalar and rng.random() < 0.2:
            number = rng.choice((1, -0.5, rng.gauss(0, 1)))
            return rng.choice((float, np.float32, torch.tensor))(number), float(np.float32(number))
        width, count = point.shape[-1], 1 if point.heads is None else len(heads or range(point.heads))
        tensor = torch.randn(rows, count, width, generator=torch.Generator().manual_seed(rng.randrange(2**32)))
        dtype = rng.choice((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64))
        tensor = tensor.to(dtype)
        if one_row := rng.random() < 0.5:
            tensor = tensor[:1]
        shapes: list[tuple[int, ...]] = [(count, width)]
        if point.heads is None or heads is None:
            shapes = [(count * width,)] if point.heads is None else [(count, width), (count * width,)]
        # with chosen heads `(d_head,)` is one value for all of them; two axes are heads, where both would fit
        elif rng.random() < 0.3 and (one_row or rows != count):
            tensor, shapes = tensor[:, :1], [(width,)]
        shape = rng.choice(shapes)
        written = tensor.reshape(*shape) if one_row else tensor.reshape(rows, *shape)
        meaning = tensor.to(torch.float32).expand(rows, count, width)
        return self.array(written), meaning if point.heads is not None else meaning[:, 0]

    def array(self, tensor: torch.Tensor) -> Any:
        """An array in any library's form, whole in memory or not."""
        flipped = tensor.flip(-1)
        forms: list[Callable[[], Any]] = [
            lambda: tensor,
            tensor.tolist,
            lambda: tensor.unsqueeze(-1).repeat_interleave(2, -1)[..., 0],
            lambda: tensor.tolist() if tensor.dim() == 1 else list(tensor),
        ]
        if tensor.dtype != torch.bfloat16:  # numpy has none
            forms += [tensor.numpy, lambda: flipped.numpy()[..., ::-1]]
        if tensor.is_floating_point():
            forms.append(lambda: tensor.clone().requires_grad_())
        return self.rng.choice(forms)()

    def source(self, length: Length, point: HookPoint, depth: int) -> tuple[Any, Length, dict[str, Any]]:
        """A patch source in any form, its length, and what it means."""
        rng = self.rng
        if self.kept and rng.random() < 0.4:
            kept = rng.choice(self.kept)
            run = kept.run
            return run, Length(run.prompt_length, run.rows), {"ids": list(run.fed), "edits": kept.meaning}
        ids = self.ids(rng.choice((length.prompt, length.prompt, rng.randint(1, 14))))
        own = Length(len(ids), len(ids))
        form = rng.choice(("text", "ids", "recipe of text", "recipe"))
        if not form.startswith("recipe"):
            array = rng.choice((list, tuple, np.array, torch.tensor))
            return words(ids) if form == "text" else array(ids), own, {"ids": ids}
        recipe: dict[str, Any] = {"prompt": words(ids)} if form == "recipe of text" else {"ids": ids}
        means: dict[str, Any] = {"ids": ids}
        if rng.random() < 0.6:
            op = rng.choice(("scale", "set", "patch")[: 3 - depth])
            edit, (hook, meaning) = self.edit(own, self.point(), op, depth + 1)
            recipe["edits"] = rng.choice((edit, [edit], as_dict([edit])))
            means["edits"] = {hook: [meaning]}
        return recipe, own, means


def words(ids: Sequence[int]) -> str:
    """The text that the tiny tokenizer turns into these ids."""
    return " ".join(f"w{i - 3}" for i in ids)


def repeat(pos: Any, phase: str, length: Length, source: Length) -> list[int] | None:
    """What a patch reads when `source_pos` is left out: what `pos` is there. None where that is past it."""
    if pos is None or (isinstance(pos, str) and pos in ("all", "last")):
        if isinstance(pos, str) and pos == "last":
            return [source.prompt - 1]
        first = source.prompt if phase == "decode" else 0
        return list(range(first, source.prompt if phase == "prompt" else source.rows)) or None
    if isinstance(pos, str):
        return None  # slices are cut to each one's own length: left to the other tests
    rows = [int(p) + source.prompt if p < 0 else int(p) for p in np.atleast_1d(np.asarray(pos))]
    limit = source.prompt if phase == "prompt" else source.rows
    return rows if len(set(rows)) == len(rows) and all(0 <= r < limit for r in rows) else None


def as_dict(edits: Sequence[Edit]) -> dict[str, Any] | None:
    """The JSON form, values as they are; None where it would change the order."""
    out: dict[str, Any] = {}
    for edit in edits:
        if edit.hook in out and list(out)[-1] != edit.hook:
            return None
        fields = ("pos", "head", "value", "factor", "source", "source_pos")
        body = {"op": edit.op} | {f: getattr(edit, f) for f in fields if getattr(edit, f) is not None}
        if edit.phase != "prompt":
            body["phase"] = edit.phase
        out.setdefault(edit.hook, []).append(body)
    return {hook: bodies[0] if len(bodies) == 1 else bodies for hook, bodies in out.items()}


# what can be wrong -> (the op it needs, whether the hook must have heads, how to spoil an edit, a word of the message);
# "=" before the word: it is about the hook's name
Spoil = Callable[["Author", Edit, HookPoint, int], Any]


def _with(**fields: Any) -> Spoil:
    return lambda author, edit, point, prompt: replace(edit, **fields)


def _wrong_shape(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
    width = point.shape[-1] + author.rng.choice((-1, 1, 7))
    shape = author.rng.choice(((width,), (1, width), (2, 3, width), (0,), (point.shape[-1], 0)))
    return replace(edit, value=author.array(torch.zeros(shape)))


def _wrong_count(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
    count = 1 if point.heads is None else point.heads
    value = torch.zeros(prompt + 1, *((count,) if point.heads else ()), point.shape[-1])
    return replace(edit, value=author.array(value), head=None, pos=None, phase="prompt")


def _past(field: str) -> Spoil:
    def spoil(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
        if field == "head":
            limit = point.heads or 0
            wrong = author.rng.choice((limit, -1, limit + 10**9))
            return replace(edit, head=author.rng.choice((wrong, [0, wrong], np.int64(wrong))))
        wrong = author.rng.choice((prompt, -prompt - 1, 10**12))
        return replace(edit, phase="prompt", pos=author.rng.choice((wrong, [wrong], (0, wrong), f"0:{prompt + 1}")))

    return spoil


def _not_finite(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
    bad = author.rng.choice((float("nan"), float("inf"), -float("inf"), 1e39))
    if edit.op == "scale":
        return replace(edit, factor=author.rng.choice((bad, np.float64(bad))))
    whole = torch.zeros(point.shape, dtype=torch.float64)
    whole.view(-1)[author.rng.randrange(whole.numel())] = bad
    return replace(edit, value=author.rng.choice((bad, author.array(whole))), head=None)


def _renamed(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
    at = author.rng.randrange(len(edit.hook) + 1)
    names = (f"{edit.hook[:at]}?{edit.hook[at:]}", edit.hook + "x", "blocks.99.hook_out", "blocks.0.hook_result", "")
    return replace(edit, hook=author.rng.choice(names))


def _read_only(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
    return replace(edit, hook=author.rng.choice((*author.read_only, "logits")))


def _counts_that_differ(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
    few = {"pos": 0, "source_pos": [0, 1], "source": [5, 6, 7]}
    many = {"pos": None, "source_pos": list(range(prompt + 1)), "source": {"ids": [5] * (prompt + 1)}}
    return replace(edit, phase="prompt", **author.rng.choice((few, many)))


def _source(*sources: Any) -> Spoil:
    def spoil(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Edit:
        return replace(edit, source=author.rng.choice(sources), source_pos=author.rng.choice((None, edit.source_pos)))

    return spoil


def _one_of(field: str, *wrong: Any) -> Spoil:
    return lambda author, edit, point, prompt: replace(edit, **{field: author.rng.choice(wrong)})


def _body(*changes: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Wrong in a way that only the JSON form can be."""

    def spoil(author: Author, edit: Edit, point: HookPoint, prompt: int) -> Any:
        form = as_dict([edit])
        assert form is not None
        return author.rng.choice(changes)(form[edit.hook])

    return spoil


WRONG: dict[str, tuple[str, bool, Spoil, str]] = {
    "an unknown hook": ("", False, _renamed, ""),
    "a hook that is no string": ("", False, _one_of("hook", 5, None, b"logits"), "string"),
    "a hook that cannot be edited": ("", False, _read_only, "not edited"),
    "an unknown op": ("", False, _one_of("op", "zero", "Scale", "supress", "", None, 3, ["set"]), "unknown op"),
    "an unknown phase": ("", False, _one_of("phase", "later", "Prompt", None, 1), "unknown phase"),
    "no factor": ("scale", False, _with(factor=None), "'factor'"),
    "no value": ("set", False, _with(value=None), "'value'"),
    "no source": ("patch", False, _with(source=None), "'source'"),
    "a value too many": ("suppress", False, _with(value=0.0), "'value'"),
    "a factor too many": ("add", False, _with(factor=1.0), "'factor'"),
    "a source too many": ("scale", False, _with(source="w1"), "'source'"),
    "a source_pos too many": ("set", False, _with(source_pos=0), "'source_pos'"),
    "a value of a wrong shape": ("set", False, _wrong_shape, "value has shape"),
    "a value for too many positions": ("add", False, _wrong_count, "value has shape"),
    "a value that is not finite": ("set", False, _not_finite, "value holds"),
    "a value that is no number": (
        "add",
        False,
        _one_of("value", "big", True, len, 1j, [1.0, [2.0]], [None], {"a": 1}, object(), np.array(["x"]), [True]),
        "value",
    ),
    "a factor that is not finite": ("scale", False, _not_finite, "factor is"),
    "a factor that is no number": (
        "scale",
        False,
        _one_of("factor", "2", True, [2.0], torch.ones(2), 1j, len, {}),
        "factor must be one number",
    ),
    "a position past the prompt": ("", False, _past("pos"), "pos"),
    "a position that is no whole number": (
        "",
        False,
        _one_of("pos", True, [False], 0.0, [0.5], {0}, {"start": 0}, len, np.array([True]), torch.tensor(0.5), [[0]]),
        "pos takes whole numbers",
    ),
    "a position twice": ("", False, _one_of("pos", [0, 0], (-1, 0, -1)), "twice"),
    "no position": ("", False, _one_of("pos", [], (), "0:0", np.array([], int), range(0)), "pos"),
    "a text that is no slice": ("", False, _one_of("pos", "first", "0", "", "0:1:2:3", "a:b", "0.5:"), "understood"),
    "a slice backwards": ("", False, _one_of("pos", "::-1", "::0", "0:1:-2"), "step"),
    "a head past the last": ("", True, _past("head"), "head"),
    "a head that is no whole number": ("", True, _one_of("head", True, 0.0, "0", [[0]], {0}, len), "head takes whole"),
    "a head twice": ("suppress", True, _with(head=[0, 0]), "twice"),
    "no head": ("suppress", True, _one_of("head", [], (), range(0)), "head is empty"),
    "decode without generation": ("", False, _with(phase="decode", pos=None), "no row"),
    "a source that is none": ("patch", False, _source(5, 1.5, len, {1}, object(), torch.zeros(3)), "source"),
    "a source without tokens": ("patch", False, _source("", [], {"ids": []}, {"prompt": ""}), "source"),
    "a source of no ids": ("patch", False, _source([-1], [10**6], [0.5], [True], {"ids": ["w1"]}), "source"),
    "a recipe of another kind": (
        "patch",
        False,
        _source({}, {"prompt": "w1", "ids": [5]}, {"text": "w1"}, {"ids": [5], "edit": {}}, {"prompt": 5}),
        "source",
    ),
    "a source with a wrong spec": (
        "patch",
        False,
        _source(*({"ids": [5] * 14, "edits": e} for e in ({"blocks.9.hook_in": {"op": "scale"}}, 5, {"logits": {}}))),
        "source",
    ),
    "counts that differ": ("patch", False, _counts_that_differ, "equal count"),
    "a source position past it": ("patch", False, _with(source=[5, 6], source_pos=2), "source_pos"),
    "a source position that is none": ("patch", False, _one_of("source_pos", True, 0.5, [], "x"), "source_pos"),
    "an unknown key": (
        "",
        False,
        _body(lambda b: b | {"position": 1}, lambda b: b | {"hook": "logits"}, lambda b: b | {3: 4}),
        "unknown key",
    ),
    "no op": ("", False, _body(lambda b: {k: v for k, v in b.items() if k != "op"}), "names no op"),
    "a function": ("", False, _body(lambda b: len, lambda b: lambda x: x), "is a function"),
    "no dict": ("", False, _body(lambda b: 3, lambda b: "suppress", lambda b: None, lambda b: [[b]]), "must be a dict"),
}  # fmt: skip


@dataclass(frozen=True)
class Spoilt:
    """A prompt and a spec in which one thing is wrong: at which edit (from 0), and a word that its refusal must say."""

    ids: list[int]
    spec: Any
    index: int
    kind: str
    word: str


def spoilt(author: Author, kind: str) -> Spoilt:
    """A valid spec with one edit more, which is wrong in one way."""
    op, heads, spoil, word = WRONG[kind]
    example = author.example()
    prompt = len(example.ids)
    edits: list[Any] = list(example.edits)
    points = [p for p in author.points if p.heads is not None] if heads else author.points
    point = author.rng.choice(points)
    wrong, _ = author.edit(Length(prompt, prompt), point, op)
    if op == "patch" and kind != "counts that differ":
        wrong = replace(wrong, pos=0, phase="prompt")
    wrong = spoil(author, wrong, point, prompt)
    index = author.rng.randint(0, len(edits))
    if isinstance(wrong, Edit):
        edits.insert(index, wrong)
        return Spoilt(example.ids, author.written(edits), index, kind, word)
    spec = as_dict(edits[:1]) or {}  # a wrong body stands in a dict
    taken = {edit.hook for edit in edits[:1]}
    hook = next(p.name for p in author.points if p.name not in taken)
    spec = {hook: wrong} | spec if index == 0 else spec | {hook: author.rng.choice((wrong, [wrong]))}
    return Spoilt(example.ids, spec, 0 if index == 0 else 1, kind, word)
