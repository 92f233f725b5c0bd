// How hard the prompts are, and how that changes.

import { get, path } from "../api.js";
import { chart } from "../charts.js";
import { bin } from "../colors.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { empty, keep, keeper, refusal, region } from "../live.js";
import { href, setQuery, whole } from "../router.js";
import { table } from "../tables.js";
import { heatmap } from "./heatmap.js";
import { binChip, groupSize, stepControls } from "./parts.js";

/** @param {import("./run.js").Visit} visit */
export function showDifficulty(visit) {
  const now = region();
  const migration = h("section", { class: "card" });
  const over = binsOverTime(visit, now);
  fill(
    visit.root,
    h("div", { class: "split" }, over, h("section", { class: "card" }, h("h2", {}, "Now"), now.element)),
    migration,
  );
  showMigration(visit, migration);
}

// ---- bins over time -----------------------------------------------------------------------------

function binsOverTime(visit, now) {
  const { name, signal, run } = visit;
  const size = groupSize(run);
  let unit = visit.query.unit === "prompts" ? "prompts" : "share";
  let history = [];
  const options = {
    title: "Training prompts by accuracy bin",
    note: `k of ${size} correct at each prompt's last attempt: dark is none, bright is all.`,
    // As high as the table beside it.
    height: Math.min(600, Math.max(330, 110 + 27 * (size + 1))),
    empty: "No step is committed yet.",
  };
  const box = h("div", { class: "tall" });
  let drawing = make();

  const keepBins = keeper(signal);
  visit.changed((run) =>
    keepBins({
      load: (ours) => get(path`/runs/${name}/difficulty/bins/history`, { points: 200 }, ours),
      show: (found) => {
        history = found;
        draw();
        now.show(currentBins(visit, history.at(-1), run));
      },
      refuse: now.refuse,
    }),
  );
  return box;

  function make() {
    const made = chart({
      ...options,
      y: unit === "share" ? "share of the attempted prompts" : "prompts",
      format: unit === "share" ? format.percent : format.count,
      axisFormat: unit === "share" ? format.percent : undefined,
    });
    made.element.querySelector(".chart-head").append(
      field(
        "Show",
        select(
          [
            ["share", "Shares"],
            ["prompts", "Numbers"],
          ],
          unit,
          (value) => (
            (unit = value),
            setQuery({ unit: value === "share" ? "" : value }),
            (drawing = make()),
            draw()
          ),
        ),
      ),
    );
    fill(box, made.element);
    return made;
  }

  function draw() {
    const seen = history.map(({ bins }) => bins.reduce((sum, each) => sum + each, 0));
    drawing.update({
      x: history.map(({ step }) => step),
      yDomain: unit === "share" ? [0, 1] : undefined,
      series: Array.from({ length: size + 1 }, (_, k) => ({
        name: `${k} of ${size}`,
        kind: "area",
        color: bin(k, size),
        values: history.map(({ bins }, i) =>
          unit === "share" ? (seen[i] ? bins[k] / seen[i] : 0) : bins[k],
        ),
      })),
    });
  }
}

function currentBins({ name }, newest, run) {
  if (!newest) return empty("No step is committed yet.");
  const size = groupSize(run);
  const most = Math.max(...newest.bins, 1);
  const seen = newest.bins.reduce((sum, each) => sum + each, 0);
  return [
    table({
      caption: `Training prompts by bin after step ${format.count(newest.step)}`,
      rows: newest.bins.map((prompts, k) => ({ prompts, k })),
      columns: [
        {
          title: "Correct",
          cell: ({ k }) => h("a", { href: href(["runs", name, "prompts"], { bin: k }) }, binChip(k, size)),
        },
        { title: "Prompts", number: true, cell: ({ prompts }) => format.count(prompts) },
        { title: "Share", number: true, cell: ({ prompts }) => format.percent(seen ? prompts / seen : null) },
        {
          title: "",
          cell: ({ prompts, k }) =>
            h(
              "span",
              { class: "meter", "aria-hidden": "true" },
              h("i", { style: { width: `${(100 * prompts) / most}%`, background: bin(k, size) } }),
            ),
        },
      ],
    }),
    h("p", { class: "note" }, `${format.count(seen)} attempted, ${format.count(newest.unseen)} not yet.`),
  ];
}

// ---- migration ----------------------------------------------------------------------------------

