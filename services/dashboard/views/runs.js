// All runs: found by name and status, each with its progress and its held-out accuracy.

import { get, path } from "../api.js";
import { sparkline } from "../charts.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { announce, EVERY_MS, keeper, region } from "../live.js";
import { go, href, setQuery } from "../router.js";
import { Pager, table } from "../tables.js";
import { progress, statusPill } from "./parts.js";

const STATUSES = ["created", "running", "paused", "stopped", "finished", "failed", "deleting"];
const PAGE = 25;
const NO_EVALUATIONS = [];

export function showRuns(root, signal, query) {
  const wanted = { search: query.search ?? "", status: query.status ?? "" };
  const results = region();
  /** Names ticked for comparison, oldest tick first. */
  let ticked = [];
  const keepResults = keeper(signal);
  /** Evaluations of runs that are not at work: they need no second look. */
  const atRest = new Map();
  const pager = new Pager(again);

  const compareButton = h("button", {
    type: "button",
    onclick: () => go(href(["compare"], { first: ticked[0], second: ticked[1] })),
  });
  const search = h("input", {
    type: "search",
    value: wanted.search,
    placeholder: "Part of a name",
    maxlength: 63,
    oninput: () => filter({ search: search.value }),
  });
  const status = select(
    [["", "Any status"], ...STATUSES.map((each) => [each, each])],
    wanted.status,
    (value) => filter({ status: value }),
  );

  fill(
    root,
    h("h1", {}, "Runs"),
    h(
      "form",
      { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
      field("Name", search),
      field("Status", status),
      h("div", { class: "push" }, compareButton),
    ),
    h("section", { class: "card", "aria-label": "List of runs" }, results.element),
  );
  tick();
  again();

  function filter(change) {
    Object.assign(wanted, change);
    setQuery(change);
    pager.reset();
    again();
  }

  function again() {
    keepResults({
      every: EVERY_MS,
      load: async (ours) => {
        const page = await get("/runs", { ...wanted, cursor: pager.cursor, limit: PAGE }, ours);
        return [page, ...(await Promise.all(page.items.map((run) => evaluationsOf(run, ours))))];
      },
      show: ([page, ...evaluations]) => {
        results.show(listing(page.items, evaluations), pager.controls(page.next));
        announce(`${format.plural(page.items.length, "run")}${page.next ? ", and more" : ""}`, {
          seldom: true,
        });
      },
      refuse: results.refuse,
    });
  }

  /** None for a run that was deleted after the list was made. */
  async function evaluationsOf({ name, status, attempt, current_step: step }, ours) {
    const state = [name, status, attempt, step].join();
    if (atRest.has(state)) return atRest.get(state);
    try {
      const found = await get(path`/runs/${name}/evaluations`, {}, ours);
      if (status !== "running") atRest.set(state, found);
      return found;
    } catch (problem) {
      if (problem.status === 404) return NO_EVALUATIONS;
      throw problem;
    }
  }

  function listing(runs, evaluations) {
    if (runs.length === 0) {
      const filtered = wanted.search || wanted.status;
      return h(
        "p",
        { class: "empty" },
        filtered ? "No run matches." : "No runs yet. Start one with ",
        !filtered && h("code", {}, "bapo run examples/countdown.yaml"),
      );
    }
    const rows = runs.map((run, i) => ({ run, evaluations: evaluations[i] }));
    return table({
      caption: "Runs, oldest first",
      rows,
      columns: [
        {
          title: "Name",
          cell: ({ run }) => h("a", { class: "strong", href: href(["runs", run.name]) }, run.name),
        },
        { title: "Status", cell: ({ run }) => statusPill(run.status) },
        { title: "Algorithm", cell: ({ run }) => run.config.algorithm ?? format.NONE },
        { title: "Progress", cell: ({ run }) => progress(run) },
        { title: "Held-out accuracy", cell: accuracy },
        { title: "Seed", number: true, cell: ({ run }) => format.count(run.config.seed) },
        {
          title: "Created",
          cell: ({ run }) =>
            h(
              "time",
              { datetime: run.created_at, title: format.time(run.created_at) },
              format.ago(run.created_at),
            ),
        },
        { title: "Compare", cell: ({ run }) => tickBox(run.name) },
      ],
    });
  }

  function accuracy({ run, evaluations }) {
    if (evaluations.length === 0) return h("span", { class: "muted" }, "no evaluation yet");
    const values = evaluations.map((each) => each.mean_accuracy);
    return h(
      "span",
      { class: "spark" },
      h("b", {}, format.score(values.at(-1))),
      sparkline(
        values,
        `Held-out accuracy of ${run.name}: ${format.score(values[0])} to ${format.score(values.at(-1))}`,
      ),
    );
  }

  function tickBox(name) {
    return h("input", {
      type: "checkbox",
      "aria-label": `Compare ${name}`,
      checked: ticked.includes(name),
      onchange: (event) => {
        ticked = [...ticked.filter((each) => each !== name), ...(event.target.checked ? [name] : [])].slice(
          -2,
        );
        for (const box of results.element.querySelectorAll("input[type=checkbox]")) {
          box.checked = ticked.some((each) => box.getAttribute("aria-label") === `Compare ${each}`);
        }
        tick();
      },
    });
  }

  function tick() {
    compareButton.disabled = ticked.length !== 2;
    compareButton.textContent =
      ticked.length === 2 ? `Compare ${ticked.join(" and ")}` : "Tick two runs to compare";
  }
}
