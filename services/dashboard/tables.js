// Tables: captioned, sortable where all rows are there, paged by cursor where they are not.

import { fill, h } from "./dom.js";
import { count } from "./format.js";

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: any) => any} cell what the cell shows
 * @property {(row: any) => number | string} [by] what the column sorts by; without, it does not
 * @property {boolean} [number] aligned to the right
 * @property {"ascending" | "descending"} [sorted] by the server
 * @property {() => void} [onsort] the server sorts: what a click on the title does
 * @property {string} [hint]
 */

/**
 * @param {{caption: string, columns: Column[], rows: any[], empty?: string, hideCaption?: boolean,
 *   most?: number}} options most: rows shown until the reader asks for the others
 */
export function table({ caption, columns, rows, empty = "Nothing here.", hideCaption = false, most = 200 }) {
  if (rows.length === 0) return h("p", { class: "empty" }, empty);
  const body = h("tbody");
  const others = h(
    "p",
    { hidden: rows.length <= most },
    h("button", { type: "button", onclick: showAll }, `Show all ${count(rows.length)} rows`),
  );
  const heads = columns.map((column) => headOf(column, () => sort(column)));
  let order = { column: null, direction: 1 };

  function sort(column) {
    order = { column, direction: order.column === column ? -order.direction : 1 };
    columns.forEach((each, i) => {
      if (each.by)
        heads[i].setAttribute(
          "aria-sort",
          each !== column ? "none" : order.direction > 0 ? "ascending" : "descending",
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
      sorted.slice(0, most).map((row) =>
        h(
          "tr",
          {},
          columns.map((column, i) => cellOf(column, row, i)),
        ),
      ),
    );
  }

  function showAll() {
    most = Infinity;
    others.hidden = true;
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
        h("caption", { class: hideCaption ? "unseen" : null }, caption),
        h("thead", {}, h("tr", {}, heads)),
        body,
      ),
    ),
    others,
  );
}

function headOf(column, sortHere) {
  const sorts = column.by || column.onsort;
  return h(
    "th",
    {
      scope: "col",
      class: column.number ? "number" : null,
      "aria-sort": sorts ? (column.sorted ?? "none") : null,
      title: column.hint,
    },
    sorts
      ? h("button", { type: "button", class: "sort", onclick: column.onsort ?? sortHere }, column.title)
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
 * Pages by cursor go forward only; the cursors passed are kept, so that one can go back.
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

  /** The buttons, for a page whose `next` this is. */
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
