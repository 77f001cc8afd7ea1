/**
 * Markdown of a model as safe HTML. The text is hostile: no HTML of its own, no images, links only to http, https and mailto,
 * no style attributes; what comes out is sanitized once more.
 */

import DOMPurify from "../vendor/purify.js";
import highlighter from "../vendor/highlight.js";
import MarkdownIt from "../vendor/markdown-it.js";
import { MATH_ATTRIBUTES, MATH_TAGS, addMaths, renderFormula } from "./maths.js";

/** Longer blocks are shown as plain text: while they grow, and when they are complete. */
const MOST_GROWING = 16_000;
const MOST_COMPLETE = 200_000;
const MOST_HIGHLIGHTED = 30_000;

const MISSING = "formula-source";
const PLAIN_ATTRIBUTES = ["start", "target", "rel", "type", "tabindex", "dir"]; // their values are no addresses
const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
    ...MATH_TAGS,
  ],
  ALLOWED_ATTR: ["href", "class", ...PLAIN_ATTRIBUTES, ...MATH_ATTRIBUTES],
  ADD_URI_SAFE_ATTR: [...PLAIN_ATTRIBUTES, ...MATH_ATTRIBUTES],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

const markdown = new MarkdownIt({ html: false, linkify: true });
markdown.disable("image");
markdown.validateLink = (url) => /^(?:https?|mailto):/i.test(url.trim());
const rules = markdown.renderer.rules;
rules.link_open = (tokens, at, options, env, self) => {
  tokens[at].attrSet("target", "_blank");
  tokens[at].attrSet("rel", "noopener noreferrer");
  return self.renderToken(tokens, at, options);
};
rules.fence = rules.code_block = (tokens, at, options, env) =>
  writeCode(tokens[at].content, tokens[at].info, env.isComplete);
rules.th_open = rules.td_open = (tokens, at) => {
  const align = /text-align:(left|right|center)/.exec(tokens[at].attrGet("style") ?? "")?.[1];
  return align ? `<${tokens[at].tag} class="align-${align}">` : `<${tokens[at].tag}>`;
};
rules.table_open = () => '<div class="table-box" tabindex="0"><table>';
rules.table_close = () => "</table></div>";

addMaths(markdown, (source, isBlock) => {
  const written =
    renderFormula(source, isBlock) ?? `<code class="${MISSING}">${markdown.utils.escapeHtml(source)}</code>`;
  return isBlock ? `<span class="formula" tabindex="0">${written}</span>` : written;
});

/** Whether HTML of a block has a formula that is not drawn yet: `loadMaths` must come first. */
export function lacksMaths(html) {
  return html.includes(`class="${MISSING}"`);
}

/** The HTML of one block; null if it is so long that it should be shown as plain text. */
export function renderBlock(text, isComplete) {
  if (text.length > (isComplete ? MOST_COMPLETE : MOST_GROWING)) return null;
  return DOMPurify.sanitize(markdown.render(text, { isComplete }), ALLOWED);
}

function writeCode(text, info, isComplete) {
  const name = /^[\w+#.-]{1,30}/.exec(info.trim())?.[0] ?? "";
  const head = `<div class="code-head"><span>${markdown.utils.escapeHtml(name)}</span>${COPY_BUTTON}</div>`;
  const body = `<pre tabindex="0"><code>${writeColoured(text, name, isComplete)}</code></pre>`;
  return `<div class="code" dir="ltr">${head}${body}</div>`;
}

const COPY_BUTTON = '<button type="button" class="copy-code">Copy</button>';

function writeColoured(text, name, isComplete) {
  const isKnown = name && highlighter.getLanguage(name);
  if (!isComplete || !isKnown || text.length > MOST_HIGHLIGHTED) return markdown.utils.escapeHtml(text);
  return highlighter.highlight(text, { language: name, ignoreIllegals: true }).value;
}

/** JSON of a schema, a call or its arguments, in colours. */
export function renderJson(text) {
  return DOMPurify.sanitize(writeColoured(text, "json", true), ALLOWED);
}
