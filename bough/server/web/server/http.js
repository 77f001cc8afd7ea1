/**
 * Requests to the server that sent this page: with the user's key, and errors in the server's own words.
 *
 * The key stays in this browser (`sessionStorage`, or `localStorage` if the user wants it kept).
 */

const KEY_NAME = "bough.key";

/** A request that failed. `status` is 0 if the server could not be reached. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  /** Whether a key is missing or wrong. */
  get needsKey() {
    return this.status === 401;
  }

  /** Whether the server is away, or has no time now: the same request may succeed later. */
  get isTemporary() {
    return this.status === 0 || this.status === 429 || this.status === 503;
  }
}

export function readKey() {
  return sessionStorage.getItem(KEY_NAME) ?? localStorage.getItem(KEY_NAME);
}

export function writeKey(key, { isKept }) {
  forgetKey();
  (isKept ? localStorage : sessionStorage).setItem(KEY_NAME, key);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY_NAME);
  localStorage.removeItem(KEY_NAME);
}

/** Send a request; `body` is sent as JSON. Returns the Response, or throws ServerError (AbortError if aborted). */
export async function request(path, { method, body, signal } = {}) {
  const headers = {};
  const key = readKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method: method ?? (body === undefined ? "GET" : "POST"), headers, signal, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "the server cannot be reached");
  }
  if (!response.ok) throw new ServerError(response.status, await readErrorText(response));
  return response;
}

/** Send a request and parse its JSON. */
export async function requestJson(path, options) {
  return (await request(path, options)).json();
}

/** The JSON objects of a response with one in each line, as they come. Throws ServerError if a line has an `error`. */
export async function* readLines(response) {
  for await (const line of splitText(response, "\n")) {
    if (!line.trim()) continue;
    const value = JSON.parse(line);
    if (value.error) throw new ServerError(response.status, String(value.error));
    yield value;
  }
}

/** The server-sent events of a response, as they come: {event, data}, data parsed; comments are {event: "", data: null}. */
export async function* readEvents(response) {
  for await (const block of splitText(response, "\n\n")) {
    let event = "";
    const data = [];
    for (const line of block.split("\n")) {
      if (line.startsWith("event:")) event = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).trim());
    }
    yield data.length ? { event, data: JSON.parse(data.join("\n")) } : { event: "", data: null };
  }
}

/** The parts of a body's text between separators, as they come. The last part need not be ended by one. */
async function* splitText(response, separator) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split(separator);
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "the connection to the server was lost");
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function readErrorText(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return String(error?.message ?? error ?? text);
  } catch {
    return text.slice(0, 300) || `the server answered with ${response.status}`;
  }
}
