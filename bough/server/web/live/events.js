/**
 * The event stream of the server, mirrored: models, trees, requests and figures as they are now.
 *
 * This is the only reader of `/api/events`. When the connection is lost it reconnects; the server then tells the whole
 * state again, and what has ended meanwhile is not told at all.
 */

import { readEvents, request } from "../server/http.js";
import { History } from "./history.js";
import { TreeMirror } from "./tree_mirror.js";

const LEAST_WAIT_MS = 500;
const MOST_WAIT_MS = 10_000;
const SILENCE_MS = 25_000; // the server says something at least every 10 s
const MOST_ENDED = 300;
const MOST_ANSWERS = 1000;

const ENDS = new Set(["done", "cancelled", "failed", "lost"]);

/** Whether a request is still under way. */
export function isRunning(request) {
  return !ENDS.has(request.state);
}

/** Reads the stream from `start` to `stop`. */
export class LiveEvents {
  /** `open(signal)` gives the events, `schedule` calls a function soon, `now` is the time in seconds: for tests. */
  constructor({ open = openStream, schedule = callNextFrame, now = () => Date.now() / 1000 } = {}) {
    this.isConnected = false;
    this.problem = null;
    this.needsKey = false;
    this.scope = "all";
    this.defaultModel = null; // the name of the one that the server uses if none is named
    this.models = [];
    this.trees = new Map();
    this.requests = new Map();
    this.figures = new Map();
    this.histories = new Map(); // model → History
    this.answers = new Map(); // request id → branch, as the chat has told
    this.version = 0;
    this._open = open;
    this._schedule = schedule;
    this._now = now;
    this._listeners = new Set();
    this._isScheduled = false;
    this._abort = null;
  }

  /** Read the stream, from now on. If it is being read already, connect again at once. */
  start() {
    this.stop();
    this._abort = new AbortController();
    this._run(this._abort.signal);
  }

  stop() {
    this._abort?.abort();
    this._abort = null;
    this.isConnected = false;
  }

  /** Call a function when anything has changed, at most once a frame. Returns what ends that. */
  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** Note which branch {conversationId, messageId, title} the answer to a request belongs to. */
  noteAnswer(requestId, branch) {
    this.answers.set(requestId, branch);
    if (this.answers.size > MOST_ANSWERS) this.answers.delete(this.answers.keys().next().value);
    this._changed();
  }

  /** The history of a model for the plots; empty if nothing was told of it. */
  historyOf(model) {
    return this.histories.get(model) ?? new History();
  }

  /** Take over one event. */
  apply(event, data) {
    if (event === "hello") this._welcome(data);
    else if (event === "models") this._takeModels(data.models);
    else if (event === "tree") this._treeOf(data.model).apply(data);
    else if (event === "request") this._takeRequest(data);
    else if (event === "figures") this._takeFigures(data);
    this._changed();
  }

  async _run(signal) {
    let wait_ms = LEAST_WAIT_MS;
    while (!signal.aborted) {
      try {
        for await (const { event, data } of this._open(signal)) {
          if (signal.aborted) return;
          this.apply(event, data);
          wait_ms = LEAST_WAIT_MS;
        }
        this._disconnect("the server has ended the connection", signal);
      } catch (error) {
        this._disconnect(error.message, signal);
        if (error.needsKey) return this._askForKey(signal);
      }
      await sleep(wait_ms, signal);
      wait_ms = Math.min(2 * wait_ms, MOST_WAIT_MS);
    }
  }

  _welcome({ scope, default_model }) {
    this.scope = scope;
    this.defaultModel = default_model;
    this.isConnected = true;
    this.problem = null;
    this.needsKey = false;
    for (const [id, each] of this.requests) if (isRunning(each)) this.requests.set(id, { ...each, state: "lost" });
  }

  _disconnect(problem, signal) {
    if (signal.aborted) return;
    this.isConnected = false;
    this.problem = problem;
    this._changed();
  }

  /** Without a key there is no use in trying again; `start` is called when there is one. */
  _askForKey(signal) {
    if (signal.aborted) return;
    this.needsKey = true;
    this._changed();
  }

  _takeModels(models) {
    this.models = models;
    const names = new Set(models.map((each) => each.model));
    for (const known of [this.trees, this.figures]) {
      for (const name of known.keys()) if (!names.has(name)) known.delete(name);
    }
  }

  _takeRequest(data) {
    this.requests.delete(data.id); // the newest is the last
    this.requests.set(data.id, data);
    if (isRunning(data)) return;
    this._historyFor(data.model).addRequest(data);
    this._forgetOldest();
  }

  _forgetOldest() {
    const ended = [...this.requests.values()].filter((each) => !isRunning(each));
    for (const each of ended.slice(0, Math.max(0, ended.length - MOST_ENDED))) this.requests.delete(each.id);
  }

  _takeFigures(data) {
    this.figures.set(data.model, data);
    this._historyFor(data.model).addFigures(data, this._now());
  }

  _historyFor(model) {
    if (!this.histories.has(model)) this.histories.set(model, new History());
    return this.histories.get(model);
  }

  _treeOf(model) {
    if (!this.trees.has(model)) this.trees.set(model, new TreeMirror());
    return this.trees.get(model);
  }

  _changed() {
    this.version += 1;
    if (this._isScheduled) return;
    this._isScheduled = true;
    this._schedule(() => {
      this._isScheduled = false;
      for (const listener of [...this._listeners]) listener();
    });
  }
}

/** The events of the server. A connection on which nothing comes for too long counts as lost. */
async function* openStream(signal) {
  const abort = new AbortController();
  const end = () => abort.abort();
  signal.addEventListener("abort", end);
  let timer = setTimeout(end, SILENCE_MS);
  try {
    for await (const each of readEvents(await request("/api/events", { signal: abort.signal }))) {
      clearTimeout(timer);
      timer = setTimeout(end, SILENCE_MS);
      yield each;
    }
  } catch (error) {
    throw error.name === "AbortError" ? new Error("nothing was heard from the server for a while") : error;
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", end);
    end();
  }
}

/** Frames do not come while the page is hidden; then a timer does. */
function callNextFrame(work) {
  if (document.visibilityState === "visible") requestAnimationFrame(work);
  else setTimeout(work, 250);
}

function sleep(time_ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, time_ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
