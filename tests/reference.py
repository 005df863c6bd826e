"""The tests' own yardstick: transformers with eager attention in fp32, read and edited with plain PyTorch hooks.

Written from the definitions of the hook points, not from the engine: it shares no code with `explorer`. It takes specs
in their JSON form, with positions and heads as plain ints or lists of ints.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Spec = dict[str, Any]
PER_LAYER = (
    "hook_in", "attn.q.hook_out", "attn.k.hook_out", "attn.v.hook_out", "attn.hook_rot_q", "attn.hook_rot_k",
    "attn.hook_attn_scores", "attn.hook_pattern", "attn.o.hook_in", "attn.hook_out", "ln2.hook_in", "mlp.out.hook_in",
    "mlp.hook_out", "hook_out",
)  # fmt: skip


class Pass:
    """One forward pass: `logits` (positions, vocabulary), and every hook point's rows by canonical name."""

    def __init__(self, ids: Sequence[int], rows: dict[str, torch.Tensor]) -> None:
        self.ids = tuple(ids)
        self.rows = rows
        self.logits = rows["unembed.hook_out"]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows[name]

    @property
    def loss(self) -> torch.Tensor:
        """Entry t is the surprise, in nats, of token t + 1."""
        return torch.nn.functional.cross_entropy(
            self.logits[:-1], torch.tensor(self.ids[1:], dtype=torch.long), reduction="none"
        )


