/** The key that the server may ask for: requests wait until the user has given one. */

import { forgetKey, readKey, request, requestJson, writeKey } from "../server/http.js";

export class Access {
  constructor() {
    this.isAsking = false;
    this.problem = "";
    this.numGiven = 0; // keys that the server took
    this._listeners = new Set();
    this._waiting = [];
  }

  get hasKey() {
    return Boolean(readKey());
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** Send a request; if the server wants a key, ask the user and send it again. Throws as `request` does. */
  async request(path, options) {
    return this._repeat(() => request(path, options));
  }

  /** The same for a request that is answered by JSON. */
  async requestJson(path, options) {
    return this._repeat(() => requestJson(path, options));
  }

  /** Ask for a key. Resolves when one was given, to false if the user wants to give none. */
  ask() {
    this._set({ isAsking: true });
    return new Promise((resolve) => this._waiting.push(resolve));
  }

  /** Try a key, and go on with it if the server takes it. Else `problem` says why not. */
  async give(key, isKept) {
    writeKey(key, { isKept });
    try {
      await request("/api/version");
    } catch (error) {
      forgetKey();
      this._set({
        problem: error.needsKey ? "The server does not know this key." : `That did not work: ${error.message}.`,
      });
      return;
    }
    this._end(true);
  }

  /** Go on without a key: what waits for one fails. */
  dismiss() {
    this._end(false);
  }

  logOut() {
    forgetKey();
    this._set({ problem: "" });
  }

  async _repeat(send) {
    while (true) {
      try {
        return await send();
      } catch (error) {
        if (!error.needsKey || !(await this.ask())) throw error;
      }
    }
  }

  _end(isGiven) {
    const waiting = this._waiting;
    this._waiting = [];
    this._set({ isAsking: false, problem: "", numGiven: this.numGiven + (isGiven ? 1 : 0) });
    for (const resolve of waiting) resolve(isGiven);
  }

  _set(fields) {
    Object.assign(this, fields);
    for (const listener of this._listeners) listener();
  }
}
