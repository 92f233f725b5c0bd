// The committed steps of a run in a few hundred points, kept up to date by their new end alone.

import { get, path } from "./api.js";

const POINTS = 400;
const MOST = 1000;
const EXACT = 20;

export class Steps {
  constructor(name, signal) {
    this.name = name;
    this.signal = signal;
    this.attempt = -1;
    /** @type {any[]} a sample of all steps; the last 20 are all there */
    this.steps = [];
    this.under = Promise.resolve();
  }

  /** Brings the steps up to the run's current one; one call after the other. */
  bring(run) {
    this.under = this.under.catch(() => {}).then(() => this.#bring(run));
    return this.under;
  }

  async #bring(run) {
    const last = this.steps.at(-1)?.step ?? 0;
    const rewound = run.attempt !== this.attempt || run.current_step < last;
    if (rewound || run.current_step - last > POINTS || this.steps.length > MOST)
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

/** The mean reward of the step's fresh rollouts, before any filter. */
export function reward({ bins }) {
  const groups = bins.reduce((sum, each) => sum + each, 0);
  return groups ? bins.reduce((sum, each, k) => sum + each * k, 0) / (groups * (bins.length - 1)) : null;
}

/** The seconds of a step by phase of the trainer. */
export function phases({ metrics }) {
  return Object.fromEntries(
    Object.entries(metrics)
      .filter(([name]) => name.startsWith("seconds/"))
      .map(([name, value]) => [name.slice(8), value]),
  );
}

/** The seconds of a step. */
export const duration = (step) => Object.values(phases(step)).reduce((sum, each) => sum + each, 0) || null;

/** Tokens generated for a step, by the second of that step. */
export function throughput(step) {
  const spent = duration(step);
  return spent ? step.tokens / spent : null;
}

export const metric = (step, name) => step.metrics[name] ?? null;

export function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
}
