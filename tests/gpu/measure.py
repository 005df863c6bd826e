"""What plain vLLM, this engine, TransformerLens's vLLM source and transformers with hooks take for the same questions.

    python -m tests.gpu.measure --model 1b --mode compiled --out FOLDER

Each side runs in a process of its own, but for plain vLLM and ours: they live in one, with the same options, and are
timed in turns, for the clock of a machine wanders. `FOLDER/measure.jsonl` has a line for each figure as soon as it is
there, `measure.json` all of them with versions, GPU, date and command, `measure.md` the table, which is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .models import folder_of
from .report import about, table

SIDES = ("vllm", "transformer-lens", "transformers")
NAMES = ("plain", "ours", "transformer-lens", "transformers")
ON_GPU = torch.cuda.is_available()
ROOM = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.3}
# A GPU's cache would be as large as the memory that is left.
ROOM |= {"kv_cache_memory_bytes": 2**31 if ON_GPU else 2**28}
SWEEP = 16  # layers and positions

# The most that ours may take, of the plain forward pass of as many tokens (of plain's same prompts for the sweep).
BOUNDS = {
    "forward, 64 tokens": {"compiled": 1.05, "eager": 1.03},
    "forward, 512 tokens": {"compiled": 1.05, "eager": 1.03},
    "decode, 64 tokens": {"compiled": 1.05, "eager": 1.03},
    "compare, one edit and top 20, 64 tokens": {"compiled": 1.25},
    "sweep of patches, 16 x 16": {"compiled": 1.15},
    "all hooks, 512 tokens": {"compiled": 4.0},
    "logits of all 512 positions": {"compiled": 6.0},
    "second boot": {"compiled": 1.15},
    "memory when idle, of the weights": {"compiled": 0.01, "eager": 0.01},
}


@dataclass(frozen=True)
class Question:
    """Something to time: what it is called, ours, what plain vLLM does meanwhile, and how often."""

    what: str
    ours: Callable[[], Any]
    plain: Callable[[], Any]
    repeats: int = 40


def drawn(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same every time."""
    return random.Random(length + 1000 * seed).sample(range(100, 1000), length)


