/** How often and how many: calls that are put off, and turns of which only so many run at a time. */

/** Calls a function a while after `soon`, once for all calls in between. A slow call makes the next ones rarer. */
export class Flush {
  constructor(call, leastMs) {
    this._call = call;
    this._leastMs = leastMs;
    this._costMs = 0;
    this._timer = null;
  }

  soon() {
    this._timer ??= setTimeout(() => this._run(), Math.max(this._leastMs, 3 * this._costMs));
  }

  cancel() {
    clearTimeout(this._timer);
    this._timer = null;
  }

  /** What the call changes is drawn after it, so its cost is known when the browser is free again. */
  _run() {
    this._timer = null;
    const began = performance.now();
    this._call();
    setTimeout(() => (this._costMs = performance.now() - began));
  }
}

/** Lets at most so many run at a time; the others wait in the order in which they came. */
export class Turns {
  constructor(most) {
    this._free = most;
    this._waiting = [];
  }

  /** Wait for a turn and run it. Throws the signal's reason if it is aborted while it waits. */
  async run(signal, work) {
    await this._begin(signal);
    try {
      return await work();
    } finally {
      this._end();
    }
  }

  async _begin(signal) {
    signal.throwIfAborted();
    if (this._free > 0) {
      this._free--;
      return;
    }
    await new Promise((resolve, reject) => {
      this._waiting.push(resolve);
      signal.addEventListener("abort", () => {
        if (!this._waiting.includes(resolve)) return;
        this._waiting = this._waiting.filter((each) => each !== resolve);
        reject(signal.reason);
      });
    });
  }

  /** The turn goes to the one that has waited longest. */
  _end() {
    const next = this._waiting.shift();
    if (next) next();
    else this._free++;
  }
}
