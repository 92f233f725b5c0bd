// The training batch of a step: the sources of its groups, and why a prompt is in it or not.

import { get, path } from "../api.js";
import { chart } from "../charts/chart.js";
import { SOURCES } from "../colors.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { announce, empty, keeper, region } from "../live.js";
import { setQuery, whole } from "../router.js";
import { Steps } from "../steps.js";
import { table } from "../tables.js";
import { batchLink, binChip, promptLink, source, tiles } from "./pieces.js";

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
  const keepDecision = keeper(signal);

  const composition = chart({
    title: "Composition over time",
    note: "Groups by source. Click or press Enter to open a step.",
    y: "groups",
    integers: true,
    height: 170,
    empty: "No step is committed yet.",
    pick: { label: "open this step's batch", act: (chosen) => open(chosen) },
  });
  const number = h("input", {
    type: "number",
    min: 1,
    inputmode: "numeric",
    onchange: () => open(whole(number.value)),
  });
  const button = (label, target) => h("button", { type: "button", onclick: () => open(target()) }, label);
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
  const submit = (event) => {
    event.preventDefault();
    setQuery({ uid: uid.value });
    loadDecision();
  };

  fill(
    root,
    composition.element,
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
        { class: "controls", onsubmit: submit },
        field("Prompt uid", uid),
        h("button", { type: "submit" }, "Explain"),
      ),
      answer,
    ),
    h("section", { class: "card" }, h("h2", {}, "Groups of the batch"), members.element),
  );

  let opened = false;
  visit.changed((run) => {
    keepSteps({ load: () => store.load(run), show: drawComposition, refuse: () => {} });
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

  function drawComposition(steps) {
    composition.update({
      x: steps.map((record) => record.step),
      series: Object.entries(SOURCES).map(([key, color]) => ({
        name: format.term(key),
        kind: "area",
        stepped: true,
        color,
        values: steps.map((record) => record.counts[key] ?? 0),
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
      load: (signal) => get(path`/runs/${name}/batches/${at}`, {}, signal),
      show: (batch) => {
        showBatch(batch);
        announce(`Batch of step ${at}: ${format.plural(batch.members.length, "group")}`, { seldom: true });
      },
      refuse: (problem) => (fill(facts), members.refuse(problem)),
    });
    loadDecision();
  }

  function showBatch(batch) {
    // Replayed responses belong to the fresh group before them.
    const size = Object.keys(SOURCES).reduce((sum, key) => sum + (batch.counts[key] ?? 0), 0);
    const responses = batch.counts.replayed_responses;
    const staleness = batch.members.map((member) => batch.step - member.policy_version);
    const share = (key) => (size ? `${format.percent((batch.counts[key] ?? 0) / size)} of the batch` : "");
    fill(
      facts,
      tiles([
        ["Groups", format.count(size), `in the batch of step ${format.count(batch.step)}`],
        ...Object.keys(SOURCES).map((key) => [source(key), format.count(batch.counts[key] ?? 0), share(key)]),
        ...(responses === undefined
          ? []
          : [["Replayed responses", format.count(responses), "of earlier steps, beside fresh groups"]]),
        ...(batch.supervised.length
          ? [["Supervised prompts", format.count(batch.supervised.length), "unsolved, by their demonstrations"]]
          : []),
        [
          "Replay window",
          `${format.score(batch.c2)} to ${format.score(batch.c3)}`,
          `[c2, c3]; r_tot ${format.score(batch.r_tot)}`,
        ],
        [
          "Staleness",
          format.number(size ? staleness.reduce((sum, steps) => sum + steps, 0) / staleness.length : null),
          size ? `steps on average; at most ${Math.max(...staleness)}` : "",
        ],
      ]),
    );
    members.show(
      table({
        caption: `Groups in the batch of step ${format.count(batch.step)}`,
        rows: batch.members.map((member, i) => ({ ...member, position: i + 1 })),
        empty: "The batch is empty: no fresh group passed the filter, and no group was promoted or replayed.",
        maxRows: 100,
        columns: [
          {
            title: "Prompt",
            by: (member) => member.prompt_uid,
            cell: (member) => promptLink(name, member.prompt_uid, { first: member.group_id }),
          },
          { title: "Source", by: (member) => member.source, cell: (member) => source(member.source) },
          {
            title: "Correct",
            by: (member) => member.correct / member.size,
            cell: (member) => binChip(member.correct, member.size),
          },
          {
            title: "Responses",
            number: true,
            by: (member) => member.rows?.length ?? member.row_count,
            cell: (member) =>
              `${member.rows?.length ?? member.row_count} of ${member.row_count}` +
              (member.demonstration ? " and a demonstration" : ""),
          },
          {
            title: "Generated at step",
            number: true,
            by: (member) => member.step,
            cell: (member) => batchLink(name, member.step),
          },
          {
            title: "Policy version",
            number: true,
            by: (member) => member.policy_version,
            cell: (member) => format.count(member.policy_version),
          },
          {
            title: "Staleness",
            number: true,
            by: (member) => batch.step - member.policy_version,
            cell: (member) => format.count(batch.step - member.policy_version),
          },
          {
            title: "Group",
            number: true,
            by: (member) => member.group_id,
            cell: (member) => member.group_id,
          },
          {
            title: "Why",
            cell: (member) =>
              h(
                "button",
                {
                  type: "button",
                  class: "quiet",
                  "aria-label": `Why ${member.prompt_uid}`,
                  onclick: () => explain(member.prompt_uid),
                },
                "Why",
              ),
          },
        ],
      }),
    );
  }

  function explain(promptUid) {
    uid.value = promptUid;
    setQuery({ uid: promptUid });
    loadDecision();
    root.querySelector("#why h2").focus();
  }

  function loadDecision() {
    const promptUid = uid.value.trim();
    if (!promptUid || shown() === 0)
      return fill(answer, empty("Enter a uid, or press Why beside one of the groups below."));
    const at = shown();
    const result = region();
    fill(answer, result.element);
    keepDecision({
      load: (signal) => get(path`/runs/${name}/steps/${at}/decision`, { uid: promptUid }, signal),
      show: (decision) => result.show(decisionView(name, decision)),
      refuse: result.refuse,
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
    decision.draw && h("p", { class: "note" }, `Sampler ${decision.draw.sampler}: ${decision.draw.reason}.`),
    table({
      caption: `Decision of each source (batch capacity ${decision.capacity}, c1 ${format.number(decision.c1)}, replay window ${format.score(decision.c2)} to ${format.score(decision.c3)})`,
      rows: decision.considered,
      columns: [
        { title: "Source", cell: (decided) => source(decided.source) },
        {
          title: "Outcome",
          cell: (decided) => h("span", { class: `outcome ${decided.outcome}` }, format.term(decided.outcome)),
        },
        { title: "Reason", cell: (decided) => h("span", { class: "reason" }, decided.reason) },
        { title: "Accuracy", number: true, cell: (decided) => format.score(decided.accuracy) },
      ],
    }),
  ];
}
