// One chart: lines, stacked areas, bars or points over a common x, drawn as SVG.
//
// A chart is a <figure> that stays in the page; `update` gives it new data. It can be read without
// seeing it: it has a name, the arrow keys walk along x and say the values, and a table holds them.

import { h, s, fill, uniqueId } from "./dom.js";
import * as format from "./format.js";
import { extent, linear, padded, ticks, tickStep } from "./scales.js";

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {(number | null)[]} values one for each x; null is a gap
 * @property {string} color
 * @property {"line" | "faint" | "area" | "bar" | "band" | "points"} [kind]
 * @property {number[]} [low] lower edge of a band, whose upper edge is `values`
 * @property {"circle" | "triangle" | "diamond"} [marker]
 * @property {boolean[]} [ringed] points with a ring around them
 * @property {boolean} [stepped] an area that jumps from point to point
 * @property {boolean} [joined] a line that runs on over gaps
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
 *
 * @typedef {object} Options
 * @property {string} title
 * @property {string} [note] one line on what is shown
 * @property {string} y what the y axis counts, with its unit
 * @property {string} [x] what the x axis counts
 * @property {(value: number) => string} [format]
 * @property {(value: number) => string} [axisFormat] of the y axis; default: as many decimals as it needs
 * @property {string} [empty] what to say when there is nothing
 * @property {number} [height]
 * @property {boolean} [integers] only whole numbers on the y axis
 * @property {{words: string, act: (x: number) => void}} [pick] what a click or Enter does
 * @property {"h2" | "h3"} [heading]
 */

