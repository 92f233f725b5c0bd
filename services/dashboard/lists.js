// A list of a run that the service filters and pages. The address has its filters and its page.

import { get } from "./api.js";
import { h, select } from "./dom.js";
import * as format from "./format.js";
import { announce, keeper, region } from "./live.js";
import { setQuery } from "./router.js";
import { Pager } from "./tables.js";

const SEARCH_DELAY_MS = 300;

/**
 * @param {import("./views/run.js").Visit} visit
 * @param {{route: string, keys: string[], noun: string, pageSize: number,
 *   listing: (page: {items: any[], next: string | null}) => any}} options route: of the service; keys:
 *   names of the filters, in the address and for the service; noun: what an item is; listing: shows a
 *   page
 */
export function filteredList({ signal, query }, { route, keys, noun, pageSize, listing }) {
  /** @type {Record<string, string>} */
  const filters = Object.fromEntries(keys.map((key) => [key, query[key] ?? ""]));
  const controls = {};
  const results = region();
  const keepResults = keeper(signal);
  const pager = new Pager(load, query.cursor ?? null);
  let typing = 0;

  function filter(change) {
    if (signal.aborted) return;
    clearTimeout(typing);
    Object.assign(filters, change);
    for (const key of Object.keys(change))
      if (controls[key].value !== filters[key]) controls[key].value = filters[key];
    pager.reset();
    setQuery({ ...change, cursor: "" });
    load();
  }

  function load() {
    setQuery({ cursor: pager.cursor });
    keepResults({
      load: (signal) => get(route, { ...filters, cursor: pager.cursor, limit: pageSize }, signal),
      show: (page) => {
        results.show(listing(page), pager.controls(page.next));
        announce(
          `${format.plural(page.items.length, noun)}${page.next ? ", and more on the next page" : ""}`,
        );
      },
      refuse: results.refuse,
    });
  }

  return {
    filters,
    filter,
    load,
    element: results.element,

    /** A select that filters. @param {[string, string][]} options value and label */
    choice(key, options) {
      return (controls[key] = select(options, filters[key], (value) => filter({ [key]: value })));
    },

    /** A field for a text that filters once the reader pauses. */
    search(key, placeholder) {
      const input = h("input", {
        type: "search",
        value: filters[key],
        maxlength: 200,
        placeholder,
        oninput: () => {
          clearTimeout(typing);
          typing = setTimeout(() => filter({ [key]: input.value }), SEARCH_DELAY_MS);
        },
      });
      return (controls[key] = input);
    },

    /** A field for a number that filters. */
    number(key, attributes) {
      return (controls[key] = h("input", {
        type: "number",
        inputmode: "numeric",
        value: filters[key],
        onchange: (event) => filter({ [key]: event.target.value }),
        ...attributes,
      }));
    },

    /** The form of the fields, with a button that clears all filters. */
    form(...fields) {
      const clear = () => {
        filter(Object.fromEntries(keys.map((key) => [key, ""])));
        form.querySelector("input[type=search]").focus();
      };
      const form = h(
        "form",
        { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
        fields,
        h("button", { type: "button", class: "quiet", onclick: clear }, "Clear"),
      );
      return form;
    },
  };
}
