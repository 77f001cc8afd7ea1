// Formulas in the markdown of an answer: what is one, and what is a price.

import assert from "node:assert/strict";
import { test } from "node:test";

import { addMaths, findFormula } from "../../bough/server/web/chat/maths.js";
import MarkdownIt from "../../bough/server/web/vendor/markdown-it.js";

const markdown = new MarkdownIt({ html: false });
addMaths(markdown, (source, isBlock) => (isBlock ? `{{${source}}}` : `{${source}}`));
const render = (text) => markdown.renderInline(text);

test("formulas are read between dollars and between brackets with a backslash", () => {
  assert.equal(render("so $a_1 + b_2$ and \\(c\\)"), "so {a_1 + b_2} and {c}");
  assert.equal(render("$$\\sum_{i=1}^n i$$ or \\[x^2\\]"), "{{\\sum_{i=1}^n i}} or {{x^2}}");
});

test("prices, escaped dollars and code are no formulas", () => {
  for (const text of ["from $5 to $10", "$5-$10", "$ a $", "\\$a\\$", "a $ alone"])
    assert.ok(!/[{}]/.test(render(text)), text);
  assert.equal(render("`$a$`"), "<code>$a$</code>");
});

test("a formula without its end, without content, or of thousands of characters is text", () => {
  assert.equal(findFormula("$a", 0), null);
  assert.equal(findFormula("$$ $$", 0), null);
  assert.equal(findFormula(`$${"a".repeat(5000)}$`, 0), null);
  assert.deepEqual(findFormula("$a\\$b$", 0), { source: "a\\$b", isBlock: false, end: 6 });
});
