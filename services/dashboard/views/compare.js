// Two runs side by side.

import { get, path } from "../api.js";
import { chart } from "../charts.js";
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
      load: (ours) => get("/runs", { search: part.slice(0, 63), limit: 20 }, ours),
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
    if (!pair[0] || !pair[1]) return results.show(empty("Name two runs."));
    keepResults({
      load: (ours) =>
        Promise.all([
          get("/comparisons", { first: pair[0], second: pair[1] }, ours),
          ...pair.map((name) => get(path`/runs/${name}/steps`, { points: 300 }, ours)),
        ]),
      show: ([comparison, ...steps]) => results.show(comparisonView(comparison, steps)),
      refuse: results.refuse,
    });
  }
}

function comparisonView(found, steps) {
  const [a, b] = found.runs;
  const link = (name) => h("a", { href: href(["runs", name]) }, name);
  const versions = found.evaluations.map(([version]) => version);
  const accuracy = [1, 2].map((i) => found.evaluations.map((each) => each[i]));
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
    series: accuracy.map((values, i) => ({ name: found.runs[i], color: COLORS[i], values, joined: true })),
  });
  const rewards = chart({
    title: "Reward",
    note: "Mean of each step's fresh rollouts; moving mean.",
    y: "mean reward",
    format: format.score,
    height: 260,
    empty: "Neither run has committed a step yet.",
  });
  rewards.update(aligned(steps, found.runs));
  const known = accuracy.map((values) => values.filter((value) => value !== null));
  const totals = [
    ["Committed steps", found.steps.map(format.count)],
    ["Training responses", found.rollouts.map(format.count)],
    ["Training tokens", found.tokens.map(format.compact)],
    ["First accuracy", known.map((values) => format.score(values[0]))],
    ["Last accuracy", known.map((values) => format.score(values.at(-1)))],
    ["Best accuracy", known.map((values) => format.score(values.length ? Math.max(...values) : null))],
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
        found.difficulty.map((bins, i) => binBar(found.runs[i], bins)),
      ),
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "What is set differently"),
      table({
        caption: "Keys of the configuration that differ",
        hideCaption: true,
        rows: Object.entries(found.differing_config),
        empty: "Nothing: the configurations are the same.",
        columns: [
          { title: "Key", cell: ([key]) => h("code", {}, key) },
          { title: a, cell: ([, values]) => h("code", {}, JSON.stringify(values[0])) },
          { title: b, cell: ([, values]) => h("code", {}, JSON.stringify(values[1])) },
        ],
      }),
    ),
  ];
}

/** Both runs over the union of their steps; where one has no point, its line goes on. */
function aligned(steps, names) {
  const x = [...new Set(steps.flat().map((each) => each.step))].sort((a, b) => a - b);
  return {
    x,
    series: steps.map((own, i) => {
      const values = new Map(own.map((each, j) => [each.step, j]));
      const means = smoothed(own.map(reward));
      const last = own.at(-1)?.step ?? 0;
      return {
        name: names[i],
        color: COLORS[i],
        values: x.map((step) => (step > last ? null : between(own, means, values, step))),
      };
    }),
  };
}

/** The value at a step, on a straight line between the points around it. */
function between(own, means, places, step) {
  if (places.has(step)) return means[places.get(step)];
  const after = own.findIndex((each) => each.step > step);
  if (after <= 0) return null;
  const [low, high] = [own[after - 1].step, own[after].step];
  if (means[after - 1] === null || means[after] === null) return null;
  return means[after - 1] + ((means[after] - means[after - 1]) * (step - low)) / (high - low);
}

function binBar(name, { bins, step, unseen }) {
  const size = bins.length - 1;
  const seen = bins.reduce((sum, each) => sum + each, 0);
  return h(
    "div",
    { class: "bin-bar" },
    h("h3", {}, name),
    seen === 0
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
