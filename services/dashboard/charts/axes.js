// What surrounds the marks of a chart: axes, grid, the limit line, and the lanes below the plot.

import { s } from "../dom.js";
import * as format from "../format.js";
import { ticks } from "../scales.js";
import { CHARACTER, LANE } from "./layout.js";
import { round } from "./marks.js";

const FONT = 11;

/** @param {import("./layout.js").Layout} layout @param {import("./chart.js").Options} options */
export function drawAxes(layout, options) {
  const { left, right, lanesBottom, nameBelow, yTicks, yLabel, toY } = layout;
  const name = nameBelow ? { x: right, y: lanesBottom + 34 } : { x: left - 8, y: lanesBottom + 18 };
  const xTicks = ticks(...layout.xDomain, Math.max(2, (right - left) / 80), { integers: true });
  return s(
    "g",
    { class: "axes", "aria-hidden": "true" },
    s("text", { class: "axis-title", x: 0, y: FONT }, options.y),
    yTicks.map((value) => {
      const y = round(toY(value));
      return [
        s("line", { class: value === 0 ? "base" : "grid", x1: left, x2: right, y1: y, y2: y }),
        s("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, yLabel(value)),
      ];
    }),
    xTicks.map((value) => xTick(layout, value)),
    s("text", { class: "axis-title", ...name, "text-anchor": "end" }, options.x),
  );
}

function xTick({ left, width, lanesBottom, toX }, value) {
  const x = toX(value);
  const label = format.compact(value);
  const half = (label.length * CHARACTER) / 2;
  // A label must not leave the picture, nor cover the name of the axis on the left of the plot.
  const anchor = x + half > width ? "end" : x - half < left - 5 ? "start" : "middle";
  return [
    s("line", { class: "grid", x1: x, x2: x, y1: lanesBottom, y2: lanesBottom + 4 }),
    s("text", { x, y: lanesBottom + 18, "text-anchor": anchor }, label),
  ];
}

/** A dashed line across the plot, with its name. */
export function drawLimit({ left, right, toY }, limit) {
  const y = round(toY(limit.value));
  return s(
    "g",
    {},
    s("line", { class: "limit", x1: left, x2: right, y1: y, y2: y }),
    s("text", { class: "limit-name", x: right, y: y - 4, "text-anchor": "end" }, limit.name),
  );
}

/** Dashed lines upright, each with its name as a tooltip; those outside of the plot are left out. */
export function drawMarks({ top, lanesBottom, xDomain, toX }, marks) {
  return s(
    "g",
    { "aria-hidden": "true" },
    marks
      .filter((mark) => mark.x >= xDomain[0] && mark.x <= xDomain[1])
      .map((mark) => {
        const x = round(toX(mark.x));
        return s("line", { class: "mark", x1: x, x2: x, y1: top, y2: lanesBottom }, s("title", {}, mark.name));
      }),
  );
}

/** @param {import("./chart.js").Lane[]} lanes */
export function drawLanes(layout, lanes) {
  return s(
    "g",
    { class: "lanes", "aria-hidden": "true" },
    lanes.map((lane, i) => drawLane(layout, lane, layout.lanesTop + i * LANE)),
  );
}

function drawLane({ left, right, toX }, lane, y) {
  const height = LANE - 6;
  return [
    s("text", { x: left - 6, y: y + 11, "text-anchor": "end" }, lane.name),
    s("rect", { class: "lane", x: left, y: y + 2, width: right - left, height }),
    lane.spans.map(([from, to]) => {
      const x = toX(from);
      return s("rect", {
        x: round(x - (from === to ? 1.5 : 0)),
        y: y + 2,
        width: round(Math.max(3, toX(to) - x)),
        height,
        rx: 1,
        style: { fill: lane.color },
      });
    }),
  ];
}
