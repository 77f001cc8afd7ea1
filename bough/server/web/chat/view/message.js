/** One message: its text, thoughts and calls, what it has cost, and what can be done with it. */

import { Component, html, useState } from "../../vendor/preact-htm.js";
import { siblingsOf } from "../conversation.js";
import { describeEnd, describeFigures, describeLeftOut, describeProgress, shareDone, writeCount, writeCounted } from "../figures.js";
import { renderJson } from "../markdown.js";
import { CopyButton, Icon, IconButton } from "./controls.js";
import { MarkdownText } from "./markdown_text.js";
import { copyText, useServices, useStore } from "./services.js";

const NAMES = { user: "You", assistant: "Answer", system: "System prompt", tool: "Result of a tool" };

/** `actions`: what a thread can do with its messages. Drawn again only if the message or its place has changed. */
export class Message extends Component {
  shouldComponentUpdate(next, nextState) {
    const { message, number, numSiblings, isEditing, isCompared, isActive } = this.props;
    const isSame =
      next.message === message &&
      next.number === number &&
      next.numSiblings === numSiblings &&
      next.isEditing === isEditing;
    return !isSame || next.isCompared !== isCompared || next.isActive !== isActive || nextState !== this.state;
  }

  /** The button that has the focus, by its label: drawing may take it away. */
  getSnapshotBeforeUpdate() {
    const focused = document.activeElement;
    return this.base.contains(focused) ? focused.getAttribute("aria-label") : null;
  }

  componentDidUpdate(before, stateBefore, label) {
    if (!label || document.activeElement !== document.body) return;
    const again = [...this.base.querySelectorAll("[aria-label]")].find((each) => each.getAttribute("aria-label") === label);
    (again && !again.disabled ? again : this.base).focus();
  }

  render({ message, number, numSiblings, isEditing, isCompared, isActive, actions }) {
    const classes = ["message", `from-${message.role}`, isCompared ? "is-compared" : "", isActive ? "is-active" : ""];
    const name = message.role === "tool" && message.tool_name ? `Result of ${message.tool_name}` : NAMES[message.role];
    return html`<article class=${classes.join(" ")} aria-label=${name} data-message=${message.id} tabindex="-1">
      <header class="message-head">
        <span class="message-name">${name}</span>
        ${message.role === "assistant" && message.model && html`<span class="message-model">${message.model}</span>`}
        ${!isCompared && numSiblings > 1 && html`<${Siblings} ...${{ message, number, numSiblings, actions }} />`}
      </header>
      ${isEditing ? html`<${Editor} key=${message.id} message=${message} actions=${actions} />` : html`<${Body} key=${message.id} message=${message} />`}
      ${message.role === "assistant" && html`<${Footer} key=${`${message.id} end`} message=${message} actions=${actions} />`}
      ${!isEditing && html`<${Actions} ...${{ message, isCompared, actions }} />`}
    </article>`;
  }
}

/** The place of a message among its siblings, for `Message`. */
export function placeOf(conversation, message) {
  const siblings = siblingsOf(conversation, message.id);
  return { number: siblings.indexOf(message), numSiblings: siblings.length };
}

function Siblings({ message, number, numSiblings, actions }) {
  const isAnswer = message.role === "assistant";
  return html`<span
    class="siblings"
    role="group"
    aria-label=${isAnswer ? "Answers to the same message" : "Versions of this message"}
  >
    <${IconButton}
      icon="left"
      label="The one before"
      disabled=${number === 0}
      onClick=${() => actions.switchTo(message, -1)}
    />
    <span>${number + 1}/${numSiblings}</span>
    <${IconButton}
      icon="right"
      label="The next one"
      disabled=${number === numSiblings - 1}
      onClick=${() => actions.switchTo(message, 1)}
    />
    ${isAnswer && html`<${IconButton} icon="columns" label="Show all side by side" onClick=${() => actions.compare(message)} />`}
  </span>`;
}

function Body({ message }) {
  if (message.role !== "assistant") return html`<div class="said" dir="auto">${message.content}</div>`;
  const isGrowing = message.state === "answering";
  return html`
    ${message.thinking && html`<${Thoughts} message=${message} />`}
    ${message.content && html`<${MarkdownText} text=${message.content} isGrowing=${isGrowing} />`}
    ${(message.tool_calls ?? []).map((call) => html`<${ToolCall} call=${call} />`)}
  `;
}

function Thoughts({ message }) {
  const isThinking = message.state === "answering" && !message.content;
  const tokens = message.thinking_tokens ? ` for ${writeCounted(message.thinking_tokens, "token")}` : "";
  return html`<details class="thoughts">
    <summary>${isThinking ? "Thinking" : "Thought"}${tokens}</summary>
    <div class="said" dir="auto">${message.thinking}</div>
  </details>`;
}

