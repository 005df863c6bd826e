"""The vLLM engine: requests in, steps run, captured rows out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import Cancelled
from ...hooks import Catalogue
from ...resolve import RowEdit
from ..protocol import Request, Result
from ..rows import check
from . import internals
from .boot import Progress, construct, describe
from .wire import pack, pack_requests, unpack


class VllmEngine:
    """An `Engine` on `vllm.LLM`, eager mode, V1 model runner, one process."""

    def __init__(self, path: str, options: dict[str, Any], stop_ids: Sequence[int], progress: Progress) -> None:
        """`stop_ids` end a generation: vLLM has no tokenizer here to know them from."""
        self._stop_ids = list(stop_ids)
        with internals.lifetime.booting():
            self._llm = construct(path, options, progress)
            try:
                self.model = describe(self._llm)
                progress("first forward pass")
                self._warm_up()
            except BaseException:
                internals.free(self._llm)
                raise

    def _warm_up(self) -> None:
        """Everything that is slow the first time: a prompt, a decode step, a capture, an edit, the head."""
        edit = RowEdit("blocks.0.hook_out", "scale", (0,), factor=1.0)
        capture = tuple(p.name for p in Catalogue(self.model.shape) if p.layer == 0 and not p.derived_from)
        ids = (0,) * min(16, self.model.max_model_len - 2)
        request = Request("warm-up", ids, (edit,), capture, max_new_tokens=2)
        self.logits(self.execute([request], lambda done, total: None, lambda: False)[0].head_rows)

    def execute(
        self, requests: Sequence[Request], progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> list[Result]:
        """See `Engine.execute`."""
        keys = [request.key for request in requests]
        running: dict[str, Request] = {}
        generated: dict[str, tuple[int, ...]] = {}
        try:
            self._rpc("explorer_open", *pack_requests(requests))
            for request in requests:
                internals.add(self._llm, request.key, request.ids, self._params(request))
                running[request.key] = request
            while running:
                if cancelled():
                    raise Cancelled("cancelled")
                for output in internals.step(self._llm):
                    request = running[output.request_id]
                    tokens = tuple(output.outputs[0].token_ids)
                    generated[request.key] = tokens[: request.max_new_tokens]
                    stopped = not output.finished and request.stop is not None and request.stop(tokens)
                    if stopped:
                        internals.abort(self._llm, [request.key])
                    if output.finished or stopped:
                        del running[request.key]
                        progress(len(requests) - len(running), len(requests))
            answers = self._rpc("explorer_read", keys)
            results = [self._result(r, generated[r.key], a) for r, a in zip(requests, answers, strict=True)]
        except BaseException:
            internals.abort(self._llm, list(running))
            self.release(keys)
            raise
        self.release([request.key for request in requests if not request.hold])
        return results

    def logits(self, head_rows: torch.Tensor) -> torch.Tensor:
        """See `Engine.logits`."""
        return unpack(self._rpc("explorer_logits", pack(head_rows)))

    def release(self, keys: Sequence[str]) -> None:
        """See `Engine.release`."""
        self._rpc("explorer_release", list(keys))

    def close(self) -> None:
        """See `Engine.close`."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            try:
                internals.free(llm)
            finally:
                internals.lifetime.left()

    def _rpc(self, method: str, *args: Any) -> Any:
        return internals.rpc(self._llm, method, *args)

    def _params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            output_kind=RequestOutputKind.FINAL_ONLY if request.stop is None else RequestOutputKind.CUMULATIVE,
            max_tokens=max(1, request.max_new_tokens),  # vLLM always samples; a run of the prompt alone drops the token
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=self._stop_ids,
            detokenize=False,
            extra_args={"explorer": request.key},
        )

    @staticmethod
    def _result(request: Request, generated: tuple[int, ...], answer: dict[str, Any]) -> Result:
        result = Result(
            generated=generated,
            head_rows=unpack(answer["head_rows"]),
            last_logits=unpack(answer["last_logits"]),
            captures={name: unpack(packed) for name, packed in answer["captures"].items()},
        )
        check(request, result, answer["edited"])
        return result
