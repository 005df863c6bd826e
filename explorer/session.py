"""The session: run, compare, generate and collect on a model that is booted."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral, Number, Real
from pathlib import Path
from typing import Any, NoReturn

import torch

from .catalogue import Catalogue
from .engine.process import one_boot
from .engine.protocol import Engine, Request, Result
from .errors import Cancelled, ExplorerError, SessionClosed, SpecError
from .given import Once
from .jobs import Job, Jobs
from .plan import Plan, tapped
from .runs import Comparison, Origin, Run
from .specs import Edit, describe, parse, parse_batch
from .status import StatusLine
from .tokens import Token, encode, token_table
from .worker import Worker

log = logging.getLogger("explorer")

Prompt = str | Sequence[int]
Build = Callable[[Callable[[str], None]], Engine]  # given how to show progress

GONE = "the session is closed: logits that were not read are gone, and nothing can run; boot a new one"
FAILED = "the session has no engine since its reboot failed; call session.reboot() again"
BUSY = "the engine is in the middle of a run: ask when it is over, or submit a job to session.jobs from here"
REBOOTED = "the session was rebooted after this run: logits that were not read by then are gone; run it again"


class Session:
    """A model in an engine, and everything that can be asked of it.

    Every method may be called from any thread; the engine itself lives in one worker thread (`jobs`). A context
    manager: leaving it closes the session.

    Attributes:
        hooks: the catalogue of hook points: names, shapes, and which cannot fire here and why.
        info: engine, version, device, dtype, mode and sizes of the model, for people to read.
        jobs: the worker thread; widgets enqueue there.
        name: the name it was booted with; `model_path`: the folder the engine loaded, None for a hub id.
    """

    def __init__(
        self,
        name: str,
        path: str,
        engine: Engine,
        tokenizer: Any,
        jobs: Jobs,
        build: Build | None = None,
    ) -> None:
        """`build` makes the engine anew, for `reboot`."""
        self.name = Path(name).name
        self.model_path = path if Path(path).is_dir() else None
        self.jobs = jobs
        self._build = build
        self._tokenizer = tokenizer
        self._engines: list[Engine] = []  # one, or none after a reboot that failed
        self._busy = False  # whether the worker thread is at work in the engine
        self._finalizer = weakref.finalize(self, jobs.close, partial(_close, self._engines))
        self._adopt(engine)

    def _adopt(self, engine: Engine) -> None:
        self._engines.append(engine)
        self.model = engine.model
        self.hooks = Catalogue(engine.model.shape, engine.model.missing, apart=engine.model.apart)
        for line in self.hooks.report():
            log.info("%s: %s", self.name, line)
        self.info = {
            "model": self.name,
            **engine.model.info,
            **vars(engine.model.shape),
            "max_model_len": engine.model.max_model_len,
        }
        self._origin = Origin(engine.model, self.hooks, self._tokenizer, _head_of(self, engine))

    # asking

    def tokens(self, prompt: Prompt, chat: bool = False) -> list[Token]:
        """The prompt as the model will read it: ids, raw and display text, special flags, position by position."""
        return token_table(self._tokenizer, self._encode(prompt, chat))

    def run(
        self,
        prompt: Prompt | Sequence[Prompt],
        edits: Any = None,
        capture: str | Sequence[str] = (),
        max_new_tokens: int = 0,
        *,
        chat: bool = False,
        logits: bool = False,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Any:
        """Run a prompt under a spec. A list of prompts is one batch and gives a list of Runs in that order.

        Args:
            prompt: a string, a list of token ids, or a list of those. Special tokens are the tokenizer's own default.
            edits: a spec (dict, Edit or list of Edits); for a batch one for all, or a list with one a prompt.
            capture: hook names, aliases, globs (`"blocks.*.hook_out"`) or `"all"`.
            max_new_tokens: tokens to generate; the run then has prompt + max_new_tokens - 1 rows.
            chat: apply the tokenizer's chat template.
            logits: compute the logits of every row now instead of on first access.
            temperature: from 0, greedy, to 2. `seed` makes sampling repeat.
            stop: generation ends when one of these strings appears.

        Returns a `Run` or a list of them. Raises `SpecError` for a spec and ValueError for a prompt that cannot run.
        """
        one, prompts = _batch(prompt)
        specs = parse_batch(edits, len(prompts)) if not one else [parse(edits)]
        runs = self._run(prompts, specs, capture, chat, logits, _sampling(max_new_tokens, temperature, seed, stop))
        return runs[0] if one else runs

    def compare(
        self, prompt: Prompt | Sequence[Prompt], edits: Any, capture: str | Sequence[str] = (), *, chat: bool = False
    ) -> Any:
        """Run a prompt clean and under a spec, in one batch. Arguments as for `run`.

        Returns a `Comparison`, or a list of them for a list of prompts.
        """
        one, prompts = _batch(prompt)
        specs = parse_batch(edits, len(prompts)) if not one else [parse(edits)]
        runs = self._run([*prompts, *prompts], [*[()] * len(prompts), *specs], capture, chat, False, {}, len(prompts))
        pairs = [Comparison(c, p) for c, p in zip(runs[: len(prompts)], runs[len(prompts) :], strict=True)]
        return pairs[0] if one else pairs

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        edits: Any = None,
        max_new_tokens: int = 40,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        *,
        capture: str | Sequence[str] = (),
        chat: bool = False,
    ) -> Any:
        """Generate text; `run` with `max_new_tokens` at least 1. The text is `run.text`."""
        if _is_number(max_new_tokens, Integral) and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1 to generate, not {max_new_tokens!r}")
        return self.run(
            prompt, edits, capture, max_new_tokens, chat=chat, temperature=temperature, seed=seed, stop=stop
        )

    def collect(
        self,
        prompts: Iterable[Prompt],
        hooks: str | Sequence[str],
        folder: str | Path,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> Path:
        """Stream the activations of many prompts to safetensors shards, at bounded memory; returns the folder.

        What is held at a time are the rows of one batch, a shard: at most 2048 tokens and 256 MiB of rows (one prompt's
        rows where a single one has more), a row of logits a prompt, and as much again while it is put together.
        Each shard `shard-00000.safetensors` holds a tensor `(rows, ...)` for each hook, and for each row its `prompt`
        (counted over all prompts from 0), `position` and `token`. `collection.json` lists the shards. An interrupted
        collection goes on where it was when it is asked for again with the same prompts.

        Args:
            prompts: a list, or any iterable: it is read as it is needed.
            hooks: names, aliases or globs of hooks that have a row a token.
            progress: called with the prompts done and their number (None for an iterable); None shows a line.

        Raises `SpecError` for hooks, ValueError for a prompt, or for a folder that holds another collection.
        """
        from .collect import collect

        if progress is not None:
            return collect(self, prompts, hooks, folder, progress)
        with StatusLine("collect") as line:
            return collect(self, prompts, hooks, folder, line.count)

    @property
    def worker(self) -> Worker:
        """For programmers: parameters of the loaded model, and how often its hooks fired."""
        return Worker(lambda fn: self._call(lambda engine, job: fn(engine)))

    def encode(self, prompt: Prompt, chat: bool = False) -> tuple[int, ...]:
        """The token ids of a prompt, checked. ValueError for one that the session cannot run."""
        return self._encode(prompt, chat, 1)

    def explore(self, prompt: str = "The Eiffel Tower is in the city of") -> Any:
        """The workbench on this session, as a widget: show it as the last line of a cell."""
        if self.jobs.closed:
            raise SessionClosed(GONE)
        try:
            from widgets import explore
        except ImportError as error:
            raise ImportError(
                f"the workbench needs Jupyter widgets ({error}): pip install 'activation-explorer[notebooks]'"
            ) from error
        return explore(self, prompt)

    def close(self) -> None:
        """Free the model's memory. Runs stay readable, but for logits not read yet. A second close does nothing."""
        self._finalizer()

    def reboot(self) -> None:
        """Boot the same model with the same arguments into this session again, whatever has become of its engine.

        What is left of the engine is freed first. `hooks`, `info` and `model` are new afterwards; earlier Runs stay
        readable, but for logits not read yet. When it fails the session has no engine: call it again. Like every method
        it may be called in a job, but not in what a run calls while it goes on (`on_progress`).
        """
        build = self._build
        if build is None or self.jobs.closed:
            raise SessionClosed(GONE)

        def again(job: Job) -> None:
            with one_boot():  # not while it waits for its turn: the job before it may boot as well
                if job.cancelled:
                    raise Cancelled("cancelled before it began")
                _close(self._engines, job)
                self._adopt(build(line))

        with StatusLine(self.name) as line:
            self._in_turn(again)
            line.say(f"{self!r}; ready in {line.seconds:.1f} s")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a Session is neither pickled nor copied: it holds a model; boot {self.name} where it is needed"
        )

    def __repr__(self) -> str:
        i = self.info
        state = " (closed)" if self.jobs.closed else ""
        return (
            f"Session of {self.name}{state}: {i['engine']}, {i['device']}, {i['dtype']}, {i['mode']}; "
            f"{i['layers']} layers, {i['heads']} heads, d_model {i['d_model']}"
        )

    # doing

    def _run(
        self,
        prompts: Sequence[Prompt],
        specs: Sequence[Any],
        capture: str | Sequence[str],
        chat: bool,
        logits: bool,
        sampling: dict[str, Any],
        numbered: int = 0,
    ) -> list[Run]:
        captured = self.hooks.match(capture)
        numbered = numbered or len(prompts)
        plan = Plan(self.hooks, self.model.dtype, lambda p: self._encode(p, False, 1))
        capturing = tapped(self.hooks, captured)
        stop = _stopper(sampling.pop("stop", ()), self._tokenizer)
        room = max(1, sampling.get("max_new_tokens", 0))
        once = Once()
        for i, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
            try:
                plan.add(once(self._encode, prompt, chat, room), spec, capturing, **sampling, stop=stop)
            except ValueError as error:
                if numbered > 1:
                    error.args = (f"prompt {i % numbered + 1}: {error}", *error.args[1:])
                raise
        results = self._call(lambda engine, job: _execute(engine, plan, job))
        for i, (request, result) in enumerate(zip(plan.requests, results, strict=True)):
            _all_matched(specs[i], request, result, f"prompt {i % numbered + 1}: " if numbered > 1 else "")
        runs = [
            Run(self._origin, request, result, spec, captured)
            for request, result, spec in zip(plan.requests, results, specs, strict=True)
        ]
        if logits:
            for run in runs:
                run.keep_logits()
        return runs

    def _encode(self, prompt: Prompt, chat: bool = False, room: int = 0) -> tuple[int, ...]:
        """Checked token ids; ValueError when they and `room` generated tokens are more than the session takes."""
        ids = tuple(encode(self._tokenizer, prompt, chat, vocab_size=self.model.shape.d_vocab))
        limit = self.model.max_model_len
        if room and len(ids) + room > limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and needs room for {room} more, but this session takes {limit} in "
                "all; shorten it, or boot with a larger max_model_len"
            )
        return ids

    def _call(self, fn: Callable[[Engine, Job], Any]) -> Any:
        job = self.jobs.current
        if job is not None and job.cancelled:  # first: closing cancels what runs, and that is how such a job ends
            raise Cancelled("cancelled")
        if self.jobs.closed:
            raise SessionClosed(GONE)
        return self._in_turn(lambda job: fn(self._engine, job))

    def _in_turn(self, fn: Callable[[Job], Any]) -> Any:
        """Run `fn(job)` in the worker thread, when the engine has nothing else to do."""

        def run(job: Job) -> Any:
            if self._busy:
                raise ExplorerError(BUSY)
            self._busy = True
            try:
                return fn(job)
            finally:
                self._busy = False

        return self.jobs.call(run)

    @property
    def _engine(self) -> Engine:
        if not self._engines:
            raise SessionClosed(FAILED)
        return self._engines[0]


