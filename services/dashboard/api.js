// Calls to the buffer service: each carries the token, a repeated GET the ETag of its last answer.

const TOKEN_KEY = "bapo-token";
const MAX_CACHED = 60;
const TIMEOUT_MS = 30_000;

/** An answer that is not a success. `status` is 0 if the service did not answer. */
export class Problem extends Error {
  constructor(status, title, detail, retryAfter = 0) {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.retryAfter = retryAfter;
  }

  /** Whether the same call may succeed later. */
  get transient() {
    return [0, 429, 502, 503, 504].includes(this.status);
  }
}

// Session storage is for this tab only: a token must not outlive the visit.
export const token = () => sessionStorage.getItem(TOKEN_KEY) ?? "";
export const setToken = (value) => sessionStorage.setItem(TOKEN_KEY, value);
export function forgetToken() {
  sessionStorage.removeItem(TOKEN_KEY);
  answers.clear();
  for (const url of images.values()) URL.revokeObjectURL(url);
  images.clear();
}

/** The last answers by URL: {tag, data}. Unchanged data is returned as the same object. */
const answers = new Map();

/**
 * @param {string} path below /v1
 * @param {Record<string, any>} query null, undefined and empty values are left out; a list is repeated
 */
export async function get(path, query = {}, signal = undefined) {
  const url = address(path, query);
  const cached = answers.get(url);
  const response = await send(url, { signal, headers: cached ? { "If-None-Match": cached.tag } : {} });
  if (response.status === 304) return cached.data;
  const data = await body(response);
  const tag = response.headers.get("etag");
  if (tag) remember(url, { tag, data });
  return data;
}

export async function post(path, value = undefined) {
  const sent = value && {
    body: JSON.stringify(value),
    headers: { "Content-Type": "application/json" },
  };
  return body(await send(address(path, {}), { method: "POST", ...sent }));
}

/** The images shown last, by digest: the address of a copy in memory. */
const images = new Map();

/** Returns an address for <img>, whose own requests would not carry the token. */
export async function imageAddress(digest, signal = undefined) {
  if (!images.has(digest)) {
    const response = await send(address(path`/images/${digest}`, {}), { signal });
    images.set(digest, URL.createObjectURL(await answeredOrProblem(response.blob())));
    if (images.size > MAX_CACHED) {
      const [oldest, url] = images.entries().next().value;
      URL.revokeObjectURL(url);
      images.delete(oldest);
    }
  }
  return images.get(digest);
}

function address(path, query) {
  // Relative to this file: the address of the page may or may not end with a slash.
  const url = new URL(`../v1${path}`, import.meta.url);
  for (const [name, value] of Object.entries(query)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") url.searchParams.append(name, String(item));
    }
  }
  return url.href;
}

function remember(url, answer) {
  answers.delete(url);
  answers.set(url, answer);
  if (answers.size > MAX_CACHED) answers.delete(answers.keys().next().value);
}

async function send(url, options) {
  const headers = { Accept: "application/json", Authorization: `Bearer ${token()}`, ...options.headers };
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  const signal = options.signal ? AbortSignal.any([options.signal, timeout]) : timeout;
  const response = await answeredOrProblem(fetch(url, { ...options, headers, signal }));
  if (response.ok || response.status === 304) return response;
  throw await problem(response);
}

/** The JSON of an answer. */
const body = (response) => answeredOrProblem(response.json());

/** Turns a missing or incomplete answer into a Problem; an aborted visit stays an AbortError. */
async function answeredOrProblem(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "No answer", "the service does not answer");
  }
}

async function problem(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  try {
    const body = await response.json();
    return new Problem(response.status, body.title ?? response.statusText, body.detail ?? "", retryAfter);
  } catch {
    return new Problem(
      response.status,
      response.statusText,
      `the service answered ${response.status}`,
      retryAfter,
    );
  }
}

/** Encodes the values in a path, which may contain any character: path`/runs/${name}` */
export const path = (parts, ...values) =>
  parts.reduce((joined, part, i) => joined + encodeURIComponent(String(values[i - 1])) + part);
