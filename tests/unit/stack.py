"""A stack of modules shaped like vLLM's Llama: layers return (delta, residual), norms add the two."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from explorer.hooks import ModelShape

SHAPE = ModelShape(layers=2, d_model=8, heads=4, kv_heads=2, d_head=2, d_mlp=10, d_vocab=20)
EPS = 1e-5


class Linear(nn.Module):
    """Returns (output, bias) as vLLM's linear layers do."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, outside) * 0.3)

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.weight, None


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.variance_epsilon = EPS

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        stream = x if residual is None else x + residual
        normed = stream * torch.rsqrt(stream.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype) * self.weight
        return normed if residual is None else (normed, stream)


class Attend(nn.Module):
    """Attention within each of the sequences whose `lengths` make up the batch."""

    lengths: tuple[int, ...] = ()
    head_size, num_heads, num_kv_heads = SHAPE.d_head, SHAPE.heads, SHAPE.kv_heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.split(self.lengths or (len(x),)) for x in (q, k, v)), strict=True)
        return torch.cat([self.one(*part) for part in parts])

    def one(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.reshape(len(x), -1, SHAPE.d_head).transpose(0, 1)[None] for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        return out.transpose(0, 1).flatten(1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = [SHAPE.heads * SHAPE.d_head, SHAPE.kv_heads * SHAPE.d_head, SHAPE.kv_heads * SHAPE.d_head]
        self.qkv_proj, self.attn = Linear(SHAPE.d_model, sum(self.sizes)), Attend()
        self.o_proj = Linear(self.sizes[0], SHAPE.d_model)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(self.sizes, -1)
        turn = positions[:, None].to(q.dtype) * 0.1  # in rotary's place
        return self.o_proj(self.attn(q + turn, k + turn, v))[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down_proj = Linear(SHAPE.d_model, SHAPE.d_mlp), Linear(SHAPE.d_mlp, SHAPE.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up(x)[0]))[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(SHAPE.d_model), Norm(SHAPE.d_model)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions=positions, hidden_states=x)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class OneTensor(Layer):
    """As vLLM's GPT-2: the stream is one tensor."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> Any:
        x = x + self.self_attn(positions, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Whole(OneTensor):
    """As StableLM: the first of two results is the whole stream already."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> Any:
        return super().forward(positions, x), x


class Multiplied(OneTensor):
    """As Granite: what is added is multiplied first."""

    residual_multiplier = 0.25

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> Any:
        x = x + self.self_attn(positions, self.input_layernorm(x)) * self.residual_multiplier
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_multiplier


class Parallel(OneTensor):
    """As GPT-NeoX: attention and MLP read the same stream."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> Any:
        attention = self.self_attn(positions, self.input_layernorm(x))
        return x + attention + self.mlp(self.post_attention_layernorm(x))


class PostNorms(Layer):
    """As Gemma 2: what is added is normed first."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(SHAPE.d_model), Norm(SHAPE.d_model)

    def forward(self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(positions, x))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class NormsOnly(OneTensor):
    """As OLMo 2: attention and MLP read the stream itself; what they add is normed."""

    def __init__(self) -> None:
        super().__init__()
        self.post_feedforward_layernorm = Norm(SHAPE.d_model)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> Any:
        x = x + self.post_attention_layernorm(self.self_attn(positions, x))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Unknown(OneTensor):
    """Something that nobody has told us of comes between the modules and the stream."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> Any:
        x = x + 3 * self.self_attn(positions, self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(SHAPE.d_vocab, SHAPE.d_model)
        self.layers = nn.ModuleList(layer() for _ in range(SHAPE.layers))
        self.norm = Norm(SHAPE.d_model)


class Stack(nn.Module):
    """`forward` gives what the head reads, one row a token; `compute_logits` the head."""

    def __init__(self, dtype: torch.dtype = torch.float32, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Inner(layer)
        self.head = nn.Parameter(torch.randn(SHAPE.d_model, SHAPE.d_vocab))
        self.to(dtype).requires_grad_(False)

    def forward(self, ids: torch.Tensor, lengths: tuple[int, ...] = ()) -> torch.Tensor:
        positions = torch.cat([torch.arange(n) for n in lengths or (len(ids),)])
        for layer in self.model.layers:
            layer.self_attn.attn.lengths = lengths
        x, residual = self.model.embed_tokens(ids), None
        for layer in self.model.layers:
            if isinstance(layer, OneTensor):
                out = layer(positions, x)
                x = out[0] if isinstance(out, tuple) else out
            else:
                x, residual = layer(positions, x, residual)
        return self.model.norm(x) if residual is None else self.model.norm(x, residual)[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.head

    def hooks(self) -> int:
        """How many forward hooks and replaced forwards there are anywhere."""
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in vars(m)) for m in self.modules())
