// Any number of runs side by side, over what they cost.

import { get } from "../api.js";
import { chart } from "../charts/chart.js";
import { bin, series as color } from "../colors.js";
import { field, fill, h, select, uniqueId } from "../dom.js";
import * as format from "../format.js";
import { announce, empty, keeper, region } from "../live.js";
import { href, setQuery } from "../router.js";
import { smoothed } from "../scales.js";
import { table } from "../tables.js";

const MAX_RUNS = 8;
/** What curves are drawn over: the title of the axis, and the value of a point. */
const COSTS = {
  steps: { title: "training steps", of: (point) => point.step ?? point.version - 1 },
  rollouts: { title: "training responses", of: (point) => point.rollouts },
  tokens: { title: "generated tokens", of: (point) => point.tokens },
  seconds: { title: "seconds of the trainer", of: (point) => point.seconds },
};

export function showCompare(root, signal, query) {
  /** Names of the compared runs, in the order of their colours. */
  let names = [...new Set((query.runs ?? "").split(",").filter(Boolean))].slice(0, MAX_RUNS);
  let cost = query.by in COSTS ? query.by : "steps";
  let comparison = null;
  const results = region({ class: "page" });
  const keepResults = keeper(signal);
  const keepNames = keeper(signal);
  const known = h("datalist", { id: uniqueId("names") });
  const chosen = h("ul", { class: "chosen", "aria-label": "Compared runs" });
  const input = h("input", {
    type: "text",
    list: known.id,
    maxlength: 63,
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => suggest(input.value),
  });
  const add = h("button", { type: "submit", class: "primary" }, "Add");
  const axis = select(
    Object.entries(COSTS).map(([key, { title }]) => [key, title]),
    cost,
    (value) => {
      cost = value;
      setQuery({ by: value });
      draw();
    },
  );
  fill(
    root,
    h("h1", {}, "Compare runs"),
    h(
      "form",
      { class: "controls", onsubmit: submit },
      field("Add a run", input),
      add,
      h("div", { class: "push" }, field("Curves by", axis)),
      known,
    ),
    chosen,
    results.element,
  );
  suggest("");
  load();

  function submit(event) {
    event.preventDefault();
    const name = input.value.trim();
    if (!name || names.includes(name)) return;
    input.value = "";
    change([...names, name]);
  }

  function change(changed) {
    names = changed;
    setQuery({ runs: names.join(",") });
    announce(`${format.plural(names.length, "run")} compared`);
    load();
  }

  function suggest(part) {
    keepNames({
      load: (signal) => get("/runs", { search: part.slice(0, 63), limit: 20 }, signal),
      show: (page) =>
        fill(
          known,
          page.items.map((run) => h("option", { value: run.name })),
        ),
      refuse: () => {},
    });
  }

  function load() {
    input.disabled = add.disabled = names.length >= MAX_RUNS;
    fill(chosen, names.map(chip));
    comparison = null;
    if (names.length === 0) return results.show(empty("Add the names of the runs to compare."));
    keepResults({
      load: (signal) => get("/comparisons", { run: names }, signal),
      show: (loaded) => ((comparison = loaded), draw()),
      refuse: results.refuse,
    });
  }

  function draw() {
    if (comparison) results.show(comparisonView(comparison, COSTS[cost]));
  }

  function chip(name, i) {
    return h(
      "li",
      {},
      h("i", { style: { background: color(i) } }),
      h("a", { href: href(["runs", name]) }, name),
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          "aria-label": `Remove ${name}`,
          onclick: () => {
            change(names.filter((other) => other !== name));
            input.focus();
          },
        },
        "×",
      ),
    );
  }
}

function comparisonView({ runs, differing_config: differing }, cost) {
  const curves = (options, pointsOf, valueOf, smooth) => {
    const figure = chart({ ...options, x: cost.title, format: format.score, height: 260 });
    figure.update(aligned(runs.map(pointsOf), runs, cost.of, valueOf, smooth));
    return figure.element;
  };
  const accuracy = curves(
    {
      title: "Held-out evaluation",
      note: `Mean accuracy on the held-out prompts, by ${cost.title}.`,
      y: "accuracy",
      empty: "No run has an evaluation yet.",
    },
    (run) => run.evaluations,
    (point) => point.mean_accuracy,
  );
  const fresh = curves(
    {
      title: "Accuracy of fresh rollouts",
      note: `Moving mean of the accuracy of each step's fresh rollouts, by ${cost.title}.`,
      y: "accuracy",
      empty: "No run has committed a step yet.",
    },
    (run) => run.fresh,
    (point) => point.accuracy,
    smoothed,
  );
  const measured = runs.map((run) => run.evaluations.map((point) => point.mean_accuracy));
  const totals = [
    ["Committed steps", (run) => format.count(run.step)],
    ["Training responses", (run) => format.count(run.cost.rollouts)],
    ["Training tokens", (run) => format.compact(run.cost.tokens)],
    ["Time of the trainer", (run) => format.seconds(run.cost.seconds)],
    ["First accuracy", (_, i) => format.score(measured[i][0])],
    ["Last accuracy", (_, i) => format.score(measured[i].at(-1))],
    ["Best accuracy", (_, i) => format.score(measured[i].length ? Math.max(...measured[i]) : null)],
  ];
  const columns = (cell, attributes = {}) =>
    runs.map((run, i) => ({ title: run.run, ...attributes, cell: (row) => cell(row, run, i) }));
  return [
    h("div", { class: "charts wide" }, accuracy, fresh),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Totals"),
      table({
        caption: "Totals of the runs",
        hideCaption: true,
        rows: totals,
        columns: [
          { title: "", cell: ([name]) => name },
          ...columns(([, total], run, i) => total(run, i), { number: true }),
        ],
      }),
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Training prompts by accuracy bin"),
      h(
        "div",
        { class: "bin-bars" },
        runs.map((run) => binBar(run.run, run.difficulty)),
      ),
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Configuration differences"),
      table({
        caption: "Keys of the configuration that differ",
        hideCaption: true,
        rows: Object.entries(differing),
        empty: "The configurations are equal.",
        columns: [
          { title: "Key", cell: ([key]) => h("code", {}, key) },
          ...columns(([, values], _, i) => h("code", {}, JSON.stringify(values[i]))),
        ],
      }),
    ),
  ];
}

/**
 * Puts the points of the runs on the union of their x, interpolating where a run has no point.
 * `smooth` is applied to the values of each run.
 */
function aligned(pointsByRun, runs, xOf, valueOf, smooth = (values) => values) {
  const x = [...new Set(pointsByRun.flat().map(xOf))].sort((a, b) => a - b);
  return {
    x,
    series: pointsByRun.map((points, i) => ({
      name: runs[i].run,
      color: color(i),
      values: interpolated(points.map(xOf), smooth(points.map(valueOf)), x),
    })),
  };
}

/** Returns the values at the sorted `targets`, on straight lines; null outside of `x`. */
function interpolated(x, values, targets) {
  let after = 0;
  return targets.map((target) => {
    while (after < x.length && x[after] < target) after++;
    if (x[after] === target) return values[after];
    if (after === 0 || after === x.length) return null;
    const share = (target - x[after - 1]) / (x[after] - x[after - 1]);
    return values[after - 1] + share * (values[after] - values[after - 1]);
  });
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
