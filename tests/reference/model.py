"""A transformers model whose every hook point can be read and edited."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ..untouched import imported_anew, model_class
from .edits import apply
from .families import family_of, kv_heads_of

Spec = dict[str, Any]
Edit = Callable[[torch.Tensor], torch.Tensor]  # the rows of one hook point in, what the model goes on with out


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


class Hooks(contextlib.ExitStack):
    """The hooks of one pass under a spec. At each hook point: its edits, then its rows are kept."""

    def __init__(self, edits: Spec, sources: dict[tuple[str, int], torch.Tensor]) -> None:
        super().__init__()
        self.edits, self.sources = edits, sources
        self.rows: dict[str, torch.Tensor] = {}

    def visit(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The rows of one hook point, `(positions, ...)`; returns what the model goes on with."""
        assert name not in self.rows, f"{name} fired twice"
        x = x.clone()
        for i, edit in enumerate(self.edits.get(name, ())):
            apply(x, edit, self.sources.get((name, i)))
        self.rows[name] = x.clone()
        return x

    def named(self, name: str, heads: int = 0) -> Edit:
        """Visit whole rows; with `heads`, as that many heads."""
        return lambda x: self.visit(name, x.reshape(len(x), heads, -1) if heads else x).reshape(x.shape)

    def before(self, module: torch.nn.Module, edit: Edit) -> None:
        """Replace a module's input in place: what else holds that tensor (the residual) sees it too."""

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            x.copy_(edit(x.reshape(-1, x.shape[-1])).reshape(x.shape))

        self.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(self, module: torch.nn.Module, edit: Edit) -> None:
        """Replace a module's output: the first, where it returns several."""

        def hook(_: Any, __: Any, out: Any) -> Any:
            x = out[0] if isinstance(out, tuple) else out
            new = edit(x.reshape(-1, x.shape[-1])).reshape(x.shape)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        self.callback(module.register_forward_hook(hook).remove)

    def instead(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, where there is no module to hook."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


class Reference:
    """A transformers model, in fp32 on the CPU unless said; `names` are the canonical names of its hook points.

    What its passes return is on the CPU.
    """

    def __init__(
        self,
        folder: str | Path,
        exact_gelu: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """`exact_gelu`: Bloom's, where transformers approximates it by tanh."""
        model = model_class(AutoConfig.from_pretrained(folder))
        self.model = model.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval().to(device)
        self.config = self.model.config
        if exact_gelu:
            for layer in self.model.transformer.h:
                layer.mlp.gelu_impl = torch.nn.GELU()
        self.family = family_of(self.config)
        self.heads = self.config.num_attention_heads
        self.kv_heads = kv_heads_of(self.config)
        self.rotary = bool(self.family.reads or self.family.rotates)
        self.d_head = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        self.names = list(self.run([0]).rows)

    @torch.no_grad()
    def run(self, ids: Sequence[int], edits: Spec | None = None) -> Pass:
        """One forward pass under a spec in its JSON form, positions and heads as plain ints or lists of ints.

        The `source` of a patch is `{"ids": [...], "edits": ...}`.
        """
        edits = {hook: body if isinstance(body, list) else [body] for hook, body in (edits or {}).items()}
        assert not edits or set(edits) <= set(self.names), f"the reference knows no {set(edits) - set(self.names)}"
        sources = {
            (hook, i): self.run(edit["source"]["ids"], edit["source"].get("edits"))[hook]
            for hook, bodies in edits.items()
            for i, edit in enumerate(bodies)
            if edit["op"] == "patch"
        }
        with Hooks(edits, sources) as hooks:
            self._hook_model(hooks)
            out = self.model(input_ids=torch.tensor([list(ids)], device=self.model.device), use_cache=False)
        hooks.visit("unembed.hook_out", out.logits[0])
        return Pass(ids, {name: rows.cpu() for name, rows in hooks.rows.items()})

    @torch.no_grad()
    def greedy(
        self, ids: Sequence[int], tokens: int, spec: Callable[[int], Spec | None] = lambda fed: None
    ) -> list[int]:
        """Greedy generation by whole forward passes; `spec(fed)` is the spec when `fed` tokens are fed."""
        sequence = list(ids)
        for _ in range(tokens):
            sequence.append(int(self.run(sequence, spec(len(sequence))).logits[-1].argmax()))
        return sequence[len(ids) :]

    def _hook_model(self, hooks: Hooks) -> None:
        inner = self.model.get_submodule(self.family.inner)
        hooks.after(inner.get_submodule(self.family.embed), hooks.named("embed.hook_out"))
        for i, layer in enumerate(inner.get_submodule(self.family.layers)):
            self._hook_layer(hooks, f"blocks.{i}", layer)
        norm = inner.get_submodule(self.family.norm)
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

        def normalized(x: torch.Tensor) -> torch.Tensor:
            """By the definition of the norm, before weight and bias."""
            wide = x.float()
            centred = wide - wide.mean(-1, keepdim=True) if self.family.centred else wide
            normal = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
            hooks.visit("ln_final.hook_normalized", normal.to(x.dtype))
            return x

        hooks.before(norm, normalized)
        if self.rotary:
            self._hook_rotary(hooks)

    def _hook_layer(self, hooks: Hooks, block: str, layer: Any) -> None:
        family = self.family
        hooks.before(layer, hooks.named(f"{block}.hook_in"))
        if family.o:
            self._hook_attention(hooks, f"{block}.attn", layer.get_submodule(family.attention))
        hooks.after(layer.get_submodule(family.attn_out), hooks.named(f"{block}.attn.hook_out"))
        if family.mid:
            hooks.before(layer.get_submodule(family.mid), hooks.named(f"{block}.ln2.hook_in"))
        if family.neurons in dict(layer.named_modules()):
            hooks.before(layer.get_submodule(family.neurons), hooks.named(f"{block}.mlp.out.hook_in"))
        hooks.after(layer.get_submodule(family.mlp_out), hooks.named(f"{block}.mlp.hook_out"))
        added = [hooks.named(f"{block}.hook_{x}_out") for x in ("attn", "mlp")]
        if family.post_norms:
            for norm, edit in zip(family.post_norms, added, strict=True):
                hooks.after(layer.get_submodule(norm), edit)
        elif hasattr(layer, "residual_multiplier"):
            hooks.instead(layer, "residual_multiplier", Multiplier(layer.residual_multiplier, added))
        hooks.after(layer, hooks.named(f"{block}.hook_out"))

    def _hook_attention(self, hooks: Hooks, block: str, attention: Any) -> None:
        q, k, v = (
            hooks.named(f"{block}.{x}.hook_out", heads)
            for x, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        edits = (q, k, v) if len(self.family.qkv) == 3 else (self._fused(q, k, v),)
        for name, edit in zip(self.family.qkv, edits, strict=True):
            hooks.after(attention.get_submodule(name), edit)

        def observe(_: Any, __: Any, kwargs: dict[str, Any], out: tuple[torch.Tensor, ...]) -> None:
            names = ("hook_rot_q", "hook_rot_k") if self.rotary else ("q.hook_out", "k.hook_out")
            scores = self._scores(*(hooks.rows[f"{block}.{name}"] for name in names), kwargs)
            hooks.visit(f"{block}.hook_attn_scores", scores)
            hooks.visit(f"{block}.hook_pattern", out[1][0])

        hooks.callback(attention.register_forward_hook(observe, with_kwargs=True).remove)
        hooks.before(attention.get_submodule(self.family.o), hooks.named(f"{block}.o.hook_in", self.heads))

    def _fused(self, *qkv: Edit) -> Edit:
        """q, k and v out of one projection, and back into it."""
        group = self.heads // self.kv_heads
        sizes = [group, 1, 1] if self.family.by_group else [self.heads, self.kv_heads, self.kv_heads]

        def edit(x: torch.Tensor) -> torch.Tensor:
            heads = x.reshape(len(x), -1, sum(sizes), self.d_head)
            parts = heads.split(sizes, dim=2)
            parts = [one(part.reshape(len(x), -1)).reshape(part.shape) for one, part in zip(qkv, parts, strict=True)]
            return torch.cat(parts, dim=2).reshape(x.shape)

        return edit

    def _scores(self, q: torch.Tensor, k: torch.Tensor, attention: dict[str, Any]) -> torch.Tensor:
        """What goes into the softmax, by definition. `attention` is what transformers' attention was called with."""
        config = self.config
        scale = getattr(config, "attention_multiplier", None)  # Granite
        scale = scale or (getattr(config, "query_pre_attn_scalar", None) or self.d_head) ** -0.5  # Gemma 2 and 3
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(self.heads // self.kv_heads, dim=1)) * scale
        cap = getattr(config, "attn_logit_softcapping", None)  # Gemma 2
        if cap:
            scores = cap * (scores / cap).tanh()
        if attention.get("alibi") is not None:  # each head's slope times the key's position
            scores = scores + attention["alibi"]
        return scores.masked_fill(attention["attention_mask"][0] < 0, float("-inf"))

    def _hook_rotary(self, hooks: Hooks) -> None:
        """Between rotary and softmax there is no module: surround transformers' own function there."""
        *place, name = (self.family.reads or self.family.rotates or "").split(".")
        owner = reduce(getattr, place, imported_anew(type(self.model).__module__))
        original = getattr(owner, name)
        calls = itertools.count()

        def visit(layer: int, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            copies = key.shape[1] // self.kv_heads  # Falcon has one of each key for each of its queries
            query, key = (
                hooks.visit(f"blocks.{layer}.attn.{name}", x[0].transpose(0, 1)).transpose(0, 1)[None]
                for name, x in (("hook_rot_q", query), ("hook_rot_k", key[:, ::copies]))
            )
            return query, key.repeat_interleave(copies, dim=1)

        def reading(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
            return original(module, *visit(module.layer_idx, query, key), *rest, **kwargs)

        def rotating(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Any:
            return visit(next(calls), *original(query, key, *rest))

        hooks.instead(owner, name, reading if self.family.reads else rotating)


class Multiplier:
    """Granite multiplies what attention and MLP add inside the layer's own code: this stands there for the number."""

    def __init__(self, factor: float, edits: Sequence[Edit]) -> None:
        self.factor, self.edits = factor, iter(edits)

    def __rmul__(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.edits)((x * self.factor)[0])[None]


def reference(folder: str | Path, engine: str = "transformers") -> Reference:
    """The reference of a checkpoint folder, for an engine: vLLM gives Bloom the exact GELU."""
    bloom = AutoConfig.from_pretrained(folder).model_type == "bloom"
    return _kept(str(folder), exact_gelu=engine == "vllm" and bloom)


_kept = cache(Reference)  # loading costs seconds
