/** The field to write in: Enter sends. What was typed stays until it is sent, also after a reload of the tab. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/preact-htm.js";
import { writeMessage } from "../attachments.js";
import { findMessage } from "../conversation.js";
import { ContextMeter } from "./context_meter.js";
import { Icon } from "./controls.js";
import { FileButton, FileList, useFiles } from "./files.js";
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
    ${files.length > 0 && html`<${FileList} files=${files} onRemove=${remove} />`}
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