def swept(layers: int) -> list[tuple[int, int]]:
    """Layers and positions of the sweep: 16 of each, some layers more than once in a model of fewer."""
    return [(i * layers // SWEEP, pos) for i in range(SWEEP) for pos in range(SWEEP)]


def synchronized(call: Callable[[], Any]) -> float:
    """Seconds that a call takes, the GPU's work with it."""
    start = time.perf_counter()
    call()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


# plain vLLM and ours


def questions(session: Any, llm: Any) -> Iterator[Question]:
    """What is asked of both; of plain vLLM a forward pass of the same prompts."""
    from vllm import SamplingParams

    def plain(prompts: list[list[int]], tokens: int = 1) -> Callable[[], Any]:
        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        return lambda: llm.generate(given, params, use_tqdm=False)

    layers = session.model.shape.layers
    stream = f"blocks.{layers // 3}.hook_out"
    short, long, start = drawn(64), drawn(512), drawn(16)
    for ids in (short, long):
        yield Question(f"forward, {len(ids)} tokens", lambda ids=ids: session.run(ids), plain([ids]), 60)
    edit = {stream: {"op": "scale", "factor": 0.5, "pos": 3}}
    one = plain([short])
    yield Question("compare, one edit and top 20, 64 tokens", lambda: session.compare(short, edit).top(20), one)
    yield Question("all hooks, 512 tokens", lambda: session.run(long, capture="all"), plain([long]))
    theirs = ["embed.hook_out", "ln_final.hook_normalized", "blocks.*.hook_out", "blocks.*.attn.hook_out"]
    theirs.append("blocks.*.mlp.hook_out")
    yield Question("TransformerLens's hooks, 512 tokens", lambda: session.run(long, capture=theirs), plain([long]))
    yield Question("logits of all 512 positions", lambda: session.run(long, logits=True), plain([long]))
    yield Question("decode, 64 tokens", lambda: decode(session, start, None), plain([start], 64), 15)
    steered = {stream: {"op": "add", "value": 0.01, "phase": "both"}}
    yield Question("decode, 64 tokens, steered", lambda: decode(session, start, steered), plain([start], 64), 7)
    many = [drawn(SWEEP, seed=1)] * SWEEP**2
    yield Question("256 prompts of 16 tokens", lambda: session.run(many), plain(many), 15)
    specs = [
        {f"blocks.{layer}.hook_out": {"op": "patch", "source": {"ids": start}, "pos": pos}}
        for layer, pos in swept(layers)
    ]
    yield Question("sweep of patches, 16 x 16", lambda: session.run(many, specs), plain(many), 15)


def decode(session: Any, ids: list[int], edits: Any) -> None:
    """64 tokens; an end of text before that would make it cheaper than plain vLLM, which goes on."""
    written = len(session.run(ids, edits, max_new_tokens=64).generated)
    if written < 64:
        raise RuntimeError(f"the model ended the text after {written} tokens: the figure would be too good")


def in_turns(question: Question) -> dict[str, Any]:
    """Both in turns, the order turned round each time; medians in ms, and the median of their ratios."""
    sides = {"plain": question.plain, "ours": question.ours}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(question.repeats + 3):  # the first three warm up
        for name in list(sides)[:: 1 if i % 2 else -1]:
            taken[name].append(synchronized(sides[name]))
    kept = {name: seconds[3:] for name, seconds in taken.items()}
    ratios = sorted(mine / theirs for mine, theirs in zip(kept["ours"], kept["plain"], strict=True))
    return {
        "plain": statistics.median(kept["plain"]) * 1e3,
        "ours": statistics.median(kept["ours"]) * 1e3,
        "ratio": statistics.median(ratios),
        "middle half of ratios": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "repeats": question.repeats,
    }


@contextmanager
def timed(told: dict[str, float], name: str) -> Iterator[None]:
    """Seconds that something takes, under a name."""
    start = time.perf_counter()
    yield
    told[name] = time.perf_counter() - start


def measure_vllm(folder: Path, mode: str, only: str) -> Iterator[dict[str, Any]]:
    """Boot each of them twice, plain vLLM first; then ask the second ones everything."""
    import explorer

    from ..engine.compare import plain_twin

    if ON_GPU:
        torch.zeros(1, device="cuda")  # the first boot shall not pay for CUDA's start
    import vllm  # noqa: F401  (nor for this)

    options = ROOM | {"dtype": "bfloat16"}
    first: dict[str, float] = {}
    edit = {"blocks.0.hook_out": {"op": "scale", "factor": 0.5, "pos": 3}}

    @contextmanager
    def plain() -> Iterator[Any]:
        with plain_twin(str(folder), mode, **options) as llm:
            yield llm

    def ours() -> Any:
        return explorer.boot(folder, mode=mode, **options)

    for name, boot in (("plain", plain), ("ours", ours)):
        with timed(first, name):
            booted = boot()
            engine = booted.__enter__()
        if name == "ours":
            with timed(first, "edit"):
                engine.run(drawn(64), edit)
        booted.__exit__(None, None, None)
        del booted, engine
    edits = {"ours": first.pop("edit")}
    yield row("first boot", "s", first)
    yield row("first edit, new", "s", edits)
    second: dict[str, float] = {}
    held: dict[str, float] = {}
    with ExitStack() as stack:
        before = memory()
        with timed(second, "plain"):
            llm = stack.enter_context(plain())
        after_plain = memory()
        with timed(second, "ours"):
            session = stack.enter_context(ours())
        held = {"plain": after_plain - before, "ours": memory() - after_plain}
        yield row("second boot", "s", second, ratio=second["ours"] / second["plain"])
        weights = session.info["weights_bytes"]
        gib = {name: size / 2**30 for name, size in held.items()}
        share = (held["ours"] - held["plain"]) / weights
        yield row("memory when idle, of the weights", "GiB", gib, ratio=share, weights=weights / 2**30)
        with timed(second, "edit"):
            session.run(drawn(64), edit)
        yield row("first edit, compiled before", "s", {"ours": second["edit"]})
        more = (memory() - after_plain - held["plain"]) / weights
        yield row("memory after edits, of the weights", "GiB", {"ours": more * weights / 2**30}, ratio=more)
        for question in questions(session, llm):
            if only in question.what:
                yield row(question.what, "ms", in_turns(question))


def memory() -> int:
    """Bytes that this process's tensors take on the GPU; on a CPU what all of it takes."""
    if ON_GPU:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    import psutil

    return int(psutil.Process().memory_info().rss)


def row(what: str, unit: str, figures: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A line of results: figures of the sides, and what else belongs to them."""
    return {"what": what, "unit": unit, **figures, **more}


# the others, each alone


def alone(name: str, what: str, call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """The median of one side, in ms."""
    for _ in range(2):
        call()
    return row(what, "ms", {name: statistics.median(synchronized(call) for _ in range(repeats)) * 1e3})


def measure_transformer_lens(folder: Path, mode: str, only: str) -> Iterator[dict[str, Any]]:
    """As its users do: `run_with_cache`, `intervene=`; a sweep one prompt after the other, since specs are global."""
    from transformer_lens.model_bridge.remote_bridge import RemoteBridge

    me = "transformer-lens"
    boots: dict[str, float] = {}

    def boot(**keywords: Any) -> Any:
        return RemoteBridge.boot_vllm(str(folder), dtype=torch.bfloat16, **ROOM, **keywords)

    eager = {"enforce_eager": True} if mode == "eager" else {}
    before = memory()
    with timed(boots, "first"):
        bridge = boot(enable_position_interventions=True, **eager)
    yield row("first boot", "s", {me: boots["first"]})
    yield row("memory when idle, of the weights", "GiB", {me: (memory() - before) / 2**30})
    short, long, start = (torch.tensor([drawn(n)]) for n in (64, 512, 16))
    layers = bridge.cfg.n_layers
    edit = {f"blocks.{layers // 3}.hook_out": {"op": "scale", "factor": 0.5, "pos": 3}}

    def compare() -> Any:
        clean, patched = bridge.forward(short), bridge.forward(short, intervene=edit)
        return [logits[0, -1].softmax(-1).topk(20) for logits in (clean, patched)]

    def sweep(return_logits: bool) -> None:
        names = [f"blocks.{layer}.hook_out" for layer in range(layers)]
        _, cache = bridge.run_with_cache(start, names_filter=names)
        corrupt = torch.tensor([drawn(SWEEP, seed=1)])
        for layer, pos in swept(layers):
            name = f"blocks.{layer}.hook_out"
            spec = {name: {"op": "set", "value": cache[name][0, pos], "pos": pos}}
            bridge.forward(corrupt, intervene=spec, return_logits=return_logits, return_type="logits")

    asked: list[tuple[str, Callable[[], Any], int]] = [
        ("forward, 64 tokens", lambda: bridge.forward(short, return_logits=False), 20),
        ("forward, 512 tokens", lambda: bridge.forward(long, return_logits=False), 20),
        ("compare, one edit and top 20, 64 tokens", compare, 10),
        ("logits of all 512 positions", lambda: bridge.forward(long), 5),
        ("TransformerLens's hooks, 512 tokens", lambda: bridge.run_with_cache(long), 5),
        ("sweep of patches, 16 x 16", lambda: sweep(True), 1),
        ("sweep of patches, 16 x 16, without logits", lambda: sweep(False), 1),
    ]
    for what, call, repeats in asked:
        if only in what:
            yield alone(me, what, call, repeats)
    bridge.close()
    with timed(boots, "second"):
        boot(**eager).close()
    yield row("second boot", "s", {me: boots["second"]})


@torch.inference_mode()
def measure_transformers(folder: Path, mode: str, only: str) -> Iterator[dict[str, Any]]:
    """transformers' own attention in bf16 with PyTorch hooks; a sweep is one batch with a hook a layer."""
    from transformers import AutoModelForCausalLM

    me, device = "transformers", "cuda" if ON_GPU else "cpu"
    boots: dict[str, float] = {}
    with timed(boots, "first"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        model(torch.tensor([drawn(64)], device=device))
    yield row("first boot", "s", {me: boots["first"]})
    layers = list(model.model.layers)
    short, long, start = ([drawn(n)] for n in (64, 512, 16))

    def forward(batch: list[list[int]], **keywords: Any) -> Any:
        return model(torch.tensor(batch, device=device), use_cache=False, **keywords).logits

    @contextmanager
    def after(hooks: Iterable[tuple[Any, Callable[[torch.Tensor], torch.Tensor | None]]]) -> Iterator[None]:
        """Hooks on modules' outputs."""

        def hook(act: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[..., Any]:
            def after(_: Any, __: Any, out: Any) -> Any:
                new = act(out[0] if isinstance(out, tuple) else out)
                return out if new is None else (new, *out[1:]) if isinstance(out, tuple) else new

            return after

        handles = [module.register_forward_hook(hook(act)) for module, act in hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def compare() -> Any:
        def halve(x: torch.Tensor) -> None:
            x[1, 3] *= 0.5

        with after([(layers[len(layers) // 3], halve)]):
            return forward(short * 2, logits_to_keep=1)[:, -1].float().softmax(-1).topk(20).indices.tolist()

    def hooks() -> dict[int, torch.Tensor]:
        kept: dict[int, torch.Tensor] = {}

        def keep(x: torch.Tensor) -> None:
            kept[len(kept)] = x.to("cpu")

        modules = [m for layer in layers for m in (layer, layer.self_attn, layer.mlp)]
        with after([(module, keep) for module in (model.model.embed_tokens, *modules, model.model.norm)]):
            forward(long, logits_to_keep=1)
        return kept

    def sweep() -> Any:
        clean: dict[int, torch.Tensor] = {}
        rows: dict[int, list[tuple[int, int]]] = {}
        for n, (layer, pos) in enumerate(swept(len(layers))):
            rows.setdefault(layer, []).append((n, pos))
        with after([(layers[i], lambda x, i=i: clean.update({i: x.clone()})) for i in rows]):
            forward(start, logits_to_keep=1)

        def patch(x: torch.Tensor, layer: int) -> None:
            numbers, positions = zip(*rows[layer], strict=True)
            x[list(numbers), list(positions)] = clean[layer][0, list(positions)]

        with after([(layers[i], lambda x, i=i: patch(x, i)) for i in rows]):
            return forward([drawn(SWEEP, seed=1)] * SWEEP**2, logits_to_keep=1).float().cpu()

    def written() -> Any:
        ids = torch.tensor(start, device=device)
        return model.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0)

    asked: list[tuple[str, Callable[[], Any], int]] = [
        ("forward, 64 tokens", lambda: forward(short, logits_to_keep=1).float().cpu(), 20),
        ("forward, 512 tokens", lambda: forward(long, logits_to_keep=1).float().cpu(), 20),
        ("compare, one edit and top 20, 64 tokens", compare, 20),
        ("logits of all 512 positions", lambda: forward(long).float().cpu(), 5),
        ("TransformerLens's hooks, 512 tokens", hooks, 5),
        ("decode, 64 tokens", written, 3),
        ("sweep of patches, 16 x 16", sweep, 5),
    ]
    for what, call, repeats in asked:
        if only in what:
            yield alone(me, what, call, repeats)


MEASURES: dict[str, Callable[[Path, str, str], Iterator[dict[str, Any]]]] = {
    "vllm": measure_vllm,
    "transformer-lens": measure_transformer_lens,
    "transformers": measure_transformers,
}


# all of it


def bound(what: str, mode: str) -> float | None:
    """The most that ours may cost."""
    return BOUNDS.get(what, {}).get(mode)


def joined(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each question, with the figures of all sides."""
    by_question: dict[str, dict[str, Any]] = {}
    for one in rows:
        by_question.setdefault(one["what"], {}).update(one)
    return list(by_question.values())


def shown(rows: list[dict[str, Any]], mode: str) -> str:
    """The table."""

    def number(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)

    cells = []
    for one in rows:
        most = bound(one["what"], mode)
        ratio = one.get("ratio")
        past = most is not None and ratio is not None and ratio > most
        figures = (number(one.get(name)) for name in NAMES)
        cells.append([f"{one['what']} ({one['unit']})", *figures, number(ratio) + past * " PAST IT", number(most)])
    return table(["", *NAMES, "ours to plain", "at most"], cells)


def main() -> int:
    """Measure, keep each figure as it comes, print; 1 when a side failed or a figure is past its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", help="a name of tests.gpu.models, a bundled name or a folder")
    parser.add_argument("--mode", choices=("compiled", "eager"), default="compiled")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--only", default="", help="the questions with this in their name")
    parser.add_argument("--out", type=Path, default=Path(".out/gpu-results"))
    parser.add_argument("--here", choices=SIDES, help=argparse.SUPPRESS)  # one side, in this process
    asked = parser.parse_args()
    folder = folder_of(asked.model)
    name = f"measure-{asked.model.rpartition('/')[2]}-{asked.mode}"
    asked.out.mkdir(parents=True, exist_ok=True)
    lines = asked.out / f"{name}.jsonl"
    if asked.here:
        with lines.open("a", encoding="utf-8") as file:
            for one in MEASURES[asked.here](folder, asked.mode, asked.only):
                print(json.dumps(one, default=str), file=file, flush=True)
        return 0
    lines.unlink(missing_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as cache:  # so that the first boot compiles
        environment = os.environ | {"VLLM_CACHE_ROOT": cache}
        for side in asked.sides:
            command = [sys.executable, "-m", "tests.gpu.measure", *sys.argv[1:], "--here", side]
            if subprocess.run(command, env=environment).returncode:
                failed.append(side)
    rows = joined(json.loads(line) for line in lines.read_text().splitlines()) if lines.exists() else []
    for one in rows:
        one["at most"] = bound(one["what"], asked.mode)
    result = {"about": about(), "model": asked.model, "mode": asked.mode, "failed": failed, "rows": rows}
    (asked.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = f"{asked.model}, {asked.mode}, bfloat16\n\n{shown(rows, asked.mode)}"
    (asked.out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    for side in failed:
        print(f"{side} FAILED: see above")
    past = [one for one in rows if one["at most"] is not None and one.get("ratio", 0) > one["at most"]]
    return int(bool(failed or past))


if __name__ == "__main__":
    sys.exit(main())
