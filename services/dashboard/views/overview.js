// The progress of a run: reward, evaluation, staleness, throughput.

import { get, path } from "../api.js";
import { chart } from "../charts/chart.js";
import { SOURCES, series } from "../colors.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { POLL_INTERVAL_MS, keep, keeper, refusal } from "../live.js";
import { go, href, setQuery } from "../router.js";
import { smoothed } from "../scales.js";
import {
  accuracy,
  duration,
  explanations,
  mean,
  metric,
  phases,
  reward,
  Steps,
  throughput,
} from "../steps.js";
import { table } from "../tables.js";
import { tiles } from "./pieces.js";

const FORKS_INTERVAL_MS = 30_000;
/** Forks that the page asks for, and those of them that it shows at once. */
const LISTED_FORKS = 200;
const SHOWN_FORKS = 10;
/** Keys that the mark of a change names. */
const NAMED_KEYS = 4;
const NO_STEP = "No step is committed yet.";
const PHASES = ["wait", "read", "proximal", "update", "publish", "checkpoint", "commit"];

/** @param {import("./run.js").Visit} visit */
export function showOverview(visit) {
  const { name, signal, root } = visit;
  const charts = makeCharts(visit);
  const facts = h("div");
  const scores = h("div");
  const forks = h("div");
  const changes = h("div");
  let drawnChanges = 0;
  const store = new Steps(name, signal);
  let steps = [];
  let sets = [];
  let metricName = visit.query.metric ?? "loss";
  let partName = visit.query.part ?? ACCURACY;

  const picker = h("select", {
    onchange: () => ((metricName = picker.value), setQuery({ metric: metricName }), drawMetric()),
  });
  const partPicker = h("select", {
    onchange: () => ((partName = partPicker.value), setQuery({ part: partName }), drawPart()),
  });
  charts.part.element.querySelector(".chart-head").append(field("Part", partPicker));
  const figures = Object.values(charts).map(({ element }) => element);
  charts.metric.element.querySelector(".chart-head").append(field("Metric", picker));
  fill(root, facts, forks, scores, changes, h("div", { class: "charts" }, figures));

  const keepSteps = keeper(signal);
  visit.changed((run) =>
    keepSteps({
      load: () => store.load(run),
      show: (loaded) => ((steps = loaded), drawSteps(), drawChanges()),
      refuse: (problem) => fill(facts, refusal(problem)),
    }),
  );
  // An evaluation may be complete long after its step was committed.
  keep({
    signal,
    every: 2 * POLL_INTERVAL_MS,
    load: () => get(path`/runs/${name}/evaluation-sets`, {}, signal),
    show: (loaded) => ((sets = loaded), drawEvaluations()),
    refuse: (problem) => fill(facts, refusal(problem)),
  });

  keep({
    signal,
    every: FORKS_INTERVAL_MS,
    load: () => get("/runs", { parent: name, limit: LISTED_FORKS }, signal),
    show: (page) => fill(forks, page.items.length ? forkList(page) : null),
    refuse: (problem) => fill(forks, refusal(problem)),
  });

  function drawSteps() {
    const x = steps.map((step) => step.step);
    const marks = marksOf(visit.run);
    const valuesOf = (measure) => steps.map((step) => measure(step));
    charts.reward.update({ x, marks, series: smoothLine("reward", valuesOf(reward), "var(--blue)") });
    drawPart();
    charts.batch.update({
      x,
      marks,
      series: Object.entries(SOURCES).map(([source, color]) => ({
        name: format.term(source),
        kind: "area",
        stepped: true,
        color,
        values: valuesOf((step) => step.counts[source] ?? 0),
      })),
      limit: capacity(visit.run),
    });
    charts.window.update({
      x,
      marks,
      yDomain: [0, 1],
      series: [
        {
          name: "replay window [c2, c3]",
          kind: "band",
          color: "var(--green)",
          low: valuesOf((step) => step.c2),
          values: valuesOf((step) => step.c3),
        },
        { name: "r_tot", color: "var(--blue)", values: valuesOf((step) => step.r_tot) },
      ],
    });
    charts.entropy.update({
      x,
      marks,
      series: smoothLine(
        "entropy",
        valuesOf((step) => metric(step, "entropy")),
        "var(--blue)",
      ),
    });
    charts.staleness.update({
      x,
      marks,
      series: [
        { name: "mean", color: "var(--blue)", values: valuesOf((step) => metric(step, "staleness_mean")) },
        { name: "max", color: "var(--orange)", values: valuesOf((step) => metric(step, "staleness_max")) },
      ],
    });
    charts.throughput.update({ x, marks, series: smoothLine("generated", valuesOf(throughput), "var(--blue)") });
    const byPhase = valuesOf(phases);
    const named = [...new Set([...PHASES, ...byPhase.flatMap(Object.keys)])].filter((phase) =>
      byPhase.some((seconds) => phase in seconds),
    );
    charts.phases.update({
      x,
      marks,
      series: named.map((phase, i) => ({
        name: phase,
        kind: "area",
        stepped: true,
        color: series(i),
        values: byPhase.map((seconds) => seconds[phase] ?? 0),
      })),
    });
    drawMetric();
    drawFacts();
  }

  /** Draws one part of the reward, because parts have scales of their own. */
  function drawPart() {
    const parts = partsOf(steps);
    charts.part.element.hidden = parts.length === 0;
    if (!parts.length) return;
    if (!parts.includes(partName)) partName = ACCURACY;
    offer(partPicker, parts, (part) => partTitle(part, visit.run));
    partPicker.value = partName;
    const valueOf = partName === ACCURACY ? accuracy : (step) => step.reward_parts[partName] ?? null;
    charts.part.update({
      x: steps.map((step) => step.step),
      marks: marksOf(visit.run),
      series: smoothLine(format.term(partName), steps.map(valueOf), "var(--blue)"),
    });
  }

  function drawMetric() {
    const names = [...new Set(steps.flatMap((step) => Object.keys(step.metrics)))].sort();
    if (names.length && !names.includes(metricName)) metricName = names[0];
    offer(picker, names);
    picker.value = metricName;
    picker.parentElement.hidden = names.length === 0;
    charts.metric.update({
      x: steps.map((step) => step.step),
      marks: marksOf(visit.run),
      series: smoothLine(
        metricName,
        steps.map((step) => metric(step, metricName)),
        "var(--blue)",
      ),
    });
  }

  function drawEvaluations() {
    // Sets may be evaluated at different versions.
    const versions = new Set(sets.flatMap((set) => set.evaluations.map(({ version }) => version)));
    const x = [...versions].sort((a, b) => a - b);
    const rewarded = sets.filter(hasOtherRewards);
    charts.heldOutReward.element.hidden = !rewarded.length;
    for (const [drawn, label, key, measured] of [
      [charts.evaluation, "accuracy", "mean_accuracy", sets],
      [charts.heldOutReward, "reward", "mean_reward", rewarded],
    ]) {
      drawn.update({
        x,
        marks: marksOf(visit.run),
        series: measured.map((set) => {
          const byVersion = new Map(set.evaluations.map((evaluation) => [evaluation.version, evaluation]));
          return {
            name: sets.length === 1 ? label : set.name,
            color: series(sets.indexOf(set)),
            joined: true,
            values: x.map((version) => byVersion.get(version)?.[key] ?? null),
          };
        }),
      });
    }
    const measured = sets.filter((set) => set.evaluations.length);
    fill(scores, measured.length ? scoreTable(measured) : null);
    drawFacts();
  }

  function drawChanges() {
    // A table that is drawn anew folds the rows that the reader asked for.
    if (visit.run.changes.length === drawnChanges) return;
    drawnChanges = visit.run.changes.length;
    fill(changes, changeTable(visit.run.changes));
  }

  function drawFacts() {
    const recent = steps.slice(-20);
    const last = steps.at(-1);
    const left = visit.run.config.steps - visit.run.current_step;
    const pace = mean(recent.map(duration));
    const evaluations = sets.find((set) => set.primary)?.evaluations ?? [];
    const [base, newest] = [evaluations[0]?.mean_accuracy, evaluations.at(-1)?.mean_accuracy];
    const primary = sets.find((set) => set.primary);
    const notes = explanations(steps, visit.run.config.task?.solved_at ?? null);
    fill(
      facts,
      notes.map((note) => h("p", { class: "note" }, note)),
      tiles([
        [
          "Reward",
          format.score(mean(recent.map(reward))),
          last
            ? `mean of the last ${format.plural(recent.length, "step")}; last ${format.score(reward(last))}`
            : NO_STEP,
        ],
        [
          "Held-out accuracy",
          format.score(newest),
          evaluations.length
            ? `${sets.length > 1 ? `${evaluations.at(-1).evaluation_set}, ` : ""}version ${format.count(evaluations.at(-1).version)}; base model ${format.score(base)}`
            : "no evaluation yet",
        ],
        ...(primary && hasOtherRewards(primary)
          ? [
              [
                "Held-out reward",
                format.score(evaluations.at(-1).mean_reward),
                `version ${format.count(evaluations.at(-1).version)}; base model ${format.score(evaluations[0].mean_reward)}`,
              ],
            ]
          : []),
        ["Entropy", format.number(last ? metric(last, "entropy") : null), "nats per token"],
        [
          "Staleness",
          format.number(last ? metric(last, "staleness_mean") : null),
          last ? `steps on average; at most ${format.number(metric(last, "staleness_max"))}` : "steps",
        ],
        [
          "Throughput",
          format.compact(
            mean(recent.map(throughput)) === null ? null : Math.round(mean(recent.map(throughput))),
          ),
          pace ? `tokens/s; ${format.seconds(pace)} per step` : "tokens/s",
        ],
        [
          "Time left",
          visit.run.status === "running" && pace ? format.seconds(left * pace) : format.NONE,
          `${format.plural(Math.max(0, left), "step")} left`,
        ],
      ]),
    );
  }
}

