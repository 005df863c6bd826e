"""What comes back: a Run, and the Comparison of a clean and a patched one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch

from .analysis import attention, metrics
from .catalogue import Catalogue, HookPoint
from .engine.protocol import Model, Request, Result
from .errors import EngineError, NotFinite
from .given import plural, whole
from .resolve import pin
from .specs import Edit, to_json
from .tokens import Token, Tokenizer, one_token, texts, token_table


class TopToken(NamedTuple):
    """One candidate for the next token."""

    text: str
    id: int
    prob: float
    logprob: float


class TokenChange(NamedTuple):
    """One candidate for the next token, clean and patched; `change` is patched_prob - clean_prob."""

    text: str
    id: int
    clean_prob: float
    patched_prob: float
    change: float


class Difference(NamedTuple):
    """A number of a clean and of a patched run."""

    clean: float
    patched: float


class Origin(NamedTuple):
    """What a Run needs of the session that made it: the model, names, words, and the engine's head."""

    model: Model
    catalogue: Catalogue
    tokenizer: Tokenizer
    head: Callable[[torch.Tensor], torch.Tensor]  # (rows, d_model) -> (rows, d_vocab); raises SessionClosed


class Run:
    """One forward pass, and optional generation, of one prompt under one spec.

    A run has a row for each token that was fed: the prompt's, and with generation every generated one but the last.
    Nothing changes a run: every tensor that it gives is the caller's own, to write to as well.

    Attributes:
        ids: token ids of the prompt and the generated tokens.
        prompt_length: how many of them are the prompt's.
        rows: how many tokens were fed.
        captured: canonical names of what was captured.
        spec: the edits as plain JSON, `{}` for a clean run.
    """

    def __init__(
        self, origin: Origin, request: Request, result: Result, edits: Sequence[Edit], captured: Sequence[str]
    ) -> None:
        self.ids = (*request.ids, *result.generated)
        self.prompt_length = len(request.ids)
        self.rows = result.head_rows.shape[0]
        self.captured = tuple(captured)
        self._edits = tuple(edits)
        self._request = request
        self._origin = origin
        self._captures = result.captures
        self._head_rows = result.head_rows
        self._last_logits = result.last_logits
        self._logits: torch.Tensor | None = None

    # what was captured

    def __getitem__(self, hook: str) -> torch.Tensor:
        """What a hook held: CPU tensor in the engine's dtype, a new one each time.

        `(rows, width)`; `(rows, heads, d_head)` on head hooks; `(heads, query, key)` for patterns and scores;
        `(rows, d_vocab)` float32 for the logits. At an edited hook this is the value after the edits.
        KeyError when the hook was not captured; `SpecError` when there is no such hook.
        """
        point = self._point(hook)
        return self._replay(point) if point.derived_from else self.view(hook).clone()

    def view(self, hook: str) -> torch.Tensor:
        """Like `run[hook]`, but the run's own memory where it has any: nobody may write to it."""
        point = self._point(hook)
        if point.derived_from:
            return self._replay(point)
        return self._every_logit() if point.component == "logits" else self._captures[point.name]

    def _point(self, hook: str) -> HookPoint:
        point = self._origin.catalogue.require(hook)
        if point.name not in self.captured:
            raise KeyError(f"{point.name} was not captured; run again with capture={hook!r} (or a list that holds it)")
        return point

    def _replay(self, point: HookPoint) -> torch.Tensor:
        q, k = (self._captures[name] for name in point.derived_from)
        assert point.layer is not None
        replay = attention.pattern if point.component == "pattern" else attention.scores
        return replay(q, k, self._origin.model.attention[point.layer]).to(q.dtype)

    def __contains__(self, hook: object) -> bool:
        return hook in self._origin.catalogue and self._origin.catalogue.find(hook).name in self.captured

    def __iter__(self) -> Iterator[str]:
        return iter(self.captured)

    def __len__(self) -> int:
        return len(self.captured)

    def __bool__(self) -> bool:
        return True  # a run that captured nothing is still a run

    def pattern(self, layer: int) -> torch.Tensor:
        """Attention weights of a layer: `(heads, query, key)`. Needs `capture="blocks.{layer}.attn.hook_pattern"`."""
        layers = self._origin.model.shape.layers
        number = whole(layer, "layer")
        if not -layers <= number < layers:
            raise IndexError(f"layer {number} is past the model's {layers} layers")
        return self[f"blocks.{number % layers}.attn.hook_pattern"]

    # what was predicted

    @property
    def logits(self) -> torch.Tensor:
        """Logits at every row, float32 `(rows, d_vocab)`: the model's own head, applied in the worker on first access.

        No second forward pass; each read copies them, `logits_at` a single row. Raises `SessionClosed` when the session
        was closed before they were read, `EngineError` where the model's head gives the last row's alone. Warns when
        some are not finite.
        """
        return self._every_logit().clone()

    def keep_logits(self) -> None:
        """Have the logits of every row computed now, so that they can be read when the session is closed."""
        self._every_logit()

    def _every_logit(self) -> torch.Tensor:
        if self._logits is None:
            if self.rows > 1 and self._origin.model.no_head:
                raise EngineError(
                    "this model's head gives logits of the last position only, so there are none of earlier ones and "
                    f"no loss ({self._origin.model.no_head}); top, logit_diff and kl work at the last position"
                )
            if self.rows > 1:
                self._logits = self._origin.head(self._head_rows)
                self._logits[-1] = self._last_logits  # the very numbers that were served: of a batch's own rounding
            else:
                self._logits = self._last_logits[None]
            good = _finite(self._logits)
            if not good.all():
                first, count = int((~good).nonzero()[0]), plural(int((~good).sum()), "position")
                warnings.warn(self._overflow(f"{count} (the first is {first})"), RuntimeWarning, stacklevel=3)
        return self._logits

    def _overflow(self, where: str) -> str:
        """What to say of logits that are NaN or infinite."""
        dtype = str(self._origin.model.dtype).removeprefix("torch.")
        if self._edits:
            return f"the logits at {where} are not finite: with this run's edits, numbers grow past what {dtype} holds"
        advice = "its weights may be damaged" if dtype == "float32" else "boot with dtype='float32'"
        return f"the logits at {where} are not finite in {dtype}, and no edit did it, but the model itself; {advice}"

    @property
    def loss(self) -> torch.Tensor:
        """Nats a token, `(rows - 1,)`: entry t scores token t + 1."""
        return metrics.next_token_loss(self._every_logit(), self.ids[: self.rows])

    def top(self, k: int = 10, position: int = -1) -> list[TopToken]:
        """The k most probable next tokens at a position, best first."""
        ids = self._best(k, position)
        values = self._log_probs_of(ids, position)
        words = self._texts(ids)
        return [TopToken(t, i, math.exp(v), v) for t, i, v in zip(words, ids, values, strict=True)]

    def _best(self, k: int, position: int = -1) -> list[int]:
        """The ids of `top`."""
        if whole(k, "k") < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        row = self._row(position)
        ids = metrics.largest(row, whole(k, "k"))
        if not math.isfinite(row[ids[0]]):
            raise NotFinite(self._overflow(f"position {self._place(position)}"))
        return ids

    def _log_probs_of(self, ids: list[int], position: int = -1) -> list[float]:
        """Log-probabilities of some next tokens at a position, for whoever asked for the `best` there."""
        return metrics.log_probs(self._row(position)).numpy()[ids].tolist()  # type: ignore[no-any-return]

    def logit_diff(self, a: str | int, b: str | int, position: int = -1) -> float:
        """logit(a) - logit(b) at a position; a and b are one-token strings or ids."""
        logits = self.logits_at(position)
        return float(logits[self.token_id(a)] - logits[self.token_id(b)])

    def logits_at(self, position: int = -1) -> torch.Tensor:
        """Logits of one row, float32 `(d_vocab,)`; the last needs no call to the worker.

        IndexError past the rows; `NotFinite` for logits that are NaN or infinite.
        """
        row = self._row(position)
        if not _finite(row):
            raise NotFinite(self._overflow(f"position {self._place(position)}"))
        return row.clone()

    def _place(self, position: int) -> int:
        at = whole(position, "position", "; -1 is the last row")
        if not -self.rows <= at < self.rows:
            raise IndexError(f"position {at} is past the run's {self.rows} rows")
        return at % self.rows

    def _row(self, position: int) -> torch.Tensor:
        """The run's own memory."""
        at = self._place(position)
        return self._last_logits if at == self.rows - 1 else self._every_logit()[at]

    def token_id(self, token: str | int) -> int:
        """The id of a one-token string, or the id itself. ValueError when it is several tokens."""
        return one_token(self._origin.tokenizer, token, vocab_size=self._origin.model.shape.d_vocab)

    # what was run

    @property
    def tokens(self) -> list[Token]:
        """Prompt and generated tokens, position by position."""
        return list(self._tokens)

    @cached_property
    def _tokens(self) -> list[Token]:
        return token_table(self._origin.tokenizer, self.ids)

    @property
    def generated(self) -> tuple[int, ...]:
        """Ids of the generated tokens."""
        return self.ids[self.prompt_length :]

    @cached_property
    def text(self) -> str:
        """The generated text; empty when nothing was generated. `NotFinite` when its last logits are not."""
        if self.generated and not _finite(self._last_logits):
            raise NotFinite(self._overflow(f"position {self.rows - 1}"))
        return str(self._origin.tokenizer.decode(self.generated, skip_special_tokens=True))

    @property
    def spec(self) -> dict[str, Any]:
        """The edits as plain JSON, `{}` for a clean run. Patch sources are recipes."""
        return to_json(self._edits, self._name)

    def recipe(self) -> dict[str, Any]:
        """How to make the fed tokens' activations again: `{"ids": [...], "edits": {...}}`, plain JSON."""
        out: dict[str, Any] = {"ids": list(self.fed)}
        return out | {"edits": to_json(self.fed_edits, self._name)} if self.fed_edits else out

    def _name(self, hook: str) -> str:
        return self._origin.catalogue.find(hook).name

    @property
    def fed(self) -> tuple[int, ...]:
        """Ids of the tokens that were fed, one a row."""
        return self.ids[: self.rows]

    @property
    def fed_edits(self) -> tuple[Edit, ...]:
        """The edits as they act on the fed tokens in one pass: after a generation, with the positions they touched."""
        if self.rows == self.prompt_length:
            return self._edits
        pinned = [pin(e, r, self.rows) for e, r in zip(self._edits, self._request.edits, strict=True)]
        return tuple(edit for edit in pinned if edit is not None)

    def made_in(self, catalogue: Catalogue) -> bool:
        """Whether the session with this catalogue ran it."""
        return self._origin.catalogue is catalogue

    def rows_at(self, hook: str) -> torch.Tensor | None:
        """The captured rows of a tapped hook, None when it was not captured."""
        return self._captures.get(hook)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Run is neither pickled nor copied (nothing changes it, so share it); run.recipe() is plain JSON that "
            "makes it again, and safetensors saves what it captured"
        )

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """What tokens stand for."""
        return texts(self._origin.tokenizer, ids)

    def __repr__(self) -> str:
        count = sum(len(b) if isinstance(b, list) else 1 for b in self.spec.values())
        prompt = "".join(token.text for token in self.tokens[: self.prompt_length])
        lines = [
            f"Run of {prompt if len(prompt) <= 60 else prompt[:57] + '...'!r}",
            f"  {plural(self.rows, 'row')}, {plural(len(self.generated), 'generated token')}, "
            f"{plural(count, 'edit')}, {plural(len(self.captured), 'hook')} captured",
            f"  {self._outcome()}",
        ]
        return "\n".join(lines)

    def _outcome(self) -> str:
        try:
            if self.generated:
                return f"text: {self.text!r}"
            return "next: " + ", ".join(f"{t.text!r} {t.prob:.1%}" for t in self.top(5))
        except NotFinite as error:
            return str(error)


