/** The models of the server: those that are here, those that are loaded, and downloads under way. */

import { readLines } from "../server/http.js";

/** A name without the tag that every name has. */
export function plainName(name) {
  return name.replace(/:latest$/, "");
}

export class Models {
  constructor(access, live) {
    this.list = []; // {name, target (of an alias, else ""), bytes, loadedBytes (null: not loaded), parameters, quantization}
    this.catalogue = []; // what can be downloaded by a short name, as /api/catalogue has it
    this.memoryBytes = 0; // of the server's machine
    this.pulls = new Map(); // name → {status, total, completed, problem, abort}
    this.problem = "";
    this._access = access;
    this._live = live;
    this._details = new Map();
    this._listeners = new Set();
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** The model that a conversation asks: its own, else the server's default, else the first. "" if nothing is known yet. */
  nameFor(conversation) {
    if (conversation?.model) return conversation.model;
    return plainName(this._live.defaultModel ?? "") || (this.list[0]?.name ?? "");
  }

  /**
   * What is known of a model; undefined until it is: `capabilities`, such as "tools", `contextTokens`, and `defaults`, the
   * options that it has if none are given, by name.
   */
  detailsOf(name) {
    if (name && !this._details.has(name)) this._readDetails(name);
    return this._details.get(name);
  }

  /** How many tokens a model can read, as it is loaded; null until it is known. */
  contextOf(name) {
    const loaded = this._live.models.find((each) => each.model === name);
    return loaded?.context_tokens ?? this.detailsOf(name)?.contextTokens ?? null;
  }

  async refresh() {
    try {
      const [tags, running] = await Promise.all([
        this._access.requestJson("/api/tags"),
        this._access.requestJson("/api/ps"),
      ]);
      const loaded = new Map(
        running.models.flatMap((each) => [each.name, ...each.aliases].map((name) => [name, each.size])),
      );
      this.list = tags.models.map(({ name, size, details }) => ({
        name: plainName(name),
        target: plainName(details.parent_model),
        bytes: size,
        loadedBytes: loaded.get(name) ?? null,
        parameters: details.parameter_size,
        quantization: details.quantization_level,
      }));
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
    this._tell();
  }

  /** Read what can be downloaded by a short name. */
  async readCatalogue() {
    try {
      const { memory_bytes, models } = await this._access.requestJson("/api/catalogue");
      Object.assign(this, { catalogue: models, memoryBytes: memory_bytes });
    } catch (error) {
      this.problem = error.message;
    }
    this._tell();
  }

  load(name) {
    return this._do("/api/chat", { body: { model: name, messages: [] } });
  }

  unload(name) {
    return this._do("/api/chat", { body: { model: name, messages: [], keep_alive: 0 } });
  }

  remove(name) {
    this._details.delete(name);
    return this._do("/api/delete", { method: "DELETE", body: { model: name } });
  }

  /** Download a model; `pulls` tells how far it is. A download that was cancelled goes on from there another time. */
  async pull(name) {
    if (this.pulls.has(name) && !this.pulls.get(name).problem) return;
    const abort = new AbortController();
    this._setPull(name, { status: "asking the server", total: 0, completed: 0, problem: "", abort });
    try {
      const response = await this._access.request("/api/pull", { body: { model: name }, signal: abort.signal });
      for await (const { status, total = 0, completed = 0 } of readLines(response))
        this._setPull(name, { status, total, completed });
      this.pulls.delete(name);
      await this.refresh();
    } catch (error) {
      if (error.name === "AbortError") this.pulls.delete(name);
      else this._setPull(name, { problem: error.message });
    }
    this._tell();
  }

  cancelPull(name) {
    this.pulls.get(name)?.abort.abort();
    this.pulls.delete(name);
    this._tell();
  }

  /** Do something, and then look again. What fails is told as `problem`. */
  async _do(path, options) {
    let problem = "";
    try {
      await this._access.request(path, options);
    } catch (error) {
      problem = error.message;
    }
    await this.refresh();
    if (problem) this.problem = problem;
    this._tell();
  }

  async _readDetails(name) {
    this._details.set(name, undefined);
    try {
      const shown = await this._access.requestJson("/api/show", { body: { model: name } });
      const contextTokens = shown.model_info[`${shown.details.family}.context_length`] ?? null;
      this._details.set(name, {
        capabilities: shown.capabilities,
        contextTokens,
        defaults: readDefaults(shown.parameters),
      });
      this._tell();
    } catch {
      this._details.delete(name); // it is asked again when somebody looks again
    }
  }

  _setPull(name, fields) {
    this.pulls.set(name, { ...this.pulls.get(name), ...fields });
    this._tell();
  }

  _tell() {
    for (const listener of this._listeners) listener();
  }
}

/** The lines of a model's parameters ("temperature   0.2") by name. */
export function readDefaults(parameters) {
  return Object.fromEntries(parameters.split("\n").map((line) => /^(\S+)\s+(.*)$/.exec(line)?.slice(1) ?? ["", ""]));
}