function ToolCall({ call }) {
  const text = JSON.stringify(call.function.arguments ?? {}, null, 2);
  return html`<div class="tool-call">
    <div class="code-head">
      <span>calls <strong>${call.function.name}</strong></span>
    </div>
    <pre tabindex="0"><code dangerouslySetInnerHTML=${{ __html: renderJson(text) }} /></pre>
  </div>`;
}

function Footer({ message, actions }) {
  if (message.state === "answering") return html`<${Progress} message=${message} />`;
  const parts = message.figures ? describeFigures(message.figures) : [];
  const end = describeEnd(message.figures?.end);
  const leftOut = describeLeftOut(message.figures ?? {});
  return html`<footer class="message-foot">
    ${message.state !== "done" && html`<${Broken} message=${message} actions=${actions} />`}
    ${leftOut && html`<p class="left-out">${leftOut}</p>`}
    ${parts.length > 0 && html`<p class="figures">${parts.join(", ")}${end && `. ${end}`}</p>`}
    ${parts.length > 0 && html`<${Why} message=${message} actions=${actions} />`}
  </footer>`;
}

function Broken({ message, actions }) {
  const label = message.content ? "Continue" : "Try again";
  return html`<p class=${message.state === "failed" ? "broken problem" : "broken"}>
    <span>${message.state === "failed" ? `Broken off: ${message.error}.` : "Stopped."}</span>
    <button type="button" class="small" onClick=${() => actions.goOn(message)}><${Icon} name="play" />${label}</button>
  </p>`;
}

function Progress({ message }) {
  const { live, answers } = useServices();
  const request = useStore(live, () => (message.requestId ? live.requests.get(message.requestId) : undefined));
  const hasText = Boolean(message.content || message.thinking);
  const share = hasText ? null : shareDone(request);
  const isLoaded = useStore(live, () => live.models.some((each) => each.model === message.model));
  const describe = () => {
    if (!answers.isRunning(message.id)) return "answered in another tab";
    if (answers.isWaiting(message.id)) return "waiting for the other answers";
    return message.requestId || isLoaded ? describeProgress(request, hasText) : "loading the model";
  };
  return html`<footer class="message-foot">
    <p class="progress"><span class="pulse" aria-hidden="true"></span>${describe()}</p>
    ${share !== null && html`<progress class="share" value=${share} aria-label="Computed share of the prompt"></progress>`}
    ${request?.cached_tokens > 0 && !hasText && html`<p class="figures">${writeCount(request.cached_tokens)} tokens reused</p>`}
  </footer>`;
}

/** Why not more was reused: what the event stream said, else what the server says now. */
function Why({ message, actions }) {
  const [reason, setReason] = useState(message.figures.reason ?? "");
  const ask = async (event) => {
    if (event.currentTarget.open && !reason) setReason(await actions.explain(message));
  };
  return html`<details class="why" onToggle=${ask}>
    <summary>why not more?</summary>
    <p dir="auto">${message.figures.reason || reason || "asking the server …"}</p>
  </details>`;
}

function Actions({ message, isCompared, actions }) {
  const isAnswer = message.role === "assistant";
  const isRunning = message.state === "answering";
  return html`<div class="message-actions">
    ${
      isCompared &&
      html`<button type="button" class="small primary" onClick=${() => actions.choose(message)}>Go on with this one</button>`
    }
    ${
      isRunning &&
      html`<button type="button" class="small" onClick=${() => actions.stop(message)}><${Icon} name="stop" />Stop</button>`
    }
    <${CopyButton} label="Copy the text" copy=${() => copyText(message.content)} />
    ${!isRunning && html`<${IconButton} icon="edit" label="Edit as a new branch" onClick=${() => actions.edit(message)} />`}
    ${isAnswer && html`<${IconButton} icon="redo" label="Answer again, beside this one" onClick=${() => actions.again(message)} />`}
    ${!isRunning && html`<${IconButton} icon="trash" label="Delete this branch" onClick=${() => actions.remove(message)} />`}
  </div>`;
}

function Editor({ message, actions }) {
  const [text, setText] = useState(message.content);
  const isAnswered = message.role !== "assistant";
  const onKeyDown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      actions.endEdit();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && isAnswered) {
      event.preventDefault();
      actions.saveEdit(message, text);
    }
  };
  const focus = (element) =>
    element &&
    document.activeElement !== element &&
    !element.dataset.seen &&
    ((element.dataset.seen = "1"), element.focus());
  return html`<form class="editor" onSubmit=${(event) => event.preventDefault()}>
    <textarea
      ref=${focus}
      aria-label="The new text"
      dir="auto"
      rows=${Math.min(20, text.split("\n").length + 1)}
      value=${text}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${onKeyDown}
    ></textarea>
    <div class="row">
      <button type="button" class="small primary" onClick=${() => actions.saveEdit(message, text)}>
        ${isAnswered ? "Save and ask" : "Save as a new branch"}
      </button>
      <button type="button" class="small" onClick=${actions.endEdit}>Cancel</button>
    </div>
  </form>`;
}
