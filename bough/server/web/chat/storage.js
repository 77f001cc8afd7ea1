/**
 * Conversations in this browser (IndexedDB), and news of them between tabs.
 *
 * A tab that saves merges with what another tab has saved, so none of them loses messages.
 */

import { readConversation } from "./archive.js";
import { merge, newId } from "./conversation.js";

const DATABASE = "bough";
const TABLE = "conversations";
const CHANNEL = "bough.conversations";

export class Storage {
  /** `onChange(id)` is called when another tab has saved or removed a conversation. */
  constructor(onChange) {
    this.tab = newId();
    this._others = new Set();
    this._database = null;
    this._channel = new BroadcastChannel(CHANNEL);
    this._channel.onmessage = ({ data }) => this._hear(data, onChange);
  }

  /** Open the database. Throws Error if this browser keeps none, for instance in a private window. */
  async open() {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    this._database = await finish(opening);
    this._database.onversionchange = () => this._database.close();
  }

  /** All that can be read: `conversations`, and `problems` with a sentence for each that cannot. */
  async readAll() {
    const found = await finish(this._table("readonly").getAll());
    const conversations = [];
    const problems = [];
    for (const each of found) {
      try {
        conversations.push(readConversation(each, `the conversation ${each.id}`));
      } catch (error) {
        problems.push(error.message);
      }
    }
    return { conversations, problems };
  }

  /** One conversation as it is stored, or undefined. */
  async read(id) {
    const found = await finish(this._table("readonly").get(id));
    return found && readConversation(found, `the conversation ${id}`);
  }

  /** Save a conversation, merged with what is stored. Returns what has been stored. */
  async save(conversation) {
    const table = this._table("readwrite");
    const stored = await finish(table.get(conversation.id));
    const merged = stored ? { ...merge(conversation, stored), active: conversation.active } : conversation;
    await finish(table.put(merged));
    this._channel.postMessage({ changed: conversation.id });
    return merged;
  }

  async remove(id) {
    await finish(this._table("readwrite").delete(id));
    this._channel.postMessage({ changed: id });
  }

  /** The ids of the tabs that are open, this one included. */
  async findTabs() {
    this._others.clear();
    this._channel.postMessage({ asks: this.tab });
    await new Promise((resolve) => setTimeout(resolve, 400));
    return new Set([this.tab, ...this._others]);
  }

  _table(mode) {
    return this._database.transaction(TABLE, mode).objectStore(TABLE);
  }

  _hear({ changed, asks, answers }, onChange) {
    if (changed) onChange(changed);
    if (asks) this._channel.postMessage({ answers: this.tab });
    if (answers) this._others.add(answers);
  }
}

function finish(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab has an older version of this page open"));
  });
}
