// Formats numbers and times for readers. Digits are aligned by `tabular-nums` in the style sheet.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const NONE = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1,234,567 */
export const count = (value) => (isNumber(value) ? whole.format(value) : NONE);

/** 1.23M */
export const compact = (value) =>
  isNumber(value) ? (Math.abs(value) < 10_000 ? count(value) : short.format(value)) : NONE;

/** An accuracy or a mean reward: three decimals. */
export const score = (value) => (isNumber(value) ? minus(value.toFixed(3)) : NONE);

/** A share of a whole, in percent. */
export const percent = (value) =>
  isNumber(value) ? `${(100 * value).toFixed(value !== 0 && Math.abs(value) < 0.1 ? 1 : 0)} %` : NONE;

/** Any number, with about three significant digits. */
export function number(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 10_000) return minus(short.format(value));
  if (Number.isInteger(value) || size >= 1000) return minus(whole.format(value));
  if (size < 0.001) return minus(value.toExponential(1));
  return minus(value.toFixed(size >= 100 ? 1 : size >= 1 ? 2 : 3));
}

const minus = (text) => text.replace("-", "−");

/** The labels of an axis whose ticks are `step` apart: all with the same number of decimals. */
export function axis(step) {
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (decimals > 5) return (value) => minus(value.toExponential(1));
  return (value) =>
    minus(
      Math.abs(value) >= 10_000
        ? short.format(value)
        : decimals
          ? value.toFixed(decimals)
          : whole.format(value),
    );
}

/** A value of unknown kind, on one line. */
export function any(value) {
  if (typeof value === "string") return value;
  return Array.isArray(value) ? `[${value.map(any).join(", ")}]` : JSON.stringify(value);
}

/** 1 step, 2 steps */
export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 172_800) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${count(Math.round(value / 86_400))} days`;
}

/** "3 min ago", for a time in the past. */
export function ago(iso) {
  const passed = (Date.now() - Date.parse(iso)) / 1000;
  if (passed < 5) return "just now";
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  if (passed < 172_800) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86_400)} days ago`;
}

export const time = (iso) =>
  new Date(iso).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** Terms of the API as they are written on a page: high_quality → high-quality. */
const TERMS = {
  high_quality: "high-quality",
  reevaluated: "re-evaluated",
  reevaluation: "re-evaluation",
  not_used: "not used",
  not_considered: "not considered",
  never_solved: "never solved",
};
export const term = (value) => TERMS[value] ?? String(value);
