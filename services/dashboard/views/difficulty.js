// Difficulty of the prompts over time, and their migration between accuracy bins.

import { get, path } from "../api.js";
import { chart } from "../charts/chart.js";
import { bin } from "../colors.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { empty, keep, keeper, refusal, region } from "../live.js";
import { href, setQuery, whole } from "../router.js";
import { table } from "../tables.js";
import { heatmap } from "./heatmap.js";
import { binChip, groupSize, stepControls } from "./pieces.js";

/** @param {import("./run.js").Visit} visit */
export function showDifficulty(visit) {
  const now = region();
  const migration = h("section", { class: "card" });
  const history = binsOverTime(visit, now);
  fill(
    visit.root,
    h("div", { class: "split" }, history, h("section", { class: "card" }, h("h2", {}, "Now"), now.element)),
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
    note: `k of ${size} correct at each prompt's last attempt; dark: none, bright: all.`,
    // The height of the table beside it.
    height: Math.min(600, Math.max(330, 110 + 27 * (size + 1))),
    empty: "No step is committed yet.",
  };
  const box = h("div", { class: "tall" });
  let drawing = make();

  const keepBins = keeper(signal);
  visit.changed((run) =>
    keepBins({
      load: (signal) => get(path`/runs/${name}/difficulty/bins/history`, { points: 200 }, signal),
      show: (bins) => {
        history = bins;
        draw();
        now.show(currentBins(visit, history.at(-1), run));
      },
      refuse: now.refuse,
    }),
  );
  return box;

  function make() {
    const figure = chart({
      ...options,
      y: unit === "share" ? "share of the attempted prompts" : "prompts",
      format: unit === "share" ? format.percent : format.count,
      axisFormat: unit === "share" ? format.percent : undefined,
    });
    figure.element.querySelector(".chart-head").append(
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
    fill(box, figure.element);
    return figure;
  }

  function draw() {
    const attempted = history.map(({ bins }) => total(bins));
    drawing.update({
      x: history.map(({ step }) => step),
      yDomain: unit === "share" ? [0, 1] : undefined,
      series: Array.from({ length: size + 1 }, (_, k) => ({
        name: `${k} of ${size}`,
        kind: "area",
        color: bin(k, size),
        values: history.map(({ bins }, i) =>
          unit === "share" ? (attempted[i] ? bins[k] / attempted[i] : 0) : bins[k],
        ),
      })),
    });
  }
}

const total = (bins) => bins.reduce((sum, prompts) => sum + prompts, 0);

function currentBins({ name }, newest, run) {
  if (!newest) return empty("No step is committed yet.");
  const size = groupSize(run);
  const most = Math.max(...newest.bins, 1);
  const attempted = total(newest.bins);
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
        {
          title: "Share",
          number: true,
          cell: ({ prompts }) => format.percent(attempted ? prompts / attempted : null),
        },
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
    h(
      "p",
      { class: "note" },
      `${format.count(attempted)} attempted, ${format.count(newest.unseen)} not yet.`,
    ),
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
      "A prompt is counted in the row of its bin before and the column of its bin after. Prompts to the right of the outlined diagonal became easier.",
    ),
    h("div", { class: "controls" }, field("Prompts", choose), controls),
    results.element,
  );
  if (heldOut) heldOutMigration();
  else trainingMigration();

  function trainingMigration() {
    const last = visit.run.current_step;
    const isCommitted = (step) => step !== null && step <= last;
    let before = isCommitted(whole(query.before)) ? whole(query.before) : Math.ceil(last / 2);
    let after = isCommitted(whole(query.after)) ? whole(query.after) : null;
    const update = () => {
      const shownAfter = after ?? visit.run.current_step;
      load(path`/runs/${name}/difficulty/migration`, before, shownAfter, (migration) =>
        trainingResult(visit, migration),
      );
    };
    const first = stepControls(
      "Before: step",
      before,
      0,
      last,
      (step) => ((before = step), setQuery({ before: step }), update()),
    );
    const second = stepControls(
      "After: step",
      after ?? last,
      0,
      last,
      (step) => ((after = step), setQuery({ after: step }), update()),
    );
    fill(controls, first.element, second.element);
    visit.changed((run) => {
      if (!controls.contains(first.element)) return;
      first.set(before, run.current_step);
      second.set(after ?? run.current_step, run.current_step);
      update();
    });
  }

  function heldOutMigration() {
    let chosen = query.evaluation;
    keep({
      signal,
      load: () => get(path`/runs/${name}/evaluation-sets`, {}, signal),
      show: function showSets(sets) {
        const set = sets.find((one) => one.name === chosen) ?? sets.find((one) => one.primary);
        const versions = set.evaluations.map((evaluation) => evaluation.version);
        if (versions.length < 2)
          return results.show(
            empty(versions.length ? "One evaluation so far; a migration needs two." : "No evaluation yet."),
          );
        let before = versions.includes(whole(query.before)) ? whole(query.before) : versions[0];
        let after = versions.includes(whole(query.after)) ? whole(query.after) : versions.at(-1);
        const options = versions.map((version) => [String(version), `version ${format.count(version)}`]);
        const update = () =>
          load(path`/runs/${name}/evaluations/migration`, before, after, heldOutResult, {
            evaluation_set: set.name,
          });
        fill(
          controls,
          sets.length > 1 &&
            field(
              "Evaluation set",
              select(
                sets.map((one) => [one.name, one.name]),
                set.name,
                (value) => ((chosen = value), setQuery({ evaluation: value }), showSets(sets)),
              ),
            ),
          field(
            "Before",
            select(
              options,
              String(before),
              (value) => ((before = Number(value)), setQuery({ before }), update()),
            ),
          ),
          field(
            "After",
            select(
              options,
              String(after),
              (value) => ((after = Number(value)), setQuery({ after }), update()),
            ),
          ),
        );
        update();
      },
      refuse: results.refuse,
    });
  }

  function load(address, before, after, result, parameters = {}) {
    keepMatrix({
      load: (signal) => get(address, { before, after, ...parameters }, signal),
      show: (migration) => results.show(result(migration)),
      refuse: (problem) => results.show(refusal(problem)),
    });
  }
}

