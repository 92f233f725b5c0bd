// Runs side by side, over what they cost. Runs whose configurations differ in the seed alone are one
// variant, which has one colour.

import { get } from "../api.js";
import { chart } from "../charts/chart.js";
import { bin, series as color } from "../colors.js";
import { field, fill, h, select, uniqueId } from "../dom.js";
import * as format from "../format.js";
import { announce, empty, keeper, region } from "../live.js";
import { href, setQuery } from "../router.js";
import { smoothed } from "../scales.js";
import { mean } from "../steps.js";
import { table } from "../tables.js";
import { backTestCard } from "./backtests.js";
import { forkOrigin } from "./pieces.js";

const MAX_RUNS = 24;
/** What curves are drawn over: the title of the axis, and the value of a point. */
const COSTS = {
  steps: { title: "training steps", of: (point) => point.step ?? point.version - 1 },
  rollouts: { title: "training responses", of: (point) => point.rollouts },
  tokens: { title: "generated tokens", of: (point) => point.tokens },
  seconds: { title: "seconds of the trainer", of: (point) => point.seconds },
};

export function showCompare(root, signal, query) {
  /** Names of the compared runs, in the order of selection. */
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
    backTestCard(),
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
    comparison = null;
    fill(chosen, names.map(chip));
    if (names.length === 0) return results.show(empty("Add the names of the runs to compare."));
    keepResults({
      load: (signal) => get("/comparisons", { run: names }, signal),
      show: (loaded) => ((comparison = loaded), fill(chosen, names.map(chip)), draw()),
      refuse: results.refuse,
    });
  }

  function draw() {
    if (comparison) results.show(comparisonView(comparison, cost));
  }

  function chip(name) {
    const origin = comparison?.runs.find(({ run }) => run === name)?.forked_from;
    const variant = comparison?.variants.findIndex(({ runs }) => runs.includes(name)) ?? -1;
    return h(
      "li",
      {},
      h("i", { style: { background: variant < 0 ? "var(--faint)" : color(variant) } }),
      h("a", { href: href(["runs", name]) }, name),
      origin && h("span", { class: "note" }, forkOrigin({ forked_from: origin })),
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

function comparisonView({ runs, variants, measure, at_equal, differing_config: differing }, by) {
  const cost = COSTS[by];
  const several = variants.some((variant) => variant.runs.length > 1);
  const curves = (options, pointsOf, valueOf, smooth) => {
    const note = several
      ? `${options.note} Lines are means over the seeds, as far as all of them go, in bands from the lowest to the highest; thin lines are seeds that go further.`
      : options.note;
    const figure = chart({ ...options, note, x: cost.title, y: measure, format: format.score, height: 260 });
    figure.update(aligned(runs, variants, pointsOf, cost.of, valueOf, smooth));
    return figure.element;
  };
  const evaluated = (point) => point[`mean_${measure}`];
  const evaluation = curves(
    {
      title: "Held-out evaluation",
      note: `Mean ${measure} on the held-out prompts, by ${cost.title}.`,
      empty: "No run has an evaluation yet.",
    },
    (run) => run.evaluations,
    evaluated,
  );
  const fresh = curves(
    {
      title: `${capitalized(measure)} of fresh rollouts`,
      note: `Moving mean of the ${measure} of each step's fresh rollouts, by ${cost.title}.`,
      empty: "No run has committed a step yet.",
    },
    (run) => run.fresh,
    (point) => (measure === "reward" ? point.mean_reward : point.accuracy),
    smoothed,
  );
  const measured = runs.map((run) => run.evaluations.map(evaluated));
  const totals = [
    ["Committed steps", (run) => format.count(run.step)],
    ["Training responses", (run) => format.count(run.cost.rollouts)],
    ["Training tokens", (run) => format.compact(run.cost.tokens)],
    ["Time of the trainer", (run) => format.seconds(run.cost.seconds)],
    [`First ${measure}`, (_, i) => format.score(measured[i][0])],
    [`Last ${measure}`, (_, i) => format.score(measured[i].at(-1))],
    [`Best ${measure}`, (_, i) => format.score(measured[i].length ? Math.max(...measured[i]) : null)],
  ];
  const columns = (cell, attributes) =>
    runs.map((run, i) => ({ title: run.run, ...attributes, cell: (row) => cell(row, run, i) }));
  const valuesOf = (variant, values) =>
    variant.runs.map((name) => JSON.stringify(values[runs.findIndex(({ run }) => run === name)]));
  return [
    h("div", { class: "charts wide" }, evaluation, fresh),
    runs.length > 1 && variantsView(variants, measure, at_equal[by], cost),
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
          ...variants.map((variant) => ({
            title: titleOf(variant),
            cell: ([, values]) => h("code", {}, [...new Set(valuesOf(variant, values))].join(", ")),
          })),
        ],
      }),
    ),
  ];
}

const capitalized = (word) => word[0].toUpperCase() + word.slice(1);

