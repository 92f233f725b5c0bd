// The form that asks for the access token.

import { fill, h } from "../dom.js";

/** @param {(token: string) => void} entered */
export function askForToken(root, problem, entered) {
  const input = h("input", {
    id: "token",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "token-hint",
    "aria-invalid": problem ? "true" : null,
  });
  const submit = (event) => {
    event.preventDefault();
    const value = input.value.trim();
    if (value) entered(value);
  };
  fill(
    root,
    h(
      "section",
      { class: "card ask" },
      h("h1", {}, "Access token"),
      problem &&
        h("p", { class: "problem", role: "alert" }, `The token was not accepted: ${problem.message}.`),
      h(
        "form",
        { onsubmit: submit },
        h("label", { for: "token" }, "Token"),
        input,
        h(
          "p",
          { class: "note", id: "token-hint" },
          "A local stack writes its token to ",
          h("code", {}, ".bapo/stack.json"),
          ". The token is kept in this tab until the tab is closed.",
        ),
        h("button", { type: "submit", class: "primary" }, "Open"),
      ),
    ),
  );
  document.title = "Access token – bapo";
  input.focus();
}
