// Training prompts, filtered, ordered and paged by the service.

import { get, path } from "../api.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { announce, keeper, region } from "../live.js";
import { setQuery } from "../router.js";
import { Pager, table } from "../tables.js";
import { binChip, groupSize, payloadText, promptLink } from "./pieces.js";

const PAGE_SIZE = 50;
const SEARCH_DELAY_MS = 250;
const FILTERS = ["search", "bin", "trend", "unlocked_after", "unlocked_until", "order"];
const TRENDS = [
  ["", "Any"],
  ["improving", "Improving"],
  ["worsening", "Worsening"],
  ["steady", "Steady"],
  ["forgotten", "Forgotten (solved before, 0 now)"],
  ["never_solved", "Never solved"],
];
const ORDERS = [
  ["", "As stored"],
  ["hardest", "Hardest first"],
  ["most_improved", "Most improved first"],
  ["unlocked", "Earliest unlocked first"],
];

/** @param {import("./run.js").Visit} visit */
export function showPrompts(visit) {
  const { name, signal, root, query, run } = visit;
  const size = groupSize(run);
  const filters = Object.fromEntries(FILTERS.map((key) => [key, query[key] ?? ""]));
  const results = region();
  const keepResults = keeper(signal);
  const pager = new Pager(load, query.cursor ?? null);
  let typing = 0;

  const step = (key) =>
    h("input", {
      type: "number",
      min: 0,
      value: filters[key],
      inputmode: "numeric",
      onchange: (event) => filter({ [key]: event.target.value }),
    });
  const search = h("input", {
    type: "search",
    value: filters.search,
    maxlength: 200,
    placeholder: "Part of the uid or payload",
    oninput: typed,
  });
  const bins = [["", "Any"], ...Array.from({ length: size + 1 }, (_, k) => [String(k), `${k} of ${size}`])];
  const order = select(ORDERS, filters.order, (value) => filter({ order: value }));
  fill(
    root,
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Training prompts"),
      h(
        "form",
        { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
        field("Search", search),
        field(
          "Now correct",
          select(bins, filters.bin, (bin) => filter({ bin })),
        ),
        field(
          "Trend",
          select(TRENDS, filters.trend, (trend) => filter({ trend })),
        ),
        field("Unlocked after step", step("unlocked_after")),
        field("Up to step", step("unlocked_until")),
        field("Order", order),
        h("button", { type: "button", class: "quiet", onclick: clear }, "Clear"),
      ),
      results.element,
    ),
  );
  load();

  function typed() {
    clearTimeout(typing);
    typing = setTimeout(() => filter({ search: search.value }), SEARCH_DELAY_MS);
  }

  function clear() {
    // Building the page again is the simplest way to clear the form.
    setQuery({ ...Object.fromEntries(FILTERS.map((key) => [key, ""])), cursor: "" });
    visit.query = {};
    showPrompts(visit);
    root.querySelector("input[type=search]").focus();
  }

  function filter(change) {
    if (signal.aborted) return;
    Object.assign(filters, change);
    pager.reset();
    order.value = filters.order;
    setQuery({ ...change, cursor: "" });
    load();
  }

  function load() {
    setQuery({ cursor: pager.cursor });
    keepResults({
      load: (signal) =>
        get(path`/runs/${name}/prompts`, { ...filters, cursor: pager.cursor, limit: PAGE_SIZE }, signal),
      show: (page) => {
        results.show(listing(page.items), pager.controls(page.next));
        announce(
          `${format.plural(page.items.length, "prompt")}${page.next ? ", and more on the next page" : ""}`,
        );
      },
      refuse: results.refuse,
    });
  }

  function listing(items) {
    const filtered = FILTERS.some((key) => key !== "order" && filters[key]);
    const toggle = (key) => () => filter({ order: filters.order === key ? "" : key });
    return table({
      caption: `Attempted training prompts, ${(ORDERS.find(([key]) => key === filters.order) ?? ORDERS[0])[1].toLowerCase()}`,
      rows: items,
      empty: filtered ? "No prompt matches the filters." : "No prompt was attempted yet.",
      columns: [
        { title: "Prompt", cell: (prompt) => promptLink(name, prompt.uid) },
        {
          title: "Payload",
          cell: (prompt) =>
            h(
              "span",
              { class: "payload", title: payloadText(prompt.payload, 1000) },
              h("bdi", {}, payloadText(prompt.payload, 80)),
            ),
        },
        { title: "Now", cell: (prompt) => binChip(prompt.bin, size) },
        { title: "First", number: true, cell: (prompt) => format.score(prompt.first_mean) },
        {
          title: "Best",
          number: true,
          sorted: filters.order === "hardest" ? "ascending" : undefined,
          onsort: toggle("hardest"),
          hint: "Sort: hardest first",
          cell: (prompt) => format.score(prompt.best_mean),
        },
        {
          title: "Change",
          number: true,
          sorted: filters.order === "most_improved" ? "descending" : undefined,
          onsort: toggle("most_improved"),
          hint: "Sort: most improved first",
          cell: (prompt) => change(prompt.last_mean - prompt.first_mean),
        },
        { title: "Attempts", number: true, cell: (prompt) => format.count(prompt.attempts) },
        {
          title: "First solved at step",
          number: true,
          cell: (prompt) => format.count(prompt.first_solved_step),
        },
        { title: "Last attempt at step", number: true, cell: (prompt) => format.count(prompt.last_step) },
      ],
    });
  }
}

/** A change with its sign; the colour only repeats the sign. */
function change(value) {
  const text = value === 0 ? "0.000" : `${value > 0 ? "+" : "−"}${format.score(Math.abs(value))}`;
  return h("span", { class: value > 0 ? "better" : value < 0 ? "worse" : "muted" }, text);
}