/** a, b and c */
const list = (words) => `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;

/** The name of a variant, with the number of its seeds, or of its runs if two have the same seed. */
function titleOf({ name, runs, seeds }) {
  if (runs.length === 1) return name;
  return `${name} (${format.plural(runs.length, new Set(seeds).size === runs.length ? "seed" : "run")})`;
}

function variantsView(variants, measure, equal, cost) {
  return h(
    "section",
    { class: "card" },
    h("h2", {}, `Held-out ${measure} at equal ${cost.title}`),
    equal
      ? [
          h("p", { class: "note" }, explainMeasure(measure, equal, cost)),
          variantTable(variants, measure, equal),
          h("p", { class: "note" }, explainResolution(equal.resolution, variants.length)),
        ]
      : empty("No run was evaluated after its first training steps yet."),
  );
}

function explainMeasure(measure, { costs, cheapest_run: cheapest }, cost) {
  const last = format.count(costs.at(-1));
  return costs.length === 1
    ? `The ${measure} at ${last} ${cost.title}, the last evaluation of ${cheapest}, which has cost least.`
    : `The mean ${measure} at ${list(costs.map(format.count))} ${cost.title}, the last ${costs.length} evaluations of ${cheapest}, which has cost least. Other runs are read there on straight lines between their evaluations.`;
}

/** Says which differences the seeds decide, as `bapo compare` does. */
function explainResolution(resolution, count) {
  if (!resolution)
    return count === 1
      ? "One variant has nothing to be compared with."
      : "With one seed each, nothing shows how far repetitions of a run differ: no variant has a place. Two seeds are the fewest, four or more decide more.";
  const { standard_deviation: deviation, degrees_of_freedom: freedom, smallest_difference: smallest } = resolution;
  const pairs = (count * (count - 1)) / 2;
  const decided =
    smallest === null
      ? "Two variants have no seed in common, so that nothing decides between them."
      : `Differences above ${format.score(smallest)} are decided (95% for ${pairs === 1 ? "the pair" : `all ${pairs} pairs together`}).`;
  return `Repetitions of a run differ by ${deviation.toFixed(4)} (standard deviation, ${format.plural(freedom, "degree")} of freedom). ${decided} Variants between which nothing is decided share their places.`;
}

function variantTable(variants, measure, equal) {
  const [first] = variants;
  const results = new Map(variants.map((variant, i) => [variant, equal.variants[i]]));
  const known = (variant) => results.get(variant).values.filter((value) => value !== null);
  return table({
    caption: `Held-out ${measure} by variant`,
    hideCaption: true,
    rows: variants,
    columns: [
      {
        title: "Variant",
        cell: (variant) => [
          h("i", { class: "colour", style: { background: color(variants.indexOf(variant)) } }),
          variant.name,
        ],
      },
      { title: "Seeds", cell: ({ seeds }) => seeds.join(", ") },
      { title: "Place", number: true, cell: (variant) => placesOf(results.get(variant)) },
      { title: "Mean", number: true, cell: (variant) => format.score(mean(known(variant))) },
      {
        title: "Lowest to highest",
        number: true,
        cell: (variant) => {
          const values = known(variant);
          if (values.length < 2) return format.NONE;
          return `${format.score(Math.min(...values))} to ${format.score(Math.max(...values))}`;
        },
      },
      ...(variants.length > 1
        ? [
            {
              title: `Difference from ${first.name}`,
              cell: (variant) =>
                variant === first || known(variant).length * known(first).length === 0
                  ? format.NONE
                  : differenceOf(results.get(variant)),
            },
          ]
        : []),
    ],
  });
}

function placesOf({ places }) {
  if (!places) return format.NONE;
  const [best, worst] = places;
  return best === worst ? String(best) : `${best}–${worst}`;
}

function differenceOf({ difference }) {
  if (!difference) return "no seed in common";
  const { mean: value, seeds, half_width: half } = difference;
  const signed = `${value < 0 ? "−" : "+"}${format.score(Math.abs(value))}`;
  return half === null
    ? `${signed}, ${format.plural(seeds, "seed")}: no interval worth reading`
    : `${signed} ± ${format.score(half)}, ${format.plural(seeds, "seed")}`;
}

/**
 * Puts the points of the runs on the union of their x, interpolating where a run has no point, and
 * joins the runs of a variant. `smooth` is applied to the values of each run.
 */
function aligned(runs, variants, pointsOf, xOf, valueOf, smooth = (values) => values) {
  const x = [...new Set(runs.flatMap(pointsOf).map(xOf))].sort((a, b) => a - b);
  const curveOf = (run) => {
    const points = pointsOf(run);
    return interpolated(points.map(xOf), smooth(points.map(valueOf)), x);
  };
  return {
    x,
    series: variants.flatMap((variant, i) => {
      // A run without points yet does not shorten the curve of its variant.
      const begun = runs.filter((run) => variant.runs.includes(run.run) && pointsOf(run).length > 0);
      const curves = begun.map(curveOf);
      const name = titleOf({ ...variant, ...seedsOf(variant, begun) });
      if (curves.length < 2)
        return { name, color: color(i), values: curves[0] ?? x.map(() => null) };
      return band(name, color(i), curves, x);
    }),
  };
}

/** The names and seeds of the runs of a variant that have points; of all if none has. */
function seedsOf(variant, begun) {
  if (begun.length === 0) return variant;
  const runs = begun.map(({ run }) => run);
  return { runs, seeds: runs.map((run) => variant.seeds[variant.runs.indexOf(run)]) };
}

/** The mean of the curves in a band from their minimum to their maximum, and what goes further. */
function band(name, color, curves, x) {
  const over = (reduce) =>
    x.map((_, i) => {
      const values = curves.map((curve) => curve[i]);
      return values.includes(null) ? null : reduce(values);
    });
  const values = over(mean);
  const end = values.findLastIndex((value) => value !== null);
  const low = over((seeds) => Math.min(...seeds));
  const high = over((seeds) => Math.max(...seeds));
  const further = curves
    .map((curve) => curve.map((value, i) => (i < end ? null : value)))
    .filter((curve) => curve.some((value, i) => i > end && value !== null))
    .map((curve) => ({ name, color, kind: "faint", hidden: true, values: curve }));
  return [{ name, color, values, low, high }, ...further];
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
