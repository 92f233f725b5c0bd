// A chart: lines, stacked areas, bars or points over a common x, drawn as SVG.
//
// A chart is a <figure> that stays in the page; `update` gives it new data. It is accessible without
// sight: it has a name, the arrow keys move along x and announce the values, and a table holds them.

import { s, fill, h, uniqueId } from "../dom.js";
import * as format from "../format.js";
import { drawAxes, drawLanes, drawLimit, drawMarks } from "./axes.js";
import { layoutOf } from "./layout.js";
import { drawSeries, round, swatch } from "./marks.js";
import { valueTable, valueText } from "./table.js";

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {(number | null)[]} values one for each x; null is a gap
 * @property {string} color
 * @property {"line" | "faint" | "area" | "bar" | "band" | "points"} [kind]
 * @property {(number | null)[]} [low] lower edge of a band, whose upper edge is `values`
 * @property {(number | null)[]} [high] with `low`: the edges of a band around a line
 * @property {"circle" | "triangle" | "diamond"} [marker]
 * @property {boolean[]} [ringed] points with a ring around them
 * @property {boolean} [stepped] an area that jumps from point to point
 * @property {boolean} [joined] a line that continues over gaps
 * @property {boolean} [hidden] drawn, but neither in the legend nor in the table
 *
 * @typedef {object} Lane a strip below the plot
 * @property {string} name
 * @property {string} color
 * @property {[number, number][]} spans in x; one of no width is a tick
 *
 * @typedef {object} Data
 * @property {number[]} x
 * @property {Series[]} series
 * @property {[number, number]} [yDomain]
 * @property {[number, number]} [xDomain]
 * @property {Lane[]} [lanes]
 * @property {{value: number, name: string}} [limit] a dashed line across
 * @property {{x: number, name: string}[]} [marks] dashed lines upright
 *
 * @typedef {object} Options
 * @property {string} title
 * @property {string} [note] one line that explains the chart
 * @property {string} y what the y axis counts, with its unit
 * @property {string} [x] what the x axis counts
 * @property {(value: number) => string} [format]
 * @property {(value: number) => string} [axisFormat] of the y axis; default: as many decimals as it needs
 * @property {string} [empty] text of a chart without values
 * @property {number} [height]
 * @property {boolean} [integers] only whole numbers on the y axis
 * @property {{label: string, act: (x: number) => void}} [pick] what a click or Enter does
 * @property {"h2" | "h3"} [heading]
 */

/** @param {Options} options */
export function chart(options) {
  return new Chart(options);
}

