/**
 * Texts of nodes for people: in a box, in a line, and as a screen reader says them.
 *
 * A model's text is hostile: nothing here makes HTML of it.
 */

import { mainTier } from "../tiers.js";

const CONTROLS =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** A text in one line, with what cannot be seen made visible: no control character can change how the rest is shown. */
export function toOneLine(text) {
  return text.replace(/\r?\n/g, "⏎").replace(/\t/g, " ").replace(CONTROLS, "▯").replace(/ {2,}/g, " ");
}

/** The marks of chat templates (`<|im_start|>`) made short, so that a label begins with what was said. */
export function toLabel(text) {
  return toOneLine(text)
    .replace(/<\|im_start\|>(\w+)⏎?/g, "$1: ")
    .replace(/<\|im_end\|>⏎?/g, "\u00a0· ")
    .trim();
}

const ROLES = { system: "System", user: "User", assistant: "Answer", tool: "Tool" };

/** The name of a role as it stands before what was said; "" for text of no chat. */
export function nameRole(role) {
  return ROLES[role] ?? "";
}

/** The label of a span: who says what, and of a long one how many tokens it has. */
export function labelSpan({ start, end, role, text, isGap, isContinued }, isLong) {
  const tokens = `${formatCount(end - start)} tokens`;
  if (isGap) return `… ${tokens} …`;
  const said = toOneLine(text.trim());
  if (isContinued && said) return `… ${said}`;
  const name = [nameRole(role), isLong && tokens].filter(Boolean).join(", ");
  return [name, said].filter(Boolean).join(": ");
}

/** How a node is said: "tokens 31 to 64, 'When do you open?', device, 3 uses, kept". */
export function describeNode(node) {
  const parts = [`tokens ${node.start} to ${node.end}`, `'${shorten(toLabel(node.text), 80)}'`, nameTier(node)];
  parts.push(node.hits === 1 ? "1 use" : `${node.hits} uses`);
  if (node.kept.length) parts.push("kept");
  else if (node.points.length)
    parts.push(`${node.points.length} restore ${node.points.length === 1 ? "point" : "points"}`);
  return parts.join(", ");
}

/** The tier in words. */
export function nameTier(node) {
  const tier = mainTier(node);
  return tier === null ? "holds nothing" : tier === "lane" ? "in a lane" : tier;
}

export function shorten(text, most) {
  const characters = [...text.slice(0, 2 * most + 2)];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

/** A number with separators of thousands. */
export function formatCount(number) {
  return number.toLocaleString("en");
}

/** Seconds as people read them, such as "88 ms", "2.3 s", "4 min". */
export function formatSeconds(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129_600 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

/** How long ago a time of day was. */
export function formatAgo(time_s, now_s) {
  const seconds = now_s - time_s;
  return seconds < 2 ? "now" : `${seconds < 100 ? `${Math.round(seconds)} s` : formatSeconds(seconds)} ago`;
}

/** Breaks texts into lines of a width by a table of character widths: exact enough for labels, and fast. */
export class TextFitter {
  /** `measure(text)` gives a width in pixels, `em` that of the widest letters. */
  constructor(measure, em) {
    this._widths = new Float32Array(256);
    for (let code = 32; code < 256; code += 1) this._widths[code] = measure(String.fromCharCode(code));
    this._em = em;
    this._ellipsis = measure("…");
  }

  /** The lines of a text that fit into a width and a number of lines, broken at spaces; the last may end in "…". */
  fit(text, width, mostLines) {
    const lines = [];
    let start = 0;
    while (start < text.length && lines.length < mostLines) {
      const isLast = lines.length === mostLines - 1;
      let end = this._lineEnd(text, start, width, isLast);
      const isCut = isLast && end < text.length;
      if (isCut) end = this._lineEnd(text, start, width - this._ellipsis, true);
      if (end === start) return lines;
      lines.push(text.slice(start, end).trimEnd() + (isCut ? "…" : ""));
      start = end;
      while (text[start] === " ") start += 1;
    }
    return lines;
  }

  _lineEnd(text, start, width, isLast) {
    let used = 0;
    let space = -1;
    for (let at = start; at < text.length; at += 1) {
      const code = text.charCodeAt(at);
      used += code < 256 ? this._widths[code] : this._em;
      if (used > width) return !isLast && space > start ? space : at;
      if (code === 32) space = at;
    }
    return text.length;
  }
}
