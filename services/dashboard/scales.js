// Scales and ticks of a chart, and the smoothing of values.

/** Maps [low, high] linearly to [from, to]. @returns {(value: number) => number} */
export function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

/** Returns about `count` round numbers in [low, high]. */
export function ticks(low, high, count, { integers = false } = {}) {
  const step = tickStep(low, high, count, integers);
  const first = Math.ceil(low / step - 1e-9);
  const length = Math.max(0, Math.floor(high / step + 1e-9) - first + 1);
  // toPrecision removes the noise of floating point from the multiples of the step.
  return Array.from({ length }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Returns 1, 2 or 5 times a power of ten, for about `count` ticks. */
export function tickStep(low, high, count, integers = false) {
  const rough = (high - low || 1) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.85);
  return integers ? Math.max(1, Math.round(step)) : step;
}

/** [low, high] of the numbers among `values`; null if there are none. */
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}

/** Widens an extent by a margin, and down to 0 if 0 is near. */
export function padded([low, high]) {
  // Values that differ only by the noise of floating point count as equal.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
    const margin = Math.abs(low) || 1;
    return low >= 0 ? [0, low + margin * 0.25 || 1] : [low - margin * 0.25, 0];
  }
  const margin = (high - low) * 0.08;
  if (low >= 0 && low < (high - low) * 1.5) return [0, high + margin];
  return [low - margin, high + margin];
}

/** Returns the centred moving mean over up to `window` neighbours, without nulls. */
export function smoothed(values, window = 15) {
  const half = Math.floor(window / 2);
  return values.map((current, i) => {
    if (current === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((value) => value !== null);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}