/** Returns whether the mean reward of an evaluation is another number than its accuracy. */
const hasOtherRewards = ({ evaluations }) =>
  evaluations.some((evaluation) => Math.abs(evaluation.mean_reward - evaluation.mean_accuracy) > 1e-6);

/** Returns the steps at which the configuration was changed, with what was changed. */
const marksOf = (run) =>
  run.changes.map((change) => ({ x: change.first_step, name: changeText(change, run.forked_from) }));

function changeText(change, origin) {
  const values = valuesOfChange(change);
  const named = values.slice(0, NAMED_KEYS).map(({ key, before, after }) => `${key} ${before} → ${after}`);
  if (values.length > NAMED_KEYS) named.push(`${values.length - NAMED_KEYS} more`);
  if (origin && change.first_step === origin.step + 1 && change.new.name)
    named.unshift(`fork of ${origin.run} at step ${origin.step}`);
  return `From step ${change.first_step} on: ${named.join(", ")}`;
}

/**
 * Returns the keys of a change with their values. A key that begins or ends with a fork is unset before
 * or after it; the name, which every fork changes, is left out.
 */
const valuesOfChange = ({ old, new: values }) =>
  [...new Set([...Object.keys(old), ...Object.keys(values)])]
    .filter((key) => key !== "name")
    .sort()
    .map((key) => ({ key, before: valueText(old, key), after: valueText(values, key) }));

