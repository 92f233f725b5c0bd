// The layout of a chart: margins, domains, ticks and scales, from its data and its width.

import * as format from "../format.js";
import { extent, linear, padded, ticks, tickStep } from "../scales.js";

/** Width of a character of a label, in pixels. */
export const CHARACTER = 6.3;
/** Most characters of the x axis' name beside its ticks; a longer one has a row of its own below. */
const NAME_BESIDE_TICKS = 9;
/** Height of a lane below the plot, in pixels. */
export const LANE = 18;

/**
 * @typedef {object} Layout all lengths in pixels
 * @property {number} width
 * @property {number} height
 * @property {boolean} nameBelow whether the name of the x axis is below its ticks, not beside them
 * @property {number} left edge of the plot; the labels of the y axis are on its left
 * @property {number} right
 * @property {number} top
 * @property {number} bottom
 * @property {number} lanesTop
 * @property {number} lanesBottom
 * @property {[number, number]} xDomain
 * @property {[number, number]} yDomain
 * @property {(value: number) => number} toX
 * @property {(value: number) => number} toY
 * @property {number[]} yTicks
 * @property {(value: number) => string} yLabel
 * @property {{series: import("./chart.js").Series, low: number[], high: number[]}[]} stacks edges of
 *   the stacked series
 */

/**
 * @param {import("./chart.js").Data} data
 * @param {import("./chart.js").Options} options
 * @returns {Layout}
 */
export function layoutOf(data, options, width) {
  const stacked = data.series.filter(({ kind }) => kind === "area" || kind === "bar");
  const stacks = stack(stacked, data.x.length);
  const yDomain = yDomainOf(data, stacked, stacks);
  const xDomain = xDomainOf(data, stacked);
  const tickCount = options.height / 42;
  const yTicks = ticks(...yDomain, tickCount, { integers: options.integers });
  const yLabel = options.axisFormat ?? format.axis(tickStep(...yDomain, tickCount, options.integers));
  const lanes = data.lanes ?? [];
  const nameBelow = options.x.length > NAME_BESIDE_TICKS;
  const labels = [nameBelow ? "" : options.x, ...yTicks.map(yLabel), ...lanes.map((lane) => lane.name)];
  const left = Math.min(width / 3, Math.max(...labels.map((label) => label.length * CHARACTER)) + 10);
  const right = width - 10;
  const top = 22;
  const bottom = options.height - 24;
  const lanesBottom = bottom + (lanes.length ? lanes.length * LANE + 8 : 0);
  return {
    width,
    height: lanesBottom + (nameBelow ? 40 : 24),
    nameBelow,
    left,
    right,
    top,
    bottom,
    lanesTop: bottom + 8,
    lanesBottom,
    xDomain,
    yDomain,
    toX: linear(xDomain, [left, right]),
    toY: linear(yDomain, [bottom, top]),
    yTicks,
    yLabel,
    stacks,
  };
}

function yDomainOf(data, stacked, stacks) {
  if (data.yDomain) return data.yDomain;
  const values = data.series
    .filter((series) => !stacked.includes(series))
    .flatMap((series) => [...series.values, ...(series.low ?? []), ...(series.high ?? [])]);
  const range = extent([
    ...values.filter((value) => value !== null),
    ...(stacks.at(-1)?.high ?? []),
    ...(stacked.length ? [0] : []),
    ...(data.limit ? [data.limit.value] : []),
  ]);
  return stacked.length ? [0, (range[1] || 1) * 1.04] : padded(range);
}

function xDomainOf(data, stacked) {
  const [first, last] = data.xDomain ?? extent(data.x);
  // Bars, and a single point, need room on both sides.
  const margin = stacked.some(({ kind }) => kind === "bar") || first === last ? 0.5 : 0;
  return [first - margin, last + margin];
}

function stack(stacked, length) {
  let low = new Array(length).fill(0);
  return stacked.map((series) => {
    const high = low.map((value, i) => value + (series.values[i] ?? 0));
    const edges = { series, low, high };
    low = high;
    return edges;
  });
}
