// Small elements that several views share.

import { h } from "../dom.js";
import { bin } from "../colors.js";
import * as format from "../format.js";
import { href } from "../router.js";

export const statusPill = (status) => h("span", { class: `pill ${status}` }, status);

/** Progress of a run: 57 / 200, with a bar. */
export function progress(run) {
  const steps = run.config.steps ?? run.current_step;
  return h(
    "span",
    { class: "progress" },
    h("progress", { max: steps || 1, value: run.current_step, "aria-label": `Steps of ${run.name}` }),
    h("span", { class: "nowrap" }, `${format.count(run.current_step)} / ${format.count(steps)}`),
  );
}

/** What a run is a fork of, with a link; null for a run that began at step 1. */
export function forkOrigin({ forked_from: origin }) {
  if (!origin) return null;
  const rollouts = origin.rollouts_until ? `, on its rollouts to step ${format.count(origin.rollouts_until)}` : "";
  return [
    "fork of ",
    h("a", { href: href(["runs", origin.run]) }, h("bdi", {}, origin.run)),
    ` at step ${format.count(origin.step)}${rollouts}`,
  ];
}

/** Names with their values: [name, value, note][] */
export function tiles(items) {
  return h(
    "dl",
    { class: "tiles" },
    items.map(([name, value, note]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value), note && h("dd", { class: "note" }, note)),
    ),
  );
}

/** k of G, with the colour of its bin. */
export const binChip = (k, size) =>
  h("span", { class: "bin" }, h("i", { style: { background: bin(k, size) } }), `${k} of ${size}`);

export const promptLink = (run, uid, query = {}) =>
  h("a", { href: href(["runs", run, "prompt"], { uid, ...query }) }, h("bdi", {}, uid));

export const batchLink = (run, step) =>
  h("a", { href: href(["runs", run, "batches"], { step }) }, format.count(step));

/** The batch of a step, with the explanation of what was decided about a prompt. */
export const decisionLink = (run, step, uid) =>
  h("a", { href: href(["runs", run, "batches"], { step, uid }) }, format.count(step));

export const source = (name) => h("span", { class: `source ${name}` }, format.term(name));

/** The images of a payload, which are given by their digests. */
export const imagesOf = ({ images }) =>
  Array.isArray(images) && images.every((image) => image?.digest) ? images : [];

/** A payload on one line of at most `maxLength` characters. Of images it has the number. */
export function payloadText(payload, maxLength = 120) {
  const images = imagesOf(payload).length;
  const text = Object.entries(payload)
    .map(([name, value]) =>
      name === "images" && images ? format.plural(images, "image") : `${name} ${format.any(value)}`,
    )
    .join(", ");
  return text.length > maxLength ? `${text.slice(0, maxLength)}…` : text;
}

export const groupSize = (run) => run.config.rollout?.group_size ?? 8;

/** A number field with a slider for a step in [low, high]; calls `onchosen` with each choice. */
export function stepControls(name, value, low, high, onchosen) {
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
    const rounded = Math.round(Number(input.value));
    const finite = Number.isFinite(rounded) ? rounded : low;
    const step = Math.min(Number(slider.max), Math.max(Number(slider.min), finite));
    set(step);
    onchosen(step);
  };
  slider.addEventListener("input", () => (number.value = slider.value));
  slider.addEventListener("change", () => settle(slider));
  number.addEventListener("change", () => settle(number));
  const set = (step, max = null) => {
    if (max !== null) slider.max = number.max = String(max);
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
