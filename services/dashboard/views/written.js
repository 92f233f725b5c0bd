// What the model wrote, in training and in evaluations, filtered and searched by the service.

import { get, path } from "../api.js";
import { field, fill, h, select } from "../dom.js";
import * as format from "../format.js";
import { announce, empty, keeper, region } from "../live.js";
import { setQuery } from "../router.js";
import { Pager } from "../tables.js";
import { payloadText, promptLink } from "./pieces.js";
import { facts, text } from "./responses.js";

const PAGE_SIZE = 20;
const SEARCH_DELAY_MS = 400;
const VERDICTS = [
  ["", "Any"],
  ["false", "Wrong"],
  ["true", "Correct"],
];

/** @param {import("./run.js").Visit} visit */
export function showWritten(visit) {
  const { name, signal, root, query, run } = visit;
  const filters = {
    evaluation_set: query.evaluation_set ?? "",
    correct: query.correct ?? "",
    contains: query.contains ?? "",
    first: query.first ?? "",
    last: query.last ?? "",
  };
  const sets = [["", "Training"], ...Object.keys(run.test_datasets).map((set) => [set, `Evaluation: ${set}`])];
  const results = region();
  const keepResults = keeper(signal);
  const pager = new Pager(load, query.cursor ?? null);
  let typing = 0;

  const step = (key) =>
    h("input", {
      type: "number",
      min: 1,
      value: filters[key],
      inputmode: "numeric",
      placeholder: key === "last" ? "newest" : "the last",
      onchange: (event) => filter({ [key]: event.target.value }),
    });
  const search = h("input", {
    type: "search",
    value: filters.contains,
    maxlength: 200,
    placeholder: "Part of the text",
    oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => filter({ contains: search.value }), SEARCH_DELAY_MS);
    },
  });
  fill(
    root,
    h(
      "section",
      { class: "card" },
      h("h2", {}, "What the model wrote"),
      h(
        "form",
        { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
        field(
          "Prompts",
          select(sets, filters.evaluation_set, (set) => filter({ evaluation_set: set })),
        ),
        field(
          "Verdict",
          select(VERDICTS, filters.correct, (correct) => filter({ correct })),
        ),
        field("Text", search),
        field("From step or version", step("first")),
        field("To", step("last")),
      ),
      results.element,
    ),
  );
  load();

  function filter(change) {
    if (signal.aborted) return;
    Object.assign(filters, change);
    pager.reset();
    setQuery({ ...change, cursor: "" });
    load();
  }

  function load() {
    setQuery({ cursor: pager.cursor });
    const asked = { ...filters, cursor: pager.cursor, limit: PAGE_SIZE };
    keepResults({
      load: (signal) => get(path`/runs/${name}/responses`, asked, signal),
      show: (page) => {
        results.show(listing(page), pager.controls(page.next));
        announce(
          `${format.plural(page.items.length, "response")}${page.next ? ", and more on the next page" : ""}`,
        );
      },
      refuse: results.refuse,
    });
  }

  function listing({ items, next }) {
    if (!items.length)
      return empty(
        next
          ? "None of the groups that were read has such a response; the next page reads further ones."
          : "No response matches. From step 1 on, all steps are searched.",
      );
    return h(
      "ol",
      { class: "responses" },
      items.map((response) =>
        h(
          "li",
          { class: response.correct ? "response right" : "response" },
          h(
            "p",
            {},
            promptLink(name, response.prompt_uid),
            " ",
            h("bdi", { class: "payload" }, payloadText(response.payload, 300)),
          ),
          facts(
            response,
            `${format.plural(response.tokens, "token")}, finish reason ${response.finish_reason}`,
            `${response.kind === "evaluation" ? "version" : "step"} ${response.step}, group ${response.group_id}, #${response.index + 1}`,
          ),
          text(response),
        ),
      ),
    );
  }
}
