// Asks the gateway. The key stays in this tab: sessionStorage, and the Authorization header.

const KEY = "catenary-key";
const TIMEOUT_MS = 6000;

/** What went wrong: `status` is the HTTP status, 0 if the gateway did not answer at all. */
export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** What this tab keeps under a name until it is closed; empty if it keeps nothing. */
export function stored(name) {
  try {
    return sessionStorage.getItem(name) || "";
  } catch {
    return "";
  }
}

export function store(name, value) {
  try {
    if (value) sessionStorage.setItem(name, value);
    else sessionStorage.removeItem(name);
  } catch {
    // A browser without storage forgets it with the page.
  }
}

export const storedKey = () => stored(KEY);
export const storeKey = (key) => store(KEY, key);

/** Returns {value, ageMs} of one kind of answer; throws a Problem. */
export async function ask(kind, query = {}) {
  const parameters = new URLSearchParams(query).toString();
  const url = `dashboard/v1/${kind}${parameters ? `?${parameters}` : ""}`;
  const key = storedKey();
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), TIMEOUT_MS);
  try {
    const response = await fetch(url, {
      headers: key ? { Authorization: `Bearer ${key}` } : {},
      signal: stop.signal,
      cache: "no-store",
      credentials: "omit",
    });
    if (!response.ok) throw await problemOf(response);
    const text = await response.text();
    return { value: JSON.parse(text), ageMs: Number(response.headers.get("Catenary-Age-Ms")) || 0 };
  } catch (error) {
    if (error instanceof Problem) throw error;
    throw new Problem(0, "the gateway does not answer");
  } finally {
    clearTimeout(timer);
  }
}

/**
 * Sends what is no question of the dashboard, with the key given; returns the response, or throws
 * a Problem, or an AbortError if `signal` says so.
 */
export async function send(url, { key = "", method = "POST", headers = {}, body, signal } = {}) {
  let response;
  try {
    response = await fetch(url, {
      method,
      headers: key ? { ...headers, Authorization: `Bearer ${key}` } : headers,
      body,
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the gateway does not answer");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const text = await response.text().catch(() => "");
  return new Problem(response.status, messageOf(text, response.status));
}

function messageOf(text, status) {
  try {
    const { error } = JSON.parse(text);
    const said = error && error.message ? error.message : error; // OpenAI's form, or ours
    if (typeof said === "string" && said) return said;
  } catch {
    // Not ours: a proxy between us and the gateway.
  }
  return `the gateway answered with status ${status}`;
}
