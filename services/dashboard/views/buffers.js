// Contents of the buffers, now or as of a step, and their admissions and evictions with reasons.

import { get, path } from "../api.js";
import { chart } from "../charts/chart.js";
import { histogram } from "../charts/histogram.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { keeper, region } from "../live.js";
import { setQuery, whole } from "../router.js";
import { mean } from "../steps.js";
import { Pager, table } from "../tables.js";
import { batchLink, binChip, groupSize, promptLink, stepControls, tiles } from "./pieces.js";

const BUFFERS = [
  ["hard", "Hard"],
  ["high_quality", "High-quality"],
];
const ABOUT = {
  hard: "Groups with an accuracy of at most c1. Their prompts are re-evaluated every m steps (X2).",
  high_quality:
    "Recent groups with an accuracy in the replay window [c2, c3], replayed if the batch has room (X3).",
};
const REASONS = {
  capacity: "the buffer was full, and this was its oldest entry",
  expired: "older than replay.buffer.max_age steps",
  replaced: "a newer group of the same prompt was admitted",
  solved: "the accuracy was above c1 when re-evaluated",
  supervised: "a supervised update trained on the prompt's demonstration",
};
const EVENTS_PER_PAGE = 25;
const MAX_PAGE = 1000;
const MAX_PAGES = 5;