def _close(engines: list[Engine], job: Job) -> None:
    while engines:
        engines.pop().close()


def _head_of(session: Session, engine: Engine) -> Callable[[torch.Tensor], torch.Tensor]:
    """The head of a session's engine for its Runs, which must not keep the model in memory when the session is gone."""
    sessions, engines = weakref.ref(session), weakref.ref(engine)

    def head(rows: torch.Tensor) -> torch.Tensor:
        alive, own = sessions(), engines()
        if alive is None:
            raise SessionClosed(GONE)

        def logits(now: Engine, job: Job) -> torch.Tensor:
            if now is not own:
                raise SessionClosed(REBOOTED)
            return now.logits(rows)

        return alive._call(logits)  # type: ignore[no-any-return]

    return head


def _execute(engine: Engine, plan: Plan, job: Job) -> list[Result]:
    """Sources first, held in the engine; then the runs that patch from them; then let the sources go."""
    held: list[str] = []
    try:
        for wave in plan.waves():
            engine.execute(wave, lambda done, total: None, lambda: job.cancelled)
            held += [request.key for request in wave]
        return engine.execute(plan.requests, job.progress, lambda: job.cancelled)
    finally:
        if held:
            engine.release(held)


def _all_matched(edits: Sequence[Edit], request: Request, result: Result, whose: str) -> None:
    """Refuse a run whose generation ended before it came to a row that an edit names."""
    rows = result.head_rows.shape[0]
    if rows == request.rows:
        return
    for i, (edit, resolved) in enumerate(zip(edits, request.edits, strict=True)):
        if min(resolved.rows) >= rows:
            raise SpecError(
                f"{whose}{describe(edit, i)}: it matched no row: the generation ended after "
                f"{len(result.generated)} tokens, before position {min(resolved.rows)} was fed",
                i,
            )


