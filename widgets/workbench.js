// The page of the workbench: puts the views together around one store, and keeps the keys to itself.

import { h, headline, keepKeys, visible } from "./dom.js";
import { mountExamples } from "./examples.js";
import { mountFirst } from "./first.js";
import { mount as mountHeatmap } from "./heatmap.js";
import { mountHistory, mountSteps } from "./history.js";
import { mount as mountHooks } from "./hooks.js";
import { mount as mountJobs } from "./jobs.js";
import { mount as mountLogits } from "./logits.js";
import { mountScreen } from "./screen.js";
import { mount as mountSpec } from "./spec.js";
import { createStore } from "./store.js";
import { mount as mountTokens } from "./tokens.js";

function mountHeader(el, store) {
  const name = h("b", {});
  const meta = h("span", { class: "meta" });
  const tools = h("span", { class: "steps" });
  el.append(name, meta, tools);
  mountExamples(el, store);
  store.watch(
    (s) => [s.about],
    (about) => {
      name.textContent = about.name;
      const engine = String(about.engine ?? "").replace(/^vllm/, "vLLM");
      const parts = [engine, String(about.device ?? "").toUpperCase(), about.dtype, about.mode].filter(Boolean).join(", ");
      meta.textContent = `${parts}: ${about.layers} layers, ${about.heads} heads`;
      meta.title = meta.textContent; // cut short where the page is narrow
    },
  );
  return tools;
}

// The result, politely and once a run.
function mountSpoken(el, store) {
  el.setAttribute("aria-live", "polite");
  store.watch(
    (s) => [s.result],
    (result) => {
      if (!result.error && result.rows?.length) el.textContent = headline(result, (token) => visible(token.trim()));
    },
  );
}

function mountWorkbench(el, store) {
  const sections = {};
  const section = (name, tag = "div", label = null) => (sections[name] = h(tag, { class: name, "aria-label": label }));
  const root = h(
    "div",
    { class: "axp", role: "region", "aria-label": "Activation Explorer", tabindex: "-1" },
    section("bar"),
    section("past", "section", "History"),
    section("first", "section", "First steps"),
    section("tokens", "section", "Prompts"),
    section("pred", "section", "Predictions"),
    h("div", { class: "main" }, section("hooks", "section", "Hooks"), section("heat", "section", "Heatmap")),
    section("edits", "section", "Edits"),
    section("job"),
    section("sr"),
  );
  keepKeys(root);
  el.append(root);
  const tools = mountHeader(sections.bar, store);
  mountFirst(sections.first, store);
  const disposers = [mountTokens(sections.tokens, store)];
  mountLogits(sections.pred, store);
  disposers.push(mountHeatmap(sections.heat, store));
  mountHooks(sections.hooks, store); // after the heatmap, whose numbers matter first
  mountSpec(sections.edits, store);
  disposers.push(mountJobs(sections.job, store));
  mountSpoken(sections.sr, store);
  disposers.push(mountSteps(tools, store, root)); // after the views: it looks where they left the focus
  mountHistory(tools, sections.past, store);
  mountScreen(sections.bar, store, root);
  return () => {
    disposers.forEach((dispose) => dispose());
    store.dispose();
    root.remove();
  };
}

function render({ model, el }) {
  return mountWorkbench(el, createStore(model, { pings: true }));
}

export default { render };
