// What is wrong with the page for those who do not see it, or see it less well. Run in the page.
(() => {
  const wrong = [];
  const say = (rule, element) => wrong.push(`${rule}: ${element.outerHTML.slice(0, 160)}`);
  const shown = (element) => element.checkVisibility({ visibilityProperty: true });
  const all = (selector) => [...document.querySelectorAll(selector)].filter(shown);
  const named = (element) =>
    element.getAttribute("aria-label") || element.getAttribute("aria-labelledby") || element.textContent.trim();

  for (const each of all("input, select, textarea")) {
    if (!each.labels.length && !each.getAttribute("aria-label")) say("no label", each);
  }
  for (const each of all("button, a, [role=region], [role=slider], nav, dialog, section")) {
    if (!named(each)) say("no name", each);
  }
  for (const each of all("svg, img")) {
    if (!each.closest("[aria-hidden=true]") && !each.getAttribute("aria-label")) say("no name", each);
  }
  for (const each of all("table")) if (!each.caption) say("no caption", each);
  for (const each of all("[tabindex]")) if (each.tabIndex > 0) say("tabindex", each);
  for (const each of all(".scroll")) if (each.tabIndex !== 0) say("not scrollable by keyboard", each);
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  for (const id of new Set(ids)) if (ids.filter((each) => each === id).length > 1) wrong.push(`twice: ${id}`);
  for (const tag of ["main", "header", "h1"]) {
    if (all(tag).length !== 1) wrong.push(`${all(tag).length} of ${tag}`);
  }
  let level = 0;
  for (const heading of all("h1, h2, h3, h4")) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1) say("a heading level is left out", heading);
    level = own;
  }

  // Contrast of text (WCAG AA), each pair of colours once. A canvas reads any notation of a colour.
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const over = (colors) => {
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
    if (!walker.currentNode.data.trim() || !shown(element)) continue;
    if (element.closest(":disabled, .unseen, .skip, option")) continue;
    const behind = [];
    for (let each = element; each; each = each.parentElement) behind.unshift(getComputedStyle(each).backgroundColor);
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    pairs.set(`${ink} on ${behind.join()}`, [ink, behind, element]);
  }
  for (const [ink, behind, element] of pairs.values()) {
    const [a, b] = [luminance(over([...behind, ink])), luminance(over(behind))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) say(`contrast ${contrast.toFixed(2)}`, element);
  }
  return wrong;
})();