def _batch(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether it is one prompt, and the prompts as a list."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, (list, tuple)) and not all(map(_is_one_number, prompt)):
        return False, list(prompt)
    return True, [prompt]


def _is_one_number(item: Any) -> bool:
    """Whether it is meant as a token id, be it a wrong one; arrays of several ids have `__index__` too."""
    if type(item) is int:  # most are
        return True
    return isinstance(item, Number) or (hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0)


def _sampling(max_new_tokens: Any, temperature: Any, seed: Any, stop: Any) -> dict[str, Any]:
    if not _is_number(max_new_tokens, Integral) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be a whole number of at least 0, not {max_new_tokens!r}")
    if not _is_number(temperature, Real) or not 0 <= temperature <= 2:  # vLLM takes no more
        raise ValueError(f"temperature must be a number from 0 to 2, not {temperature!r}")
    if seed is not None and not _is_number(seed, Integral):
        raise ValueError(f"seed must be a whole number, not {seed!r}")
    if seed is not None and not 0 <= seed < 2**63:  # vLLM takes -1 for no seed at all
        raise ValueError(f"seed must be between 0 and 2**63 - 1, not {seed!r}")
    stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
        raise ValueError(f"stop takes a string that is not empty, or a list of them, not {stop!r}")
    return {
        "max_new_tokens": int(max_new_tokens),
        "temperature": float(temperature),
        "seed": None if seed is None else int(seed),
        "stop": tuple(stops),
    }


def _is_number(value: Any, kind: type) -> bool:
    if type(value) in (int, float):  # most are; to ask of an abstract class takes as long as all the rest
        return kind is Real or type(value) is int
    return isinstance(value, kind) and not isinstance(value, bool)


def _stopper(stop: Sequence[str], tokenizer: Any) -> Callable[[Sequence[int]], bool] | None:
    if not stop:
        return None
    return lambda generated: any(s in tokenizer.decode(generated, skip_special_tokens=True) for s in stop)
