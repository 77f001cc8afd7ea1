/** The field to write in: Enter sends. What was typed stays until it is sent, also after a reload of the tab. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/preact-htm.js";
import { MOST_FILE_BYTES, readTextFile, writeMessage } from "../attachments.js";
import { describeFull, isFull, measureContext } from "../context.js";
import { findMessage } from "../conversation.js";
import { writeCount } from "../figures.js";
import { LEAVE_OUT } from "../settings.js";
import { Icon, IconButton } from "./controls.js";
import { useServices, useStore } from "./services.js";

const MOST_FORKS = 8;
const COUNTS = Array.from({ length: MOST_FORKS }, (_, number) => number + 1);

/** `problem`: why nothing can be sent now, for instance a wrong setting. */
export function Composer({ conversation, actions, problem }) {
  const { answers, models } = useServices();
  const [text, setText] = useDraft(conversation.id);
  const [count, setCount] = useState(1);
  const { files, note, add, remove, clear } = useFiles();
  const [isResult, setResult] = useState(true);
  const area = useRef(null);
  const isRunning = conversation.messages.some((each) => each.state === "answering" && answers.isRunning(each.id));
  const model = useStore(models, () => models.nameFor(conversation));
  useLayoutEffect(() => grow(area.current), [text]);
  const calls = findMessage(conversation, conversation.active)?.tool_calls ?? [];
  const tool_name = isResult ? calls[0]?.function.name : undefined;
  const whole = writeMessage(text, files);
  const canSend = whole && !problem && !isActiveRunning(conversation) && model;
  const send = () => {
    if (!canSend) return;
    setText("");
    setCount(1);
    clear();
    actions.send({ text: files.length ? whole : text, count, tool_name });
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const onPaste = (event) => {
    if (event.clipboardData.files.length) event.preventDefault();
    add(event.clipboardData.files);
  };
  const onDrop = (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    add(event.dataTransfer.files);
  };
  return html`<form
    class="composer"
    onSubmit=${(event) => event.preventDefault()}
    onDragOver=${(event) => event.dataTransfer.types.includes("Files") && event.preventDefault()}
    onDrop=${onDrop}
  >
    ${problem && html`<p class="problem">${problem}</p>`}
    ${
      calls.length > 0 &&
      html`<label class="as-result">
        <input type="checkbox" checked=${isResult} onChange=${(event) => setResult(event.target.checked)} />
        ${`This is the result of ${calls[0].function.name}`}
      </label>`
    }
    ${note && html`<p class="problem" role="alert">${note}</p>`}
    ${files.length > 0 && html`<${Files} files=${files} onRemove=${remove} />`}
    <div class="composer-box">
      <textarea
        ref=${area}
        rows="1"
        dir="auto"
        aria-label="Message"
        placeholder=${tool_name ? "The result, as the model should read it" : "Write a message"}
        value=${text}
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${onKeyDown}
        onPaste=${onPaste}
      ></textarea>
      <div class="composer-buttons">
        <${FileButton} onFiles=${add} />
        <select
          class="small"
          aria-label="Number of answers"
          title="Number of answers"
          value=${count}
          onChange=${(event) => setCount(Number(event.target.value))}
        >
          ${COUNTS.map((each) => html`<option key=${each} value=${each}>${each === 1 ? "1 answer" : `${each} forks`}</option>`)}
        </select>
        ${
          isRunning &&
          html`<button type="button" class="round" aria-label="Stop" title="Stop (Esc)" onClick=${actions.stopAll}>
            <${Icon} name="stop" />
          </button>`
        }
        <button
          type="button"
          class="round primary"
          aria-label="Send"
          title="Send (Enter)"
          disabled=${!canSend}
          onClick=${send}
        >
          <${Icon} name="send" />
        </button>
      </div>
    </div>
    <${ContextMeter} ...${{ conversation, draft: whole, actions }} />
  </form>`;
}

/** How much of the model's context is used; and before the next turn does not fit, what is to be done then. */
function ContextMeter({ conversation, draft, actions }) {
  const { live, models } = useServices();
  const name = models.nameFor(conversation);
  useStore(live, () => live.models);
  const context = useStore(models, () => models.contextOf(name));
  if (!context) return null;
  const measured = measureContext(conversation, draft, context);
  const { settings } = conversation;
  const leavesOut = settings.full === LEAVE_OUT;
  const used = measured.used + measured.coming;
  return html`<div class="context">
    <span class="context-bar" aria-hidden="true">
      <span class=${isFull(measured) ? "is-full" : ""} style=${{ width: `${Math.min(100, (100 * used) / context)}%` }}></span>
    </span>
    <span>${writeCount(used)} of ${writeCount(context)} tokens</span>
    ${
      isFull(measured) &&
      html`<p class="context-full" role="status">
        ${describeFull(measured, leavesOut)}
        ${
          !leavesOut &&
          html`<button type="button" class="small" onClick=${() => actions.setSettings({ ...settings, full: LEAVE_OUT })}>
            Leave the oldest messages out
          </button>`
        }
      </p>`
    }
  </div>`;
}

/** Files that go with the next message. What cannot be taken is told as `note`. */
function useFiles() {
  const [files, setFiles] = useState([]);
  const [note, setNote] = useState("");
  const add = async (list) => {
    const problems = [];
    for (const each of list) {
      try {
        const file = await readTextFile(each);
        setFiles((known) => [...known, file]);
      } catch (error) {
        problems.push(error.message);
      }
    }
    setNote(problems.join("; "));
  };
  const remove = (file) => setFiles((known) => known.filter((each) => each !== file));
  const clear = () => (setFiles([]), setNote(""));
  return { files, note, add, remove, clear };
}

function Files({ files, onRemove }) {
  return html`<ul class="files" aria-label="Files of this message">
    ${files.map(
      (file, number) => html`<li key=${number}>
        <bdi>${file.name}</bdi>
        <span class="hint">${writeCount(file.text.length)} characters</span>
        <${IconButton} icon="close" label=${`Leave ${file.name} out`} onClick=${() => onRemove(file)} />
      </li>`,
    )}
  </ul>`;
}

function FileButton({ onFiles }) {
  const input = useRef(null);
  const label = `Add text files, of at most ${MOST_FILE_BYTES / 1000} kB each`;
  const choose = (event) => {
    onFiles([...event.target.files]);
    event.target.value = "";
  };
  return html`
    <${IconButton} icon="clip" label=${label} onClick=${() => input.current.click()} />
    <input ref=${input} type="file" multiple class="offscreen" tabindex="-1" aria-label="Text files to add" onChange=${choose} />
  `;
}

/** Nothing can follow an answer that is not complete. */
function isActiveRunning(conversation) {
  return findMessage(conversation, conversation.active)?.state === "answering";
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
}

/** What was typed for a conversation, kept in this tab. */
function useDraft(id) {
  const name = `bough.draft.${id}`;
  const [text, setText] = useState(() => sessionStorage.getItem(name) ?? "");
  useEffect(() => {
    if (text) sessionStorage.setItem(name, text);
    else sessionStorage.removeItem(name);
  }, [text]);
  return [text, setText];
}
