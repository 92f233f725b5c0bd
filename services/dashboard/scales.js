// From values to places on a chart.

/** @returns {(value: number) => number} */
export function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

/** Round numbers in [low, high], about `wanted` of them. */
export function ticks(low, high, wanted, { integers = false } = {}) {
  const step = tickStep(low, high, wanted, integers);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  // Multiples of the step, without the noise of floating point.
  return Array.from({ length: Math.max(0, count) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** 1, 2 or 5 times a power of ten, for about `wanted` ticks. */
export function tickStep(low, high, wanted, integers = false) {
  const rough = (high - low || 1) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.85);
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

/** The extent with some air, down to 0 where 0 is near. */
export function padded([low, high]) {
  // Values that differ by the noise of floating point are the same.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
    const air = Math.abs(low) || 1;
    return low >= 0 ? [0, low + air * 0.25 || 1] : [low - air * 0.25, 0];
  }
  const air = (high - low) * 0.08;
  if (low >= 0 && low < (high - low) * 1.5) return [0, high + air];
  return [low - air, high + air];
}

/** The centred moving mean over up to `window` neighbours; nulls stay out of it. */
export function smoothed(values, window = 15) {
  const half = Math.floor(window / 2);
  return values.map((own, i) => {
    if (own === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter((value) => value !== null);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}