class Chart {
  /** @param {Options} options */
  constructor(options) {
    this.options = {
      x: "step",
      format: format.number,
      height: 190,
      empty: "No data yet.",
      heading: "h2",
      ...options,
    };
    /** @type {Data | null} */
    this.data = null;
    /** Index into x of the values that the legend shows; null follows the last one. */
    this.at = null;
    this.width = 0;
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot" });
    this.table = h(
      "details",
      { class: "values", ontoggle: () => this.#fillTable() },
      h("summary", {}, "Values as a table"),
    );
    const title = h(this.options.heading, { id: uniqueId("chart") }, options.title);
    this.element = h(
      "figure",
      { class: "chart", "aria-labelledby": title.id },
      h("div", { class: "chart-head" }, title, options.note && h("p", { class: "note" }, options.note)),
      this.legend,
      this.plot,
      this.table,
    );
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width !== this.width && width > 0) {
        this.width = width;
        this.#draw();
      }
    }).observe(this.plot);
  }

  /** @param {Data} data */
  update(data) {
    const cursorX = this.at !== null && this.data?.x[this.at];
    this.data = data;
    if (this.at !== null) {
      // The cursor stays at its x, not at its index.
      const index = data.x.indexOf(cursorX);
      this.at = index < 0 ? null : index;
    }
    this.#draw();
    if (this.table.open) this.#fillTable();
  }

  get #isEmpty() {
    return (
      !this.data ||
      this.data.x.length === 0 ||
      this.data.series.every((series) => series.values.every((value) => value === null))
    );
  }

  #draw() {
    if (!this.data || !this.width) return;
    this.table.hidden = this.#isEmpty;
    if (this.#isEmpty) {
      this.svg = null;
      fill(this.legend);
      fill(this.plot, h("p", { class: "empty" }, this.options.empty));
      return;
    }
    if (!this.svg) {
      this.svg = this.#newSvg();
      fill(this.plot, this.svg);
    }
    const { data, options } = this;
    this.layout = layoutOf(data, options, this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.layout.height}`);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.layout.height);
    this.cursor = s("g", { class: "cursor" });
    this.svg.replaceChildren(
      drawAxes(this.layout, options),
      ...data.series.map((series) => drawSeries(series, data, this.layout)),
      ...(data.limit ? [drawLimit(this.layout, data.limit)] : []),
      drawMarks(this.layout, data.marks ?? []),
      drawLanes(this.layout, data.lanes ?? []),
      this.cursor,
    );
    this.#showValues();
  }

  #newSvg() {
    const { title, pick } = this.options;
    return s("svg", {
      // A slider along x: screen readers announce its value text at every arrow key.
      role: "slider",
      tabindex: 0,
      "aria-label": title + (pick ? `. Enter: ${pick.label}` : ""),
      "aria-roledescription": "chart",
      "aria-orientation": "horizontal",
      class: pick ? "picks" : "",
      onpointermove: (event) => this.#point(event),
      // Touch has no hover: the first tap shows the values, a second one at the same x picks.
      onpointerleave: (event) => event.pointerType !== "touch" && this.#moveTo(null),
      onclick: (event) => {
        const before = this.at;
        this.#point(event);
        if (event.pointerType !== "touch" || before === this.at) this.#pick();
      },
      onkeydown: (event) => this.#key(event),
      onblur: () => this.#moveTo(null),
    });
  }

  // ---- the cursor: by pointer or by keys --------------------------------------------------------

  #point(event) {
    const { x } = this.data;
    const box = this.svg.getBoundingClientRect();
    const pointerX = ((event.clientX - box.left) / box.width) * this.width;
    const distance = (i) => Math.abs(this.layout.toX(x[i]) - pointerX);
    let nearest = 0;
    for (let i = 1; i < x.length; i++) if (distance(i) < distance(nearest)) nearest = i;
    this.#moveTo(nearest);
  }

  #key(event) {
    const last = this.data.x.length - 1;
    const from = this.at ?? last;
    const stride = event.shiftKey ? 10 : 1;
    const targets = {
      ArrowLeft: from - stride,
      ArrowRight: from + stride,
      ArrowDown: from - stride,
      ArrowUp: from + stride,
      Home: 0,
      End: last,
      Escape: null,
    };
    if (event.key === "Enter") this.#pick();
    else if (event.key in targets) {
      event.preventDefault();
      const target = targets[event.key];
      this.#moveTo(target === null ? null : Math.min(last, Math.max(0, target)));
    }
  }

  #moveTo(index) {
    if (!this.svg || index === this.at) return;
    this.at = index;
    this.#showValues();
  }

  #pick() {
    const x = this.data.x[this.at ?? this.data.x.length - 1];
    this.options.pick?.act(x);
  }

  /** Shows the values at the cursor, in the legend and to screen readers. */
  #showValues() {
    const { data, options, layout } = this;
    const i = this.at ?? data.x.length - 1;
    const named = data.series.filter((series) => !series.hidden);
    const showsTotals = this.at === null && named[0].kind === "bar";
    fill(
      this.legend,
      !showsTotals && h("span", { class: "at" }, `${options.x} ${format.count(data.x[i])}`),
      named.map((series) =>
        h(
          "span",
          { class: "key" },
          swatch(series),
          series.name,
          " ",
          h("b", {}, showsTotals ? `${format.count(sum(series.values))} in all` : this.#valueText(series, i)),
        ),
      ),
    );
    this.svg.setAttribute("aria-valuemin", data.x[0]);
    this.svg.setAttribute("aria-valuemax", data.x.at(-1));
    this.svg.setAttribute("aria-valuenow", data.x[i]);
    this.svg.setAttribute(
      "aria-valuetext",
      `${options.x} ${data.x[i]}: ${named
        .filter((series) => series.values[i] !== null)
        .map((series) => `${series.name} ${this.#valueText(series, i)}`)
        .join(", ")}`,
    );
    const x = round(layout.toX(data.x[i]));
    this.cursor.replaceChildren(
      ...(this.at === null ? [] : [s("line", { x1: x, x2: x, y1: layout.top, y2: layout.lanesBottom })]),
    );
  }

  /** The value of a series at index i; without a cursor, its last one if it ends earlier. */
  #valueText(series, i) {
    const { format: formatted, x } = this.options;
    if (series.values[i] !== null) return valueText(series, i, formatted);
    if (series.kind === "points") return "";
    const last = this.at === null ? series.values.findLastIndex((other) => other !== null) : -1;
    if (last < 0) return format.NONE;
    return `${valueText(series, last, formatted)} at ${x} ${format.count(this.data.x[last])}`;
  }

  #fillTable() {
    const [summary] = this.table.children;
    const filled = this.table.open && this.data;
    this.table.replaceChildren(summary, ...(filled ? [valueTable(this.data, this.options)] : []));
  }
}

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
