// A run as it goes: reward, evaluation, off-policyness, speed.

import { get, path } from "../api.js";
import { chart } from "../charts.js";
import { SOURCES, series } from "../colors.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { EVERY_MS, keep, keeper, refusal } from "../live.js";
import { go, href, setQuery } from "../router.js";
import { smoothed } from "../scales.js";
import { duration, mean, metric, phases, reward, Steps, throughput } from "../steps.js";
import { tiles } from "./parts.js";

const NO_STEP = "No step is committed yet.";
const PHASES = ["wait", "read", "proximal", "update", "publish", "checkpoint", "commit"];

/** @param {import("./run.js").Visit} visit */
export function showOverview(visit) {
  const { name, signal, root } = visit;
  const charts = makeCharts(visit);
  const facts = h("div");
  const store = new Steps(name, signal);
  let steps = [];
  let evaluations = [];
  let metricName = visit.query.metric ?? "loss";

  const picker = h("select", {
    onchange: () => ((metricName = picker.value), setQuery({ metric: metricName }), drawMetric()),
  });
  const all = Object.values(charts).map((each) => each.element);
  charts.metric.element.querySelector(".chart-head").append(field("Metric", picker));
  fill(root, facts, h("div", { class: "charts" }, all));

  const keepSteps = keeper(signal);
  visit.changed((run) =>
    keepSteps({
      load: () => store.bring(run),
      show: (found) => ((steps = found), drawSteps()),
      refuse: (problem) => fill(facts, refusal(problem)),
    }),
  );
  // An evaluation may be complete long after the step that it belongs to.
  keep({
    signal,
    every: 2 * EVERY_MS,
    load: () => get(path`/runs/${name}/evaluations`, {}, signal),
    show: (found) => ((evaluations = found), drawEvaluations()),
    refuse: (problem) => fill(facts, refusal(problem)),
  });

  function drawSteps() {
    const x = steps.map((each) => each.step);
    const of = (measure) => steps.map((each) => measure(each));
    charts.reward.update({ x, series: smoothLine("reward", of(reward), "var(--blue)") });
    charts.batch.update({
      x,
      series: Object.entries(SOURCES).map(([source, color]) => ({
        name: format.words(source),
        kind: "area",
        stepped: true,
        color,
        values: of((each) => each.counts[source] ?? 0),
      })),
      limit: capacity(visit.run),
    });
    charts.window.update({
      x,
      yDomain: [0, 1],
      series: [
        {
          name: "window [c2, c3]",
          kind: "band",
          color: "var(--green)",
          low: of((each) => each.c2),
          values: of((each) => each.c3),
        },
        { name: "r_tot", color: "var(--blue)", values: of((each) => each.r_tot) },
      ],
    });
    charts.entropy.update({
      x,
      series: smoothLine(
        "entropy",
        of((each) => metric(each, "entropy")),
        "var(--blue)",
      ),
    });
    charts.staleness.update({
      x,
      series: [
        { name: "mean", color: "var(--blue)", values: of((each) => metric(each, "staleness_mean")) },
        { name: "max", color: "var(--orange)", values: of((each) => metric(each, "staleness_max")) },
      ],
    });
    charts.throughput.update({ x, series: smoothLine("generated", of(throughput), "var(--blue)") });
    const byPhase = of(phases);
    const named = [...new Set([...PHASES, ...byPhase.flatMap(Object.keys)])].filter((phase) =>
      byPhase.some((each) => phase in each),
    );
    charts.phases.update({
      x,
      series: named.map((phase, i) => ({
        name: phase,
        kind: "area",
        stepped: true,
        color: series(i),
        values: byPhase.map((each) => each[phase] ?? 0),
      })),
    });
    drawMetric();
    drawFacts();
  }

  function drawMetric() {
    const names = [...new Set(steps.flatMap((each) => Object.keys(each.metrics)))].sort();
    if (names.length && !names.includes(metricName)) metricName = names[0];
    const shown = [...picker.options].map((each) => each.value);
    if (shown.join() !== names.join())
      fill(
        picker,
        names.map((each) => h("option", { value: each }, each)),
      );
    picker.value = metricName;
    picker.parentElement.hidden = names.length === 0;
    charts.metric.update({
      x: steps.map((each) => each.step),
      series: smoothLine(
        metricName,
        steps.map((each) => metric(each, metricName)),
        "var(--blue)",
      ),
    });
  }

  function drawEvaluations() {
    charts.evaluation.update({
      x: evaluations.map((each) => each.version),
      series: [
        { name: "accuracy", color: "var(--blue)", values: evaluations.map((each) => each.mean_accuracy) },
      ],
    });
    drawFacts();
  }

  function drawFacts() {
    const recent = steps.slice(-20);
    const last = steps.at(-1);
    const left = visit.run.config.steps - visit.run.current_step;
    const pace = mean(recent.map(duration));
    const [base, newest] = [evaluations[0]?.mean_accuracy, evaluations.at(-1)?.mean_accuracy];
    fill(
      facts,
      tiles([
        [
          "Reward",
          format.score(mean(recent.map(reward))),
          last ? `mean of the last ${recent.length}; now ${format.score(reward(last))}` : NO_STEP,
        ],
        [
          "Held-out accuracy",
          format.score(newest),
          evaluations.length
            ? `version ${format.count(evaluations.at(-1).version)}; base ${format.score(base)}`
            : "no evaluation yet",
        ],
        ["Entropy", format.number(last ? metric(last, "entropy") : null), "nats a token"],
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
          pace ? `tokens/s; ${format.seconds(pace)} a step` : "tokens/s",
        ],
        [
          "Time left",
          visit.run.status === "running" && pace ? format.seconds(left * pace) : format.NONE,
          `${format.plural(Math.max(0, left), "step")} to go`,
        ],
      ]),
    );
  }
}

/** The values, faint, and their moving mean. */
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

function makeCharts({ name }) {
  const openBatch = {
    words: "open this step's batch",
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
    evaluation: chart({
      title: "Held-out evaluation",
      note: "Mean accuracy on the held-out prompts.",
      y: "accuracy",
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
      note: "Groups within [c2, c3] may be replayed; r_tot moves it (Eq. 8).",
      y: "mean reward",
      format: format.score,
      empty: NO_STEP,
    }),
    entropy: chart({
      title: "Entropy",
      note: "Of the policy on the tokens it trains on.",
      y: "nats a token",
      empty: "No entropy is reported yet.",
    }),
    staleness: chart({
      title: "Staleness",
      note: "Trainer step minus policy version, over the batch.",
      y: "steps",
      empty: "No staleness is reported yet.",
    }),
    throughput: chart({
      title: "Throughput",
      note: "Tokens generated for a step, by the time it took.",
      y: "tokens/s",
      empty: "No times are reported yet.",
    }),
    phases: chart({
      title: "Time by phase",
      note: "Of the trainer; wait is for rollouts.",
      y: "seconds a step",
      empty: "No times are reported yet.",
    }),
    metric: chart({ title: "Any metric", y: "value", empty: "The trainer has reported no metrics." }),
  };
}
