// The frame around the views: token, colours, routes, focus.

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

/** Ends everything that the view before had under way. */
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

function navigate() {
  if (takeTokenFromAddress()) return;
  visit.abort();
  visit = new AbortController();
  if (!token()) return prompt();
  const found = viewOf(current());
  leave.hidden = false;
  showCrumbs(found?.[0] ?? ["Runs"]);
  fill(main);
  if (found) found[1](main, visit.signal);
  else
    fill(
      main,
      h("h1", {}, "Nothing here"),
      refusal({ title: "Not found", message: "There is no such page." }),
    );
  settle();
}

/** After navigation to another page the focus is on its heading, as after loading a document. */
function settle() {
  const heading = main.querySelector("h1");
  document.title = `${heading?.textContent ?? "Runs"} – bapo`;
  const path = current().path.join("/");
  const elsewhere = path !== shownPath;
  heading?.setAttribute("tabindex", "-1");
  if (elsewhere) {
    window.scrollTo(0, 0);
    announce(document.title);
  }
  if (shownPath && (elsewhere || document.activeElement === document.body)) {
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

/** `#token=…`, as a link may carry it, is kept and taken out of the address (and the history). */
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

/** Learns what the token may do, then shows what was asked for. */
async function enter() {
  try {
    session.scope = (await get("/token")).scope;
  } catch (problem) {
    if (problem.status === 401 || problem.status === 429) return prompt(problem);
    // Away, or an older service: the views say what they cannot do.
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
  // The part after # is the route: the link must not change it.
  event.preventDefault();
  main.focus();
});

colour(localStorage.getItem("bapo-theme") ?? "");
window.addEventListener("hashchange", navigate);
if (!takeTokenFromAddress()) {
  if (token()) enter();
  else prompt();
}