class Reference:
    """A Llama-shaped transformers model whose every hook point can be read and edited."""

    def __init__(self, folder: str | Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.layers = len(self.model.model.layers)

    @property
    def names(self) -> list[str]:
        """Canonical names of every hook point."""
        per_layer = [f"blocks.{i}.{name}" for i in range(self.layers) for name in PER_LAYER]
        return ["embed.hook_out", *per_layer, "ln_final.hook_normalized", "unembed.hook_out"]

    @torch.no_grad()
    def run(self, ids: Sequence[int], edits: Spec | None = None) -> Pass:
        """One forward pass under a spec. `source` of a patch is `{"ids": [...], "edits": ...}`."""
        edits = {hook: body if isinstance(body, list) else [body] for hook, body in (edits or {}).items()}
        unknown = set(edits) - set(self.names)
        assert not unknown, f"the reference knows no {unknown}"
        sources = {
            (hook, i): self.run(edit["source"]["ids"], edit["source"].get("edits"))[hook]
            for hook, bodies in edits.items()
            for i, edit in enumerate(bodies)
            if edit["op"] == "patch"
        }
        rows: dict[str, torch.Tensor] = {}

        def visit(name: str, x: torch.Tensor) -> torch.Tensor:
            """Edit, then keep, the value of one hook point, `(positions, ...)`; returns what the model goes on with."""
            x = x.clone()
            for i, edit in enumerate(edits.get(name, ())):
                apply(x, edit, sources.get((name, i)))
            rows[name] = x.clone()
            return x

        with self._hooked(visit):
            out = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        visit("unembed.hook_out", out.logits[0])
        return Pass(ids, rows)

    @torch.no_grad()
    def greedy(
        self, ids: Sequence[int], tokens: int, spec: Callable[[int], Spec | None] = lambda fed: None
    ) -> list[int]:
        """Greedy generation by whole forward passes; `spec(fed)` is the spec when `fed` tokens are fed."""
        sequence = list(ids)
        for _ in range(tokens):
            sequence.append(int(self.run(sequence, spec(len(sequence))).logits[-1].argmax()))
        return sequence[len(ids) :]

    @contextlib.contextmanager
    def _hooked(self, visit: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
        inner = self.model.model
        config = self.model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        with contextlib.ExitStack() as stack:

            def before(module: torch.nn.Module, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
                """Replace a module's input in place: what else holds that tensor (the residual) sees it too."""

                def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                    x = args[0] if args else kwargs["hidden_states"]
                    x.copy_(edit(x[0])[None])

                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

            def after(module: torch.nn.Module, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
                def hook(_: Any, __: Any, out: Any) -> Any:
                    x = out[0] if isinstance(out, tuple) else out
                    new = edit(x[0])[None]
                    return (new, *out[1:]) if isinstance(out, tuple) else new

                stack.callback(module.register_forward_hook(hook).remove)

            def named(name: str, count: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
                """Visit a whole tensor; with `count`, as that many heads."""

                def edit(x: torch.Tensor) -> torch.Tensor:
                    return visit(name, x.view(x.shape[0], count, width) if count else x).reshape(x.shape)

                return edit

            def fused(names: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
                """q, k and v side by side in one projection."""

                def edit(x: torch.Tensor) -> torch.Tensor:
                    counts = (heads, kv_heads, kv_heads)
                    parts = x.split([count * width for count in counts], dim=-1)
                    return torch.cat([named(n, c)(p) for n, c, p in zip(names, counts, parts, strict=True)], -1)

                return edit

            def normalized(x: torch.Tensor) -> torch.Tensor:
                visit("ln_final.hook_normalized", x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt())
                return x

            after(inner.embed_tokens, named("embed.hook_out"))
            before(inner.norm, normalized)
            for i, layer in enumerate(inner.layers):
                block, attention = f"blocks.{i}", layer.self_attn
                before(layer, named(f"{block}.hook_in"))
                qkv = [f"{block}.attn.{x}.hook_out" for x in "qkv"]
                if hasattr(attention, "qkv_proj"):
                    after(attention.qkv_proj, fused(qkv))
                else:
                    after(attention.q_proj, named(qkv[0], heads))
                    after(attention.k_proj, named(qkv[1], kv_heads))
                    after(attention.v_proj, named(qkv[2], kv_heads))
                before(attention.o_proj, named(f"{block}.attn.o.hook_in", heads))
                after(attention, named(f"{block}.attn.hook_out"))
                before(layer.post_attention_layernorm, named(f"{block}.ln2.hook_in"))
                before(layer.mlp.down_proj, named(f"{block}.mlp.out.hook_in"))
                after(layer.mlp, named(f"{block}.mlp.hook_out"))
                after(layer, named(f"{block}.hook_out"))
            stack.enter_context(_attention(sys.modules[type(self.model).__module__], visit))
            yield


@contextlib.contextmanager
def _attention(modeling: Any, visit: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Between rotary and softmax there is no module to hook: surround transformers' own eager attention function."""
    eager = modeling.eager_attention_forward

    def around(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        block = f"blocks.{module.layer_idx}.attn"
        query = visit(f"{block}.hook_rot_q", query[0].transpose(0, 1)).transpose(0, 1)[None]
        key = visit(f"{block}.hook_rot_k", key[0].transpose(0, 1)).transpose(0, 1)[None]
        out, weights = eager(module, query, key, value, mask, scaling=scaling, **kwargs)
        grouped = key[0].repeat_interleave(query.shape[1] // key.shape[1], dim=0)
        hidden = mask[0] < 0 if mask.dtype != torch.bool else ~mask[0]
        visit(f"{block}.hook_attn_scores", (query[0] @ grouped.mT * scaling).masked_fill(hidden, float("-inf")))
        visit(f"{block}.hook_pattern", weights[0])
        return out, weights

    modeling.eager_attention_forward = around
    try:
        yield
    finally:
        modeling.eager_attention_forward = eager


def apply(x: torch.Tensor, edit: dict[str, Any], source: torch.Tensor | None = None) -> None:
    """One edit on `(positions, width)` or `(positions, heads, d_head)`, in place, one position and head at a time."""

    def chosen(field: str, length: int) -> list[int]:
        given = edit.get(field)
        given = list(range(length)) if given is None else [given] if isinstance(given, int) else list(given)
        return [length + i if i < 0 else i for i in given]

    positions = chosen("pos", len(x))
    heads = chosen("head", x.shape[1]) if x.dim() == 3 else [0]
    value = None if edit.get("value") is None else torch.as_tensor(edit["value"], dtype=x.dtype)
    from_rows = None
    if source is not None:
        from_rows = positions if edit.get("source_pos") is None else chosen_in(edit["source_pos"], len(source))
    for n, p in enumerate(positions):
        for m, h in enumerate(heads):
            cell = x[p, h] if x.dim() == 3 else x[p]
            if edit["op"] == "suppress":
                cell.zero_()
            elif edit["op"] == "scale":
                cell.mul_(edit["factor"])
            elif edit["op"] == "patch":
                assert source is not None and from_rows is not None
                row = source[from_rows[n]]
                cell.copy_(row[h] if x.dim() == 3 else row)
            else:
                assert value is not None
                part = _part(value, cell, n, m, len(positions), len(heads))
                cell.copy_(part if edit["op"] == "set" else cell + part)


def chosen_in(given: Any, length: int) -> list[int]:
    """Positions of a source."""
    return [length + i if i < 0 else i for i in ([given] if isinstance(given, int) else given)]


def _part(value: torch.Tensor, cell: torch.Tensor, n: int, m: int, positions: int, heads: int) -> torch.Tensor:
    """What `value` says for the n-th chosen position and the m-th chosen head."""
    width = cell.shape[0]
    if value.dim() == 0 or value.shape == (width,):
        return value
    if value.shape == (heads, width):
        return value[m]
    if value.shape == (heads * width,):
        return value.view(heads, width)[m]
    assert value.shape[0] == positions, f"value of shape {tuple(value.shape)}"
    return _part(value[n], cell, 0, m, 1, heads)


@cache
def reference(folder: str | Path) -> Reference:
    """The reference of a checkpoint folder; kept, since loading costs seconds."""
    return Reference(folder)
