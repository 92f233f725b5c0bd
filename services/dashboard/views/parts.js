// Small pieces that several views show.

import { h } from "../dom.js";
import { bin } from "../colors.js";
import * as format from "../format.js";
import { href } from "../router.js";

export const statusPill = (status) => h("span", { class: `pill ${status}` }, status);

/** 57 / 200, with a bar. */
export function progress(run) {
  const steps = run.config.steps ?? run.current_step;
  return h(
    "span",
    { class: "progress" },
    h("progress", { max: steps || 1, value: run.current_step, "aria-label": `Steps of ${run.name}` }),
    h("span", { class: "nowrap" }, `${format.count(run.current_step)} / ${format.count(steps)}`),
  );
}

/** Name and number side by side: [name, value, further words][] */
export function tiles(items) {
  return h(
    "dl",
    { class: "tiles" },
    items.map(([name, value, more]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value), more && h("dd", { class: "note" }, more)),
    ),
  );
}

/** k of G, on its colour. */
export const binChip = (k, size) =>
  h("span", { class: "bin" }, h("i", { style: { background: bin(k, size) } }), `${k} of ${size}`);

export const promptLink = (run, uid, query = {}) =>
  h("a", { href: href(["runs", run, "prompt"], { uid, ...query }) }, h("bdi", {}, uid));

export const batchLink = (run, step) =>
  h("a", { href: href(["runs", run, "batches"], { step }) }, format.count(step));

export const source = (name) => h("span", { class: `source ${name}` }, format.words(name));

/** A payload on one line. */
export function payloadText(payload, longest = 120) {
  const text = Object.entries(payload)
    .map(([name, value]) => `${name} ${format.any(value)}`)
    .join(", ");
  return text.length > longest ? `${text.slice(0, longest)}…` : text;
}

export const groupSize = (run) => run.config.rollout?.group_size ?? 8;

/** A number field with a slider: a step in [low, high]. `chosen` is called when it is settled. */
export function stepControls(name, value, low, high, chosen) {
  const slider = h("input", { type: "range", min: low, max: high, value, "aria-label": `${name}, slider` });
  const number = h("input", {
    type: "number",
    min: low,
    max: high,
    value,
    inputmode: "numeric",
    "aria-label": name,
  });
  const settle = (input) => {
    const wanted = Math.round(Number(input.value));
    const step = Math.min(
      Number(slider.max),
      Math.max(Number(slider.min), Number.isFinite(wanted) ? wanted : low),
    );
    set(step);
    chosen(step);
  };
  slider.addEventListener("input", () => (number.value = slider.value));
  slider.addEventListener("change", () => settle(slider));
  number.addEventListener("change", () => settle(number));
  const set = (step, most = null) => {
    if (most !== null) slider.max = number.max = String(most);
    slider.value = number.value = String(step);
  };
  return {
    element: h(
      "div",
      { class: "step-control" },
      h("span", { class: "label", "aria-hidden": "true" }, name),
      number,
      slider,
    ),
    set,
  };
}
