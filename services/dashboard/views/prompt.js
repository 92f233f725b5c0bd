// One prompt: every attempt at it, and its trajectories side by side.

import { get, path } from "../api.js";
import { chart } from "../charts.js";
import { KINDS } from "../colors.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { empty, keeper, refusal, region } from "../live.js";
import { href, setQuery, whole } from "../router.js";
import { table } from "../tables.js";
import { batchLink, binChip, groupSize, tiles } from "./parts.js";
import { responses } from "./responses.js";

const MARKERS = { fresh: "circle", reevaluation: "triangle", evaluation: "diamond" };

/** @param {import("./run.js").Visit} visit */
export function showPrompt(visit) {
  const { name, signal, root, query } = visit;
  const uid = query.uid ?? "";
  const facts = region();
  const keepHistory = keeper(signal);
  const size = groupSize(visit.run);
  const over = chart({
    title: "History",
    note: "Correct responses at each attempt; a ring marks a group that was in a batch.",
    y: `correct of ${size}`,
    integers: true,
    height: 190,
    empty: "This prompt was not attempted yet.",
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
    uid && [over.element, sides, attempts],
  );
  if (!uid) return facts.refuse({ title: "Not found", message: "The address needs ?uid=…" });

  visit.changed((run) =>
    keepHistory({
      load: (ours) => get(path`/runs/${name}/prompts/history`, { uid }, ours),
      show: (history) => {
        facts.show(summary(history, size));
        over.update(historyData(history, run, size));
        fill(attempts, attemptTable(name, history, compared.compare));
        compared.offer(history.attempts);
      },
      refuse: (problem) => {
        facts.refuse(problem);
        for (const part of [over.element, sides, attempts]) part.remove();
      },
    }),
  );
}

function summary(history, size) {
  const { difficulty, payload } = history;
  return [
    h(
      "dl",
      { class: "payload-list" },
      Object.entries(payload).map(([key, value]) =>
        h("div", {}, h("dt", {}, key), h("dd", { dir: "auto" }, format.any(value))),
      ),
    ),
    h("p", { class: "note" }, `Task ${history.task}, dataset ${history.dataset}`),
    difficulty
      ? tiles([
          ["Now", binChip(difficulty.bin, size), `at step ${format.count(difficulty.last_step)}`],
          ["First", format.score(difficulty.first_mean), "mean reward"],
          ["Best", format.score(difficulty.best_mean), "mean reward"],
          ["Attempts", format.count(difficulty.attempts), "in training"],
          [
            "First solved",
            difficulty.first_solved_step ? `step ${format.count(difficulty.first_solved_step)}` : format.NONE,
            difficulty.first_solved_step ? "first with a correct response" : "never solved",
          ],
        ])
      : empty("A held-out prompt, or one that training has not drawn yet."),
  ];
}

function historyData(history, run, size) {
  const { attempts, stays } = history;
  const kinds = Object.keys(KINDS).filter((kind) => attempts.some((each) => each.kind === kind));
  const spans = (buffer) =>
    stays
      .filter((each) => each.buffer === buffer)
      .map((each) => [
        each.inserted_step,
        each.evicted_step ?? Math.max(run.current_step, each.inserted_step),
      ]);
  const batches = attempts.flatMap((each) => each.batches.map((step) => [step, step]));
  const last = Math.max(run.current_step, ...attempts.map((each) => each.step), 1);
  return {
    x: attempts.map((each) => each.step),
    xDomain: [Math.min(1, last - 1), last],
    yDomain: [-0.4, size + 0.4],
    series: [
      {
        name: "k",
        kind: "line",
        hidden: true,
        color: "var(--faint)",
        values: attempts.map((each) =>
          each.kind === "evaluation" ? null : (each.correct / each.size) * size,
        ),
      },
      ...kinds.map((kind) => ({
        name: format.words(kind),
        kind: "points",
        color: KINDS[kind],
        marker: MARKERS[kind],
        values: attempts.map((each) => (each.kind === kind ? (each.correct / each.size) * size : null)),
        ringed: attempts.map((each) => each.batches.length > 0),
      })),
    ],
    lanes: [
      { name: "in a batch", color: "var(--ink)", spans: batches },
      { name: "hard", color: "var(--red)", spans: spans("hard") },
      { name: "high-quality", color: "var(--green)", spans: spans("high_quality") },
    ],
  };
}

function attemptTable(name, { attempts, stays }, compare) {
  const staysOf = (each) =>
    stays
      .filter((stay) => stay.group_id === each.group_id)
      .map(
        (stay) =>
          `${format.words(stay.buffer)} ${format.count(stay.inserted_step)} to ${stay.evicted_step ? `${format.count(stay.evicted_step)} (${stay.eviction_reason})` : "now"}`,
      )
      .join(", ");
  return [
    h("h2", {}, "Attempts"),
    table({
      caption: "Every attempt, oldest first",
      rows: attempts,
      empty: "This prompt was not attempted yet.",
      columns: [
        { title: "Step", number: true, by: (each) => each.step, cell: (each) => format.count(each.step) },
        { title: "Kind", by: (each) => each.kind, cell: (each) => format.words(each.kind) },
        {
          title: "Version",
          number: true,
          by: (each) => each.policy_version,
          cell: (each) => format.count(each.policy_version),
        },
        { title: "Correct", by: (each) => each.correct, cell: (each) => binChip(each.correct, each.size) },
        {
          title: "Tokens",
          number: true,
          by: (each) => each.tokens,
          cell: (each) => format.count(each.tokens),
        },
        {
          title: "In the batch of",
          cell: (each) => each.batches.map((step, i) => [i > 0 && ", ", batchLink(name, step)]),
        },
        { title: "Stays in buffers", cell: staysOf },
        {
          title: "Compare",
          cell: (each) =>
            ["first", "second"].map((side) =>
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": `Show step ${each.step} as the ${side} group (group ${each.group_id})`,
                  onclick: () => compare(side, each.group_id),
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
    onchange: () => ["first", "second"].forEach(draw),
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
  let known = [];

  function offer(attempts) {
    known = attempts;
    const ids = attempts.map((each) => each.group_id);
    if (ids.length === 0)
      return Object.values(panels).forEach((panel) => panel.area.show(empty("No attempt yet.")));
    if (!ids.includes(chosen.first)) chosen.first = ids[0];
    if (!ids.includes(chosen.second)) chosen.second = ids.findLast((id) => id !== chosen.first) ?? ids[0];
    load("first");
    if (ids.length > 1) load("second");
    else panels.second.area.show(empty("Only one attempt so far: nothing to compare it with."));
  }

  function load(side) {
    const panel = panels[side];
    const options = known.map((each) => [
      String(each.group_id),
      `step ${each.step}, ${format.words(each.kind)}, version ${each.policy_version}: ${each.correct} of ${each.size}`,
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
      load: (ours) => get(path`/runs/${name}/groups/${chosen[side]}`, {}, ours),
      show: (group) => ((panel.group = group), draw(side)),
      refuse: (problem) => panel.area.show(refusal(problem)),
    });
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
