/** What is told to the user beside the conversation: states for screen readers, and notes that may be undone. */

const NOTE_MS = 10_000;

export class Notices {
  constructor() {
    this.announced = ""; // for screen readers
    this.note = null; // {text, undo}
    this._timer = null;
    this._listeners = new Set();
  }

  subscribe(listener) {
    this._listeners.add(listener);
    return () => this._listeners.delete(listener);
  }

  /** Tell a state to who cannot see it. */
  announce(text) {
    this.announced = text;
    this._tell();
  }

  /** Show a note for a while. With `undo`, a function, it has a button that calls it. */
  say(text, undo = null) {
    this._setNote({ text, undo });
    this._timer = setTimeout(() => this.dismiss(), NOTE_MS);
  }

  /** Undo what the note tells. */
  undo() {
    const { undo } = this.note;
    this.dismiss();
    undo();
  }

  dismiss() {
    this._setNote(null);
  }

  _setNote(note) {
    clearTimeout(this._timer);
    this.note = note;
    this._tell();
  }

  _tell() {
    for (const listener of this._listeners) listener();
  }
}