/** @param {import("./run.js").Visit} visit */
export function showBuffers(visit) {
  const { name, signal, root, query, run } = visit;
  const selection = {
    buffer: query.buffer === "high_quality" ? "high_quality" : "hard",
    // null: now, and updated as the run goes on.
    step: whole(query.step),
    events: whole(query.events),
  };
  const contents = region();
  const events = region();
  const about = h("p", { class: "note" });
  const keepContents = keeper(signal);
  const keepEvents = keeper(signal);
  const age = chart({
    title: "Age",
    note: "Steps since the group was generated.",
    y: "entries",
    x: "steps",
    integers: true,
    heading: "h3",
    height: 150,
    empty: "The buffer is empty.",
  });
  const staleness = chart({
    title: "Staleness",
    note: "Trainer step minus policy version.",
    y: "entries",
    x: "steps",
    integers: true,
    heading: "h3",
    height: 150,
    empty: "The buffer is empty.",
  });
  const rewards = chart({
    title: "Correct responses",
    note: "k of G correct in the stored group.",
    y: "entries",
    x: "k",
    integers: true,
    heading: "h3",
    height: 150,
    empty: "The buffer is empty.",
  });
  const facts = h("div");

  const showStep = (chosen) => {
    selection.step = chosen === visit.run.current_step ? null : chosen;
    changed({ step: selection.step });
  };
  const last = run.current_step;
  const step = stepControls("As of step", selection.step ?? last, 0, last, showStep);
  const now = h(
    "button",
    {
      type: "button",
      onclick: () => ((selection.step = null), step.set(visit.run.current_step), changed({ step: null })),
    },
    "Now",
  );
  const after = h("input", {
    type: "number",
    min: 0,
    inputmode: "numeric",
    onchange: () => (
      (selection.events = whole(after.value)),
      setQuery({ events: selection.events }),
      restartEvents()
    ),
  });
  const pager = new Pager(loadEvents);

  fill(
    root,
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Contents"),
      h(
        "div",
        { class: "controls" },
        field(
          "Buffer",
          select(
            BUFFERS,
            selection.buffer,
            (buffer) => ((selection.buffer = buffer), changed({ buffer }), restartEvents()),
          ),
        ),
        step.element,
        now,
      ),
      about,
      facts,
      h("div", { class: "charts small" }, age.element, staleness.element, rewards.element),
      contents.element,
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Admissions and evictions"),
      h("div", { class: "controls" }, field("After step", after)),
      events.element,
    ),
  );

  let seenStep = -1;
  visit.changed((newest) => {
    step.set(selection.step ?? newest.current_step, newest.current_step);
    if (selection.step === null || seenStep < 0) loadContents();
    // The shown events stay until the reader asks for later ones.
    if (seenStep < 0) restartEvents();
    seenStep = newest.current_step;
  });

  function changed(change) {
    setQuery(change);
    loadContents();
  }

  function loadContents() {
    about.textContent = ABOUT[selection.buffer];
    now.disabled = selection.step === null;
    keepContents({
      load: async (signal) => {
        const items = [];
        let cursor = null;
        do {
          const page = await get(
            path`/runs/${name}/buffers/${selection.buffer}`,
            { step: selection.step, cursor, limit: MAX_PAGE },
            signal,
          );
          items.push(...page.items);
          cursor = page.next;
        } while (cursor && items.length < MAX_PAGES * MAX_PAGE);
        return items;
      },
      show: showContents,
      refuse: contents.refuse,
    });
  }

  function showContents(items) {
    const size = groupSize(run);
    const at = selection.step === null ? "now" : `after step ${format.count(selection.step)}`;
    const average = (measure) => format.number(mean(items.map(measure)));
    fill(
      facts,
      tiles([
        ["Entries", format.count(items.length), at],
        ["Accuracy", format.score(mean(items.map((entry) => entry.accuracy))), "of the stored groups"],
        ["Age", average((entry) => entry.age), "steps on average"],
        ["Staleness", average((entry) => entry.staleness), "steps on average"],
      ]),
    );
    drawBars(
      age,
      items.map((entry) => entry.age),
    );
    drawBars(
      staleness,
      items.map((entry) => entry.staleness),
    );
    drawBars(
      rewards,
      items.map((entry) => Math.round(entry.accuracy * size)),
      [0, size],
    );
    contents.show(
      table({
        caption: `${BUFFERS.find(([key]) => key === selection.buffer)[1]} buffer ${at}, in the order of admission`,
        rows: items,
        empty: `The buffer is empty ${at}.`,
        maxRows: 50,
        columns: [
          {
            title: "Prompt",
            by: (entry) => entry.prompt_uid,
            cell: (entry) => promptLink(name, entry.prompt_uid, { first: entry.group_id }),
          },
          {
            title: "Correct",
            by: (entry) => entry.accuracy,
            cell: (entry) => binChip(Math.round(entry.accuracy * size), size),
          },
          {
            title: "Generated at step",
            number: true,
            by: (entry) => entry.step,
            cell: (entry) => format.count(entry.step),
          },
          {
            title: "Policy version",
            number: true,
            by: (entry) => entry.policy_version,
            cell: (entry) => format.count(entry.policy_version),
          },
          { title: "Age", number: true, by: (entry) => entry.age, cell: (entry) => format.count(entry.age) },
          {
            title: "Staleness",
            number: true,
            by: (entry) => entry.staleness,
            cell: (entry) => format.count(entry.staleness),
          },
          {
            title: "Admitted at step",
            number: true,
            by: (entry) => entry.inserted_step,
            cell: (entry) => format.count(entry.inserted_step),
          },
          {
            title: "Evicted at step",
            number: true,
            by: (entry) => entry.evicted_step ?? Infinity,
            cell: (entry) =>
              entry.evicted_step
                ? `${format.count(entry.evicted_step)} (${entry.eviction_reason})`
                : "in the buffer",
          },
        ],
      }),
    );
  }

  function restartEvents() {
    pager.reset();
    after.value = String(selection.events ?? Math.max(0, visit.run.current_step - 10));
    loadEvents();
  }

  function loadEvents() {
    keepEvents({
      load: (signal) =>
        get(
          path`/runs/${name}/buffers/${selection.buffer}/events`,
          { after: after.value, cursor: pager.cursor, limit: EVENTS_PER_PAGE },
          signal,
        ),
      show: (page) => events.show(eventTable(page.items), pager.controls(page.next)),
      refuse: events.refuse,
    });
  }

  function eventTable(items) {
    const size = groupSize(run);
    return table({
      caption: `Events after step ${format.count(Number(after.value))}, in order`,
      rows: items,
      empty: "No admission or eviction after this step.",
      columns: [
        { title: "Step", number: true, cell: (event) => batchLink(name, event.step) },
        { title: "Event", cell: (event) => h("span", { class: `event ${event.event}` }, event.event) },
        { title: "Prompt", cell: (event) => promptLink(name, event.prompt_uid, { first: event.group_id }) },
        { title: "Correct", cell: (event) => binChip(Math.round(event.accuracy * size), size) },
        {
          title: "Reason",
          cell: (event) =>
            h(
              "span",
              { class: "reason" },
              event.event === "evicted" ? `${event.reason}: ${REASONS[event.reason] ?? ""}` : event.reason,
            ),
        },
      ],
    });
  }
}

function drawBars(drawing, values, domain = null) {
  const { x, counts, width } = domain
    ? {
        x: range(...domain),
        counts: range(...domain).map((k) => values.filter((value) => value === k).length),
        width: 1,
      }
    : histogram(values);
  drawing.update({
    x: values.length ? x : [],
    series: [
      {
        name: width > 1 ? `entries per ${width} steps` : "entries",
        kind: "bar",
        color: "var(--blue)",
        values: values.length ? counts : [],
      },
    ],
  });
}

const range = (first, last) => Array.from({ length: last - first + 1 }, (_, i) => first + i);
