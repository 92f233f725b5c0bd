// Builds elements from values. Data becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false | Child[]} Child */

/**
 * Builds an HTML element. `on…` keys are listeners, `style` is an object of properties, `true` makes a
 * bare attribute, and null or false none.
 * @param {string} tag
 * @param {Record<string, any>} attributes
 * @param {...Child} children
 * @returns {any}
 */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Builds an SVG element, with arguments as for `h`. @returns {any} */
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
  // The content security policy forbids style attributes, but not the object model.
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
 * Replaces the children of `element`. If the focus was inside, the element that replaces the focused
 * one gets it, so that an update does not send a keyboard user back to the top of the page.
 */
export function fill(element, ...children) {
  const focused = document.activeElement;
  const replaced = focused && focused !== element && element.contains(focused) ? focused : null;
  element.replaceChildren(...nodes(children));
  if (!replaced) return;
  const candidates = [...element.querySelectorAll(replaced.tagName)];
  const replacement = candidates.find((candidate) => key(candidate) === key(replaced));
  replacement?.focus({ preventScroll: true });
}

const key = (element) =>
  element.id || element.getAttribute("href") || element.getAttribute("aria-label") || element.textContent;

let counter = 0;

/** Returns an id that no other element has. */
export const uniqueId = (prefix) => `${prefix}-${++counter}`;

/** Builds a labelled control, with the label above the control. */
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

/** Builds a <select>. @param {[string, string][]} options value and label */
export function select(options, value, onchange, attributes = {}) {
  return h(
    "select",
    { ...attributes, onchange: (event) => onchange(event.target.value) },
    options.map(([option, label]) => h("option", { value: option, selected: option === value }, label)),
  );
}

/**
 * Asks for confirmation. Resolves to whether the reader confirmed; leaving the page, which aborts
 * `signal`, counts as no.
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
