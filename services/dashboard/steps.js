// The committed steps of a run as a few hundred points; an update loads only the new steps.

import { get, path } from "./api.js";

const POINTS = 400;
/** Above this number of points the steps are sampled anew. */
const MAX_POINTS = 1000;
/** The last steps that are never thinned out. */
const EXACT = 20;

export class Steps {
  constructor(name, signal) {
    this.name = name;
    this.signal = signal;
    this.attempt = -1;
    /** @type {any[]} a sample of all steps, with all of the last 20 */
    this.steps = [];
    this.pending = Promise.resolve();
  }

  /** Loads the steps up to the run's current one; concurrent calls run one after the other. */
  load(run) {
    this.pending = this.pending.catch(() => {}).then(() => this.#load(run));
    return this.pending;
  }

  async #load(run) {
    const last = this.steps.at(-1)?.step ?? 0;
    const rewound = run.attempt !== this.attempt || run.current_step < last;
    if (rewound || run.current_step - last > POINTS || this.steps.length > MAX_POINTS)
      this.steps = await this.#sample(run);
    else if (run.current_step > last) this.steps = [...this.steps, ...(await this.#after(last))];
    this.attempt = run.attempt;
    return this.steps;
  }

  async #sample(run) {
    const exactAfter = Math.max(0, run.current_step - EXACT);
    const [sample, exact] = await Promise.all([
      get(path`/runs/${this.name}/steps`, { points: POINTS }, this.signal),
      this.#after(exactAfter),
    ]);
    return [...sample.filter(({ step }) => step <= exactAfter), ...exact];
  }

  #after(step) {
    return get(path`/runs/${this.name}/steps`, { after: step, limit: POINTS }, this.signal);
  }
}

/** Returns the mean reward of the step's fresh rollouts, before any filter. */
export const reward = (step) => step.mean_reward;

/** Returns the accuracy of the step's fresh rollouts, before any filter. */
export function accuracy({ bins }) {
  const total = bins.reduce((sum, groups) => sum + groups, 0);
  if (!total) return null;
  return bins.reduce((sum, groups, k) => sum + groups * k, 0) / (total * (bins.length - 1));
}

/** Returns the number of the step's fresh groups whose rewards differ, before any filter. */
export const mixed = ({ counts, bins }) => counts.mixed ?? sum(bins.slice(1, -1));

/**
 * Returns why no step trained, and why the accuracy does not tell how hard prompts are, where it is
 * so; services/report/explanations.py has the same rules for terminals and reports.
 */
export function explanations(steps, solvedAt) {
  if (!steps.length) return [];
  const notes = [];
  const withSignal = sum(steps.map(mixed));
  const groups = sum(steps.map(({ bins }) => sum(bins)));
  const length = steps.some(({ reward_parts: parts }) => "overlong" in parts);
  if (!steps.some(({ counts }) => counts.fresh || counts.reevaluated || counts.replayed))
    notes.push(
      withSignal
        ? `No step trained: the online filter (fresh.filter) kept none of the ${withSignal} groups whose rewards differ, of ${groups}.`
        : `No step trained: the responses of each group had equal rewards${length ? " but for the punishment of length" : ""}, which have no gradient. Read them under Prompts.`,
    );
  const none = groups === sum(steps.map(({ bins }) => bins[0]));
  const all = groups === sum(steps.map(({ bins }) => bins.at(-1)));
  // Rewards that differ by further parts alone, such as `format`, have a notion of correct.
  const ofVerdicts = steps.some(({ reward_parts: parts, mean_reward: mean }) => parts.answer ?? mean);
  if (withSignal && ofVerdicts && (none || all))
    notes.push(
      `${none ? "No" : "Every"} response ${solvedAt === null ? "counts as correct" : `has a reward of task.solved_at = ${solvedAt} or more`}, although rewards differ: groups train, but all prompts seem equally hard to what goes by the accuracy (buffers, replay window, adaptive samplers, evaluations). ${solvedAt === null ? "Set task.solved_at to the reward from which a response counts as correct." : `${none ? "Lower" : "Raise"} it in a new run.`}`,
    );
  return notes;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Returns the seconds of a step by phase of the trainer. */
export function phases({ metrics }) {
  return Object.fromEntries(
    Object.entries(metrics)
      .filter(([name]) => name.startsWith("seconds/"))
      .map(([name, value]) => [name.slice(8), value]),
  );
}

/** Returns the seconds of a step, or null if the trainer reported none. */
export const duration = (step) =>
  Object.values(phases(step)).reduce((sum, seconds) => sum + seconds, 0) || null;

/** Returns the tokens generated for a step, divided by the seconds of that step. */
export function throughput(step) {
  const seconds = duration(step);
  return seconds ? step.tokens / seconds : null;
}

export const metric = (step, name) => step.metrics[name] ?? null;

export function mean(values) {
  const present = values.filter((value) => value !== null && value !== undefined);
  return present.length ? present.reduce((sum, value) => sum + value, 0) / present.length : null;
}
