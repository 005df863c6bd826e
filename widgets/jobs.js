// The job bar: what is running and how far it is, with a cancel; a kernel that is busy with a cell and takes nothing; at
// rest, what the last run found and took.

import { h, headline, notRun, seconds } from "./dom.js";

const DEAF = "The kernel is running a cell, or has stopped. What you change or cancel counts when the cell is done.";

export function mount(el, store) {
  const text = h("span", { class: "what" });
  const fill = h("i", {});
  const track = h("div", { class: "track", role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0", "aria-valuemax": "100" }, fill);
  const cancel = h("button", { type: "button", onclick: () => store.send({ type: "cancel" }) }, "Cancel");
  const again = h("button", { type: "button", onclick: () => store.send({ type: "run" }) }, "Run again");
  el.append(text, track, cancel, again);
  const root = el.closest(".axp");
  let timer = null;
  let seen = new Map(); // job id -> when this page first saw it, by its own clock

  function show() {
    const { active, last } = store.jobs;
    seen = new Map(active.map((job) => [job.id, seen.get(job.id) ?? performance.now()]));
    // Short jobs do not flash: only one that lasts is shown as running.
    const long = active.find((job) => performance.now() - seen.get(job.id) > 300);
    el.classList.toggle("running", Boolean(long));
    // The numbers shown are of what was asked before: said beside them where that lasts.
    root.classList.toggle("late", store.deaf || active.some((job) => job.label === "Run" && performance.now() - seen.get(job.id) > 800));
    cancel.hidden = !long;
    track.hidden = !long;
    again.hidden = Boolean(active.length) || store.result.error?.where !== "run";
    if (long) {
      const share = long.total ? long.done / long.total : 0;
      const elapsed = seconds((performance.now() - seen.get(long.id)) / 1000);
      text.textContent = `${long.label}${long.total ? `: ${long.done} of ${long.total}` : ""}${long.message ? `, ${long.message}` : ""}, ${elapsed}${store.deaf ? `. ${DEAF}` : ""}`;
      fill.style.width = `${share * 100}%`;
      track.setAttribute("aria-valuenow", String(Math.round(share * 100)));
    } else if (store.deaf) {
      text.textContent = DEAF;
    } else {
      const { seconds: took } = store.result;
      const found = headline(store.result);
      if (last?.outcome === "cancelled") text.textContent = `${last.label} cancelled`;
      else if (store.result.error?.where === "edit") text.textContent = notRun(store.result.error);
      else text.textContent = found && took !== undefined ? `${found}, in ${seconds(took)}` : "";
    }
    if (active.length && !timer) timer = setInterval(show, 100);
    if (!active.length && timer) {
      clearInterval(timer);
      timer = null;
    }
  }
  store.watch((s) => [s.jobs, s.result, s.deaf], show);
  return () => clearInterval(timer);
}
