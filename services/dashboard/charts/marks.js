// The marks of a chart: lines, stacked areas, bars, bands and points, and their swatches.

import { s } from "../dom.js";

/** Above this number of points a line has no dots. */
const MAX_DOTS = 40;

const MARKERS = {
  circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  triangle: "M0,-5L4.8,3.6L-4.8,3.6Z",
  diamond: "M0,-5.4L5,0L0,5.4L-5,0Z",
};

const DRAW = { area: drawArea, bar: drawBars, band: drawBand, points: drawPoints };

/**
 * @param {import("./chart.js").Series} series
 * @param {import("./chart.js").Data} data
 * @param {import("./layout.js").Layout} layout
 */
export const drawSeries = (series, data, layout) => (DRAW[series.kind] ?? drawLine)(series, data, layout);

function drawLine(series, data, layout) {
  const line = drawPath(series, data, layout);
  if (!series.high) return line;
  return s("g", {}, drawEdges(series.low, series.high, series.color, data, layout), line);
}

function drawPath(series, { x }, { toX, toY }) {
  const faint = series.kind === "faint";
  const points = series.values.map((value, i) => (value === null ? null : [toX(x[i]), toY(value)]));
  const connected = series.joined ? points.filter((point) => point !== null) : points;
  const path = s("path", {
    class: faint ? "line faint" : "line",
    d: pathOf(connected),
    style: { stroke: series.color },
  });
  const dots = connected.filter((point) => point !== null);
  if (faint || dots.length > MAX_DOTS) return path;
  return s(
    "g",
    {},
    path,
    dots.map(([cx, cy]) =>
      s("circle", { class: "dot", cx: round(cx), cy: round(cy), r: 2.5, style: { fill: series.color } }),
    ),
  );
}

function drawArea(series, data, layout) {
  const { low, high } = edgesOf(series, layout);
  return s("path", {
    class: series.stepped ? "area stepped" : "area",
    d: outline(data, layout, low, high, series.stepped),
    style: { fill: series.color },
  });
}

function drawBand(series, data, layout) {
  return drawEdges(series.low, series.values, series.color, data, layout);
}

/** Fills the area between two edges, which have values from some x to another. */
function drawEdges(low, high, color, { x }, layout) {
  const from = high.findIndex((value) => value !== null);
  const to = high.findLastIndex((value) => value !== null) + 1;
  const inner = { x: x.slice(from, to) };
  return s("path", {
    class: "band",
    d: from < 0 ? "" : outline(inner, layout, low.slice(from, to), high.slice(from, to)),
    style: { fill: color },
  });
}

/** The outline of the area between two edges. */
function outline({ x }, { xDomain, toX, toY }, low, high, stepped = false) {
  const edge = (values) => {
    if (!stepped && x.length > 1) return x.map((value, i) => [toX(value), toY(values[i])]);
    const middle = (i) => (x[i - 1] + x[i]) / 2;
    return x.flatMap((_, i) => {
      const from = i === 0 ? xDomain[0] : middle(i);
      const to = i === x.length - 1 ? xDomain[1] : middle(i + 1);
      return [from, to].map((value) => [toX(value), toY(values[i])]);
    });
  };
  return `${pathOf(edge(high))}L${pathOf(edge(low).reverse()).slice(1)}Z`;
}

function drawBars(series, { x }, layout) {
  const { left, right, xDomain, toX, toY } = layout;
  const { low, high } = edgesOf(series, layout);
  const spacing = x.length > 1 ? x[1] - x[0] : 1;
  const width = Math.max(1, ((right - left) / (xDomain[1] - xDomain[0])) * spacing - 2);
  return s(
    "g",
    {},
    x.map((value, i) => {
      const height = toY(low[i]) - toY(high[i]);
      return (
        height > 0 &&
        s("rect", {
          class: "bar",
          x: round(toX(value) - width / 2),
          y: round(toY(high[i])),
          width: round(width),
          height: round(height),
          style: { fill: series.color },
        })
      );
    }),
  );
}

function drawPoints(series, data, { toX, toY }) {
  return s(
    "g",
    {},
    series.values.map((value, i) => {
      if (value === null) return null;
      const [x, y] = [round(toX(data.x[i])), round(toY(value))];
      return [
        series.ringed?.[i] &&
          s("circle", { class: "ring", cx: x, cy: y, r: 8, style: { stroke: series.color } }),
        s("path", {
          class: "point",
          d: MARKERS[series.marker ?? "circle"],
          transform: `translate(${x} ${y})`,
          style: { fill: series.color },
        }),
      ];
    }),
  );
}

const edgesOf = (series, { stacks }) => stacks.find((edges) => edges.series === series);

/** The sign of a series in the legend. */
export function swatch(series) {
  const { kind = "line", marker = "circle", color } = series;
  const shape =
    kind === "points"
      ? s("path", { d: MARKERS[marker], transform: "translate(6 6)" })
      : kind === "area" || kind === "bar" || kind === "band"
        ? s("rect", { x: 1, y: 1, width: 10, height: 10, rx: 2 })
        : s("rect", { x: 0, y: 4.5, width: 12, height: 3, rx: 1 });
  shape.style.setProperty("fill", color);
  return s(
    "svg",
    { class: `swatch ${kind}`, width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" },
    shape,
  );
}

/** A coordinate with one decimal, which keeps paths short. */
export const round = (value) => Math.round(value * 10) / 10;

/** A path through the points; a null interrupts it. */
export function pathOf(points) {
  let d = "";
  let command = "M";
  for (const point of points) {
    if (point === null) {
      command = "M";
      continue;
    }
    d += `${command}${round(point[0])},${round(point[1])}`;
    command = "L";
  }
  return d;
}
