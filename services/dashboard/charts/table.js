// The values of a chart as a table.

import { h } from "../dom.js";
import * as format from "../format.js";

const MAX_ROWS = 200;

/** The value of a series at index i, with the edges of its band. @param {import("./chart.js").Series} series */
export function valueText({ values, low, high }, i, format) {
  const value = format(values[i]);
  if (!low || values[i] === null) return value;
  return high ? `${value} (${format(low[i])} to ${format(high[i])})` : `${format(low[i])} to ${value}`;
}

/** @param {import("./chart.js").Data} data @param {import("./chart.js").Options} options */
export function valueTable(data, options) {
  const columns = data.series.filter((series) => !series.hidden);
  const stride = Math.ceil(data.x.length / MAX_ROWS);
  const last = data.x.length - 1;
  const indices = data.x.map((_, i) => i).filter((i) => (last - i) % stride === 0);
  const sampling = stride > 1 ? `, every ${stride}th of ${data.x.length} points` : "";
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": `${options.title}, values` },
    h(
      "table",
      {},
      h("caption", {}, `${options.title} (${options.y})${sampling}`),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          [options.x, ...columns.map((series) => series.name)].map((name) =>
            h("th", { scope: "col", class: "number" }, name),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        indices.map((i) =>
          h(
            "tr",
            {},
            h("th", { scope: "row", class: "number" }, format.count(data.x[i])),
            columns.map((series) => h("td", { class: "number" }, valueText(series, i, options.format))),
          ),
        ),
      ),
    ),
  );
}
