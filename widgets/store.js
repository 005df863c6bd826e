// The one store of a page: the state that the user chose, the results of the kernel, and arrays pulled by key.

const TRAITS = ["state", "about", "tokens", "result", "jobs", "steps", "history"];
const KEPT = 24; // arrays remembered; the kernel keeps more
const PATIENCE = 700; // milliseconds until a kernel that does not answer is called busy

// `meant`: whether an empty choice of tokens means the last one. `pings`: whether the kernel's side answers a ping.
export function createStore(model, { meant = true, pings = false } = {}) {
  const watchers = new Set();
  const arrays = new Map(); // key -> {shape, values} | {error} | {pending: true}

  let runs; // the history's, as they were last sent
  let asked = null; // the history they were asked for
  let moves = model.get("steps")?.moves ?? 0; // how many undos the kernel has answered
  let later = null; // changes made while one is on its way
  let held = false; // whether a slider is
  let pinged = -PATIENCE; // when the kernel was last asked whether it listens
  let alarm = null; // until it has answered

  function changed() {
    for (const watcher of [...watchers]) {
      try {
        watcher();
      } catch (error) {
        reportError(error); // a view that cannot be drawn keeps neither the others nor what the user did from going on
      }
    }
  }

  // A kernel that runs a cell takes no messages: one that does answers this.
  function ping() {
    if (!pings || alarm || performance.now() - pinged < PATIENCE) return;
    pinged = performance.now();
    alarm = setTimeout(() => {
      store.deaf = true;
      changed();
    }, PATIENCE);
    model.send({ type: "ping" });
  }

  function onPong() {
    clearTimeout(alarm);
    alarm = null;
    if (!store.deaf) return;
    store.deaf = false;
    changed();
  }

  function onMessage(message, buffers) {
    if (message?.type === "pong") onPong();
    if (message?.type === "history") {
      runs = message.runs;
      changed();
    }
    if (message?.type !== "data") return;
    const [rows, cols] = message.shape;
    arrays.delete(message.key);
    if (message.dropped) return; // asked again when it is wanted again
    arrays.set(message.key, message.error ? { error: message.error } : { rows, cols, values: floats(buffers[0]), toJSON: () => message.key }); // told apart by its key, not its numbers
    while (arrays.size > KEPT) arrays.delete(arrays.keys().next().value);
    changed();
  }

  // The page that an undo brings has come: what was changed meanwhile is changed there.
  function onSteps() {
    if ((model.get("steps").moves ?? 0) === moves) return;
    moves = model.get("steps").moves;
    const patches = later ?? [];
    later = null;
    if (patches.length) store.set(Object.assign({}, ...patches));
  }

  model.on("change:steps", onSteps);
  for (const name of TRAITS) model.on(`change:${name}`, changed);
  model.on("msg:custom", onMessage);

  const store = {
    deaf: false, // whether the kernel runs a cell, and takes no messages
    waiting: new Set(), // functions, each sends a change that waits for the numbers of the one before
    get state() {
      return model.get("state");
    },
    get about() {
      return model.get("about");
    },
    get result() {
      return model.get("result");
    },
    get jobs() {
      return model.get("jobs");
    },
    // What undo and redo would do next.
    get steps() {
      return model.get("steps");
    },
    get history() {
      return model.get("history");
    },
    // The runs of the history, newest first: asked for by whoever shows them, undefined until they have come once.
    runs() {
      if (asked !== store.history.key) model.send({ type: "history" });
      asked = store.history.key;
      return runs;
    },
    // The tokens of "prompt" or "source": [id, text, flag] each.
    tokens(role = "prompt") {
      return model.get("tokens")[role]?.tokens ?? NONE;
    },
    // Every gesture of the user comes through here.
    set(patch) {
      model.set("state", { ...model.get("state"), ...patch });
      if (later) later.push(patch);
      else model.save_changes();
      ping();
    },
    // Undo, redo and restore are the kernel's: it answers with the state. They go the way of the state, so that none
    // overtakes a change made before, which may wait until the kernel has taken the one before that.
    move(message) {
      for (const send of [...store.waiting]) send(); // what was dragged is part of what is taken back
      later ??= [];
      const open = (model.get("moves") ?? []).filter((move) => move.id > moves);
      model.set("moves", [...open, { ...message, id: moves + open.length + 1 }]);
      model.save_changes();
      ping();
    },
    send(message) {
      model.send(message);
      ping();
    },
    // A slider is held, or let go.
    hold(on) {
      if (on === held) return;
      held = on;
      model.send({ type: "hold", on });
      changed();
    },
    // Calls fn(...values) now, and whenever one of the values that `select` returns has changed.
    watch(select, fn) {
      let last;
      const watcher = () => {
        const now = select(store);
        if (last && now.every((value, i) => same(value, last[i]))) return;
        last = now;
        fn(...now);
      };
      watchers.add(watcher);
      watcher();
    },
    // The selected tokens: those that exist, else the last one. For the source: the prompt's own, unless chosen apart.
    selection(role = "prompt") {
      const count = store.tokens(role).length;
      const chosen = store.state[role === "source" && store.state.source_positions.length ? "source_positions" : "positions"];
      const existing = chosen.filter((p) => p >= 0 && p < count);
      return existing.length || !count || !meant ? existing : [count - 1];
    },
    // An array, or undefined while it is on its way, or null where nothing is ever run. Asked for once; the answer carries
    // its key.
    data({ view, of = "clean", hook = "", head = 0 }) {
      const run = store.result.keys?.[of === "clean" ? "clean" : "patched"];
      if (!run) return store.result.keys ? undefined : null;
      const key = [view, of, hook, head, run].join("|");
      const found = arrays.get(key);
      // An array is another run: on a slow engine the next numbers would wait for it.
      if (!found && held && store.result.seconds > 0.05) return undefined;
      if (!found) {
        arrays.set(key, { pending: true });
        model.send({ type: "data", key, view, of, hook, head, run });
      }
      return found?.pending ? undefined : found;
    },
    error(where, index = null) {
      const error = store.result.error;
      return error && error.where === where && (index === null || error.index === index) ? error.message : null;
    },
    dispose() {
      clearTimeout(alarm);
      watchers.clear();
      store.waiting.clear();
      for (const name of TRAITS) model.off(`change:${name}`, changed);
      model.off("change:steps", onSteps);
      model.off("msg:custom", onMessage);
    },
  };
  return store;
}

const NONE = Object.freeze([]);

function same(a, b) {
  if (ArrayBuffer.isView(a?.values)) return a === b; // arrays, by identity
  return Object.is(a, b) || (typeof a === "object" && typeof b === "object" && JSON.stringify(a) === JSON.stringify(b));
}

// float32 of a message's buffer, copied only when it does not start at a multiple of four.
function floats(view) {
  const bytes = view instanceof DataView ? view : new DataView(view.buffer ?? view);
  if (bytes.byteOffset % 4) return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
  return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4);
}

// Hook points: from a column of the catalogue and a layer to a name, and back.
export function hookName(column, layer) {
  return column.name.replace("{i}", String(layer));
}

export function findHook(about, name) {
  for (const column of about.columns) {
    const [before, after] = column.name.split("{i}");
    if (after === undefined) {
      if (name === column.name) return { column, layer: null };
    } else if (name.startsWith(before) && name.endsWith(after)) {
      const middle = name.slice(before.length, name.length - after.length);
      if (/^\d+$/.test(middle)) return { column, layer: Number(middle) };
    }
  }
  return null;
}
