// The buffer service: every call carries the token, every repeated GET its ETag.

const STORED = "bapo-token";
const REMEMBERED = 60;
const LONGEST_MS = 30_000;

/** An answer that is not a success. `status` is 0 when there was none at all. */
export class Problem extends Error {
  constructor(status, title, detail, retryAfter = 0) {
    super(detail || title);
    this.status = status;
    this.title = title;
    this.retryAfter = retryAfter;
  }

  /** Whether the same call may succeed later. */
  get away() {
    return [0, 429, 502, 503, 504].includes(this.status);
  }
}

// For this tab only: a token must not outlive the visit.
export const token = () => sessionStorage.getItem(STORED) ?? "";
export const setToken = (value) => sessionStorage.setItem(STORED, value);
export function forgetToken() {
  sessionStorage.removeItem(STORED);
  answers.clear();
}

/** The last answers by address: {tag, data}. The same data comes back as the same object. */
const answers = new Map();

/** @param {string} path below /v1 @param {Record<string, any>} query what is null is left out */
export async function get(path, query = {}, signal = undefined) {
  const url = address(path, query);
  const known = answers.get(url);
  const response = await send(url, { signal, headers: known ? { "If-None-Match": known.tag } : {} });
  if (response.status === 304) return known.data;
  const data = await body(response);
  const tag = response.headers.get("etag");
  if (tag) remember(url, { tag, data });
  return data;
}

export async function post(path) {
  return body(await send(address(path, {}), { method: "POST" }));
}

function address(path, query) {
  const url = new URL(`v1${path}`, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, String(value));
  }
  return url.href;
}

function remember(url, answer) {
  answers.delete(url);
  answers.set(url, answer);
  if (answers.size > REMEMBERED) answers.delete(answers.keys().next().value);
}

async function send(url, options) {
  const headers = { Accept: "application/json", Authorization: `Bearer ${token()}`, ...options.headers };
  const late = AbortSignal.timeout(LONGEST_MS);
  const signal = options.signal ? AbortSignal.any([options.signal, late]) : late;
  const response = await answered(fetch(url, { ...options, headers, signal }));
  if (response.ok || response.status === 304) return response;
  throw await problem(response);
}

/** The JSON of an answer. */
const body = (response) => answered(response.json());

/** An answer that does not come, or not whole, is a problem like any other; a visit's end is not. */
async function answered(promise) {
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

/** A path of segments that may hold any character: path`/runs/${name}` */
export const path = (parts, ...values) =>
  parts.reduce((all, part, i) => all + encodeURIComponent(String(values[i - 1])) + part);
