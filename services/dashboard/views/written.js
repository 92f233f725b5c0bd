// What the model wrote, in training and in evaluations, filtered and searched by the service.

import { path } from "../api.js";
import { field, fill, h } from "../dom.js";
import * as format from "../format.js";
import { filteredList } from "../lists.js";
import { empty } from "../live.js";
import { payloadText, promptLink } from "./pieces.js";
import { facts, text } from "./responses.js";

const VERDICTS = [
  ["", "Any"],
  ["false", "Wrong"],
  ["true", "Correct"],
];

/** @param {import("./run.js").Visit} visit */
export function showWritten(visit) {
  const { name, root, run } = visit;
  const sets = [["", "Training"], ...Object.keys(run.test_datasets).map((set) => [set, `Evaluation: ${set}`])];
  const list = filteredList(visit, {
    route: path`/runs/${name}/responses`,
    keys: ["evaluation_set", "correct", "contains", "first", "last"],
    noun: "response",
    pageSize: 20,
    listing,
  });
  fill(
    root,
    h(
      "section",
      { class: "card" },
      h("h2", {}, "What the model wrote"),
      list.form(
        field("Prompts", list.choice("evaluation_set", sets)),
        field("Verdict", list.choice("correct", VERDICTS)),
        field("Text", list.search("contains", "Part of the text")),
        field("From step or version", list.number("first", { min: 1, placeholder: "the last" })),
        field("To", list.number("last", { min: 1, placeholder: "newest" })),
      ),
      list.element,
    ),
  );
  list.load();

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
