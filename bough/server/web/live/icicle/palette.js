/** The colours of the page for a canvas: one for each role, and a texture for what is not in the fastest memory. */

const ROLES = ["system", "user", "assistant", "tool"];

/** Read from the CSS variables of an element; read again when the theme changes. */
export class Palette {
  constructor(element) {
    const style = getComputedStyle(element);
    const read = (name) => style.getPropertyValue(name).trim();
    this.text = read("--text");
    this.muted = read("--muted");
    this.accent = read("--accent");
    this.font = style.fontFamily;
    this.surface = read("--surface");
    this.lane = read("--tier-lane");
    this.roles = Object.fromEntries(ROLES.map((role) => [role, read(`--role-${role}`)]));
    this.isDark = isDark(read("--surface"));
    this._patterns = new Map();
  }

  /** How strong a box is filled. */
  get fillAlpha() {
    return this.isDark ? 0.42 : 0.26;
  }

  colourOf(role) {
    return this.roles[role] ?? this.muted;
  }

  /** The texture over boxes of a tier; null for those that are plain. */
  patternOf(tier, context) {
    if (tier !== "host" && tier !== "disk") return null;
    if (!this._patterns.has(tier)) this._patterns.set(tier, context.createPattern(this._drawTile(tier), "repeat"));
    return this._patterns.get(tier);
  }

  _drawTile(tier) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const context = tile.getContext("2d");
    context.fillStyle = context.strokeStyle = this.text;
    if (tier === "disk") {
      context.fillRect(1, 1, 1.5, 1.5);
      context.fillRect(4, 4, 1.5, 1.5);
    } else {
      context.beginPath();
      for (const shift of [-6, 0, 6]) {
        context.moveTo(shift, 6);
        context.lineTo(shift + 6, 0);
      }
      context.stroke();
    }
    return tile;
  }
}

/** Whether a colour as CSS writes it (#rrggbb, rgb()) is a dark one. */
export function isDark(colour) {
  const hex = /^#([0-9a-f]{6})$/i.exec(expandHex(colour));
  const parts = hex
    ? [0, 2, 4].map((at) => parseInt(hex[1].slice(at, at + 2), 16))
    : (colour.match(/[\d.]+/g) ?? []).map(Number);
  const [red, green, blue] = parts.length >= 3 ? parts : [255, 255, 255];
  return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
}

function expandHex(colour) {
  return /^#[0-9a-f]{3}$/i.test(colour) ? `#${[...colour.slice(1)].map((digit) => digit + digit).join("")}` : colour;
}
