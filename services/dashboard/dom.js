// Elements from values. Data becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false | Child[]} Child */

/**
 * An HTML element. `on…` keys are listeners, `style` is an object of properties, `true` makes a
 * bare attribute, and null or false none.
 * @param {string} tag
 * @param {Record<string, any>} attributes
 * @param {...Child} children
 * @returns {any}
 */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** The same for SVG. @returns {any} */
export function s(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") setStyle(element, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(children));
  return element;
}

function setStyle(element, style) {
  // Through the object model: the content security policy forbids style attributes.
  for (const [name, value] of Object.entries(style)) element.style.setProperty(name, value);
}

/** @param {Child[]} children */
function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .map((child) => (child instanceof Node ? child : String(child)));
}

/**
 * Replaces what is in `element`. If the focus was inside, what took the place of the focused
 * element gets it, so that an update does not throw a keyboard user back to the top.
 */
export function fill(element, ...children) {
  const focused = document.activeElement;
  const lost = focused && focused !== element && element.contains(focused) ? focused : null;
  element.replaceChildren(...nodes(children));
  if (!lost) return;
  const same = [...element.querySelectorAll(lost.tagName)].find((each) => key(each) === key(lost));
  same?.focus({ preventScroll: true });
}

const key = (element) =>
  element.id || element.getAttribute("href") || element.getAttribute("aria-label") || element.textContent;

let counter = 0;

/** An id that no other element has. */
export const uniqueId = (prefix) => `${prefix}-${++counter}`;

/** A labelled control: the label above, the control below. */
export function field(label, control, hint) {
  control.id ||= uniqueId("field");
  return h(
    "div",
    { class: "field" },
    h("label", { for: control.id }, label),
    control,
    hint && h("small", {}, hint),
  );
}

/** A <select>. @param {[string, string][]} options value and words */
export function select(options, value, onchange, attributes = {}) {
  return h(
    "select",
    { ...attributes, onchange: (event) => onchange(event.target.value) },
    options.map(([each, words]) => h("option", { value: each, selected: each === value }, words)),
  );
}

/**
 * Asks before something is done. Resolves to whether it was confirmed; leaving the page, which ends
 * `signal`, is a no.
 */
export function confirmed(title, text, action, signal) {
  return new Promise((resolve) => {
    const heading = h("h2", { id: uniqueId("dialog") }, title);
    const dialog = h(
      "dialog",
      {
        "aria-labelledby": heading.id,
        onclose: () => (dialog.remove(), resolve(dialog.returnValue === "yes")),
      },
      heading,
      h("p", {}, text),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", autofocus: true, onclick: () => dialog.close("no") }, "Cancel"),
        h("button", { type: "button", class: "danger", onclick: () => dialog.close("yes") }, action),
      ),
    );
    signal.addEventListener("abort", () => dialog.close("no"), { once: true });
    document.body.append(dialog);
    dialog.showModal();
  });
}
