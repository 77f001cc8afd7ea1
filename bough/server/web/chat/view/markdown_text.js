/** The text of an answer as it grows: closed blocks are drawn once, the last one again with each piece. */

import { Component, html, useRef } from "../../vendor/preact-htm.js";
import { BlockSplitter } from "../blocks.js";
import { lacksMaths, renderBlock } from "../markdown.js";
import { loadMaths } from "../maths.js";
import { copyText } from "./services.js";

const GROUP = 32;

export function MarkdownText({ text, isGrowing }) {
  const splitter = useRef(null);
  splitter.current ??= new BlockSplitter();
  const blocks = splitter.current.update(text.replaceAll("\r\n", "\n"));
  const groups = [];
  for (let start = 0; start < blocks.length; start += GROUP) groups.push(blocks.slice(start, start + GROUP));
  return html`<div class="markdown" onClick=${copyCode}>
    ${groups.map(
      (group, number) =>
        html`<${Group} key=${number} blocks=${group} isGrowing=${isGrowing && number === groups.length - 1} />`,
    )}
  </div>`;
}

/** Some blocks. A group that is full and closed costs nothing when the text grows, and nothing while it is out of sight. */
class Group extends Component {
  shouldComponentUpdate({ blocks, isGrowing }) {
    const last = this.props.blocks.length - 1;
    return isGrowing || this.props.isGrowing || blocks.length - 1 !== last || blocks[last] !== this.props.blocks[last];
  }

  render({ blocks, isGrowing }) {
    const isComplete = (number) => !isGrowing || number < blocks.length - 1;
    return html`<div class="group">
      ${blocks.map((text, number) => html`<${Block} key=${number} text=${text} isComplete=${isComplete(number)} />`)}
    </div>`;
  }
}

class Block extends Component {
  shouldComponentUpdate({ text, isComplete }) {
    return text !== this.props.text || isComplete !== this.props.isComplete;
  }

  render({ text, isComplete }) {
    if (!text) return null;
    const rendered = renderBlock(text, isComplete);
    if (rendered === null) return html`<div class="block plain" dir="auto">${text}</div>`;
    if (lacksMaths(rendered))
      loadMaths().then(
        () => this.forceUpdate(),
        () => {},
      ); // else its source stays
    return html`<div class="block" dir="auto" dangerouslySetInnerHTML=${{ __html: rendered }} />`;
  }
}

/** The buttons are part of the HTML of a block, so their clicks are handled here for all of them. */
async function copyCode(event) {
  const button = event.target.closest(".copy-code");
  if (!button) return;
  const isDone = await copyText(button.closest(".code").querySelector("code").textContent);
  button.textContent = isDone ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
