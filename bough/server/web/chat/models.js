/** The models of the server: those that are here, those that are loaded, and downloads under way. */

import { readLines } from "../server/http.js";

/** A name without the tag that every name has. */
export function plainName(name) {
  return name.replace(/:latest$/, "");
}

export class Models {
  constructor(access, live) {
    this.list = []; // {name, bytes, loadedBytes (null: not loaded), parameters, quantization}
    this.pulls = new Map(); // name → {status, total, completed, problem, abort}
    this.problem = "";
    this._access = access;
    this._live = live;
    this._capabilities = new Map();
    this._listeners = new Set();
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** The model that a conversation asks: its own, else the server's default, else the first. "" if nothing is known yet. */
  nameFor(conversation) {
    if (conversation?.model) return conversation.model;
    return (
      this._live.models?.find((each) => each.is_default)?.model ??
      this._live.models?.[0]?.model ??
      this.list[0]?.name ??
      ""
    );
  }

  /** What a model can do, such as "tools" and "thinking"; undefined until it is known. */
  capabilitiesOf(name) {
    if (name && !this._capabilities.has(name)) this._readCapabilities(name);
    return this._capabilities.get(name);
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

  load(name) {
    return this._do("/api/chat", { body: { model: name, messages: [] } });
  }

  unload(name) {
    return this._do("/api/chat", { body: { model: name, messages: [], keep_alive: 0 } });
  }

  remove(name) {
    this._capabilities.delete(name);
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

  async _readCapabilities(name) {
    this._capabilities.set(name, undefined);
    try {
      const { capabilities } = await this._access.requestJson("/api/show", { body: { model: name } });
      this._capabilities.set(name, capabilities);
      this._tell();
    } catch {
      this._capabilities.delete(name); // it is asked again when somebody looks again
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
