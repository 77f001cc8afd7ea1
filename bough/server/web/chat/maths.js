/**
 * Maths in markdown: `$…$`, `$$…$$`, `\(…\)` and `\[…\]` in LaTeX become MathML, which browsers draw themselves.
 *
 * The library for it is fetched with the first formula; until then the source is shown.
 */

const LIBRARY = "/web/vendor/temml.js";
const MOST_CHARACTERS = 4000;
const FORMS = [
  { open: "$$", close: "$$", isBlock: true },
  { open: "\\[", close: "\\]", isBlock: true },
  { open: "\\(", close: "\\)", isBlock: false },
  { open: "$", close: "$", isBlock: false },
];

/** The tags and attributes of MathML that formulas need. */
export const MATH_TAGS =
  "math semantics mrow mi mn mo ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mmultiscripts mprescripts mtable mtr mtd mpadded mphantom menclose mstyle".split(
    " ",
  );
export const MATH_ATTRIBUTES =
  "display displaystyle scriptlevel mathvariant stretchy fence separator form lspace rspace largeop movablelimits symmetric minsize maxsize accent accentunder linethickness width height depth voffset notation columnalign columnspacing columnspan rowspacing rowspan".split(
    " ",
  );

/** Teach a parser (markdown-it) the formulas; `render(source, isBlock)` gives their HTML. */
export function addMaths(markdown, render) {
  markdown.inline.ruler.before("escape", "maths", readFormula);
  markdown.renderer.rules.maths = (tokens, at) => render(tokens[at].content, tokens[at].block);
}

/** A rule of markdown-it: read one formula at the current position. */
function readFormula(state, isSilent) {
  const found = findFormula(state.src, state.pos);
  if (!found) return false;
  if (!isSilent) {
    const token = state.push("maths", "math", 0);
    token.content = found.source;
    token.block = found.isBlock;
  }
  state.pos = found.end;
  return true;
}

/** The formula that begins at a position: {source, isBlock, end}; null if there is none. */
export function findFormula(text, at) {
  const form = FORMS.find(({ open }) => text.startsWith(open, at));
  if (!form) return null;
  const start = at + form.open.length;
  const end = findClose(text, start, form.close);
  const source = text.slice(start, end);
  if (end < 0 || !source.trim() || source.length > MOST_CHARACTERS) return null;
  if (form.open === "$" && !isDollarFormula(source, text[end + 1])) return null;
  return { source, isBlock: form.isBlock, end: end + form.close.length };
}

/** Dollars are also prices: a formula touches its dollars, and no digit follows it. */
function isDollarFormula(source, after = "") {
  return !/^\s|\s$/.test(source) && !/\d/.test(after);
}

function findClose(text, start, close) {
  for (let at = text.indexOf(close, start); at >= 0; at = text.indexOf(close, at + 1)) {
    if (text[at - 1] !== "\\" || close.startsWith("\\")) return at;
  }
  return -1;
}

/** The MathML of a formula, without styles; null until the library is there. A wrong formula is shown as it is written. */
export function renderFormula(source, isBlock) {
  const options = { displayMode: isBlock, throwOnError: false, trust: false };
  return globalThis.temml?.renderToString(source, options).replace(/ style="[^"]*"/g, "") ?? null;
}

let loading = null;

/** Fetch the library, once. */
export function loadMaths() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = LIBRARY;
    script.onload = resolve;
    script.onerror = () => reject(new Error("the library for maths cannot be loaded"));
    document.head.append(script);
  });
  return loading;
}
