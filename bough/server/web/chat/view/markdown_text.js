/** The text of an answer as it grows: closed blocks are drawn once, the last one again with each piece. */

import { Component, html, useRef } from "../../vendor/preact-htm.js";
import { BlockSplitter } from "../blocks.js";
import { renderBlock } from "../markdown.js";
import { copyText } from "./services.js";

export function MarkdownText({ text, isGrowing }) {
  const splitter = useRef(null);
  splitter.current ??= new BlockSplitter();
  const blocks = splitter.current.update(text.replaceAll("\r\n", "\n"));
  return html`<div class="markdown" onClick=${copyCode}>
    ${blocks.map((block, number) => html`<${Block} key=${number} text=${block} isComplete=${!isGrowing || number < blocks.length - 1} />`)}
  </div>`;
}

class Block extends Component {
  shouldComponentUpdate({ text, isComplete }) {
    return text !== this.props.text || isComplete !== this.props.isComplete;
  }

  render({ text, isComplete }) {
    if (!text) return null;
    const rendered = renderBlock(text, isComplete);
    if (rendered === null) return html`<div class="block plain" dir="auto">${text}</div>`;
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