const valueText = (values, key) => (Object.hasOwn(values, key) ? format.any(values[key]) : "unset");

/** Returns the forks of a run, newest first, with links. */
function forkList({ items, next }) {
  const link = ({ name, forked_from: { step } }) =>
    h("li", {}, h("a", { href: href(["runs", name]) }, h("bdi", {}, name)), ` at step ${format.count(step)}`);
  const all = items.map(link);
  const rest = all.slice(SHOWN_FORKS);
  return h(
    "section",
    { class: "card forks", "aria-label": "Forks of this run" },
    h("h2", {}, "Forks of this run"),
    h("ul", {}, all.slice(0, SHOWN_FORKS)),
    rest.length > 0 &&
      h("details", {}, h("summary", {}, `${rest.length}${next ? " or more" : ""} earlier forks`), h("ul", {}, rest)),
  );
}

/** Returns the changes of the configuration, one row for each key; null if none is changed. */
function changeTable(changes) {
  const rows = changes.flatMap((change) => valuesOfChange(change).map((value) => ({ ...change, ...value })));
  if (rows.length === 0) return null;
  return table({
    caption: "Changes of the configuration, which dashed lines in the charts mark",
    rows,
    maxRows: 10,
    columns: [
      { title: "From step", number: true, cell: (row) => format.count(row.first_step) },
      { title: "Key", cell: (row) => h("code", { class: "nowrap" }, row.key) },
      { title: "Before", number: true, cell: (row) => row.before },
      { title: "After", number: true, cell: (row) => row.after },
      { title: "Attempt", number: true, cell: (row) => format.count(row.attempt) },
      { title: "When", cell: (row) => h("span", { class: "nowrap" }, format.time(row.at)) },
      { title: "By", cell: (row) => h("span", { class: "nowrap" }, row.by) },
    ],
  });
}

/** Returns the scores of the last evaluation on each set. */
function scoreTable(sets) {
  const scoreOf = (set, metric) =>
    set.evaluations.at(-1).scores.findLast((score) => score.metric === metric);
  const column = (metric, hint) => ({
    title: `${metric}@n`,
    hint,
    number: true,
    by: (set) => scoreOf(set, metric)?.value ?? -1,
    cell: (set) => interval(scoreOf(set, metric)),
  });
  return table({
    caption: "Evaluation sets: last evaluation, with 95% confidence intervals",
    rows: sets,
    columns: [
      { title: "Set", cell: (set) => (set.primary && sets.length > 1 ? `${set.name} (primary)` : set.name) },
      { title: "Version", number: true, cell: (set) => format.count(set.evaluations.at(-1).version) },
      { title: "Prompts", number: true, cell: (set) => format.count(set.evaluations.at(-1).prompts) },
      { title: "n", number: true, hint: "Responses to each prompt", cell: (set) => format.count(set.samples) },
      column("mean", "Share of correct responses"),
      column("pass", "Share of prompts with a correct response among n"),
      column("maj", "Share of prompts whose most frequent answer is correct"),
      {
        title: "Reward",
        hint: "Mean reward of the responses",
        number: true,
        by: (set) => set.evaluations.at(-1).mean_reward,
        cell: (set) => format.score(set.evaluations.at(-1).mean_reward),
      },
      {
        title: "Bins",
        hint: "Prompts with 0, 1, … n correct responses",
        cell: (set) =>
          h("span", { class: "nowrap" }, set.evaluations.at(-1).bins.map(format.count).join(" · ")),
      },
    ],
  });
}

