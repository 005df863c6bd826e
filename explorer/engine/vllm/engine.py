"""The vLLM engine: requests in, steps run, captured rows out."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ...catalogue import Catalogue, HookPoint
from ...errors import BootError, Cancelled, EngineError
from ...resolve import RowEdit
from ...status import StatusLine
from ..protocol import Request, Result, unknown_parameter
from ..rows import check
from . import internals
from .boot import COMPILING, Progress, construct, describe
from .shards import Shard, agree, assemble, gather
from .wire import pack, pack_requests, received, share, unpack

# How far a row may be off after all layers, of its length, in 2 and in 4 bytes a number: ten times what rounding does.
WELL_IN_GRAPH = {2: 0.2, 4: 1e-3}
Count = TypeVar("Count")
log = logging.getLogger("explorer.vllm")


class VllmEngine:
    """An `Engine` on `vllm.LLM`: the engine core is in this process, and so is a single worker."""

    def __init__(self, path: str, options: dict[str, Any], stop_ids: Sequence[int], progress: Progress) -> None:
        """`stop_ids` end a generation: vLLM has no tokenizer here to know them from."""
        self._stop_ids = tuple(stop_ids)
        self._broken: str | None = None  # why the worker processes are of no use any more
        self._untried = False
        with internals.lifetime.booting():
            self._llm = construct(path, options, progress)
            self._watch = internals.watch(self._llm)
            self._shares = not internals.in_processes(self._llm)  # its memory with the one worker
            try:
                progress("first forward pass")
                self._first_pass()
                self._stop_ids = tuple(dict.fromkeys([*stop_ids, *internals.configured_stops(self._llm)]))
                self.model, self._shards = describe(self._llm)
                self._warm_up()
                self._untried = True  # edits in the compiled graph
            except BaseException:
                internals.free(self._llm, at_once=True)
                raise

    def _first_pass(self) -> None:
        """Some different tokens, for the worker to see what the model's hooks hold."""
        ids = range(min(16, internals.max_model_len(self._llm) - 1, internals.vocabulary(self._llm)))
        self._add(Request("first pass", tuple(ids)))
        while not internals.step(self._llm):
            pass

    def _warm_up(self) -> None:
        """Everything that is slow the first time: a prompt, a decode step, every hook, an edit, the head."""
        edit = RowEdit("blocks.0.hook_out", "scale", (0,), factor=1.0)
        hooks = {name: None for shards in self._shards for name in shards if name not in self.model.missing}
        ids = (0,) * min(16, self.model.max_model_len - 2)
        request = Request("warm-up", ids, (edit,), tuple(hooks), hold=True, max_new_tokens=2)
        (result,) = self.execute([request], lambda done, total: None, lambda: False)
        try:
            self.logits(result.head_rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model's head may raise: said at boot, and when more is asked for
            if self._broken:
                raise
            traced = log.isEnabledFor(logging.DEBUG)  # boot says it too
            log.warning("the head of this model cannot be asked for logits of every row", exc_info=traced)
            self.model = replace(self.model, no_head=f"{type(error).__name__}: {error}")
        (answers,) = zip(*self._rpc("explorer_read", {request.key: len(result.head_rows)}, True), strict=True)
        self.detach()
        self.reset_fires()
        for name, pieces in self._pieces(answers).items():
            if not agree(pieces):
                raise BootError(f"boot: workers that should hold the same at {name} do not; please report this")

    def _try_graph(self) -> None:
        """Where edits go into a compiled graph: compile it, and hold it to layers that run as they are written, once.

        What the compiler makes of a model with edits in it is not vLLM's to test. A model where the two differ, or that
        cannot be compiled so, does without: edits then run uncompiled.
        """
        if not any(self._rpc("explorer_begin_trial")):
            return
        passed, most = False, WELL_IN_GRAPH[self.model.dtype.itemsize]
        with StatusLine("edits in the compiled graph") as line:
            line(COMPILING)
            try:
                off = self._off_in_graph()
                passed = off <= most
                if not passed:
                    log.warning(
                        "edits in the compiled graph are off by %.2g of rows' length, at most %.2g is right: "
                        "they run uncompiled instead",
                        *(off, most),
                    )
            except Exception as error:  # of whatever compiler
                if self._broken:
                    raise
                log.warning("this model's graph cannot take edits (%s): they run uncompiled instead", error)
            line.say(f"edits in the compiled graph: {'ready' if passed else 'not used'} after {line.seconds:.1f} s")
        self._rpc("explorer_end_trial", passed)

    def _off_in_graph(self) -> float:
        """How far rows are off, of their length, with an edit at every hook point: in the graph and not.

        A layer at a time and for ordinary tokens, not the first ids: edits in all layers of a trained model, or rows of
        special tokens, magnify a rounding past any bound that would still tell something.
        """
        catalogue = Catalogue(self.model.shape, self.model.missing, apart=self.model.apart)
        points = [p for p in catalogue if p.editable and p.available]
        vocab, count = self.model.shape.d_vocab, min(16, self.model.max_model_len - 1)
        ids = tuple(vocab * (2 * i + 1) // (2 * count) for i in range(count))
        offs = []
        for layer in dict.fromkeys(p.layer for p in points):
            edits = tuple(_tried(i, p, count) for i, p in enumerate(points) if p.layer == layer)
            requests = [Request("in graph", ids, edits), Request("as written", ids, edits, capture=(points[0].name,))]
            got, want = (
                self.execute([r], lambda done, total: None, lambda: False)[0].head_rows.double() for r in requests
            )
            offs.append((got - want).norm() / want.norm())
        return float(torch.stack(offs).max())  # NaN too

    def execute(
        self, requests: Sequence[Request], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> list[Result]:
        """See `Engine.execute`."""
        if self._untried and any(request.edits for request in requests):
            self._untried = False
            self._try_graph()
        keys = [request.key for request in requests]
        running: dict[str, Request] = {}
        generated: dict[str, list[int]] = {key: [] for key in keys}
        try:
            self._rpc("explorer_open", *pack_requests(requests))
            internals.run_ahead(self._llm, self._takes_steps(requests))
            for request in requests:
                self._add(request)
                running[request.key] = request
            while running:
                if cancelled():
                    raise Cancelled("cancelled")
                for key, tokens, finished in self._ask(internals.step):
                    request, ours = running[key], generated[key]
                    ours += tokens[: request.max_new_tokens - len(ours)]
                    stopped = bool(tokens) and not finished and request.stop is not None and request.stop(ours)
                    if stopped:
                        internals.abort(self._llm, [key])
                    if finished or stopped:
                        del running[key]
                        progress(len(requests) - len(running), len(requests))
            forget = [request.key for request in requests if not request.hold]
            self._ask(internals.catch_up)
            rows = {r.key: len(r.ids) + max(0, len(generated[r.key]) - 1) for r in requests}
            answers = zip(*self._rpc("explorer_read", rows, False, self._shares, forget), strict=True)
            results = [self._result(r, tuple(generated[r.key]), a) for r, a in zip(requests, answers, strict=True)]
        except BaseException:
            internals.give_up(self._llm, list(running))
            self.release(keys)
            raise
        return results

    def logits(self, head_rows: torch.Tensor) -> torch.Tensor:
        """See `Engine.logits`."""
        rows = share(head_rows) if self._shares else pack(head_rows)
        answers = self._rpc("explorer_logits", rows, self._shares)
        found = next((answer for answer in answers if answer is not None), None)
        if found is None:
            raise EngineError("no worker has the model's head; please report this")
        return received(found)

    def release(self, keys: Sequence[str]) -> None:
        """See `Engine.release`."""
        if self._broken is None:  # else it is gone with the workers
            self._rpc("explorer_release", list(keys))

    def parameter(self, name: str) -> torch.Tensor:
        """See `Engine.parameter`. Names are vLLM's: q, k and v are one `qkv_proj`."""
        answers = self._rpc("explorer_parameter", name)
        held = [answer for answer in answers if "tensor" in answer]
        if not held:
            raise unknown_parameter(name, list(dict.fromkeys(n for answer in answers for n in answer["close"])))
        first = held[0]
        shards = [unpack(answer["tensor"]) for answer in held if answer["stage"] == first["stage"]]
        if first["axis"] is None:
            if any(not torch.equal(shard, shards[0]) for shard in shards[1:]):
                raise ValueError(
                    f"workers share {name} in a way that is not known; read it with tensor_parallel_size=1"
                )
            return shards[0]
        whole = assemble(shards, first["axis"], first["sections"])
        return whole if first["length"] is None else whole.narrow(first["axis"], 0, first["length"])

    def fires(self) -> dict[str, int]:
        """See `Engine.fires`."""
        return _agreed(self._rpc("explorer_fires"))

    def reset_fires(self) -> None:
        """See `Engine.reset_fires`."""
        self._rpc("explorer_reset_fires")

    def detach(self) -> None:
        """See `Engine.detach`."""
        self._rpc("explorer_detach")

    def close(self) -> None:
        """See `Engine.close`."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            try:
                internals.free(llm, at_once=self._broken is not None)
            finally:
                del llm  # so that its memory can be given back
                internals.lifetime.left()

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Ask each worker. One that cannot answer says so: the workers go on, and the error is raised here."""
        if self._shares:
            return self._ask(internals.call, method, *args)
        answers = self._ask(internals.rpc, "explorer_answer", method, *args)
        for answer in answers:
            if "raised" in answer:
                kind = torch.OutOfMemoryError if answer["raised"] == "OutOfMemoryError" else EngineError
                raise kind(f"a worker failed at {method}: {answer['raised']}: {answer['says']}")
        return [answer["answer"] for answer in answers]

    def _ask(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Have the workers do something. A worker process that dies or fails meanwhile is the end of all of them."""
        if self._broken is not None:
            raise EngineError(self._broken)
        try:
            return ask(self._llm, *args)
        except Exception as error:
            if not internals.in_processes(self._llm):
                raise
            what = self._watch.died() or f"one failed: {error}"
            self._broken = f"the engine has lost its worker processes ({what}); session.reboot() boots the model again"
            raise EngineError(self._broken) from error

    def _takes_steps(self, requests: Sequence[Request]) -> bool:
        """Whether they take more than one forward pass."""
        if any(request.max_new_tokens > 1 for request in requests):
            return True
        return not internals.fit_in_one_pass(self._llm, [len(request.ids) for request in requests])

    def _add(self, request: Request) -> None:
        tokens = max(1, request.max_new_tokens)  # vLLM always samples; a run of the prompt alone drops the token
        internals.add(
            self._llm,
            request.key,
            request.ids,
            internals.sampling(tokens, request.temperature, self._stop_ids),
            # the V2 runner would take one from numpy's random numbers, which are the user's
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            extra_args={"explorer": request.key},
        )

    def _result(self, request: Request, generated: tuple[int, ...], answers: Sequence[dict[str, Any]]) -> Result:
        """Put together what each worker answered about one request."""
        result = Result(
            generated=generated,
            head_rows=received(_first("head_rows", answers)),
            last_logits=received(_first("last_logits", answers)),
            captures={name: gather(pieces) for name, pieces in self._pieces(answers).items()},
        )
        check(request, result, _agreed([answer["edited"] for answer in answers]))
        return result

    def _pieces(self, answers: Sequence[dict[str, Any]]) -> dict[str, list[tuple[Shard, torch.Tensor]]]:
        """Of each hook that was captured, the shard that each worker holds."""
        pieces: dict[str, list[tuple[Shard, torch.Tensor]]] = {}
        for shards, answer in zip(self._shards, answers, strict=True):
            for name, given in answer["captures"].items():
                pieces.setdefault(name, []).append((shards[name], received(given)))
        return pieces


def _tried(i: int, point: HookPoint, rows: int) -> RowEdit:
    """The edit that a hook point is tried with, the `i`-th of them: every op, and single heads where there are any.

    Only single heads are set: to set a row of the stream would hide whatever came before.
    """
    at, heads, value = (i % rows,), None if point.heads is None else (0,), torch.full((1, 1, 1), 0.25)
    if i % 2:
        return RowEdit(point.name, "scale", at, heads, factor=0.5)
    return RowEdit(point.name, "add" if heads is None or i % 4 else "set", at, heads, value=value)


def _first(name: str, answers: Sequence[dict[str, Any]]) -> Any:
    return next(answer[name] for answer in answers if name in answer)


def _agreed(counts: Sequence[Mapping[str, Count]]) -> dict[str, Count]:
    """What workers counted at hooks; EngineError when two that hold the same hook counted differently."""
    merged: dict[str, Count] = {}
    for of_worker in counts:
        for name, count in of_worker.items():
            if merged.setdefault(name, count) != count:
                raise EngineError(
                    f"{name}: one worker counted {merged[name]}, another {count}; they did not do the same, "
                    "please report this"
                )
    return merged
