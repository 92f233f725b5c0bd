// The frame of the views: token, colours, routes, focus.

import { forgetToken, get, setToken, token } from "./api.js";
import { fill, h } from "./dom.js";
import { announce, onUnauthorized, refusal } from "./live.js";
import { current, decoded, href } from "./router.js";
import { session } from "./session.js";
import { askForToken } from "./views/token.js";
import { showCompare } from "./views/compare.js";
import { showRun } from "./views/run.js";
import { showRuns } from "./views/runs.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const leave = document.getElementById("leave");
const theme = /** @type {HTMLSelectElement} */ (document.getElementById("theme"));

/** Aborting it ends all requests and listeners of the current view. */
let visit = new AbortController();
let shownPath = "";

/** @returns {[string[], (root: HTMLElement, signal: AbortSignal) => void] | null} crumbs and view */
function viewOf({ path, query }) {
  const [first, name, section = "overview", ...rest] = path;
  if (rest.length) return null;
  if (first === undefined || (first === "runs" && name === undefined)) {
    return [["Runs"], (root, signal) => showRuns(root, signal, query)];
  }
  if (first === "compare" && name === undefined) {
    return [["Runs", "Compare"], (root, signal) => showCompare(root, signal, query)];
  }
  if (first === "runs") {
    return [["Runs", name], (root, signal) => showRun(root, signal, { name, section, query })];
  }
  return null;
}

/** Replaces `#/runs/R/prompts/UID`, which readers guess, by the address of the prompt's page. */
function correctAddress() {
  const { path, query } = current();
  const [first, name, section, ...uid] = path;
  if (first !== "runs" || section !== "prompts" || uid.length === 0) return;
  history.replaceState(null, "", href(["runs", name, "prompt"], { ...query, uid: uid.join("/") }));
}

function navigate() {
  if (takeTokenFromAddress()) return;
  correctAddress();
  visit.abort();
  visit = new AbortController();
  if (!token()) return prompt();
  const [names, show] = viewOf(current()) ?? [["Runs"], showNotFound];
  leave.hidden = false;
  showCrumbs(names);
  fill(main);
  show(main, visit.signal);
  focusHeading();
}

function showNotFound(root) {
  fill(
    root,
    h("h1", {}, "Page not found"),
    refusal({ title: "Not found", message: "The dashboard has no page at this address." }),
  );
}

/** Moves the focus to the heading of a new page, as after loading a document. */
function focusHeading() {
  const heading = main.querySelector("h1");
  document.title = `${heading?.textContent ?? "Runs"} – bapo`;
  const path = current().path.join("/");
  const isNewPage = path !== shownPath;
  heading?.setAttribute("tabindex", "-1");
  if (isNewPage) {
    window.scrollTo(0, 0);
    announce(document.title);
  }
  if (shownPath && (isNewPage || document.activeElement === document.body)) {
    heading?.focus({ preventScroll: true });
  }
  shownPath = path || "runs";
}

function showCrumbs(names) {
  const last = names.length - 1;
  fill(
    crumbs,
    h(
      "ol",
      {},
      names.map((name, i) =>
        h(
          "li",
          {},
          i === last ? h("span", { "aria-current": "page" }, name) : h("a", { href: href(["runs"]) }, name),
        ),
      ),
    ),
  );
}

// ---- token --------------------------------------------------------------------------------------

/** Stores the token of a link with `#token=…` and removes it from the address and the history. */
function takeTokenFromAddress() {
  const match = /^#token=([^&]*)(?:&(\/.*))?$/.exec(location.hash);
  if (!match) return false;
  setToken(decoded(match[1]));
  history.replaceState(null, "", `#${match[2] ?? "/runs"}`);
  enter();
  return true;
}

function prompt(problem) {
  visit.abort();
  visit = new AbortController();
  leave.hidden = true;
  document.getElementById("connection").textContent = "";
  document.getElementById("banner").hidden = true;
  showCrumbs([]);
  shownPath = "";
  askForToken(main, problem, (entered) => {
    setToken(entered);
    enter();
  });
}

/** Reads the scope of the token, then shows the requested page. */
async function enter() {
  try {
    session.scope = (await get("/token")).scope;
  } catch (problem) {
    if (problem.status === 401 || problem.status === 429) return prompt(problem);
    // Unavailable, or an older service: the views show their own errors.
  }
  navigate();
}

onUnauthorized((problem) => {
  forgetToken();
  prompt(problem);
});

leave.addEventListener("click", () => {
  forgetToken();
  prompt();
});

// ---- colours ------------------------------------------------------------------------------------

function colour(choice) {
  document.documentElement.dataset.theme = choice;
  theme.value = choice;
}

theme.addEventListener("change", () => {
  localStorage.setItem("bapo-theme", theme.value);
  colour(theme.value);
});

// ---- start --------------------------------------------------------------------------------------

document.getElementById("skip").addEventListener("click", (event) => {
  // The part after # is the route, which the link must not change.
  event.preventDefault();
  main.focus();
});

colour(localStorage.getItem("bapo-theme") ?? "");
window.addEventListener("hashchange", navigate);
if (!takeTokenFromAddress()) {
  if (token()) enter();
  else prompt();
}
