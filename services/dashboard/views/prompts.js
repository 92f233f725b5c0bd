// Training prompts by what is known of them. Filtered, ordered and paged by the service.

import { get, path } from "../api.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { announce, keeper, region } from "../live.js";
import { setQuery } from "../router.js";
import { Pager, table } from "../tables.js";
import { binChip, groupSize, payloadText, promptLink } from "./parts.js";

const PAGE = 50;
const TYPING_MS = 250;
const FILTERS = ["search", "bin", "trend", "unlocked_after", "unlocked_until", "order"];
const TRENDS = [
  ["", "Any"],
  ["improving", "Improving"],
  ["worsening", "Worsening"],
  ["steady", "Steady"],
  ["forgotten", "Forgotten (solved once, 0 now)"],
  ["never_solved", "Never solved"],
];
const ORDERS = [
  ["", "As stored"],
  ["hardest", "Hardest first"],
  ["most_improved", "Most improved first"],
  ["unlocked", "First unlocked first"],
];

/** @param {import("./run.js").Visit} visit */
export function showPrompts(visit) {
  const { name, signal, root, query, run } = visit;
  const size = groupSize(run);
  const wanted = Object.fromEntries(FILTERS.map((key) => [key, query[key] ?? ""]));
  const results = region();
  const keepResults = keeper(signal);
  const pager = new Pager(again, query.cursor ?? null);
  let typing = 0;

  const step = (key) =>
    h("input", {
      type: "number",
      min: 0,
      value: wanted[key],
      inputmode: "numeric",
      onchange: (event) => filter({ [key]: event.target.value }),
    });
  const search = h("input", {
    type: "search",
    value: wanted.search,
    maxlength: 200,
    placeholder: "Part of the uid or payload",
    oninput: typed,
  });
  const bins = [["", "Any"], ...Array.from({ length: size + 1 }, (_, k) => [String(k), `${k} of ${size}`])];
  const order = select(ORDERS, wanted.order, (value) => filter({ order: value }));
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
          select(bins, wanted.bin, (bin) => filter({ bin })),
        ),
        field(
          "Trend",
          select(TRENDS, wanted.trend, (trend) => filter({ trend })),
        ),
        field("Unlocked after step", step("unlocked_after")),
        field("Up to step", step("unlocked_until")),
        field("Order", order),
        h("button", { type: "button", class: "quiet", onclick: clear }, "Clear"),
      ),
      results.element,
    ),
  );
  again();

  function typed() {
    clearTimeout(typing);
    typing = setTimeout(() => filter({ search: search.value }), TYPING_MS);
  }

  function clear() {
    // The form says what is asked for: a new page of it is the simplest way to clear it.
    setQuery({ ...Object.fromEntries(FILTERS.map((key) => [key, ""])), cursor: "" });
    visit.query = {};
    showPrompts(visit);
    root.querySelector("input[type=search]").focus();
  }

  function filter(change) {
    if (signal.aborted) return;
    Object.assign(wanted, change);
    pager.reset();
    order.value = wanted.order;
    setQuery({ ...change, cursor: "" });
    again();
  }

  function again() {
    setQuery({ cursor: pager.cursor });
    keepResults({
      load: (ours) =>
        get(path`/runs/${name}/prompts`, { ...wanted, cursor: pager.cursor, limit: PAGE }, ours),
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
    const filtered = FILTERS.some((key) => key !== "order" && wanted[key]);
    const toggle = (key) => () => filter({ order: wanted.order === key ? "" : key });
    return table({
      caption: `Attempted training prompts, ${(ORDERS.find(([key]) => key === wanted.order) ?? ORDERS[0])[1].toLowerCase()}`,
      rows: items,
      empty: filtered ? "No prompt matches." : "No prompt was attempted yet.",
      columns: [
        { title: "Prompt", cell: (each) => promptLink(name, each.uid) },
        {
          title: "Payload",
          cell: (each) =>
            h(
              "span",
              { class: "payload", title: payloadText(each.payload, 1000) },
              h("bdi", {}, payloadText(each.payload, 80)),
            ),
        },
        { title: "Now", cell: (each) => binChip(each.bin, size) },
        { title: "First", number: true, cell: (each) => format.score(each.first_mean) },
        {
          title: "Best",
          number: true,
          sorted: wanted.order === "hardest" ? "ascending" : undefined,
          onsort: toggle("hardest"),
          hint: "Sort: hardest first",
          cell: (each) => format.score(each.best_mean),
        },
        {
          title: "Change",
          number: true,
          sorted: wanted.order === "most_improved" ? "descending" : undefined,
          onsort: toggle("most_improved"),
          hint: "Sort: most improved first",
          cell: (each) => change(each.last_mean - each.first_mean),
        },
        { title: "Attempts", number: true, cell: (each) => format.count(each.attempts) },
        { title: "First solved at", number: true, cell: (each) => format.count(each.first_solved_step) },
        { title: "Last attempt at", number: true, cell: (each) => format.count(each.last_step) },
      ],
    });
  }
}

/** With its sign: the colour only repeats it. */
function change(value) {
  const text = value === 0 ? "0.000" : `${value > 0 ? "+" : "−"}${format.score(Math.abs(value))}`;
  return h("span", { class: value > 0 ? "better" : value < 0 ? "worse" : "muted" }, text);
}