/** A score with its interval, or a dash. */
const interval = (score) =>
  score
    ? h(
        "span",
        { class: "nowrap" },
        `${format.score(score.value)} [${format.score(score.low)}–${format.score(score.high)}]`,
      )
    : format.NONE;

/** Returns the values as a faint line and their moving mean; of few values, one line. */
function smoothLine(name, values, color) {
  if (values.length < 30) return [{ name, values, color }];
  return [
    { name, values, color, kind: "faint" },
    { name: "moving mean", values: smoothed(values), color },
  ];
}

function capacity(run) {
  const value = run.config.batch?.capacity ?? run.config.rollout?.prompts_per_step;
  return value ? { value, name: `capacity ${format.count(value)}` } : undefined;
}

/** Fills a select with these values, unless it has them already. */
function offer(picker, values, title = (value) => value) {
  const shown = [...picker.options].map((option) => option.value);
  if (shown.join() === values.join()) return;
  fill(
    picker,
    values.map((value) => h("option", { value }, title(value))),
  );
}

const ACCURACY = "accuracy";
/** Parts that count without a weight in the configuration. */
const BUILT_IN = ["answer", "overlong", "failed"];

/** Returns the accuracy and the names of the reward's parts; none if the reward is the accuracy. */
function partsOf(steps) {
  const parts = [...new Set(steps.flatMap((step) => Object.keys(step.reward_parts)))];
  const isAccuracy = steps.every((step) => Math.abs(reward(step) - accuracy(step)) < 1e-6);
  return parts.length < 2 && isAccuracy ? [] : [ACCURACY, ...parts];
}

function partTitle(part, run) {
  const counts =
    part === ACCURACY || BUILT_IN.includes(part) || (run.config.reward?.weights?.[part] ?? 0) !== 0;
  return counts ? format.term(part) : `${format.term(part)} (not in the reward)`;
}

function makeCharts({ name }) {
  const openBatch = {
    label: "open this step's batch",
    act: (step) => go(href(["runs", name, "batches"], { step })),
  };
  return {
    reward: chart({
      title: "Reward",
      note: "Mean of each step's fresh rollouts, before any filter.",
      y: "mean reward",
      format: format.score,
      empty: NO_STEP,
    }),
    part: chart({
      title: "Part of the reward",
      note: "Mean over each step's fresh rollouts, without its weight, or their accuracy.",
      y: "mean",
      format: format.score,
      empty: NO_STEP,
    }),
    evaluation: chart({
      title: "Held-out evaluation",
      note: "Mean accuracy on the held-out prompts of each evaluation set.",
      y: "accuracy",
      x: "version",
      format: format.score,
      empty: "No evaluation yet.",
    }),
    heldOutReward: chart({
      title: "Held-out reward",
      note: "Mean reward on the held-out prompts of each evaluation set, which is another number than the accuracy.",
      y: "reward",
      x: "version",
      format: format.score,
      empty: "No evaluation yet.",
    }),
    batch: chart({
      title: "Batch composition",
      note: "Groups by source. Batches are never padded.",
      y: "groups",
      integers: true,
      empty: NO_STEP,
      pick: openBatch,
    }),
    window: chart({
      title: "Replay window",
      note: "Groups with an accuracy in [c2, c3] may be replayed; r_tot moves the window (Eq. 8).",
      y: "accuracy",
      format: format.score,
      empty: NO_STEP,
    }),
    entropy: chart({
      title: "Entropy",
      note: "Mean entropy of the policy over the trained tokens.",
      y: "nats per token",
      empty: "No entropy has been reported yet.",
    }),
    staleness: chart({
      title: "Staleness",
      note: "Trainer step minus policy version, over the groups of the batch.",
      y: "steps",
      empty: "No staleness has been reported yet.",
    }),
    throughput: chart({
      title: "Throughput",
      note: "Tokens generated for a step, divided by its duration.",
      y: "tokens/s",
      empty: "No times have been reported yet.",
    }),
    phases: chart({
      title: "Time by phase",
      note: "Trainer time by phase; `wait` is the time until the batch is ready.",
      y: "seconds per step",
      empty: "No times have been reported yet.",
    }),
    metric: chart({ title: "Any metric", y: "value", empty: "The trainer has reported no metrics." }),
  };
}
