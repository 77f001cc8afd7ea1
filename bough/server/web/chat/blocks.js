/**
 * Splits the markdown of an answer that grows into blocks, so that only the last one has to be rendered again.
 *
 * Blocks are those at the top level: paragraphs, lists, tables, code. A block is closed when another one has begun after it on
 * a whole line; what is closed never changes.
 */

import MarkdownIt from "../vendor/markdown-it.js";

const CHECKED_CHARACTERS = 64;

export class BlockSplitter {
  constructor() {
    this._parser = new MarkdownIt({ html: false });
    this._clear();
  }

  /** The texts of the blocks: all but the last are closed. The cost is that of the last block and of what is new. */
  update(text) {
    if (text.length < this._offset || !text.startsWith(this._closedEnd, this._offset - this._closedEnd.length))
      this._clear();
    const tail = text.slice(this._offset);
    const lines = tail.slice(0, tail.lastIndexOf("\n") + 1);
    const starts = this._findStarts(lines);
    for (let number = 0; number + 1 < starts.length; number++)
      this.closed.push(tail.slice(starts[number], starts[number + 1]));
    if (starts.length > 1) {
      this._offset += starts.at(-1);
      this._closedEnd = text.slice(Math.max(0, this._offset - CHECKED_CHARACTERS), this._offset);
    }
    return [...this.closed, text.slice(this._offset)];
  }

  _clear() {
    this.closed = [];
    this._offset = 0;
    this._closedEnd = "";
  }

  /** Where the blocks of whole lines begin, in characters. The first begins at 0. */
  _findStarts(lines) {
    const tokens = [];
    this._parser.block.parse(lines, this._parser, {}, tokens);
    const numbers = tokens
      .filter((token) => token.level === 0 && token.nesting >= 0 && token.map)
      .map((token) => token.map[0]);
    const starts = [];
    let line = 0;
    let at = 0;
    for (const number of numbers) {
      for (; line < number; line++) at = lines.indexOf("\n", at) + 1;
      starts.push(at);
    }
    return starts.length ? [0, ...starts.slice(1)] : [];
  }
}
