// Counts of values in ranges of equal width, for a bar chart.

import { extent } from "../scales.js";

/** Counts `values` in at most `maxRanges` ranges whose width is a whole number. */
export function histogram(values, maxRanges = 30) {
  const range = extent(values);
  if (!range) return { x: [], counts: [], width: 1 };
  const width = Math.max(1, Math.ceil((range[1] - range[0] + 1) / maxRanges));
  const first = Math.floor(range[0] / width) * width;
  const x = [];
  for (let start = first; start <= range[1]; start += width) x.push(start);
  const counts = new Array(x.length).fill(0);
  for (const value of values) counts[Math.floor((value - first) / width)]++;
  return { x, counts, width };
}
