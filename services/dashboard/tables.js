// Tables with a caption, sortable if all rows are loaded, and paged by cursor otherwise.

import { fill, h } from "./dom.js";
import { count } from "./format.js";

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: any) => any} cell content of a cell
 * @property {(row: any) => number | string} [by] sort key; a column without one cannot be sorted
 * @property {boolean} [number] aligned to the right
 * @property {"ascending" | "descending"} [sorted] order in which the server sorted by it
 * @property {() => void} [onsort] asks the server to sort, at a click on the title
 * @property {string} [hint]
 */

/**
 * @param {{caption: string, columns: Column[], rows: any[], empty?: string, hideCaption?: boolean,
 *   maxRows?: number}} options maxRows: rows shown until the reader asks for all of them
 */
export function table({
  caption,
  columns,
  rows,
  empty = "No entries.",
  hideCaption = false,
  maxRows = 200,
}) {
  if (rows.length === 0) return h("p", { class: "empty" }, empty);
  const body = h("tbody");
  const showAllButton = h(
    "p",
    { hidden: rows.length <= maxRows },
    h("button", { type: "button", onclick: showAll }, `Show all ${count(rows.length)} rows`),
  );
  const heads = columns.map((column) => headOf(column, () => sort(column)));
  let order = { column: null, direction: 1 };

  function sort(column) {
    order = { column, direction: order.column === column ? -order.direction : 1 };
    columns.forEach((other, i) => {
      if (other.by)
        heads[i].setAttribute(
          "aria-sort",
          other !== column ? "none" : order.direction > 0 ? "ascending" : "descending",
        );
    });
    show();
  }

  function show() {
    const sorted = order.column
      ? [...rows].sort((a, b) => order.direction * compare(order.column.by(a), order.column.by(b)))
      : rows;
    fill(
      body,
      sorted.slice(0, maxRows).map((row) =>
        h(
          "tr",
          {},
          columns.map((column, i) => cellOf(column, row, i)),
        ),
      ),
    );
  }

  function showAll() {
    maxRows = Infinity;
    showAllButton.hidden = true;
    show();
  }

  show();
  return h(
    "div",
    {},
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h(
        "table",
        {},
        h("caption", { class: hideCaption ? "unseen" : null }, h("span", {}, caption)),
        h("thead", {}, h("tr", {}, heads)),
        body,
      ),
    ),
    showAllButton,
  );
}

function headOf(column, sortLoadedRows) {
  const sortable = column.by || column.onsort;
  return h(
    "th",
    {
      scope: "col",
      class: column.number ? "number" : null,
      "aria-sort": sortable ? (column.sorted ?? "none") : null,
      title: column.hint,
    },
    sortable
      ? h("button", { type: "button", class: "sort", onclick: column.onsort ?? sortLoadedRows }, column.title)
      : column.title,
  );
}

function cellOf(column, row, index) {
  return h(
    index === 0 ? "th" : "td",
    { scope: index === 0 ? "row" : null, class: column.number ? "number" : null },
    column.cell(row),
  );
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en");
}

/**
 * Goes through pages by cursor. Cursors lead forward only, so those passed are kept to go back.
 * @param {(cursor: string | null) => void} show
 */
export class Pager {
  constructor(show, cursor = null) {
    this.show = show;
    this.cursor = cursor;
    /** @type {(string | null)[]} */
    this.passed = [];
  }

  reset() {
    this.cursor = null;
    this.passed = [];
  }

  #to(cursor) {
    this.cursor = cursor;
    this.show(cursor);
  }

  /** Returns the buttons of a page; `next` is the cursor of the page after it. */
  controls(next) {
    if (!next && !this.cursor) return null;
    return h(
      "nav",
      { class: "pager", "aria-label": "Pages" },
      h(
        "button",
        { type: "button", disabled: !this.cursor, onclick: () => ((this.passed = []), this.#to(null)) },
        "First page",
      ),
      h(
        "button",
        {
          type: "button",
          disabled: this.passed.length === 0,
          onclick: () => this.#to(this.passed.pop() ?? null),
        },
        "Previous",
      ),
      h(
        "button",
        { type: "button", disabled: !next, onclick: () => (this.passed.push(this.cursor), this.#to(next)) },
        "Next",
      ),
    );
  }
}
