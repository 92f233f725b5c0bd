// The responses of a group: text, reward, and optionally the tokens, shaded by log-prob.

import { h } from "../dom.js";
import * as format from "../format.js";

const FIRST_TOKENS = 600;
/** Log-prob at and below which a token has the full shade. */
const DARKEST_LOGPROB = -5;

export function responses(group, withTokens) {
  const characters = withTokens ? charactersOf(group.responses) : null;
  return h(
    "ol",
    { class: "responses" },
    group.responses.map((response, i) =>
      h(
        "li",
        { class: response.correct ? "response right" : "response" },
        head(response, i),
        withTokens ? tokens(response, characters) : text(response),
      ),
    ),
  );
}

function head(response, i) {
  const mean = response.logprobs.length
    ? response.logprobs.reduce((sum, logprob) => sum + logprob, 0) / response.logprobs.length
    : null;
  return facts(
    response,
    `${format.plural(response.token_ids.length, "token")}, finish reason ${response.finish_reason}, mean log-prob ${format.number(mean)}`,
    `#${i + 1}`,
    ...Object.entries(response.repeated).map(([cause, count]) =>
      h("span", { class: "note" }, `done again ${count} times: ${format.term(cause)}`),
    ),
    ...Object.entries(response.interruptions).map(([token, version]) =>
      h("span", { class: "note" }, `version ${version} from token ${Number(token) + 1} on`),
    ),
  );
}

/**
 * Returns the line above a response: its reward, what the verifier read, and further notes.
 * @param {any} response
 * @param {string} length its tokens and how it ended
 * @param {string} place where it stands in its group
 * @param {Node[]} notes
 */
export function facts(response, length, place, ...notes) {
  const right = response.correct;
  const parts = Object.entries(response.reward_parts);
  return h(
    "div",
    { class: "response-head" },
    h(
      "span",
      { class: `reward ${right ? "right" : "wrong"}` },
      h("span", { "aria-hidden": "true" }, right ? "✓ " : "✗ "),
      `reward ${format.number(response.reward)}`,
    ),
    // A reward that is the answer's alone needs no explanation.
    parts.length > 1 &&
      h(
        "span",
        { class: "note" },
        parts.map(([name, value]) => `${format.term(name)} ${format.number(value)}`).join(", "),
      ),
    h("span", { class: "note" }, length),
    reading(response),
    response.outcome !== "scored" &&
      h(
        "span",
        { class: "note" },
        `no verdict: ${format.term(response.outcome)}${response.failure ? ` (${response.failure})` : ""}`,
      ),
    ...notes,
    h("span", { class: "note index" }, place),
  );
}

/**
 * The verifier's status and the answer that it read. Responses of older versions have neither, and a reward function
 * compares no answer: its statuses say on which side of `task.solved_at` the reward is.
 */
const reading = (response) =>
  response.status !== null &&
  !(response.extracted === null && ["ok", "wrong_value"].includes(response.status)) &&
  h(
    "span",
    { class: "note" },
    response.status === "ok" ? "" : `status ${response.status}, `,
    response.extracted === null ? "no answer read" : ["answer read: ", h("bdi", {}, response.extracted)],
  );

export const text = (response) =>
  response.text === ""
    ? h("p", { class: "empty" }, "The response is empty.")
    : // Text of a model is shown unchanged, in its own direction, and never as markup.
      h(
        "pre",
        { dir: "auto", tabindex: 0, role: "region", "aria-label": "Text of the response" },
        response.text,
      );

function tokens(response, characters) {
  const box = h("div", { class: "tokens" });
  const tokenAt = (i) => {
    const [id, logprob] = [response.token_ids[i], response.logprobs[i]];
    const share = Math.round(100 * Math.min(1, logprob / DARKEST_LOGPROB));
    const probability = format.percent(Math.exp(logprob));
    return h(
      "span",
      {
        class: "token",
        style: { "--share": `${share}%` },
        title: `token ${id}, log-prob ${format.number(logprob)}, probability ${probability}`,
      },
      response.tokens?.[i] ?? characters?.get(id) ?? String(id),
    );
  };
  const show = (count) => {
    const shown = response.token_ids.slice(0, count).map((_, i) => tokenAt(i));
    const left = response.token_ids.length - shown.length;
    box.replaceChildren(
      ...shown,
      ...(left > 0
        ? [
            h(
              "button",
              { type: "button", class: "quiet", onclick: () => show(Infinity) },
              `Show ${format.count(left)} more tokens`,
            ),
          ]
        : []),
    );
  };
  show(FIRST_TOKENS);
  return box;
}

/**
 * Maps token ids to characters, from the text of responses, where the service does not know the tokenizer:
 * with a character tokenizer the n-th character is the n-th token. Null unless that holds for
 * every response, with one character per id.
 * @returns {Map<number, string> | null}
 */
function charactersOf(responses) {
  const characterById = new Map();
  for (const { text, token_ids: ids } of responses) {
    const characters = [...text];
    // The last token of a finished response is the end of sequence, which has no text.
    if (ids.length - characters.length > 1 || ids.length < characters.length) return null;
    for (const [i, id] of ids.entries()) {
      const character = characters[i] ?? "⏎";
      if (characterById.has(id) && characterById.get(id) !== character) return null;
      characterById.set(id, character);
    }
  }
  return characterById;
}
