// The responses of a group: text, reward, and on demand each token shaded by its log-prob.

import { h } from "../dom.js";
import * as format from "../format.js";

const FIRST_TOKENS = 600;
/** At and below this log-prob the shade is full. */
const LOWEST = -5;

export function responses(group, withTokens) {
  const characters = withTokens ? charactersOf(group.responses) : null;
  return h(
    "ol",
    { class: "responses" },
    group.responses.map((response, i) =>
      h(
        "li",
        { class: response.reward > 0 ? "response right" : "response" },
        head(response, i),
        withTokens ? tokens(response, characters) : text(response),
      ),
    ),
  );
}

function head(response, i) {
  const right = response.reward > 0;
  const mean = response.logprobs.length
    ? response.logprobs.reduce((sum, each) => sum + each, 0) / response.logprobs.length
    : null;
  return h(
    "div",
    { class: "response-head" },
    h(
      "span",
      { class: `reward ${right ? "right" : "wrong"}` },
      h("span", { "aria-hidden": "true" }, right ? "✓ " : "✗ "),
      `reward ${format.number(response.reward)}`,
    ),
    h(
      "span",
      { class: "note" },
      `${format.plural(response.token_ids.length, "token")}, ended by ${response.finish_reason}, mean log-prob ${format.number(mean)}`,
    ),
    h("span", { class: "note index" }, `#${i + 1}`),
  );
}

const text = (response) =>
  response.text === ""
    ? h("p", { class: "empty" }, "The response is empty.")
    : // What a model wrote: shown as it is, in its own direction, and never as markup.
      h(
        "pre",
        { dir: "auto", tabindex: 0, role: "region", "aria-label": "Text of the response" },
        response.text,
      );

function tokens(response, characters) {
  const box = h("div", { class: "tokens" });
  const one = (i) => {
    const [id, logprob] = [response.token_ids[i], response.logprobs[i]];
    const share = Math.round(100 * Math.min(1, logprob / LOWEST));
    const probability = format.percent(Math.exp(logprob));
    return h(
      "span",
      {
        class: "token",
        style: { "--share": `${share}%` },
        title: `token ${id}, log-prob ${format.number(logprob)}, probability ${probability}`,
      },
      characters?.get(id) ?? String(id),
    );
  };
  const show = (most) => {
    const shown = response.token_ids.slice(0, most).map((_, i) => one(i));
    const left = response.token_ids.length - shown.length;
    box.replaceChildren(
      ...shown,
      ...(left > 0
        ? [
            h(
              "button",
              { type: "button", class: "quiet", onclick: () => show(Infinity) },
              `Show the other ${format.count(left)}`,
            ),
          ]
        : []),
    );
  };
  show(FIRST_TOKENS);
  return box;
}

/**
 * The service knows token ids, not their text. With a character tokenizer the text tells: its n-th
 * character is the n-th token. Null unless that holds for every response, with one meaning an id.
 * @returns {Map<number, string> | null}
 */
function charactersOf(all) {
  const found = new Map();
  for (const { text, token_ids: ids } of all) {
    const characters = [...text];
    // Where the response ended by itself, the last token is the end of sequence, which has no text.
    if (ids.length - characters.length > 1 || ids.length < characters.length) return null;
    for (const [i, id] of ids.entries()) {
      const character = characters[i] ?? "⏎";
      if (found.has(id) && found.get(id) !== character) return null;
      found.set(id, character);
    }
  }
  return found;
}
