// A line without axes, for a table cell.

import { s } from "../dom.js";
import { extent, linear } from "../scales.js";
import { pathOf, round } from "./marks.js";

/** Draws a line through the values; null for fewer than two. `name` is read by screen readers. */
export function sparkline(values, name) {
  const range = extent(values);
  if (!range || values.length < 2) return null;
  const [width, height] = [90, 22];
  const toX = linear([0, values.length - 1], [2, width - 4]);
  const toY = linear(range[0] === range[1] ? [range[0] - 1, range[1] + 1] : range, [height - 3, 3]);
  const points = values.map((value, i) => [toX(i), toY(value)]);
  const [x, y] = points.at(-1);
  return s(
    "svg",
    { class: "sparkline", role: "img", "aria-label": name, width, height, viewBox: `0 0 ${width} ${height}` },
    s("path", { d: pathOf(points) }),
    s("circle", { cx: round(x), cy: round(y), r: 2.2 }),
  );
}
