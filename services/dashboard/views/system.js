// Replicas, checkpoints and weights of a run, and its configuration.

import { get, path } from "../api.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { POLL_INTERVAL_MS, keep, region } from "../live.js";
import { table } from "../tables.js";

const when = (iso) => h("time", { datetime: iso, title: format.time(iso) }, format.ago(iso));
const SILENT_AFTER_S = 10; // a collector takes a replica for lost then (HEARTBEAT_TIMEOUT_S)
const state = (row) => {
  const text = row.detail ? `${row.state}: ${row.detail}` : row.state;
  return row.silent_s > SILENT_AFTER_S ? `gone (was ${text})` : text;
};
const digest = (row) => h("code", { title: row.manifest_digest }, row.manifest_digest.slice(0, 12));

/** @param {import("./run.js").Visit} visit */
export function showSystem(visit) {
  const { name, signal, root, run } = visit;
  const regions = { replicas: region(), checkpoints: region(), weights: region() };
  fill(
    root,
    h(
      "div",
      { class: "split even" },
      h("section", { class: "card" }, h("h2", {}, "Rollout replicas"), regions.replicas.element),
      h("section", { class: "card" }, h("h2", {}, "Checkpoints"), regions.checkpoints.element),
    ),
    h("section", { class: "card" }, h("h2", {}, "Weights"), regions.weights.element),
    configuration(run),
  );
  const tables = {
    replicas: (rows) =>
      table({
        caption: "Rollout replicas and the policy version that each has loaded",
        hideCaption: true,
        rows,
        empty: "No replica has sent a heartbeat yet.",
        columns: [
          { title: "Replica", cell: (row) => row.name },
          { title: "State", cell: state },
          { title: "Loaded version", number: true, cell: (row) => format.count(row.loaded_version) },
          { title: "Last heartbeat", cell: (row) => when(row.last_seen) },
        ],
      }),
    checkpoints: (rows) =>
      table({
        caption: "Kept checkpoints, newest first",
        hideCaption: true,
        rows,
        empty: "No checkpoint yet.",
        columns: [
          { title: "Step", number: true, cell: (row) => format.count(row.step) },
          { title: "Created", cell: (row) => when(row.created_at) },
          { title: "Manifest", cell: digest },
        ],
      }),
    weights: (rows) =>
      table({
        caption: "Versions of the weights, newest first",
        hideCaption: true,
        rows,
        empty: "No weights are published yet.",
        maxRows: 20,
        columns: [
          { title: "Version", number: true, cell: (row) => format.count(row.version) },
          { title: "Status", cell: (row) => row.status },
          { title: "Created", cell: (row) => when(row.created_at) },
          { title: "Prefix", cell: (row) => h("code", {}, row.uri) },
          { title: "Manifest", cell: digest },
        ],
      }),
  };
  for (const [kind, target] of Object.entries(regions)) {
    keep({
      signal,
      every: 2 * POLL_INTERVAL_MS,
      load: () => get(path`/runs/${name}/${kind}`, {}, signal),
      show: (rows) => target.show(tables[kind](rows)),
      refuse: target.refuse,
    });
  }
}

function configuration(run) {
  const rows = flat(run.config).sort((a, b) => a.key.localeCompare(b.key, "en"));
  const results = h("div");
  const search = h("input", { type: "search", placeholder: "Part of a key or value", oninput: () => show() });
  const show = () => {
    const text = search.value.toLowerCase();
    const matches = rows.filter((row) => `${row.key} ${row.value}`.toLowerCase().includes(text));
    fill(
      results,
      table({
        caption: "Configuration",
        hideCaption: true,
        rows: matches,
        empty: "No key or value matches.",
        maxRows: 500,
        columns: [
          { title: "Key", cell: (row) => h("code", {}, row.key) },
          { title: "Value", cell: (row) => h("code", {}, row.value) },
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
