// The parts of a run outside the training loop, and its configuration.

import { get, path } from "../api.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { EVERY_MS, keep, region } from "../live.js";
import { table } from "../tables.js";

const when = (iso) => h("time", { datetime: iso, title: format.time(iso) }, format.ago(iso));
const digest = (each) => h("code", { title: each.manifest_digest }, each.manifest_digest.slice(0, 12));

/** @param {import("./run.js").Visit} visit */
export function showSystem(visit) {
  const { name, signal, root, run } = visit;
  const parts = { replicas: region(), checkpoints: region(), weights: region() };
  fill(
    root,
    h(
      "div",
      { class: "split even" },
      h("section", { class: "card" }, h("h2", {}, "Rollout replicas"), parts.replicas.element),
      h("section", { class: "card" }, h("h2", {}, "Checkpoints"), parts.checkpoints.element),
    ),
    h("section", { class: "card" }, h("h2", {}, "Weights"), parts.weights.element),
    configuration(run),
  );
  const shown = {
    replicas: (rows) =>
      table({
        caption: "Engines, and what each has loaded",
        hideCaption: true,
        rows,
        empty: "No engine has reported yet.",
        columns: [
          { title: "Replica", cell: (each) => each.name },
          { title: "State", cell: (each) => (each.detail ? `${each.state}: ${each.detail}` : each.state) },
          { title: "Loaded version", number: true, cell: (each) => format.count(each.loaded_version) },
          { title: "Last seen", cell: (each) => when(each.last_seen) },
        ],
      }),
    checkpoints: (rows) =>
      table({
        caption: "Kept checkpoints, newest first",
        hideCaption: true,
        rows,
        empty: "No checkpoint yet.",
        columns: [
          { title: "Step", number: true, cell: (each) => format.count(each.step) },
          { title: "Made", cell: (each) => when(each.created_at) },
          { title: "Manifest", cell: digest },
        ],
      }),
    weights: (rows) =>
      table({
        caption: "Versions of the weights, newest first",
        hideCaption: true,
        rows,
        empty: "No weights are published yet.",
        most: 20,
        columns: [
          { title: "Version", number: true, cell: (each) => format.count(each.version) },
          { title: "Status", cell: (each) => each.status },
          { title: "Made", cell: (each) => when(each.created_at) },
          { title: "Where", cell: (each) => h("code", {}, each.uri) },
          { title: "Manifest", cell: digest },
        ],
      }),
  };
  for (const [what, part] of Object.entries(parts)) {
    keep({
      signal,
      every: 2 * EVERY_MS,
      load: () => get(path`/runs/${name}/${what}`, {}, signal),
      show: (rows) => part.show(shown[what](rows)),
      refuse: part.refuse,
    });
  }
}

function configuration(run) {
  const rows = flat(run.config).sort((a, b) => a.key.localeCompare(b.key, "en"));
  const results = h("div");
  const search = h("input", { type: "search", placeholder: "Part of a key or value", oninput: () => show() });
  const show = () => {
    const wanted = search.value.toLowerCase();
    const found = rows.filter((each) => `${each.key} ${each.value}`.toLowerCase().includes(wanted));
    fill(
      results,
      table({
        caption: "Configuration",
        hideCaption: true,
        rows: found,
        empty: "No key matches.",
        most: 500,
        columns: [
          { title: "Key", cell: (each) => h("code", {}, each.key) },
          { title: "Value", cell: (each) => h("code", {}, each.value) },
        ],
      }),
    );
  };
  show();
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Configuration"),
    h("div", { class: "controls" }, field("Search", search)),
    results,
  );
}

function flat(config, prefix = "") {
  return Object.entries(config).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flat(value, `${prefix}${key}.`)
      : [{ key: `${prefix}${key}`, value: typeof value === "string" ? value : JSON.stringify(value) }],
  );
}
