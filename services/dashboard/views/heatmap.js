// A matrix of counts as a table with shaded cells, which screen readers can read too.

import { h } from "../dom.js";
import * as format from "../format.js";

/** @param {{caption: string, matrix: number[][], extra?: {title: string, values: number[]}}} options */
export function heatmap({ caption, matrix, extra }) {
  const size = matrix.length - 1;
  const largest = Math.max(1, ...matrix.flat(), ...(extra?.values ?? []));
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      { class: "heatmap" },
      h("caption", {}, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("td"),
          h("th", { colspan: size + 1, scope: "colgroup" }, `after: k of ${size} correct`),
          h("td"),
        ),
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "before"),
          matrix.map((_, k) => h("th", { scope: "col" }, k)),
          h("th", { scope: "col" }, "all"),
        ),
      ),
      h(
        "tbody",
        {},
        matrix.map((row, i) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, `${i} of ${size}`),
            row.map((value, j) => cell(value, largest, i === j)),
            h("td", { class: "total" }, format.count(total(row))),
          ),
        ),
        extra &&
          h(
            "tr",
            { class: "extra" },
            h("th", { scope: "row" }, extra.title),
            extra.values.map((value) => cell(value, largest, false)),
            h("td", { class: "total" }, format.count(total(extra.values))),
          ),
      ),
    ),
  );
}

function cell(value, largest, diagonal) {
  // The square root keeps a few prompts among thousands visible.
  const share = Math.sqrt(value / largest);
  const classes = [diagonal && "diagonal", share > 0.6 && "strong", value === 0 && "none"]
    .filter(Boolean)
    .join(" ");
  return h(
    "td",
    { class: classes || null, style: { "--share": `${Math.round(100 * share)}%` } },
    format.compact(value),
  );
}
