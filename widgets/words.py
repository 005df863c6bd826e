"""What the page's tooltips say: of every hook, operation and number its shape, its formula, and where it belongs."""

from __future__ import annotations

# component -> shape of one token's activation, formula, where it sits in the block. The sentence that comes first is
# the catalogue's own.
HOOKS: dict[str, tuple[str, str, str]] = {
    "embed": (
        "d_model",
        "embed = W_E[token], \u00d7 a scale where the model has one",
        "Before the first layer, which reads it, with positions added where the model has such, as its hook_in.",
    ),
    "resid_pre": (
        "d_model",
        "pre = post of the layer before; in layer 0 the embedded tokens",
        "Where the layer begins: attention reads it, and what the layer computes is added to it.",
    ),
    "q": (
        "heads \u00d7 d_head",
        "q = W_Q x + b, x: the stream as attention reads it",
        "First step of attention, beside k and v; then come rotary and scores.",
    ),
    "k": (
        "key-value heads \u00d7 d_head",
        "k = W_K x + b, x: the stream as attention reads it",
        "First step of attention, beside q and v; several query heads may share one key-value head.",
    ),
    "v": (
        "key-value heads \u00d7 d_head",
        "v = W_V x + b, x: the stream as attention reads it",
        "First step of attention, beside q and k; the pattern weighs it into z.",
    ),
    "rot_q": (
        "heads \u00d7 d_head",
        "q\u21bb = rotary(norm(q), position)",
        "Between q and the scores; the norm only where the model has one.",
    ),
    "rot_k": (
        "key-value heads \u00d7 d_head",
        "k\u21bb = rotary(norm(k), position)",
        "Between k and the scores; the norm only where the model has one.",
    ),
    "scores": (
        "heads \u00d7 query \u00d7 key",
        "scores = q\u21bb \u00b7 k\u21bb \u00d7 scale",
        "After queries and keys, before the softmax; computed from them, so it can be read, not edited.",
    ),
    "pattern": (
        "heads \u00d7 query \u00d7 key",
        "pattern = softmax(scores) over the keys",
        "After the scores; it weighs v into z. Computed, so it can be read, not edited.",
    ),
    "z": (
        "heads \u00d7 d_head",
        "z = pattern \u00b7 v",
        "After the pattern, before W_O mixes the heads into attention's output.",
    ),
    "attn_out": ("d_model", "out = W_O z + b", "Last step of attention; it goes on to the stream."),
    "attn_added": (
        "d_model",
        "added = norm(out), or out \u00d7 a multiplier",
        "Between attention's output and the stream: post = pre + added of attention + added of the MLP.",
    ),
    "resid_mid": (
        "d_model",
        "mid = pre + what attention adds",
        "Halfway through the layer: the MLP reads it, and its output is added to it.",
    ),
    "post": (
        "neurons",
        "neurons = act(W_in x), in a gated MLP act(W_gate x) \u00d7 (W_in x); x: the stream as the MLP reads it",
        "In the middle of the MLP, before W_out takes the neurons back to the stream's width.",
    ),
    "mlp_out": ("d_model", "out = W_out neurons + b", "Last step of the MLP; it goes on to the stream."),
    "mlp_added": (
        "d_model",
        "added = norm(out), or out \u00d7 a multiplier",
        "Between the MLP's output and the stream: post = pre + added of attention + added of the MLP.",
    ),
    "resid_post": (
        "d_model",
        "post = pre + what attention adds + what the MLP adds",
        "Where the layer ends; the next layer begins with it, after the last one comes the final norm.",
    ),
    "ln_final": (
        "d_model",
        "x / rms(x), or (x \u2212 mean(x)) / std(x)",
        "After the last layer, before the unembedding; computed, so it can be read, not edited.",
    ),
    "logits": ("d_vocab", "logits = W_U norm(x)", "The end: their softmax is the prediction of the next token."),
}

# name -> one sentence, shape, formula, where
_OPS = {
    "suppress": ("Sets the activation to zero.", "any", "x \u2190 0", "It asks what the model does without it."),
    "scale": (
        "Multiplies the activation by a factor.",
        "one number",
        "x \u2190 factor \u00d7 x",
        "0 removes it, 1 changes nothing, \u22121 turns it round.",
    ),
    "add": (
        "Adds a value to the activation.",
        "one number, or one a dimension",
        "x \u2190 x + value",
        "It steers along a direction and keeps what was there.",
    ),
    "set": (
        "Overwrites the activation with a value.",
        "one number, or one a dimension",
        "x \u2190 value",
        "What was there is lost.",
    ),
    "patch": (
        "Takes the activation of another prompt's run.",
        "that of the hook",
        "x \u2190 x of the source, at its own token",
        "If the prediction follows the source, what decides it passes here.",
    ),
}
_METRICS = {
    "probability": (
        "How likely the model holds a token to come next.",
        "one number a token",
        "p = softmax(logits)",
        "At the last token of the prompt.",
    ),
    "change": (
        "How far the edits moved a token's probability, in percentage points.",
        "one number a token",
        "p patched \u2212 p clean",
        "At the last token of the prompt.",
    ),
    "difference": (
        "How much the model prefers one token to another.",
        "one number a run",
        "logit of the first \u2212 logit of the second",
        "At the last token; above 0 the first is likelier, and each 0.69 doubles the odds.",
    ),
    "kl": (
        "How far the patched prediction as a whole is from the clean one; 0: the same.",
        "one number",
        "\u03a3 p clean \u00d7 ln(p clean / p patched)",
        "Over all tokens of the vocabulary, at the last token of the prompt.",
    ),
    "norm": (
        "How long the activation is as a vector.",
        "one number a token",
        "\u221a(\u03a3 x\u00b2)",
        "At each token apart; several chosen tokens are averaged.",
    ),
}
KEYS = ("about", "shape", "formula", "place")
OPS = {name: dict(zip(KEYS, texts, strict=True)) for name, texts in _OPS.items()}
METRICS = {name: dict(zip(KEYS, texts, strict=True)) for name, texts in _METRICS.items()}
