// What the widgets of one view share: their traits look to the view like the workbench's, and it stands in the same frame.

import { h, keepKeys } from "./dom.js";
import { createStore } from "./store.js";

// The page of a widget: `traits` are the parts of the state that it has as traits of their own. `meant`: whether an empty
// choice of tokens means the last one.
export function view({ name, label, traits, mount, meant = false }) {
  function render({ model, el }) {
    const store = createStore(asWorkbench(model, traits), { meant });
    const section = h("div", { class: name });
    const root = h("div", { class: "axp one", role: "group", "aria-label": label }, section);
    keepKeys(root);
    el.append(root);
    const dispose = mount(section, store);
    return () => {
      dispose?.();
      store.dispose();
      root.remove();
    };
  }
  return { render };
}

function asWorkbench(model, traits) {
  const parts = ["state", ...traits];
  const heard = new Map(); // event -> handlers
  let quiet = false; // while a gesture sets several traits
  const tell = (event, ...args) => {
    if (!quiet) for (const handler of [...(heard.get(event) ?? [])]) handler(...args);
  };
  const told = new Map(); // event of the store -> [event of the model, handler] each

  return {
    get(name) {
      if (name === "state") return Object.assign({}, model.get("state"), ...traits.map((trait) => ({ [trait]: model.get(trait) })));
      if (name === "tokens") return { prompt: { tokens: model.get("tokens") ?? [] } };
      return model.get(name);
    },
    set(_, state) {
      const rest = { ...state };
      for (const trait of traits) delete rest[trait];
      quiet = true;
      for (const part of parts) {
        const value = part === "state" ? rest : state[part];
        if (JSON.stringify(value) !== JSON.stringify(model.get(part))) model.set(part, value);
      }
      quiet = false;
      tell("change:state");
    },
    save_changes() {
      model.save_changes();
    },
    // Small arrays came with the widget: they are there while the kernel is busy. Others are asked for.
    send(message) {
      const here = message.type === "data" ? model.get("arrays")?.[message.head] : null;
      if (here) queueMicrotask(() => tell("msg:custom", { type: "data", key: message.key, shape: here.shape }, [here.bytes]));
      else model.send(message);
    },
    on(event, handler) {
      if (!heard.has(event)) {
        heard.set(event, new Set());
        told.set(event, (event === "change:state" ? parts.map((part) => `change:${part}`) : [event]).map((name) => [name, (...args) => tell(event, ...args)]));
        for (const [name, teller] of told.get(event)) model.on(name, teller);
      }
      heard.get(event).add(handler);
    },
    off(event, handler) {
      heard.get(event)?.delete(handler);
      if (heard.get(event)?.size) return;
      for (const [name, teller] of told.get(event) ?? []) model.off(name, teller);
      heard.delete(event);
      told.delete(event);
    },
  };
}
