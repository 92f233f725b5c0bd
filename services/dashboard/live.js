// Data that stays fresh: polled while the page is visible, tried again while the service is away.

import { Problem } from "./api.js";
import { h, fill } from "./dom.js";

export const EVERY_MS = 3000;
const LONGEST_WAIT_MS = 30_000;
const ANNOUNCE_EVERY_MS = 15_000;

let unauthorized = (_problem) => {};
/** Who is told when the token is not accepted. */
export const onUnauthorized = (listener) => (unauthorized = listener);

/**
 * Loads, shows, and (with `every`) loads again for as long as `signal` lasts.
 *
 * `show` is called only when something has changed. While the service is away what was shown
 * stays, a banner says so, and the call is repeated; other errors go to `refuse` and end it.
 * @typedef {{signal: AbortSignal, load: (signal: AbortSignal) => Promise<any>,
 *   show: (found: any) => void, refuse: (problem: Problem) => void, every?: number}} Keeping
 * @param {Keeping} options
 */
export async function keep({ signal, load, show, refuse, every = 0 }) {
  let shown;
  let failures = 0;
  while (!signal.aborted) {
    try {
      const found = await load(signal);
      if (signal.aborted) return;
      failures = 0;
      connected();
      if (!same(found, shown)) show(found);
      shown = found;
      if (!every) return;
      await pause(every, signal);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (!(error instanceof Problem)) throw error;
      if (error.status === 401) return unauthorized(error);
      if (!error.away) return refuse(error);
      const wait = Math.min(LONGEST_WAIT_MS, Math.max(1000 * 2 ** failures++, 1000 * error.retryAfter));
      disconnected(error, wait);
      await pause(wait, signal);
    }
  }
}

/**
 * `keep` for one place of a page, where each call ends the one before it.
 * @returns {(options: Omit<Keeping, "signal">) => Promise<void>}
 */
export function keeper(signal) {
  let last = new AbortController();
  return (options) => {
    last.abort();
    last = new AbortController();
    return keep({ ...options, signal: AbortSignal.any([signal, last.signal]) });
  };
}

const same = (a, b) =>
  a === b ||
  (Array.isArray(a) && Array.isArray(b) && a.length === b.length && a.every((each, i) => each === b[i]));

/** Ends all pauses: whatever is kept fresh is loaded again now. */
export const refresh = () => window.dispatchEvent(new Event("bapo-refresh"));

/** Until the time is over and the page is visible, or `refresh` is called. */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const own = new AbortController();
    const done = () => (own.abort(), clearTimeout(timer), resolve());
    const look = () => over && !document.hidden && done();
    let over = false;
    const timer = setTimeout(() => ((over = true), look()), milliseconds);
    document.addEventListener("visibilitychange", look, { signal: own.signal });
    window.addEventListener("bapo-refresh", done, { signal: own.signal });
    signal.addEventListener("abort", done, { signal: own.signal });
  });
}

// ---- what the reader is told ------------------------------------------------------------------

const byId = (id) => document.getElementById(id);

function connected() {
  byId("banner").hidden = true;
  byId("connection").dataset.state = "live";
  byId("connection").textContent = "Connected";
}

function disconnected(problem, wait) {
  byId("connection").dataset.state = "away";
  byId("connection").textContent = "Away";
  const banner = byId("banner");
  banner.hidden = false;
  fill(
    banner,
    h("strong", {}, "The service is away: "),
    `${problem.message}. What you see may be old; trying again in ${Math.round(wait / 1000)} s. `,
    h("button", { type: "button", class: "quiet", onclick: refresh }, "Try now"),
  );
}

let lastAnnounced = 0;

/** For screen readers. With `seldom`, at most every 15 s: a run may commit steps faster. */
export function announce(text, { seldom = false } = {}) {
  if (seldom && Date.now() - lastAnnounced < ANNOUNCE_EVERY_MS) return;
  lastAnnounced = Date.now();
  byId("announcer").textContent = text;
}

/** A region for data that is still on its way; `refuse` shows why it will not come. */
export function region(attributes = {}) {
  const element = h(
    "div",
    { class: "region", "aria-busy": "true", ...attributes },
    h("p", { class: "empty" }, "Loading…"),
  );
  return {
    element,
    show: (...children) => {
      element.removeAttribute("aria-busy");
      fill(element, ...children);
    },
    refuse: (problem) => {
      element.removeAttribute("aria-busy");
      fill(element, refusal(problem));
    },
  };
}

export const refusal = (problem) =>
  h(
    "div",
    { class: "problem", role: "alert" },
    h("strong", {}, problem.title || "Failed"),
    h("p", {}, problem.message),
  );

export const empty = (...children) => h("p", { class: "empty" }, ...children);