class Comparison:
    """A clean and a patched run of the same prompt, made in one batch."""

    def __init__(self, clean: Run, patched: Run) -> None:
        self.clean = clean
        self.patched = patched

    def top(self, k: int = 10, position: int = -1) -> list[TokenChange]:
        """The union of both runs' k most probable next tokens, most probable (in either) first."""
        runs = (self.clean, self.patched)
        ids = list(dict.fromkeys(i for run in runs for i in run._best(k, position)))
        clean, patched = ([math.exp(v) for v in run._log_probs_of(ids, position)] for run in runs)
        words = self.clean._texts(ids)
        rows = [TokenChange(t, i, c, p, p - c) for t, i, c, p in zip(words, ids, clean, patched, strict=True)]
        return sorted(rows, key=lambda row: -max(row.clean_prob, row.patched_prob))

    def logit_diff(self, a: str | int, b: str | int, position: int = -1) -> Difference:
        """logit(a) - logit(b), clean and patched."""
        return Difference(self.clean.logit_diff(a, b, position), self.patched.logit_diff(a, b, position))

    def kl(self, position: int = -1) -> float:
        """KL(clean || patched) of the next-token distributions, in nats."""
        return float(metrics.kl(self.clean.logits_at(position), self.patched.logits_at(position)))

    def __repr__(self) -> str:
        try:
            lines = [
                *(
                    f"{r.text!r:16} {r.clean_prob:7.1%} -> {r.patched_prob:7.1%}  {r.change * 100:+6.1f}"
                    for r in self.top(5)
                ),
                f"KL(clean || patched) {self.kl():.3f} nats",
            ]
        except NotFinite as error:
            lines = [str(error)]
        return "\n  ".join(["Comparison, clean -> patched", *lines])


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Of each row `(..., d_vocab)` whether it is a distribution: no NaN, no infinity but -inf for what is ruled out."""
    return logits.amax(-1).isfinite()
