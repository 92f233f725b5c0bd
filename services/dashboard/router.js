// Addresses such as #/runs/countdown/prompts?bin=0, which hold everything that a page shows.

/** @returns {{path: string[], query: Record<string, string>}} */
export function current() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return {
    path: path.split("/").filter(Boolean).map(decoded),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

/** Decodes %-escapes; returns the segment unchanged if they are invalid. */
export function decoded(segment) {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}

/** @param {string[]} path @param {Record<string, any>} query empty values are left out */
export function href(path, query = {}) {
  const kept = Object.entries(query).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const tail = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.map((segment) => encodeURIComponent(segment)).join("/")}${tail ? `?${tail}` : ""}`;
}

/** Changes part of the query in the address without leaving the page (and without `hashchange`). */
export function setQuery(changes) {
  const { path, query } = current();
  const address = href(path, { ...query, ...changes });
  if (address !== location.hash) history.pushState(null, "", address);
}

export const go = (address) => (location.hash = address);

/** Reads a step from an address; null if it is not a whole number. */
export function whole(text) {
  return /^\d{1,15}$/.test(text ?? "") ? Number(text) : null;
}