function trainingResult({ name }, migration) {
  const unsolved = total(migration.matrix[0]);
  const steps = `after step ${format.count(migration.before)} and after step ${format.count(migration.after)}`;
  return [
    movement(migration.matrix),
    h(
      "p",
      {},
      `Of the ${format.plural(unsolved, "prompt")} at 0 before, `,
      h("b", {}, `${format.count(migration.unlocked)} (${format.percent(migration.unlocked_fraction)})`),
      " are above it after. ",
      migration.after > migration.before &&
        h(
          "a",
          {
            href: href(["runs", name, "prompts"], {
              unlocked_after: migration.before,
              unlocked_until: migration.after,
            }),
          },
          "Prompts first solved in between",
        ),
    ),
    heatmap({
      caption: `Training prompts by bin ${steps}`,
      matrix: migration.matrix,
      extra: { title: "first attempted in between", values: migration.newly_attempted },
    }),
  ];
}

function heldOutResult(migration) {
  return [
    movement(migration.matrix),
    h(
      "p",
      {},
      h("b", {}, format.percent(migration.unlocked_fraction)),
      " of the prompts at 0 before are above it after.",
    ),
    heatmap({
      caption: `Held-out prompts by bin at version ${format.count(migration.before)} and at version ${format.count(migration.after)}`,
      matrix: migration.matrix,
    }),
  ];
}

/** Counts easier, unchanged and harder prompts: the triangles and the diagonal of the matrix. */
function movement(matrix) {
  const sums = { easier: 0, same: 0, harder: 0 };
  matrix.forEach((row, i) =>
    row.forEach((value, j) => (sums[j > i ? "easier" : j < i ? "harder" : "same"] += value)),
  );
  const count = sums.easier + sums.same + sums.harder;
  if (!count) return empty("No prompt was attempted before the first of the two steps.");
  const fact = (value, text) =>
    h("span", {}, h("b", {}, format.count(value)), ` ${text} (${format.percent(value / count)})`);
  return h(
    "p",
    { class: "facts" },
    fact(sums.easier, "easier"),
    fact(sums.same, "unchanged"),
    fact(sums.harder, "harder"),
  );
}
