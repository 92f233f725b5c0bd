// A prompt: every attempt at it, and the trajectories of two groups side by side.

import { get, imageAddress, path } from "../api.js";
import { chart } from "../charts/chart.js";
import { KINDS } from "../colors.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { empty, keeper, refusal, region } from "../live.js";
import { href, setQuery, whole } from "../router.js";
import { table } from "../tables.js";
import { binChip, decisionLink, groupSize, imagesOf, tiles } from "./pieces.js";
import { responses } from "./responses.js";

const MARKERS = { fresh: "circle", reevaluation: "triangle", evaluation: "diamond" };

/** @param {import("./run.js").Visit} visit */
export function showPrompt(visit) {
  const { name, signal, root, query } = visit;
  const uid = query.uid ?? "";
  const facts = region();
  const keepHistory = keeper(signal);
  const size = groupSize(visit.run);
  const historyChart = chart({
    title: "History",
    note: "Correct responses of each attempt; a ring marks a group that was in a batch.",
    y: `correct of ${size}`,
    integers: true,
    height: 190,
    empty: "This prompt has not been attempted yet.",
  });
  const attempts = h("section", { class: "card" });
  const sides = h("section", { class: "card" });
  const compared = trajectories(visit, sides);

  fill(
    root,
    h(
      "section",
      { class: "card" },
      h("p", { class: "back" }, h("a", { href: href(["runs", name, "prompts"]) }, "All prompts")),
      h("h2", { class: "uid" }, h("bdi", {}, uid || "No uid given")),
      facts.element,
    ),
    uid && [historyChart.element, sides, attempts],
  );
  if (!uid)
    return facts.refuse({ title: "Not found", message: "The address has no uid of a prompt (?uid=…)." });

  visit.changed((run) =>
    keepHistory({
      load: (signal) => get(path`/runs/${name}/prompts/history`, { uid }, signal),
      show: (history) => {
        facts.show(summary(history, size, signal));
        historyChart.update(historyData(history, run, size));
        fill(attempts, attemptTable(name, history, compared.compare));
        compared.offer(history.attempts);
      },
      refuse: (problem) => {
        facts.refuse(problem);
        for (const element of [historyChart.element, sides, attempts]) element.remove();
      },
    }),
  );
}

function summary(history, size, signal) {
  const { difficulty, payload, posterior } = history;
  const images = imagesOf(payload);
  return [
    images.length > 0 &&
      h(
        "div",
        { class: "prompt-images" },
        images.map((image, i) => figure(image, `Image ${i + 1} of the prompt`, signal)),
      ),
    h(
      "dl",
      { class: "payload-list" },
      Object.entries(payload)
        .filter(([key]) => key !== "images" || images.length === 0)
        .map(([key, value]) =>
          h("div", {}, h("dt", {}, key), h("dd", { dir: "auto" }, format.any(value))),
        ),
    ),
    h("p", { class: "note" }, `Task ${history.task}, dataset ${history.dataset}`),
    difficulty
      ? tiles([
          ["Now", binChip(difficulty.bin, size), `at step ${format.count(difficulty.last_step)}`],
          ["First", format.score(difficulty.first_mean), "accuracy"],
          ["Best", format.score(difficulty.best_mean), "accuracy"],
          ["Attempts", format.count(difficulty.attempts), "in training"],
          [
            "First solved",
            difficulty.first_solved_step ? `step ${format.count(difficulty.first_solved_step)}` : format.NONE,
            difficulty.first_solved_step ? "first correct response" : "not solved yet",
          ],
          ...(posterior
            ? [
                [
                  "Posterior",
                  format.score(posterior.mean),
                  `mean of Beta(${format.number(posterior.a)}, ${format.number(posterior.b)})`,
                ],
              ]
            : []),
        ])
      : empty("A held-out prompt, or a training prompt that was not drawn yet."),
  ];
}

/** An image of the prompt; the reason in its place if it cannot be fetched. */
function figure({ digest, width, height }, alt, signal) {
  const image = h("img", { alt, width: String(width), height: String(height) });
  const element = h("figure", {}, image);
  imageAddress(digest, signal).then(
    (url) => (image.src = url),
    (problem) => problem.name === "AbortError" || fill(element, refusal(problem)),
  );
  return element;
}

function historyData(history, run, size) {
  const { attempts, stays } = history;
  const kinds = Object.keys(KINDS).filter((kind) => attempts.some((attempt) => attempt.kind === kind));
  const residencies = (buffer) =>
    stays
      .filter((residency) => residency.buffer === buffer)
      .map((residency) => [
        residency.inserted_step,
        residency.evicted_step ?? Math.max(run.current_step, residency.inserted_step),
      ]);
  const batches = attempts.flatMap((attempt) => attempt.batches.map((step) => [step, step]));
  const last = Math.max(run.current_step, ...attempts.map((attempt) => attempt.step), 1);
  return {
    x: attempts.map((attempt) => attempt.step),
    xDomain: [Math.min(1, last - 1), last],
    yDomain: [-0.4, size + 0.4],
    series: [
      {
        name: "k",
        kind: "line",
        hidden: true,
        color: "var(--faint)",
        values: attempts.map((attempt) =>
          attempt.kind === "evaluation" ? null : (attempt.correct / attempt.size) * size,
        ),
      },
      ...kinds.map((kind) => ({
        name: format.term(kind),
        kind: "points",
        color: KINDS[kind],
        marker: MARKERS[kind],
        values: attempts.map((attempt) =>
          attempt.kind === kind ? (attempt.correct / attempt.size) * size : null,
        ),
        ringed: attempts.map((attempt) => attempt.batches.length > 0),
      })),
    ],
    lanes: [
      { name: "in a batch", color: "var(--ink)", spans: batches },
      { name: "hard", color: "var(--red)", spans: residencies("hard") },
      { name: "high-quality", color: "var(--green)", spans: residencies("high_quality") },
    ],
  };
}

