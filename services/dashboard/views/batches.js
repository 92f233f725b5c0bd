// The training batch of a step: where its groups came from, and why a prompt is in it or not.

import { get, path } from "../api.js";
import { chart } from "../charts.js";
import { SOURCES } from "../colors.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { announce, empty, keeper, region } from "../live.js";
import { setQuery, whole } from "../router.js";
import { Steps } from "../steps.js";
import { table } from "../tables.js";
import { batchLink, binChip, promptLink, source, tiles } from "./parts.js";

/** @param {import("./run.js").Visit} visit */
export function showBatches(visit) {
  const { name, signal, root, query } = visit;
  let step = whole(query.step);
  const store = new Steps(name, signal);
  const members = region();
  const facts = h("div");
  const answer = h("div", { "aria-live": "polite" });
  const keepSteps = keeper(signal);
  const keepMembers = keeper(signal);
  const keepAnswer = keeper(signal);

  const over = chart({
    title: "Composition over time",
    note: "Groups by source. A click or Enter opens the step.",
    y: "groups",
    integers: true,
    height: 170,
    empty: "No step is committed yet.",
    pick: { words: "open this step's batch", act: (chosen) => open(chosen) },
  });
  const number = h("input", {
    type: "number",
    min: 1,
    inputmode: "numeric",
    onchange: () => open(whole(number.value)),
  });
  const button = (words, to) => h("button", { type: "button", onclick: () => open(to()) }, words);
  const previous = button("Previous", () => shown() - 1);
  const next = button("Next", () => shown() + 1);
  const newest = button("Newest", () => null);
  const uid = h("input", {
    type: "text",
    value: query.uid ?? "",
    maxlength: 512,
    autocomplete: "off",
    spellcheck: "false",
  });
  const ask = (event) => {
    event.preventDefault();
    setQuery({ uid: uid.value });
    decide();
  };

  fill(
    root,
    over.element,
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Batch of a step"),
      h("div", { class: "controls" }, field("Step", number), previous, next, newest),
      facts,
    ),
    h(
      "section",
      { class: "card", id: "why" },
      h("h2", { tabindex: -1 }, "Why is a prompt in this batch, or not?"),
      h(
        "form",
        { class: "controls", onsubmit: ask },
        field("Prompt uid", uid),
        h("button", { type: "submit" }, "Explain"),
      ),
      answer,
    ),
    h("section", { class: "card" }, h("h2", {}, "Groups of the batch"), members.element),
  );

  let opened = false;
  visit.changed((run) => {
    keepSteps({ load: () => store.bring(run), show: drawOver, refuse: () => {} });
    // Without a step in the address the page follows the run.
    if (step === null || !opened) load();
    opened = true;
  });

  function shown() {
    return step ?? visit.run.current_step;
  }

  function open(chosen) {
    step = chosen;
    setQuery({ step });
    load();
  }

  function drawOver(steps) {
    over.update({
      x: steps.map((each) => each.step),
      series: Object.entries(SOURCES).map(([key, color]) => ({
        name: format.words(key),
        kind: "area",
        stepped: true,
        color,
        values: steps.map((each) => each.counts[key] ?? 0),
      })),
    });
  }

  function load() {
    const at = shown();
    number.value = String(at);
    number.max = String(visit.run.current_step);
    previous.disabled = at <= 1;
    next.disabled = at >= visit.run.current_step;
    newest.disabled = step === null;
    if (at === 0) {
      fill(facts);
      return members.show(empty("No step is committed yet."));
    }
    keepMembers({
      load: (ours) => get(path`/runs/${name}/batches/${at}`, {}, ours),
      show: (batch) => {
        showBatch(batch);
        announce(`Batch of step ${at}: ${format.plural(batch.members.length, "group")}`, { seldom: true });
      },
      refuse: (problem) => (fill(facts), members.refuse(problem)),
    });
    decide();
  }

  function showBatch(batch) {
    const size = batch.members.length;
    const stale = batch.members.map((each) => batch.step - each.policy_version);
    const share = (key) => (size ? `${format.percent((batch.counts[key] ?? 0) / size)} of the batch` : "");
    fill(
      facts,
      tiles([
        ["Groups", format.count(size), `in the batch of step ${format.count(batch.step)}`],
        ...Object.keys(SOURCES).map((key) => [source(key), format.count(batch.counts[key] ?? 0), share(key)]),
        [
          "Window",
          `${format.score(batch.c2)} to ${format.score(batch.c3)}`,
          `c2 to c3; r_tot ${format.score(batch.r_tot)}`,
        ],
        [
          "Staleness",
          format.number(size ? stale.reduce((sum, each) => sum + each, 0) / size : null),
          size ? `steps on average; at most ${Math.max(...stale)}` : "",
        ],
      ]),
    );
    members.show(
      table({
        caption: `Groups in the batch of step ${format.count(batch.step)}`,
        rows: batch.members.map((each, i) => ({ ...each, position: i + 1 })),
        empty: "The batch is empty: no group had mixed rewards, and nothing could be replayed.",
        most: 100,
        columns: [
          {
            title: "Prompt",
            by: (each) => each.prompt_uid,
            cell: (each) => promptLink(name, each.prompt_uid, { first: each.group_id }),
          },
          { title: "Source", by: (each) => each.source, cell: (each) => source(each.source) },
          {
            title: "Correct",
            by: (each) => each.correct / each.size,
            cell: (each) => binChip(each.correct, each.size),
          },
          {
            title: "Made at step",
            number: true,
            by: (each) => each.step,
            cell: (each) => batchLink(name, each.step),
          },
          {
            title: "Version",
            number: true,
            by: (each) => each.policy_version,
            cell: (each) => format.count(each.policy_version),
          },
          {
            title: "Staleness",
            number: true,
            by: (each) => batch.step - each.policy_version,
            cell: (each) => format.count(batch.step - each.policy_version),
          },
          { title: "Group", number: true, by: (each) => each.group_id, cell: (each) => each.group_id },
          {
            title: "Why",
            cell: (each) =>
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": `Why ${each.prompt_uid}`,
                  onclick: () => explain(each.prompt_uid),
                },
                "Why",
              ),
          },
        ],
      }),
    );
  }

  function explain(wanted) {
    uid.value = wanted;
    setQuery({ uid: wanted });
    decide();
    root.querySelector("#why h2").focus();
  }

  function decide() {
    const wanted = uid.value.trim();
    if (!wanted || shown() === 0)
      return fill(answer, empty("Enter a uid, or choose Why at one of the groups below."));
    const at = shown();
    const shownAnswer = region();
    fill(answer, shownAnswer.element);
    keepAnswer({
      load: (ours) => get(path`/runs/${name}/steps/${at}/decision`, { uid: wanted }, ours),
      show: (decision) => shownAnswer.show(decisionView(name, decision)),
      refuse: shownAnswer.refuse,
    });
  }
}

function decisionView(name, decision) {
  const verdict = decision.used
    ? ["is in the batch of step ", "as ", source(decision.source)]
    : ["is not in the batch of step "];
  return [
    h(
      "p",
      {},
      promptLink(name, decision.uid),
      ` ${verdict[0]}`,
      h("b", {}, format.count(decision.step)),
      verdict.length > 1 ? [", ", verdict.slice(1)] : "",
      ".",
    ),
    table({
      caption: `What each source made of it (capacity ${decision.capacity}, c1 ${format.number(decision.c1)}, window ${format.score(decision.c2)} to ${format.score(decision.c3)})`,
      rows: decision.considered,
      columns: [
        { title: "Source", cell: (each) => source(each.source) },
        {
          title: "Outcome",
          cell: (each) => h("span", { class: `outcome ${each.outcome}` }, format.words(each.outcome)),
        },
        { title: "Reason", cell: (each) => h("span", { class: "reason" }, each.reason) },
        { title: "Mean reward", number: true, cell: (each) => format.score(each.mean_reward) },
      ],
    }),
  ];
}