const FONT = 11;
const CHARACTER = 6.3;
const LANE = 18;
const LONGEST_TABLE = 200;

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
      empty: "Nothing to show yet.",
      heading: "h2",
      ...options,
    };
    /** @type {Data | null} */
    this.data = null;
    /** Index into x of the values that the legend shows; null follows the last. */
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
    const moved = this.at !== null && this.data?.x[this.at];
    this.data = data;
    if (this.at !== null) {
      // The cursor stays at its x, not at its index.
      const found = data.x.indexOf(moved);
      this.at = found < 0 ? null : found;
    }
    this.#draw();
    if (this.table.open) this.#fillTable();
  }

  get #isEmpty() {
    return (
      !this.data ||
      this.data.x.length === 0 ||
      this.data.series.every((each) => each.values.every((v) => v === null))
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
    this.#measure();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.height);
    this.cursor = s("g", { class: "cursor" });
    this.svg.replaceChildren(this.#axes(), ...this.#marks(), this.#lanes(), this.cursor);
    this.#read();
  }

  #newSvg() {
    const { title, pick } = this.options;
    return s("svg", {
      // A slider along x: assistive technology reads its value text at each arrow key.
      role: "slider",
      tabindex: 0,
      "aria-label": title + (pick ? `. Enter: ${pick.words}` : ""),
      "aria-roledescription": "chart",
      "aria-orientation": "horizontal",
      class: pick ? "picks" : "",
      onpointermove: (event) => this.#point(event),
      // A finger has no hover: the first tap reads, the second one on the same place picks.
      onpointerleave: (event) => event.pointerType !== "touch" && this.#move(null),
      onclick: (event) => {
        const before = this.at;
        this.#point(event);
        if (event.pointerType !== "touch" || before === this.at) this.#pick();
      },
      onkeydown: (event) => this.#key(event),
      onblur: () => this.#move(null),
    });
  }

  /** Where things go: margins, domains, scales. */
  #measure() {
    const { data, options } = this;
    const stacked = data.series.filter((each) => each.kind === "area" || each.kind === "bar");
    this.stacks = stack(stacked, data.x.length);
    const values = data.series.flatMap((each) =>
      stacked.includes(each) ? [] : [...each.values, ...(each.low ?? [])],
    );
    const tops = this.stacks.at(-1)?.high ?? [];
    const found = extent([
      ...values.filter((v) => v !== null),
      ...tops,
      ...(stacked.length ? [0] : []),
      ...(data.limit ? [data.limit.value] : []),
    ]);
    this.yDomain = data.yDomain ?? (stacked.length ? [0, (found[1] || 1) * 1.04] : padded(found));
    this.xDomain = data.xDomain ?? extent(data.x);
    const half = stacked.some((each) => each.kind === "bar") || this.xDomain[0] === this.xDomain[1] ? 0.5 : 0;
    this.xDomain = [this.xDomain[0] - half, this.xDomain[1] + half];
    const wanted = options.height / 42;
    this.yTicks = ticks(...this.yDomain, wanted, { integers: options.integers });
    this.yLabel = options.axisFormat ?? format.axis(tickStep(...this.yDomain, wanted, options.integers));
    const laneNames = (data.lanes ?? []).map((lane) => lane.name.length * CHARACTER);
    const labels = this.yTicks.map((value) => this.yLabel(value).length * CHARACTER);
    this.left = Math.min(
      this.width / 3,
      Math.max(options.x.length * CHARACTER, ...labels, ...laneNames) + 10,
    );
    this.right = this.width - 10;
    this.top = 22;
    this.bottom = options.height - 24;
    this.lanesTop = this.bottom + 8;
    this.lanesBottom = this.bottom + (data.lanes?.length ? data.lanes.length * LANE + 8 : 0);
    this.height = this.lanesBottom + 24;
    this.toX = linear(this.xDomain, [this.left, this.right]);
    this.toY = linear(this.yDomain, [this.bottom, this.top]);
  }

  #axes() {
    const { options } = this;
    const xTicks = ticks(...this.xDomain, Math.max(2, (this.right - this.left) / 80), { integers: true });
    return s(
      "g",
      { class: "axes", "aria-hidden": "true" },
      s("text", { class: "axis-title", x: 0, y: FONT }, options.y),
      this.yTicks.map((value) => {
        const y = round(this.toY(value));
        return [
          s("line", { class: value === 0 ? "base" : "grid", x1: this.left, x2: this.right, y1: y, y2: y }),
          s("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, this.yLabel(value)),
        ];
      }),
      xTicks.map((value) => this.#xTick(value)),
      s(
        "text",
        { class: "axis-title", x: this.left - 8, y: this.lanesBottom + 18, "text-anchor": "end" },
        options.x,
      ),
    );
  }

  #xTick(value) {
    const x = this.toX(value);
    const label = format.compact(value);
    const half = (label.length * CHARACTER) / 2;
    // Labels leave neither the picture nor the plot, left of which is the name of the axis.
    const anchor = x + half > this.width ? "end" : x - half < this.left - 5 ? "start" : "middle";
    return [
      s("line", { class: "grid", x1: x, x2: x, y1: this.lanesBottom, y2: this.lanesBottom + 4 }),
      s("text", { x, y: this.lanesBottom + 18, "text-anchor": anchor }, label),
    ];
  }

  #marks() {
    const drawn = this.data.series.map((each) => {
      switch (each.kind) {
        case "area":
          return this.#area(each);
        case "bar":
          return this.#bars(each);
        case "band":
          return this.#band(each);
        case "points":
          return this.#points(each);
        default:
          return this.#line(each);
      }
    });
    const { limit } = this.data;
    if (limit) {
      const y = round(this.toY(limit.value));
      drawn.push(s("line", { class: "limit", x1: this.left, x2: this.right, y1: y, y2: y }));
      drawn.push(
        s("text", { class: "limit-name", x: this.right, y: y - 4, "text-anchor": "end" }, limit.name),
      );
    }
    return drawn;
  }

  #line(each) {
    const faint = each.kind === "faint";
    const style = { stroke: each.color };
    const places = each.values.map((value, i) =>
      value === null ? null : [this.toX(this.data.x[i]), this.toY(value)],
    );
    const shown = each.joined ? places.filter((place) => place !== null) : places;
    const path = s("path", {
      class: faint ? "line faint" : "line",
      d: pathOf(shown),
      style,
    });
    const dots = shown.filter((place) => place !== null);
    if (faint || dots.length > 40) return path;
    return s(
      "g",
      {},
      path,
      dots.map(([x, y]) =>
        s("circle", { class: "dot", cx: round(x), cy: round(y), r: 2.5, style: { fill: each.color } }),
      ),
    );
  }

  #area(each) {
    const { low, high } = this.stacks.find((found) => found.series === each);
    return s("path", {
      class: each.stepped ? "area stepped" : "area",
      d: this.#between(low, high, each.stepped),
      style: { fill: each.color },
    });
  }

  /** The outline of what is between two edges. */
  #between(low, high, stepped = false) {
    const { x } = this.data;
    const edge = (values) => {
      if (!stepped && x.length > 1) return x.map((value, i) => [this.toX(value), this.toY(values[i])]);
      const middle = (i) => (x[i - 1] + x[i]) / 2;
      return x.flatMap((_, i) => {
        const [from, to] = [
          i === 0 ? this.xDomain[0] : middle(i),
          i === x.length - 1 ? this.xDomain[1] : middle(i + 1),
        ];
        return [from, to].map((value) => [this.toX(value), this.toY(values[i])]);
      });
    };
    return `${pathOf(edge(high))}L${pathOf(edge(low).reverse()).slice(1)}Z`;
  }

  #bars(each) {
    const { low, high } = this.stacks.find((found) => found.series === each);
    const width = Math.max(
      1,
      ((this.right - this.left) / (this.xDomain[1] - this.xDomain[0])) * barWidth(this.data.x) - 2,
    );
    return s(
      "g",
      {},
      this.data.x.map((x, i) => {
        const height = this.toY(low[i]) - this.toY(high[i]);
        return (
          height > 0 &&
          s("rect", {
            class: "bar",
            x: round(this.toX(x) - width / 2),
            y: round(this.toY(high[i])),
            width: round(width),
            height: round(height),
            style: { fill: each.color },
          })
        );
      }),
    );
  }

  #band(each) {
    return s("path", { class: "band", d: this.#between(each.low, each.values), style: { fill: each.color } });
  }

  #points(each) {
    return s(
      "g",
      {},
      each.values.map((value, i) => {
        if (value === null) return null;
        const [x, y] = [round(this.toX(this.data.x[i])), round(this.toY(value))];
        return [
          each.ringed?.[i] &&
            s("circle", { class: "ring", cx: x, cy: y, r: 8, style: { stroke: each.color } }),
          s("path", {
            class: "point",
            d: MARKERS[each.marker ?? "circle"],
            transform: `translate(${x} ${y})`,
            style: { fill: each.color },
          }),
        ];
      }),
    );
  }

  #lanes() {
    return (this.data.lanes ?? []).length === 0
      ? s("g")
      : s(
          "g",
          { class: "lanes", "aria-hidden": "true" },
          this.data.lanes.map((lane, i) => {
            const y = this.lanesTop + i * LANE;
            return [
              s("text", { x: this.left - 6, y: y + 11, "text-anchor": "end" }, lane.name),
              s("rect", {
                class: "lane",
                x: this.left,
                y: y + 2,
                width: this.right - this.left,
                height: LANE - 6,
              }),
              lane.spans.map(([from, to]) => {
                const x = this.toX(from);
                return s("rect", {
                  x: round(x - (from === to ? 1.5 : 0)),
                  y: y + 2,
                  width: round(Math.max(3, this.toX(to) - x)),
                  height: LANE - 6,
                  rx: 1,
                  style: { fill: lane.color },
                });
              }),
            ];
          }),
        );
  }

  // ---- the cursor: by pointer or by keys --------------------------------------------------------

  #point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.width;
    let nearest = 0;
    const distance = (i) => Math.abs(this.toX(this.data.x[i]) - x);
    for (let i = 1; i < this.data.x.length; i++) if (distance(i) < distance(nearest)) nearest = i;
    this.#move(nearest);
  }

  #key(event) {
    const last = this.data.x.length - 1;
    const from = this.at ?? last;
    const stride = event.shiftKey ? 10 : 1;
    const moves = {
      ArrowLeft: from - stride,
      ArrowRight: from + stride,
      ArrowDown: from - stride,
      ArrowUp: from + stride,
      Home: 0,
      End: last,
      Escape: null,
    };
    if (event.key === "Enter") this.#pick();
    else if (event.key in moves) {
      event.preventDefault();
      const to = moves[event.key];
      this.#move(to === null ? null : Math.min(last, Math.max(0, to)));
    }
  }

  #move(index) {
    if (!this.svg || index === this.at) return;
    this.at = index;
    this.#read();
  }

  #pick() {
    const x = this.data.x[this.at ?? this.data.x.length - 1];
    this.options.pick?.act(x);
  }

  /** Shows the values at the cursor, in the legend and to assistive technology. */
  #read() {
    const { data, options } = this;
    const i = this.at ?? data.x.length - 1;
    const named = data.series.filter((each) => !each.hidden);
    const whole = this.at === null && named[0].kind === "bar";
    fill(
      this.legend,
      !whole && h("span", { class: "at" }, `${options.x} ${format.count(data.x[i])}`),
      named.map((each) =>
        h(
          "span",
          { class: "key" },
          swatch(each),
          each.name,
          " ",
          h("b", {}, whole ? `${format.count(sum(each.values))} in all` : this.#words(each, i)),
        ),
      ),
    );
    this.svg.setAttribute("aria-valuemin", data.x[0]);
    this.svg.setAttribute("aria-valuemax", data.x.at(-1));
    this.svg.setAttribute("aria-valuenow", data.x[i]);
    this.svg.setAttribute(
      "aria-valuetext",
      `${options.x} ${data.x[i]}: ${named
        .filter((each) => each.values[i] !== null)
        .map((each) => `${each.name} ${this.#words(each, i)}`)
        .join(", ")}`,
    );
    const x = round(this.toX(data.x[i]));
    this.cursor.replaceChildren(
      ...(this.at === null ? [] : [s("line", { x1: x, x2: x, y1: this.top, y2: this.lanesBottom })]),
    );
  }

  /** The value of a series at x number i; where the newest is asked for, its last one. */
  #words(each, i) {
    const { format: words, x } = this.options;
    if (each.low) return `${words(each.low[i])} to ${words(each.values[i])}`;
    if (each.values[i] !== null || each.kind === "points")
      return each.values[i] === null ? "" : words(each.values[i]);
    const last = this.at === null ? each.values.findLastIndex((value) => value !== null) : -1;
    return last < 0 ? format.NONE : `${words(each.values[last])} at ${x} ${format.count(this.data.x[last])}`;
  }

  #fillTable() {
    const [summary] = this.table.children;
    if (!this.table.open || !this.data) return this.table.replaceChildren(summary);
    const { options, data } = this;
    const named = data.series.filter((each) => !each.hidden);
    const stride = Math.ceil(data.x.length / LONGEST_TABLE);
    const rows = data.x.map((_, i) => i).filter((i) => (data.x.length - 1 - i) % stride === 0);
    const cell = (each, i) =>
      each.low
        ? `${options.format(each.low[i])} to ${options.format(each.values[i])}`
        : options.format(each.values[i]);
    this.table.replaceChildren(
      summary,
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": `${options.title}, values` },
        h(
          "table",
          {},
          h(
            "caption",
            {},
            `${options.title} (${options.y})${stride > 1 ? `, every ${stride}th of ${data.x.length} points` : ""}`,
          ),
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              [options.x, ...named.map((each) => each.name)].map((name) =>
                h("th", { scope: "col", class: "number" }, name),
              ),
            ),
          ),
          h(
            "tbody",
            {},
            rows.map((i) =>
              h(
                "tr",
                {},
                h("th", { scope: "row", class: "number" }, format.count(data.x[i])),
                named.map((each) => h("td", { class: "number" }, cell(each, i))),
              ),
            ),
          ),
        ),
      ),
    );
  }
}

const MARKERS = {
  circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  triangle: "M0,-5L4.8,3.6L-4.8,3.6Z",
  diamond: "M0,-5.4L5,0L0,5.4L-5,0Z",
};

function swatch(each) {
  const shape =
    each.kind === "points"
      ? s("path", { d: MARKERS[each.marker ?? "circle"], transform: "translate(6 6)" })
      : each.kind === "area" || each.kind === "bar" || each.kind === "band"
        ? s("rect", { x: 1, y: 1, width: 10, height: 10, rx: 2 })
        : s("rect", { x: 0, y: 4.5, width: 12, height: 3, rx: 1 });
  shape.style.setProperty("fill", each.color);
  return s(
    "svg",
    {
      class: `swatch ${each.kind ?? "line"}`,
      width: 12,
      height: 12,
      viewBox: "0 0 12 12",
      "aria-hidden": "true",
    },
    shape,
  );
}

const round = (value) => Math.round(value * 10) / 10;
const sum = (values) => values.reduce((all, each) => all + (each ?? 0), 0);

/** A path through the places; a null breaks it. */
function pathOf(places) {
  let d = "";
  let pen = "M";
  for (const place of places) {
    if (place === null) {
      pen = "M";
      continue;
    }
    d += `${pen}${round(place[0])},${round(place[1])}`;
    pen = "L";
  }
  return d;
}

function stack(series, length) {
  let low = new Array(length).fill(0);
  return series.map((each) => {
    const high = low.map((value, i) => value + (each.values[i] ?? 0));
    const found = { series: each, low, high };
    low = high;
    return found;
  });
}

/** The distance of neighbouring bars in x. */
const barWidth = (x) => (x.length > 1 ? x[1] - x[0] : 1);

/** A line without axes, for a table cell. */
export function sparkline(values, name) {
  const found = extent(values);
  if (!found || values.length < 2) return null;
  const [width, height] = [90, 22];
  const toX = linear([0, values.length - 1], [2, width - 4]);
  const toY = linear(found[0] === found[1] ? [found[0] - 1, found[1] + 1] : found, [height - 3, 3]);
  const places = values.map((value, i) => [toX(i), toY(value)]);
  const [x, y] = places.at(-1);
  return s(
    "svg",
    { class: "sparkline", role: "img", "aria-label": name, width, height, viewBox: `0 0 ${width} ${height}` },
    s("path", { d: pathOf(places) }),
    s("circle", { cx: round(x), cy: round(y), r: 2.2 }),
  );
}

/** How many of `values` are in each range; at most `most` ranges of whole width. */
export function histogram(values, most = 30) {
  const found = extent(values);
  if (!found) return { x: [], counts: [], width: 1 };
  const width = Math.max(1, Math.ceil((found[1] - found[0] + 1) / most));
  const first = Math.floor(found[0] / width) * width;
  const x = [];
  for (let start = first; start <= found[1]; start += width) x.push(start);
  const counts = new Array(x.length).fill(0);
  for (const value of values) counts[Math.floor((value - first) / width)]++;
  return { x, counts, width };
}
