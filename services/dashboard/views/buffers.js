// What the buffers hold, now or as of a step, and what came and went, with reasons.

import { get, path } from "../api.js";
import { chart, histogram } from "../charts.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { keeper, region } from "../live.js";
import { setQuery, whole } from "../router.js";
import { mean } from "../steps.js";
import { Pager, table } from "../tables.js";
import { batchLink, binChip, groupSize, promptLink, stepControls, tiles } from "./parts.js";

const BUFFERS = [
  ["hard", "Hard"],
  ["high_quality", "High-quality"],
];
const ABOUT = {
  hard: "Groups with a mean reward of at most c1, generated again every m steps (X2).",
  high_quality: "Recent groups with a mean reward in [c2, c3], replayed where a batch has room (X3).",
};
const REASONS = {
  capacity: "the buffer was full and this was its oldest entry",
  expired: "older than high_quality_buffer.max_age steps",
  replaced: "a newer group of the same prompt came",
  solved: "the prompt was above c1 when generated again",
};
const EVENTS = 25;
const LARGEST_PAGE = 1000;

/** @param {import("./run.js").Visit} visit */
export function showBuffers(visit) {
  const { name, signal, root, query, run } = visit;
  const wanted = {
    buffer: query.buffer === "high_quality" ? "high_quality" : "hard",
    // Of no step: now, and live.
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
    note: "Steps since the group was made.",
    y: "entries",
    x: "steps",
    integers: true,
    heading: "h3",
    height: 150,
    empty: "The buffer is empty.",
  });
  const staleness = chart({
    title: "Staleness",
    note: "Steps since the policy that made it.",
    y: "entries",
    x: "steps",
    integers: true,
    heading: "h3",
    height: 150,
    empty: "The buffer is empty.",
  });
  const rewards = chart({
    title: "Correct responses",
    note: "k of G in the stored group.",
    y: "entries",
    x: "k",
    integers: true,
    heading: "h3",
    height: 150,
    empty: "The buffer is empty.",
  });
  const facts = h("div");

  const step = stepControls("As of step", wanted.step ?? run.current_step, 0, run.current_step, (chosen) => {
    wanted.step = chosen === visit.run.current_step ? null : chosen;
    changed({ step: wanted.step });
  });
  const now = h(
    "button",
    {
      type: "button",
      onclick: () => ((wanted.step = null), step.set(visit.run.current_step), changed({ step: null })),
    },
    "Now",
  );
  const after = h("input", {
    type: "number",
    min: 0,
    inputmode: "numeric",
    onchange: () => (
      (wanted.events = whole(after.value)),
      setQuery({ events: wanted.events }),
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
            wanted.buffer,
            (buffer) => ((wanted.buffer = buffer), changed({ buffer }), restartEvents()),
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

  let seen = -1;
  visit.changed((newest) => {
    step.set(wanted.step ?? newest.current_step, newest.current_step);
    if (wanted.step === null || seen < 0) loadContents();
    // The events on show stay where the reader is, until they ask for later ones.
    if (seen < 0) restartEvents();
    seen = newest.current_step;
  });

  function changed(change) {
    setQuery(change);
    loadContents();
  }

  function loadContents() {
    about.textContent = ABOUT[wanted.buffer];
    now.disabled = wanted.step === null;
    keepContents({
      load: async (ours) => {
        const found = [];
        let cursor = null;
        do {
          const page = await get(
            path`/runs/${name}/buffers/${wanted.buffer}`,
            { step: wanted.step, cursor, limit: LARGEST_PAGE },
            ours,
          );
          found.push(...page.items);
          cursor = page.next;
        } while (cursor && found.length < 5 * LARGEST_PAGE);
        return found;
      },
      show: showContents,
      refuse: contents.refuse,
    });
  }

  function showContents(items) {
    const size = groupSize(run);
    const at = wanted.step === null ? "now" : `after step ${format.count(wanted.step)}`;
    const average = (measure) => format.number(mean(items.map(measure)));
    fill(
      facts,
      tiles([
        ["Entries", format.count(items.length), at],
        ["Mean reward", format.score(mean(items.map((each) => each.mean_reward))), "of the stored groups"],
        ["Age", average((each) => each.age), "steps on average"],
        ["Staleness", average((each) => each.staleness), "steps on average"],
      ]),
    );
    drawBars(
      age,
      items.map((each) => each.age),
    );
    drawBars(
      staleness,
      items.map((each) => each.staleness),
    );
    drawBars(
      rewards,
      items.map((each) => Math.round(each.mean_reward * size)),
      [0, size],
    );
    contents.show(
      table({
        caption: `${BUFFERS.find(([key]) => key === wanted.buffer)[1]} buffer ${at}, in the order of admission`,
        rows: items,
        empty: `The buffer is empty ${at}.`,
        most: 50,
        columns: [
          {
            title: "Prompt",
            by: (each) => each.prompt_uid,
            cell: (each) => promptLink(name, each.prompt_uid, { first: each.group_id }),
          },
          {
            title: "Correct",
            by: (each) => each.mean_reward,
            cell: (each) => binChip(Math.round(each.mean_reward * size), size),
          },
          {
            title: "Made at step",
            number: true,
            by: (each) => each.step,
            cell: (each) => format.count(each.step),
          },
          {
            title: "Version",
            number: true,
            by: (each) => each.policy_version,
            cell: (each) => format.count(each.policy_version),
          },
          { title: "Age", number: true, by: (each) => each.age, cell: (each) => format.count(each.age) },
          {
            title: "Staleness",
            number: true,
            by: (each) => each.staleness,
            cell: (each) => format.count(each.staleness),
          },
          {
            title: "Admitted at",
            number: true,
            by: (each) => each.inserted_step,
            cell: (each) => format.count(each.inserted_step),
          },
          {
            title: "Left at",
            number: true,
            by: (each) => each.evicted_step ?? Infinity,
            cell: (each) =>
              each.evicted_step ? `${format.count(each.evicted_step)} (${each.eviction_reason})` : "still in",
          },
        ],
      }),
    );
  }

  function restartEvents() {
    pager.reset();
    after.value = String(wanted.events ?? Math.max(0, visit.run.current_step - 10));
    loadEvents();
  }

  function loadEvents() {
    keepEvents({
      load: (ours) =>
        get(
          path`/runs/${name}/buffers/${wanted.buffer}/events`,
          { after: after.value, cursor: pager.cursor, limit: EVENTS },
          ours,
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
      empty: "Nothing came or went after this step.",
      columns: [
        { title: "Step", number: true, cell: (each) => batchLink(name, each.step) },
        { title: "Event", cell: (each) => h("span", { class: `event ${each.event}` }, each.event) },
        { title: "Prompt", cell: (each) => promptLink(name, each.prompt_uid, { first: each.group_id }) },
        { title: "Correct", cell: (each) => binChip(Math.round(each.mean_reward * size), size) },
        {
          title: "Reason",
          cell: (each) =>
            h(
              "span",
              { class: "reason" },
              each.event === "evicted" ? `${each.reason}: ${REASONS[each.reason] ?? ""}` : each.reason,
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
        counts: range(...domain).map((k) => values.filter((each) => each === k).length),
        width: 1,
      }
    : histogram(values);
  drawing.update({
    x: values.length ? x : [],
    series: [
      {
        name: width > 1 ? `entries in ${width} steps` : "entries",
        kind: "bar",
        color: "var(--blue)",
        values: values.length ? counts : [],
      },
    ],
  });
}

const range = (first, last) => Array.from({ length: last - first + 1 }, (_, i) => first + i);
