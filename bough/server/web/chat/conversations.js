/**
 * All conversations of this browser, in memory and stored. They are saved as they change.
 *
 * Conversations are immutable: who keeps one keeps it as it was. `version` grows with each change of any of them.
 */

import { mergeArchive } from "./archive.js";
import { addFrom, createConversation, merge, stopOrphans } from "./conversation.js";
import { Storage } from "./storage.js";

const SAVE_AFTER_MS = 400;

export class Conversations {
  constructor(now = Date.now) {
    this.version = 0;
    this.problem = null;
    this.isLoaded = false;
    this._now = now;
    this._byId = new Map();
    this._sorted = null;
    this._listeners = new Set();
    this._unsaved = new Set();
    this._removed = new Set();
    this._timer = null;
    this._storage = new Storage((id) => this._reload(id));
    addEventListener("pagehide", () => this.save());
  }

  /** The id of this tab, which owns the answers that it reads. */
  get tab() {
    return this._storage.tab;
  }

  /** All of them, the newest first. */
  get list() {
    this._sorted ??= [...this._byId.values()].sort((a, b) => b.created - a.created);
    return this._sorted;
  }

  get(id) {
    return this._byId.get(id);
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** Read what is stored. Answers of tabs that are gone are marked as stopped. */
  async load() {
    try {
      await this._storage.open();
      const { conversations, problems } = await this._storage.readAll();
      for (const each of conversations) this._put(this._byId.has(each.id) ? merge(this.get(each.id), each) : each);
      if (problems.length) this.problem = `${problems.length} stored conversations cannot be read: ${problems[0]}`;
      this.isLoaded = true;
    } catch (error) {
      this.problem = `Conversations are not kept: this browser's storage cannot be used (${error.message})`;
      this._storage = null;
    }
    this._tell();
    if (this.isLoaded) await this._stopOrphans();
  }

  /** A new one. It is stored when it has a message. */
  create(fields) {
    const conversation = createConversation({ now: this._now(), ...fields });
    this._put(conversation);
    this._tell();
    return conversation;
  }

  /** Replace a conversation by `change(conversation, now)`. Nothing happens if it was removed. */
  change(id, change) {
    const known = this.get(id);
    if (!known) return;
    const changed = change(known, this._now());
    if (changed === known) return;
    this._put(changed);
    this._saveSoon(id);
    this._tell();
  }

  /** Remove one. Returns a function that brings it back. */
  remove(id) {
    const removed = this.get(id);
    this._byId.delete(id);
    this._sorted = null;
    this._unsaved.delete(id);
    this._removed.add(id);
    this._note(this._storage?.remove(id));
    this._tell();
    return () => this._restore(removed);
  }

  /** Add what an archive has. What is here stays. Returns how many conversations came. */
  import(conversations) {
    for (const each of mergeArchive(this.list, conversations)) {
      this._removed.delete(each.id);
      this._put(each);
      this._saveSoon(each.id);
    }
    this._tell();
    return conversations.length;
  }

  /** Save all that is not saved, now. */
  save() {
    clearTimeout(this._timer);
    this._timer = null;
    const ids = [...this._unsaved];
    this._unsaved.clear();
    if (this._storage && this.isLoaded) for (const id of ids) this._note(this._storage.save(this.get(id)));
  }

  _restore(conversation) {
    this._removed.delete(conversation.id);
    const known = this.get(conversation.id);
    this._put(known ? addFrom(known, conversation) : conversation);
    this._saveSoon(conversation.id);
    this._tell();
  }

  async _stopOrphans() {
    if (!this.list.some((each) => each.messages.some((message) => message.state === "answering"))) return;
    const tabs = await this._storage.findTabs();
    for (const { id } of this.list) this.change(id, (each, now) => stopOrphans(each, (tab) => tabs.has(tab), now));
  }

  async _reload(id) {
    if (!this.isLoaded) return;
    const stored = await this._storage.read(id);
    const known = this.get(id);
    if (stored) {
      if (!this._removed.has(id)) this._put(known ? keepActive(merge(known, stored), known) : stored);
    } else if (known?.messages.length && !this._unsaved.has(id)) {
      this._byId.delete(id);
      this._sorted = null;
    }
    this._tell();
  }

  _put(conversation) {
    this._byId.set(conversation.id, conversation);
    this._sorted = null;
  }

  _saveSoon(id) {
    if (this.get(id).messages.length) this._unsaved.add(id);
    this._timer ??= setTimeout(() => this.save(), SAVE_AFTER_MS);
  }

  _note(saving) {
    saving?.catch((error) => {
      this.problem = `A conversation could not be saved: ${error.message}`;
      this._tell();
    });
  }

  _tell() {
    this.version++;
    for (const listener of this._listeners) listener();
  }
}

/** Another tab's change does not switch the branch that is shown here, if that still is an end. */
function keepActive(merged, known) {
  const isEnd =
    merged.messages.some((each) => each.id === known.active) &&
    !merged.messages.some((each) => each.parent === known.active);
  return isEnd ? { ...merged, active: known.active, compared: known.compared } : merged;
}