function attemptTable(name, { attempts, stays, uid }, compare) {
  const residenciesOf = (attempt) =>
    stays
      .filter((residency) => residency.group_id === attempt.group_id)
      .map(
        ({ buffer, inserted_step: from, evicted_step: to, eviction_reason: reason }) =>
          `${format.term(buffer)} ${format.count(from)} to ${to ? `${format.count(to)} (${reason})` : "now"}`,
      )
      .join(", ");
  return [
    h("h2", {}, "Attempts"),
    table({
      caption: "Every attempt, oldest first",
      rows: attempts,
      empty: "This prompt has not been attempted yet.",
      columns: [
        {
          title: "Step",
          number: true,
          by: (attempt) => attempt.step,
          cell: (attempt) => format.count(attempt.step),
        },
        { title: "Kind", by: (attempt) => attempt.kind, cell: (attempt) => format.term(attempt.kind) },
        {
          title: "Policy version",
          number: true,
          by: (attempt) => attempt.policy_version,
          cell: (attempt) => format.count(attempt.policy_version),
        },
        {
          title: "Correct",
          by: (attempt) => attempt.correct,
          cell: (attempt) => binChip(attempt.correct, attempt.size),
        },
        {
          title: "Mean reward",
          number: true,
          by: (attempt) => attempt.mean_reward,
          cell: (attempt) => format.score(attempt.mean_reward),
        },
        {
          title: "Tokens",
          number: true,
          by: (attempt) => attempt.tokens,
          cell: (attempt) => format.count(attempt.tokens),
        },
        {
          title: "In the batch of step",
          cell: (attempt) => attempt.batches.map((step, i) => [i > 0 && ", ", decisionLink(name, step, uid)]),
        },
        { title: "In buffers, by step", cell: residenciesOf },
        {
          title: "Compare",
          cell: (attempt) =>
            ["first", "second"].map((side) =>
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": `Show step ${attempt.step} as the ${side} group (group ${attempt.group_id})`,
                  onclick: () => compare(side, attempt.group_id),
                },
                side === "first" ? "left" : "right",
              ),
            ),
        },
      ],
    }),
  ];
}

// ---- trajectories -------------------------------------------------------------------------------

function trajectories(visit, root) {
  const { name, signal, query } = visit;
  const chosen = { first: whole(query.first), second: whole(query.second) };
  const shade = h("input", {
    type: "checkbox",
    id: "shade",
    onchange: () => ["first", "second"].forEach(redraw),
  });
  const panels = Object.fromEntries(
    ["first", "second"].map((side) => [
      side,
      { area: region(), pick: h("div"), keep: keeper(signal), group: null },
    ]),
  );
  fill(
    root,
    h("h2", {}, "Trajectories"),
    h(
      "div",
      { class: "controls" },
      h("label", { class: "check", for: "shade" }, shade, "Show tokens, shaded by log-prob"),
    ),
    h(
      "div",
      { class: "sides" },
      h("section", { "aria-label": "First group" }, panels.first.pick, panels.first.area.element),
      h("section", { "aria-label": "Second group" }, panels.second.pick, panels.second.area.element),
    ),
  );
  let attempts = [];

  function offer(newest) {
    attempts = newest;
    const ids = attempts.map((attempt) => attempt.group_id);
    if (ids.length === 0)
      return Object.values(panels).forEach((panel) => panel.area.show(empty("No attempt yet.")));
    if (!ids.includes(chosen.first)) chosen.first = ids[0];
    if (!ids.includes(chosen.second)) chosen.second = ids.findLast((id) => id !== chosen.first) ?? ids[0];
    load("first");
    if (ids.length > 1) load("second");
    else panels.second.area.show(empty("There is only one attempt to show."));
  }

  function load(side) {
    const panel = panels[side];
    const options = attempts.map((attempt) => [
      String(attempt.group_id),
      `step ${attempt.step}, ${format.term(attempt.kind)}, version ${attempt.policy_version}: ${attempt.correct} of ${attempt.size}`,
    ]);
    fill(
      panel.pick,
      field(
        side === "first" ? "First group" : "Second group",
        select(options, String(chosen[side]), (id) => compare(side, Number(id))),
      ),
    );
    if (panel.group?.group_id === chosen[side]) return;
    panel.keep({
      load: (signal) =>
        get(path`/runs/${name}/groups/${chosen[side]}`, shade.checked ? { tokens: true } : {}, signal),
      show: (group) => ((panel.group = group), draw(side)),
      refuse: (problem) => panel.area.show(refusal(problem)),
    });
  }

  /** Draws the group again, with the text of its tokens if they are shown. */
  function redraw(side) {
    const panel = panels[side];
    if (!panel.group) return;
    if (!shade.checked) return draw(side);
    panel.group = null;
    load(side);
  }

  function draw(side) {
    const { group, area } = panels[side];
    if (group) area.show(responses(group, shade.checked));
  }

  function compare(side, id) {
    chosen[side] = id;
    setQuery({ [side]: id });
    load(side);
  }

  return { offer, compare };
}
