"""Random states of a workbench: partial ones, as a user of Python may write them."""

from __future__ import annotations

from hypothesis import strategies as st

from widgets.state import PLACE

edits = st.fixed_dictionaries(
    {
        "hook": st.sampled_from(["blocks.1.hook_out", "blocks.2.attn.o.hook_in"]),
        "op": st.sampled_from(["suppress", "scale"]),
    },
    optional={
        "pos": st.one_of(st.integers(-3, 9), st.lists(st.integers(0, 9), max_size=3), st.just("last")),
        "factor": st.floats(-3, 3),
        "enabled": st.booleans(),
        "head": st.none() | st.integers(0, 3),
    },
)
states = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(max_size=20).filter(lambda text: text.isprintable()),
        "source": st.text(max_size=20).filter(lambda text: text.isprintable()),
        "positions": st.lists(st.integers(0, 99), max_size=5),
        "source_positions": st.lists(st.integers(0, 99), max_size=5),
        "hook": st.sampled_from(["blocks.1.hook_out", "embed.hook_out"]),
        "heads": st.lists(st.integers(0, 3), max_size=3),
        "edits": st.lists(edits, max_size=3),
        "compare": st.tuples(st.none() | st.text(max_size=4), st.none() | st.text(max_size=4)).map(list),
        "tab": st.sampled_from(["norms", "hook", "attention"]),
        "of": st.sampled_from(["clean", "patched", "change"]),
        "head": st.integers(0, 3),
        "zoom": st.just({})
        | st.fixed_dictionaries({"map": st.text(max_size=4)} | dict.fromkeys(PLACE, st.floats(0, 9))),
        "table": st.booleans(),
        "projector": st.booleans(),
    },
)
