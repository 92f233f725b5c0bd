// Training prompts, filtered, ordered and paged by the service.

import { path } from "../api.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { filteredList } from "../lists.js";
import { table } from "../tables.js";
import { binChip, groupSize, payloadText, promptLink } from "./pieces.js";

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
  const { name, root, run } = visit;
  const size = groupSize(run);
  const bins = [["", "Any"], ...Array.from({ length: size + 1 }, (_, k) => [String(k), `${k} of ${size}`])];
  const list = filteredList(visit, {
    route: path`/runs/${name}/prompts`,
    keys: FILTERS,
    noun: "prompt",
    pageSize: 50,
    listing: ({ items }) => listing(items),
  });
  const { filters } = list;
  fill(
    root,
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Training prompts"),
      list.form(
        field("Search", list.search("search", "Part of the uid or payload")),
        field("Now correct", list.choice("bin", bins)),
        field("Trend", list.choice("trend", TRENDS)),
        field("Unlocked after step", list.number("unlocked_after", { min: 0 })),
        field("Up to step", list.number("unlocked_until", { min: 0 })),
        field("Order", list.choice("order", ORDERS)),
      ),
      list.element,
    ),
  );
  list.load();

  function listing(items) {
    const filtered = FILTERS.some((key) => key !== "order" && filters[key]);
    const toggle = (key) => () => list.filter({ order: filters.order === key ? "" : key });
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
