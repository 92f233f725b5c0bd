// One run: its head, its pages, and the one poll that tells all of them that something has changed.

import { get, path, post, Problem } from "../api.js";
import { confirmed, fill, h } from "../dom.js";
import * as format from "../format.js";
import { announce, EVERY_MS, keep, refresh, refusal } from "../live.js";
import { href } from "../router.js";
import { mayChange } from "../session.js";
import { showBatches } from "./batches.js";
import { showBuffers } from "./buffers.js";
import { showDifficulty } from "./difficulty.js";
import { showOverview } from "./overview.js";
import { progress, statusPill } from "./parts.js";
import { showPrompt } from "./prompt.js";
import { showPrompts } from "./prompts.js";
import { showSystem } from "./system.js";

/**
 * What a page of a run works with.
 * @typedef {object} Visit
 * @property {string} name of the run
 * @property {any} run its state, the newest known
 * @property {HTMLElement} root where the page goes
 * @property {AbortSignal} signal ends with the page
 * @property {Record<string, string>} query
 * @property {(listener: (run: any) => void) => void} changed calls now and at each commit
 */

/** @type {Record<string, {title: string, show: (visit: Visit) => void, tab?: string}>} */
const SECTIONS = {
  overview: { title: "Overview", show: showOverview },
  difficulty: { title: "Difficulty", show: showDifficulty },
  buffers: { title: "Buffers", show: showBuffers },
  batches: { title: "Batches", show: showBatches },
  prompts: { title: "Prompts", show: showPrompts },
  prompt: { title: "Prompt", show: showPrompt, tab: "prompts" },
  system: { title: "System", show: showSystem },
};

export function showRun(root, signal, { name, section, query }) {
  const found = Object.hasOwn(SECTIONS, section) ? SECTIONS[section] : null;
  const status = h("span");
  const steps = h("span");
  const about = h("span", { class: "note" });
  const actions = h("div", { class: "actions" });
  const trouble = h("div", { class: "run-trouble" });
  const body = h("div", { class: "page" }, h("p", { class: "empty" }, "Loading…"));
  const listeners = [];
  let visit = null;

  fill(
    root,
    h(
      "div",
      { class: "run-head" },
      h("h1", {}, h("bdi", {}, name), h("span", { class: "unseen" }, `: ${found?.title ?? "not found"}`)),
      status,
      steps,
      about,
      actions,
    ),
    trouble,
    tabs(name, section),
    body,
  );
  root.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  if (!found) return fill(body, refusal(new Problem(404, "Not found", `A run has no page ${section}.`)));

  keep({
    signal,
    every: EVERY_MS,
    load: (ours) => get(path`/runs/${name}`, {}, ours),
    show: (run) => {
      head(run);
      if (visit) {
        const before = visit.run;
        visit.run = run;
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
        found.show(visit);
      }
    },
    refuse: (problem) => fill(body, refusal(problem)),
  });

  function head(run) {
    fill(status, statusPill(run.status));
    fill(steps, progress(run));
    fill(
      about,
      `${run.config.algorithm ?? "unknown algorithm"} · seed ${run.config.seed} · attempt ${run.attempt} · created ${format.ago(run.created_at)}`,
    );
    fill(actions, mayChange() && buttons(run));
  }

  function buttons(run) {
    const offered = {
      running: ["pause", "stop"],
      paused: ["resume", "stop"],
      created: ["stop"],
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
    const { title, ask } = ACTIONS[action];
    if (!(await confirmed(`${title} ${name}?`, ask, title, signal))) return;
    fill(trouble);
    try {
      head(await post(path`/runs/${name}` + `/${action}`));
      announce(`${name}: ${action} is done`);
      refresh();
    } catch (problem) {
      if (!(problem instanceof Problem)) throw problem;
      fill(trouble, refusal(problem));
    }
  }
}

const ACTIONS = {
  pause: {
    title: "Pause",
    ask: "It gets no new prompts and batches until it is resumed. What is under way finishes.",
  },
  resume: { title: "Resume", ask: "Its processes go on where they wait." },
  stop: {
    title: "Stop",
    ask: "Its processes are turned away. A new attempt (bapo run --resume) continues from the last checkpoint; steps after it are lost.",
  },
};

function tabs(name, section) {
  const active = SECTIONS[section]?.tab ?? section;
  return h(
    "nav",
    { class: "tabs", "aria-label": `Pages of ${name}` },
    Object.entries(SECTIONS)
      .filter(([, each]) => !each.tab)
      .map(([key, each]) =>
        h(
          "a",
          {
            href: href(key === "overview" ? ["runs", name] : ["runs", name, key]),
            "aria-current": key === active ? "page" : null,
          },
          each.title,
        ),
      ),
  );
}
