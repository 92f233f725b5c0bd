// Returns the accessibility errors of the page, as texts. It is evaluated in the page.
(() => {
  const errors = [];
  const report = (rule, element) => errors.push(`${rule}: ${element.outerHTML.slice(0, 160)}`);
  const isShown = (element) => element.checkVisibility({ visibilityProperty: true });
  const all = (selector) => [...document.querySelectorAll(selector)].filter(isShown);
  const nameOf = (element) =>
    element.getAttribute("aria-label") || element.getAttribute("aria-labelledby") || element.textContent.trim();

  for (const element of all("input, select, textarea")) {
    if (!element.labels.length && !element.getAttribute("aria-label")) report("no label", element);
  }
  for (const element of all("button, a, [role=region], [role=slider], nav, dialog, section")) {
    if (!nameOf(element)) report("no name", element);
  }
  for (const element of all("svg, img")) {
    const name = element.getAttribute("aria-label") || element.getAttribute("alt");
    if (!element.closest("[aria-hidden=true]") && !name) report("no name", element);
  }
  for (const element of all("table")) if (!element.caption) report("no caption", element);
  for (const element of all("[tabindex]")) if (element.tabIndex > 0) report("tabindex", element);
  for (const element of all(".scroll")) if (element.tabIndex !== 0) report("not scrollable by keyboard", element);
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) errors.push(`twice: ${id}`);
  for (const tag of ["main", "header", "h1"]) {
    if (all(tag).length !== 1) errors.push(`${all(tag).length} of ${tag}`);
  }
  let level = 0;
  for (const heading of all("h1, h2, h3, h4")) {
    const headingLevel = Number(heading.tagName[1]);
    if (headingLevel > level + 1) report("a heading level is skipped", heading);
    level = headingLevel;
  }

  // Contrast of text (WCAG AA), once for each pair of colours. A canvas parses every notation of a colour.
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const blend = (colors) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const color of colors) {
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const luminance = (rgb) =>
    rgb
      .map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
      .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const pairs = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !isShown(element)) continue;
    if (element.closest(":disabled, .unseen, .skip, option")) continue;
    const backgrounds = [];
    for (let ancestor = element; ancestor; ancestor = ancestor.parentElement) {
      backgrounds.unshift(getComputedStyle(ancestor).backgroundColor);
    }
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    pairs.set(`${ink} on ${backgrounds.join()}`, [ink, backgrounds, element]);
  }
  for (const [ink, backgrounds, element] of pairs.values()) {
    const [a, b] = [luminance(blend([...backgrounds, ink])), luminance(blend(backgrounds))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) report(`contrast ${contrast.toFixed(2)}`, element);
  }
  return errors;
})();
