// The list of runs, by name and status, with progress and held-out accuracy.

import { get, path } from "../api.js";
import { sparkline } from "../charts/sparkline.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { announce, POLL_INTERVAL_MS, keeper, region } from "../live.js";
import { go, href, setQuery } from "../router.js";
import { Pager, table } from "../tables.js";
import { forkOrigin, progress, statusPill } from "./pieces.js";

const STATUSES = ["created", "queued", "running", "paused", "stopped", "finished", "failed", "deleting"];
const PAGE_SIZE = 25;
const MAX_COMPARED = 24;
const NO_EVALUATIONS = [];

export function showRuns(root, signal, query) {
  const filters = { search: query.search ?? "", status: query.status ?? "" };
  const results = region();
  /** Names of the runs to compare, in the order of selection. */
  let selected = [];
  const keepResults = keeper(signal);
  /** Evaluations of runs that are not running, by their state: they are loaded once. */
  const cachedEvaluations = new Map();
  const pager = new Pager(load);

  const compareButton = h("button", {
    type: "button",
    onclick: () => go(href(["compare"], { runs: selected.join(",") })),
  });
  const search = h("input", {
    type: "search",
    value: filters.search,
    placeholder: "Part of a name",
    maxlength: 63,
    oninput: () => filter({ search: search.value }),
  });
  const status = select(
    [["", "Any status"], ...STATUSES.map((name) => [name, name])],
    filters.status,
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
  updateCompareButton();
  load();

  function filter(change) {
    Object.assign(filters, change);
    setQuery(change);
    pager.reset();
    load();
  }

  function load() {
    keepResults({
      every: POLL_INTERVAL_MS,
      load: async (signal) => {
        const page = await get("/runs", { ...filters, cursor: pager.cursor, limit: PAGE_SIZE }, signal);
        return [page, ...(await Promise.all(page.items.map((run) => evaluationsOf(run, signal))))];
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

  /** Returns no evaluations for a run that was deleted after it was listed. */
  async function evaluationsOf({ name, status, attempt, current_step: step }, signal) {
    const state = [name, status, attempt, step].join();
    if (cachedEvaluations.has(state)) return cachedEvaluations.get(state);
    try {
      const evaluations = await get(path`/runs/${name}/evaluations`, {}, signal);
      if (status !== "running") cachedEvaluations.set(state, evaluations);
      return evaluations;
    } catch (problem) {
      if (problem.status === 404) return NO_EVALUATIONS;
      throw problem;
    }
  }

  function listing(runs, evaluations) {
    if (runs.length === 0) {
      const filtered = filters.search || filters.status;
      return h(
        "p",
        { class: "empty" },
        filtered ? "No run matches the filters." : "No runs yet. Start one with ",
        !filtered && h("code", {}, "bapo run examples/countdown.yaml"),
      );
    }
    const rows = runs.map((run, i) => ({ run, evaluations: evaluations[i] }));
    return table({
      caption: "Runs, newest first",
      rows,
      columns: [
        {
          title: "Name",
          cell: ({ run }) => [
            h("a", { class: "strong", href: href(["runs", run.name]) }, run.name),
            run.forked_from && h("div", { class: "note" }, forkOrigin(run)),
          ],
        },
        { title: "Status", cell: ({ run }) => statusPill(run.status) },
        { title: "Algorithm", cell: ({ run }) => run.config.algorithm ?? format.NONE },
        { title: "Progress", cell: ({ run }) => progress(run) },
        {
          title: "Held-out",
          hint: "Accuracy, or the reward of a reward function without task.solved_at",
          cell: heldOut,
        },
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
        { title: "Compare", cell: ({ run }) => selectBox(run.name) },
      ],
    });
  }

  function heldOut({ run, evaluations }) {
    if (evaluations.length === 0) return h("span", { class: "muted" }, "no evaluation yet");
    const measure = measureOf(run);
    const values = evaluations.map((evaluation) => evaluation[`mean_${measure}`]);
    return h(
      "span",
      { class: "spark" },
      h("b", {}, format.score(values.at(-1))),
      h("span", { class: "muted" }, measure),
      sparkline(
        values,
        `Held-out ${measure} of ${run.name}: ${format.score(values[0])} to ${format.score(values.at(-1))}`,
      ),
    );
  }

  function selectBox(name) {
    return h("input", {
      type: "checkbox",
      "aria-label": `Compare ${name}`,
      checked: selected.includes(name),
      onchange: (event) => {
        const others = selected.filter((other) => other !== name);
        selected = [...others, ...(event.target.checked ? [name] : [])].slice(-MAX_COMPARED);
        for (const box of results.element.querySelectorAll("input[type=checkbox]")) {
          box.checked = selected.some((other) => box.getAttribute("aria-label") === `Compare ${other}`);
        }
        updateCompareButton();
      },
    });
  }

  function updateCompareButton() {
    compareButton.disabled = selected.length < 2;
    compareButton.textContent =
      selected.length < 2 ? "Select runs to compare" : `Compare ${selected.length} runs`;
  }
}

/** What evaluations of a run are compared by, as the configuration's `task.measure` says. */
const measureOf = ({ config: { task } }) => (task?.reward && task.solved_at === null ? "reward" : "accuracy");
