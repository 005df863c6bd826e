// The predictions: the likeliest next tokens of the clean and the patched run, their logit difference, and the KL.

import { alertLine, h, notRun, percent, signed, token, typed, visible } from "./dom.js";
import { explained, term } from "./tip.js";

export function mount(el, store) {
  const word = (text, metric) => term(text, () => explained(text, store.about.words.metrics[metric]));
  const line = (cells) => h("div", { role: "row" }, ...cells);
  const bars = h("span", {}, h("span", { class: "sr" }, "as bars"), h("span", { class: "stale" }, "of before: new numbers follow \u2026"));
  const titles = ["token", bars, word("clean", "probability"), "patched", word("change", "change")];
  const head = line(titles.map((title, i) => h("div", { class: i > 1 ? "h num" : "h", role: "columnheader" }, title)));
  const rows = h("div", { class: "rows", role: "table", "aria-label": "Next token, clean and patched" }, head);
  const sum = h("div", { class: "sum" });
  el.append(rows, sum);

  const inputs = [0, 1].map((side) => h("input", { type: "text", class: "tokin", size: 7, "aria-label": side ? "minus this token" : "logit of this token", autocomplete: "off", spellcheck: "false", list: null }));
  const clean = h("span", { class: "clean" });
  const patched = h("span", { class: "patched" });
  const to = h("span", { class: "dim" }, " to ");
  const gauge = h("div", { class: "gauge", "aria-hidden": "true" });
  const kl = h("b", { class: "num" });
  const klLine = h("div", { class: "dim" }, word("KL(clean \u2225 patched)", "kl"), " ", kl, " nats");
  sum.append(h("div", { class: "dim" }, word("logit difference", "difference"), " ", inputs[0], " minus ", inputs[1]));
  const fail = alertLine(sum);
  const why = h("div", { class: "dim" });
  sum.append(h("div", { class: "big" }, clean, to, patched), gauge, klLine, why);

  inputs.forEach((input, side) => {
    const commit = () => {
      const now = store.state.compare;
      const shown = now[side] ?? store.result.difference?.tokens[side] ?? "";
      const text = typed(input.value);
      // Not every token can be typed as it is shown: what nobody changed stays.
      if (input.value === visible(shown) || text === shown) return;
      store.set({ compare: now.map((old, i) => (i === side ? text || null : old)) });
    };
    input.addEventListener("keydown", (event) => event.key === "Enter" && commit());
    input.addEventListener("blur", commit);
  });

  store.watch(
    (s) => [s.result],
    (result) => {
      const shown = likeliest(result.rows ?? [], 6);
      const cell = (name, ...children) => h("div", { class: name, role: "cell" }, ...children);
      while (rows.lastChild !== head) rows.lastChild.remove(); // the head may have the focus
      rows.append(
        ...shown.map(([text, id, before, after, change]) =>
          line([
            h("div", { class: "t", role: "cell", title: `id ${id}` }, token(text)),
            cell("bars", bar("c", before), result.edited ? bar("p", after) : null),
            cell("num", percent(before)),
            cell("num", result.edited ? percent(after) : "\u2013"),
            cell(`num ${!result.edited || change === 0 ? "dim" : change > 0 ? "up" : "dn"}`, result.edited ? signed((change ?? NaN) * 100) : "\u2013"),
          ]),
        ),
      );
      if (!shown.length) rows.append(h("div", { class: "empty" }, result.error ? "No predictions: " + WHERE[result.error.where] : "\u2026"));
      el.classList.toggle("edited", Boolean(result.edited));
      why.textContent = result.error?.where === "edit" ? notRun(result.error) : "";
      klLine.hidden = !result.edited || !shown.length;
      gauge.hidden = !shown.length;
      kl.textContent = result.kl === null || result.kl === undefined ? "NaN" : result.kl.toFixed(2);
      showDifference(result);
    },
  );
  store.watch(
    (s) => [s.error("difference")],
    (message) => fail(message),
  );
  store.watch(
    (s) => [s.state.compare, s.result.difference],
    (compare, difference) => {
      inputs.forEach((input, side) => {
        if (input !== document.activeElement) input.value = visible(compare[side] ?? difference?.tokens[side] ?? "");
      });
    },
  );

  function showDifference({ difference, edited }) {
    const [before, after] = difference?.values ?? [];
    clean.textContent = difference ? signed(before) : "";
    patched.textContent = difference && edited ? signed(after) : "";
    to.hidden = !difference || !edited;
    gauge.replaceChildren();
    if (!difference || before === null || after === null) return;
    const reach = Math.max(4, Math.ceil(Math.max(Math.abs(before), Math.abs(after)) * 1.15));
    const at = (value) => `${((value + reach) / (2 * reach)) * 100}%`;
    const [a, b] = difference.tokens.map((text) => visible(text));
    for (const [value, text, side] of [[-reach, b, "left"], [0, "0", "mid"], [reach, a, "right"]]) {
      const tick = h("u", {});
      const name = h("em", { class: side }, text);
      tick.style.left = name.style.left = at(value);
      gauge.append(tick, name);
    }
    for (const [value, kind] of edited ? [[before, "c"], [after, "p"]] : [[before, "c"]]) {
      const dot = h("s", { class: kind });
      dot.style.left = at(value);
      gauge.append(dot);
    }
  }
}

// The first of each run in turn, so that a flat distribution beside a sharp one is seen too; the largest on top.
function likeliest(rows, count) {
  const most = (row) => Math.max(row[2], row[3]);
  const [clean, patched] = [2, 3].map((run) => [...rows].sort((a, b) => b[run] - a[run]));
  const rank = (row) => Math.min(clean.indexOf(row), patched.indexOf(row));
  return [...rows].sort((a, b) => rank(a) - rank(b) || most(b) - most(a)).slice(0, count).sort((a, b) => most(b) - most(a));
}

const WHERE = { prompt: "see the prompt above.", run: "see the message below." };

function bar(kind, share) {
  const el = h("span", { class: kind });
  el.style.width = `${Math.max(0.3, (share ?? 0) * 100)}%`;
  return el;
}
