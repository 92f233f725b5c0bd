// Two runs side by side.

import { get, path } from "../api.js";
import { chart } from "../charts/chart.js";
import { bin } from "../colors.js";
import { field, fill, h, uniqueId } from "../dom.js";
import * as format from "../format.js";
import { empty, keeper, region } from "../live.js";
import { href, setQuery } from "../router.js";
import { smoothed } from "../scales.js";
import { reward } from "../steps.js";
import { table } from "../tables.js";

const COLORS = ["var(--blue)", "var(--orange)"];

export function showCompare(root, signal, query) {
  const results = region({ class: "page" });
  const keepResults = keeper(signal);
  const keepNames = keeper(signal);
  const names = h("datalist", { id: uniqueId("names") });
  const input = (key) =>
    h("input", {
      type: "text",
      value: query[key] ?? "",
      list: names.id,
      autocomplete: "off",
      spellcheck: "false",
      required: true,
      oninput: (event) => suggest(event.target.value),
    });
  const [first, second] = [input("first"), input("second")];
  const submit = (event) => {
    event.preventDefault();
    setQuery({ first: first.value, second: second.value });
    load();
  };
  fill(
    root,
    h("h1", {}, "Compare two runs"),
    h(
      "form",
      { class: "controls", onsubmit: submit },
      field("First run", first),
      field("Second run", second),
      h("button", { type: "submit", class: "primary" }, "Compare"),
      names,
    ),
    results.element,
  );
  suggest("");
  load();

  function suggest(part) {
    keepNames({
      load: (signal) => get("/runs", { search: part.slice(0, 63), limit: 20 }, signal),
      show: (page) =>
        fill(
          names,
          page.items.map((run) => h("option", { value: run.name })),
        ),
      refuse: () => {},
    });
  }

  function load() {
    const pair = [first.value.trim(), second.value.trim()];
    if (!pair[0] || !pair[1]) return results.show(empty("Enter the names of two runs."));
    keepResults({
      load: (signal) =>
        Promise.all([
          get("/comparisons", { first: pair[0], second: pair[1] }, signal),
          ...pair.map((name) => get(path`/runs/${name}/steps`, { points: 300 }, signal)),
        ]),
      show: ([comparison, ...steps]) => results.show(comparisonView(comparison, steps)),
      refuse: results.refuse,
    });
  }
}

function comparisonView(comparison, steps) {
  const [a, b] = comparison.runs;
  const link = (name) => h("a", { href: href(["runs", name]) }, name);
  const versions = comparison.evaluations.map(([version]) => version);
  const accuracy = [1, 2].map((i) => comparison.evaluations.map((evaluation) => evaluation[i]));
  const evaluation = chart({
    title: "Held-out evaluation",
    note: "Mean accuracy on the held-out prompts.",
    y: "accuracy",
    x: "version",
    format: format.score,
    height: 260,
    empty: "Neither run has an evaluation yet.",
  });
  evaluation.update({
    x: versions,
    series: accuracy.map((values, i) => ({
      name: comparison.runs[i],
      color: COLORS[i],
      values,
      joined: true,
    })),
  });
  const rewards = chart({
    title: "Reward",
    note: "Moving mean of the mean reward of each step's fresh rollouts.",
    y: "mean reward",
    format: format.score,
    height: 260,
    empty: "Neither run has committed a step yet.",
  });
  rewards.update(aligned(steps, comparison.runs));
  const measured = accuracy.map((values) => values.filter((value) => value !== null));
  const totals = [
    ["Committed steps", comparison.steps.map(format.count)],
    ["Training responses", comparison.rollouts.map(format.count)],
    ["Training tokens", comparison.tokens.map(format.compact)],
    ["First accuracy", measured.map((values) => format.score(values[0]))],
    ["Last accuracy", measured.map((values) => format.score(values.at(-1)))],
    ["Best accuracy", measured.map((values) => format.score(values.length ? Math.max(...values) : null))],
  ];
  return [
    h("div", { class: "charts wide" }, evaluation.element, rewards.element),
    h(
      "div",
      { class: "split even" },
      h(
        "section",
        { class: "card" },
        h("h2", {}, "Totals"),
        table({
          caption: "Totals of both runs",
          hideCaption: true,
          rows: totals,
          columns: [
            { title: "", cell: ([name]) => name },
            { title: link(a), number: true, cell: ([, values]) => values[0] },
            { title: link(b), number: true, cell: ([, values]) => values[1] },
          ],
        }),
      ),
      h(
        "section",
        { class: "card" },
        h("h2", {}, "Training prompts by accuracy bin"),
        comparison.difficulty.map((bins, i) => binBar(comparison.runs[i], bins)),
      ),
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Configuration differences"),
      table({
        caption: "Keys of the configuration that differ",
        hideCaption: true,
        rows: Object.entries(comparison.differing_config),
        empty: "The configurations are equal.",
        columns: [
          { title: "Key", cell: ([key]) => h("code", {}, key) },
          { title: a, cell: ([, values]) => h("code", {}, JSON.stringify(values[0])) },
          { title: b, cell: ([, values]) => h("code", {}, JSON.stringify(values[1])) },
        ],
      }),
    ),
  ];
}

/** Puts both runs on the union of their steps, interpolating where a run has no point. */
function aligned(steps, names) {
  const x = [...new Set(steps.flat().map((record) => record.step))].sort((a, b) => a - b);
  return {
    x,
    series: steps.map((records, i) => {
      const indices = new Map(records.map((record, j) => [record.step, j]));
      const means = smoothed(records.map(reward));
      const last = records.at(-1)?.step ?? 0;
      return {
        name: names[i],
        color: COLORS[i],
        values: x.map((step) => (step > last ? null : interpolated(records, means, indices, step))),
      };
    }),
  };
}

/** Returns the value at a step, on a straight line between the neighbouring points. */
function interpolated(records, means, indices, step) {
  if (indices.has(step)) return means[indices.get(step)];
  const after = records.findIndex((record) => record.step > step);
  if (after <= 0) return null;
  const [low, high] = [records[after - 1].step, records[after].step];
  if (means[after - 1] === null || means[after] === null) return null;
  return means[after - 1] + ((means[after] - means[after - 1]) * (step - low)) / (high - low);
}

function binBar(name, { bins, step, unseen }) {
  const size = bins.length - 1;
  const attempted = bins.reduce((sum, prompts) => sum + prompts, 0);
  return h(
    "div",
    { class: "bin-bar" },
    h("h3", {}, name),
    attempted === 0
      ? empty("No prompt was attempted yet.")
      : [
          h(
            "div",
            { class: "bar", "aria-hidden": "true" },
            bins.map((prompts, k) => h("i", { style: { "flex-grow": prompts, background: bin(k, size) } })),
          ),
          h(
            "ul",
            { class: "bin-list" },
            bins.map((prompts, k) =>
              h(
                "li",
                {},
                h("i", { style: { background: bin(k, size) } }),
                `${k} of ${size}: `,
                h("b", {}, format.count(prompts)),
              ),
            ),
          ),
          h(
            "p",
            { class: "note" },
            `after step ${format.count(step)}; ${format.count(unseen)} not attempted`,
          ),
        ],
  );
}
