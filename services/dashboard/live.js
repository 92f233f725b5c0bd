// Data that is kept up to date: polled while the page is visible, retried during an outage.

import { Problem } from "./api.js";
import { h, fill } from "./dom.js";

export const POLL_INTERVAL_MS = 3000;
const MAX_RETRY_DELAY_MS = 30_000;
const MIN_ANNOUNCE_INTERVAL_MS = 15_000;

let unauthorized = (_problem) => {};
/** Sets the listener for a token that is not accepted. */
export const onUnauthorized = (listener) => (unauthorized = listener);

/**
 * Loads and shows data; with `every` (milliseconds), repeats until `signal` is aborted.
 *
 * `show` is called only with changed data. During an outage the shown data stays, a banner reports
 * the outage, and the call is repeated; other errors are passed to `refuse` and end the loop.
 * @typedef {{signal: AbortSignal, load: (signal: AbortSignal) => Promise<any>,
 *   show: (data: any) => void, refuse: (problem: Problem) => void, every?: number}} Keeping
 * @param {Keeping} options
 */
export async function keep({ signal, load, show, refuse, every = 0 }) {
  let shown;
  let failures = 0;
  while (!signal.aborted) {
    try {
      const data = await load(signal);
      if (signal.aborted) return;
      failures = 0;
      connected();
      if (!same(data, shown)) show(data);
      shown = data;
      if (!every) return;
      await pause(every, signal);
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (!(error instanceof Problem)) throw error;
      if (error.status === 401) return unauthorized(error);
      if (!error.transient) return refuse(error);
      const backoff = Math.max(1000 * 2 ** failures++, 1000 * error.retryAfter);
      const delay = Math.min(MAX_RETRY_DELAY_MS, backoff);
      disconnected(error, delay);
      await pause(delay, signal);
    }
  }
}

/**
 * Returns a `keep` for one region of a page: each call ends the one before it.
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
  (Array.isArray(a) && Array.isArray(b) && a.length === b.length && a.every((item, i) => item === b[i]));

/** Ends all pauses, so that all data is loaded again now. */
export const refresh = () => window.dispatchEvent(new Event("bapo-refresh"));

/** Resolves once the time has passed and the page is visible, or when `refresh` is called. */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const listeners = new AbortController();
    const options = { signal: listeners.signal };
    const end = () => (listeners.abort(), clearTimeout(timer), resolve());
    const endIfVisible = () => elapsed && !document.hidden && end();
    let elapsed = false;
    const timer = setTimeout(() => ((elapsed = true), endIfVisible()), milliseconds);
    document.addEventListener("visibilitychange", endIfVisible, options);
    window.addEventListener("bapo-refresh", end, options);
    signal.addEventListener("abort", end, options);
  });
}

// ---- connection, announcements, regions ------------------------------------------------------

const byId = (id) => document.getElementById(id);

function connected() {
  byId("banner").hidden = true;
  byId("connection").dataset.state = "live";
  byId("connection").textContent = "Connected";
}

function disconnected(problem, delay) {
  byId("connection").dataset.state = "unavailable";
  byId("connection").textContent = "Unavailable";
  const banner = byId("banner");
  banner.hidden = false;
  fill(
    banner,
    h("strong", {}, "The service is unavailable: "),
    `${problem.message}. This page may be out of date; next attempt in ${Math.round(delay / 1000)} s. `,
    h("button", { type: "button", class: "quiet", onclick: refresh }, "Try now"),
  );
}

let lastAnnounced = 0;

/** Announces a text to screen readers; with `seldom`, at most every 15 s. */
export function announce(text, { seldom = false } = {}) {
  if (seldom && Date.now() - lastAnnounced < MIN_ANNOUNCE_INTERVAL_MS) return;
  lastAnnounced = Date.now();
  byId("announcer").textContent = text;
}

/** Builds a region that shows data once it is loaded, or the problem that prevents it. */
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