function showMigration(visit, root) {
  const { name, signal, query } = visit;
  const heldOut = query.set === "held-out";
  const results = region();
  const keepMatrix = keeper(signal);
  const controls = h("div", { class: "controls" });
  const choose = select(
    [
      ["", "Training prompts"],
      ["held-out", "Held-out prompts"],
    ],
    heldOut ? "held-out" : "",
    (set) => {
      setQuery({ set, before: "", after: "" });
      Object.assign(query, { set, before: "", after: "" });
      showMigration(visit, root);
    },
  );
  fill(
    root,
    h("h2", {}, "Migration between bins"),
    h(
      "p",
      { class: "note" },
      "Each prompt is in the row of its bin before and in the column of its bin after: to the right of the outlined diagonal it became easier.",
    ),
    h("div", { class: "controls" }, field("Prompts", choose), controls),
    results.element,
  );
  if (heldOut) heldOutMigration();
  else trainingMigration();

  function trainingMigration() {
    const last = visit.run.current_step;
    const inside = (step) => step !== null && step <= last;
    let before = inside(whole(query.before)) ? whole(query.before) : Math.ceil(last / 2);
    let after = inside(whole(query.after)) ? whole(query.after) : null;
    const ask = () => {
      const shownAfter = after ?? visit.run.current_step;
      load(path`/runs/${name}/difficulty/migration`, before, shownAfter, (found) =>
        trainingResult(visit, found),
      );
    };
    const first = stepControls(
      "Before: step",
      before,
      0,
      last,
      (step) => ((before = step), setQuery({ before: step }), ask()),
    );
    const second = stepControls(
      "After: step",
      after ?? last,
      0,
      last,
      (step) => ((after = step), setQuery({ after: step }), ask()),
    );
    fill(controls, first.element, second.element);
    visit.changed((run) => {
      if (!controls.contains(first.element)) return;
      first.set(before, run.current_step);
      second.set(after ?? run.current_step, run.current_step);
      ask();
    });
  }

  function heldOutMigration() {
    keep({
      signal,
      load: () => get(path`/runs/${name}/evaluations`, {}, signal),
      show: (evaluations) => {
        const versions = evaluations.map((each) => each.version);
        if (versions.length < 2)
          return results.show(
            empty(versions.length ? "One evaluation so far; a migration needs two." : "No evaluation yet."),
          );
        let before = versions.includes(whole(query.before)) ? whole(query.before) : versions[0];
        let after = versions.includes(whole(query.after)) ? whole(query.after) : versions.at(-1);
        const options = versions.map((each) => [String(each), `version ${format.count(each)}`]);
        const ask = () => load(path`/runs/${name}/evaluations/migration`, before, after, heldOutResult);
        fill(
          controls,
          field(
            "Before",
            select(
              options,
              String(before),
              (value) => ((before = Number(value)), setQuery({ before }), ask()),
            ),
          ),
          field(
            "After",
            select(options, String(after), (value) => ((after = Number(value)), setQuery({ after }), ask())),
          ),
        );
        ask();
      },
      refuse: results.refuse,
    });
  }

  function load(address, before, after, result) {
    keepMatrix({
      load: (ours) => get(address, { before, after }, ours),
      show: (found) => results.show(result(found)),
      refuse: (problem) => results.show(refusal(problem)),
    });
  }
}

function trainingResult({ name }, found) {
  const unsolved = found.matrix[0].reduce((sum, each) => sum + each, 0);
  const inSteps = `after step ${format.count(found.before)} and after step ${format.count(found.after)}`;
  return [
    movement(found.matrix),
    h(
      "p",
      {},
      `Of the ${format.plural(unsolved, "prompt")} at 0 before, `,
      h("b", {}, `${format.count(found.unlocked)} (${format.percent(found.unlocked_fraction)})`),
      " are above it after. ",
      found.after > found.before &&
        h(
          "a",
          {
            href: href(["runs", name, "prompts"], {
              unlocked_after: found.before,
              unlocked_until: found.after,
            }),
          },
          "Prompts first solved in between",
        ),
    ),
    heatmap({
      caption: `Training prompts by bin ${inSteps}`,
      matrix: found.matrix,
      extra: { title: "first attempted in between", values: found.newly_attempted },
    }),
  ];
}

function heldOutResult(found) {
  return [
    movement(found.matrix),
    h(
      "p",
      {},
      h("b", {}, format.percent(found.unlocked_fraction)),
      " of the prompts at 0 before are above it after.",
    ),
    heatmap({
      caption: `Held-out prompts by bin at version ${format.count(found.before)} and at version ${format.count(found.after)}`,
      matrix: found.matrix,
    }),
  ];
}

/** Easier, the same, harder: the sums of the triangles and the diagonal. */
function movement(matrix) {
  const sums = { easier: 0, same: 0, harder: 0 };
  matrix.forEach((row, i) =>
    row.forEach((value, j) => (sums[j > i ? "easier" : j < i ? "harder" : "same"] += value)),
  );
  const all = sums.easier + sums.same + sums.harder;
  if (!all) return empty("No prompt was attempted by the first of the two steps.");
  const words = (value, text) =>
    h("span", {}, h("b", {}, format.count(value)), ` ${text} (${format.percent(value / all)})`);
  return h(
    "p",
    { class: "facts" },
    words(sums.easier, "easier"),
    words(sums.same, "unchanged"),
    words(sums.harder, "harder"),
  );
}
