// A run: its header, its pages, and the poll that notifies them of changes.

import { get, path, post, Problem } from "../api.js";
import { confirmed, fill, h } from "../dom.js";
import * as format from "../format.js";
import { announce, POLL_INTERVAL_MS, keep, refresh, refusal } from "../live.js";
import { href } from "../router.js";
import { mayChange } from "../session.js";
import { describeActivity } from "./activity.js";
import { showBatches } from "./batches.js";
import { showBuffers } from "./buffers.js";
import { showDifficulty } from "./difficulty.js";
import { showOverview } from "./overview.js";
import { forkOrigin, progress, statusPill } from "./pieces.js";
import { showPrompt } from "./prompt.js";
import { showPrompts } from "./prompts.js";
import { showSystem } from "./system.js";
import { showWritten } from "./written.js";

/**
 * The context of a page of a run.
 * @typedef {object} Visit
 * @property {string} name of the run
 * @property {any} run its newest state
 * @property {HTMLElement} root element that the page fills
 * @property {AbortSignal} signal aborted when the reader leaves the page
 * @property {Record<string, string>} query
 * @property {(listener: (run: any) => void) => void} changed calls the listener now, and after every
 *   commit or change of status
 */

/** @type {Record<string, {title: string, show: (visit: Visit) => void, tab?: string}>} */
const SECTIONS = {
  overview: { title: "Overview", show: showOverview },
  difficulty: { title: "Difficulty", show: showDifficulty },
  buffers: { title: "Buffers", show: showBuffers },
  batches: { title: "Batches", show: showBatches },
  prompts: { title: "Prompts", show: showPrompts },
  responses: { title: "Responses", show: showWritten },
  prompt: { title: "Prompt", show: showPrompt, tab: "prompts" },
  system: { title: "System", show: showSystem },
};

export function showRun(root, signal, { name, section, query }) {
  const page = Object.hasOwn(SECTIONS, section) ? SECTIONS[section] : null;
  const status = h("span");
  const steps = h("span");
  const about = h("span", { class: "note" });
  const activity = h("span", { class: "note" });
  const actions = h("div", { class: "actions" });
  const failure = h("div", { class: "run-failure" });
  const body = h("div", { class: "page" }, h("p", { class: "empty" }, "Loading…"));
  const listeners = [];
  let visit = null;
  let latest = null;

  fill(
    root,
    h(
      "div",
      { class: "run-head" },
      h("h1", {}, h("bdi", {}, name), h("span", { class: "unseen" }, `: ${page?.title ?? "not found"}`)),
      status,
      steps,
      about,
      activity,
      actions,
    ),
    failure,
    tabs(name, section),
    body,
  );
  root.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  if (!page) return fill(body, refusal(new Problem(404, "Not found", `A run has no page "${section}".`)));

  keep({
    signal,
    every: POLL_INTERVAL_MS,
    load: (signal) => get(path`/runs/${name}`, {}, signal),
    show: (run) => {
      head(run);
      if (visit) {
        const before = visit.run;
        visit.run = run;
        showActivity();
        if (run.current_step !== before.current_step)
          announce(`Step ${run.current_step} of ${run.name} is committed`, { seldom: true });
        if (
          run.current_step !== before.current_step ||
          run.attempt !== before.attempt ||
          run.status !== before.status
        ) {
          for (const listener of listeners) listener(run);
        }
      } else {
        fill(body);
        visit = {
          name,
          run,
          root: body,
          signal,
          query,
          changed: (listener) => (listeners.push(listener), listener(visit.run)),
        };
        page.show(visit);
        keepActivity();
      }
    },
    refuse: (problem) => fill(body, refusal(problem)),
  });

  function keepActivity() {
    keep({
      signal,
      every: POLL_INTERVAL_MS,
      load: (signal) => get(path`/runs/${name}/progress`, {}, signal),
      show: (progress) => ((latest = progress), showActivity()),
      // What is wrong with the run itself is shown by the other call.
      refuse: () => fill(activity),
    });
  }

  function showActivity() {
    const running = visit?.run.status === "running" && latest;
    fill(activity, running ? `Now: ${describeActivity(latest)}` : null);
  }

  function head(run) {
    fill(status, statusPill(run.status));
    fill(steps, progress(run));
    const facts = [
      run.config.algorithm ?? "unknown algorithm",
      `seed ${run.config.seed}`,
      `attempt ${run.attempt}`,
      `created ${format.ago(run.created_at)}`,
    ];
    if (run.workflow) facts.push(`workflow ${run.workflow}`);
    if (run.stopped) {
      const reason = run.stopped.reason ? `: ${run.stopped.reason}` : "";
      facts.push(`stopped ${format.ago(run.stopped.at)} by ${run.stopped.by}${reason}`);
    }
    if (run.status === "queued") facts.push("waits until the run before it has ended");
    const origin = forkOrigin(run);
    fill(about, origin && [origin, " · "], facts.join(" · "));
    fill(actions, mayChange() && buttons(run));
  }

  function buttons(run) {
    const offered = {
      running: ["pause", "stop"],
      paused: ["resume", "stop"],
      created: ["stop"],
      queued: ["stop"],
    }[run.status];
    return (offered ?? []).map((action) =>
      h(
        "button",
        { type: "button", class: action === "stop" ? "danger" : "", onclick: () => change(action) },
        ACTIONS[action].title,
      ),
    );
  }

  async function change(action) {
    const { title, question } = ACTIONS[action];
    if (!(await confirmed(`${title} ${name}?`, question, title, signal))) return;
    fill(failure);
    try {
      const sent = action === "stop" ? { by: "a person at the dashboard" } : undefined;
      head(await post(path`/runs/${name}` + `/${action}`, sent));
      announce(`${name}: ${action} succeeded`);
      refresh();
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      fill(failure, refusal(problem));
    }
  }
}

const ACTIONS = {
  pause: {
    title: "Pause",
    question:
      "The service withholds prompts and batches until the run is resumed. Requests under way finish.",
  },
  resume: { title: "Resume", question: "Its processes get prompts and batches again." },
  stop: {
    title: "Stop",
    question:
      "Requests of its processes are refused, so they end. A new attempt (bapo run --resume) continues from the last checkpoint; later steps are lost.",
  },
};

function tabs(name, section) {
  const active = SECTIONS[section]?.tab ?? section;
  return h(
    "nav",
    { class: "tabs", "aria-label": `Pages of ${name}` },
    Object.entries(SECTIONS)
      .filter(([, page]) => !page.tab)
      .map(([key, page]) =>
        h(
          "a",
          {
            href: href(key === "overview" ? ["runs", name] : ["runs", name, key]),
            "aria-current": key === active ? "page" : null,
          },
          page.title,
        ),
      ),
  );
}
