/** One conversation: the path that is shown, or answers side by side, and the field to write in. */

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/preact-htm.js";
import {
  activate,
  activePath,
  addMessage,
  changeMessage,
  childrenOf,
  compare,
  createMessage,
  deleteBranch,
  editMessage,
  findMessage,
  pathTo,
  siblingsOf,
  switchSibling,
  titleOf,
  toChatMessages,
  writeSystemPrompt,
} from "../conversation.js";
import { countSettings, readSettings } from "../settings.js";
import { Composer } from "./composer.js";
import { Icon, IconButton } from "./controls.js";
import { Message, placeOf } from "./message.js";
import { useServices, useStore } from "./services.js";
import { SettingsDialog } from "./settings_dialog.js";

const NEAR_BOTTOM = 48;

/** `onClose` is given where there are two side by side. */
export function Thread({ id, onClose, onModels }) {
  const { conversations, models } = useServices();
  const conversation = useStore(conversations, () => conversations.get(id));
  const [isSetting, setSetting] = useState(false);
  const [editing, setEditing] = useState(null);
  const [numSent, setNumSent] = useState(0);
  const actions = useActions(id, setEditing, () => setNumSent((number) => number + 1));
  if (!conversation) return html`<section class="thread"><p class="empty">This conversation was deleted.</p></section>`;
  const { problems } = readSettings(conversation.settings);
  return html`<section
    class="thread"
    aria-label=${titleOf(conversation)}
    data-conversation=${id}
    onKeyDown=${(event) => switchByKey(event, conversation, actions)}
  >
    <header class="thread-head">
      <h2 dir="auto">${titleOf(conversation)}</h2>
      <${ModelChoice} ...${{ conversation, conversations, models, onModels }} />
      <button type="button" class="small" aria-label="Settings of this conversation" onClick=${() => setSetting(true)}>
        <${Icon} name="sliders" /><span class="wide-only">Settings</span>${countSettings(conversation.settings) || ""}
      </button>
      ${onClose && html`<${IconButton} icon="close" label="Close this one" onClick=${onClose} />`}
    </header>
    <${Messages} ...${{ conversation, editing, actions, numSent }} />
    <${Composer} ...${{ conversation, actions, problem: Object.values(problems)[0] }} />
    ${isSetting && html`<${SettingsDialog} conversation=${conversation} actions=${actions} onClose=${() => setSetting(false)} />`}
  </section>`;
}

function ModelChoice({ conversation, conversations, models, onModels }) {
  const names = useStore(models, () => models.list).map((each) => each.name);
  const name = models.nameFor(conversation);
  const choices = name && !names.includes(name) ? [name, ...names] : names;
  const choose = (event) => {
    const { value } = event.target;
    if (value === MORE) event.target.value = name;
    if (value === MORE) return onModels();
    return conversations.change(conversation.id, (each, now) => ({ ...each, model: value, changed: now }));
  };
  return html`<select class="small" aria-label="Model" value=${name} onChange=${choose}>
    ${choices.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
    ${!choices.length && html`<option value="">no model</option>`}
    <option value=${MORE}>Other models …</option>
  </select>`;
}

const MORE = "\u0000more";

/** A message and its siblings share one place, so that the focus stays when another of them is shown. */
function Messages({ conversation, editing, actions, numSent }) {
  const box = useRef(null);
  const isAtBottom = useRef(true);
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current;
    isAtBottom.current = scrollHeight - scrollTop - clientHeight < NEAR_BOTTOM;
  };
  const toBottom = () => isAtBottom.current && (box.current.scrollTop = box.current.scrollHeight);
  useLayoutEffect(() => void (isAtBottom.current = true), [numSent]); // what was sent is seen
  useLayoutEffect(toBottom);
  useEffect(() => {
    const observer = new ResizeObserver(toBottom);
    observer.observe(box.current.firstElementChild);
    return () => observer.disconnect();
  }, []);
  const isCompared = conversation.compared !== null && childrenOf(conversation, conversation.compared).length > 1;
  const path = isCompared ? pathTo(conversation, conversation.compared) : activePath(conversation);
  return html`<div
    class="messages"
    ref=${box}
    onScroll=${onScroll}
    tabindex="0"
    role="log"
    aria-live="off"
    aria-label="Messages"
  >
    <div class="messages-inner">
      ${path[0]?.role !== "system" && html`<${SystemPrompt} ...${{ hasMessages: path.length > 0, actions }} />`}
      ${!path.length && html`<${Welcome} />`}
      ${path.map(
        (message) =>
          html`<${Message}
            key=${message.parent}
            isEditing=${editing === message.id}
            ...${{ message, ...placeOf(conversation, message), actions }}
          />`,
      )}
      ${isCompared && html`<${Compared} ...${{ conversation, editing, actions }} />`}
      ${!isCompared && html`<${Unanswered} ...${{ message: path.at(-1), actions }} />`}
    </div>
  </div>`;
}

function Welcome() {
  return html`<div class="empty">
    <p>Ask something. Each answer says how much of the prompt was reused.</p>
    <p>
      Edit any message, or ask for several answers: every version stays as a branch, and shares the state of what it has
      in common with the others.
    </p>
  </div>`;
}

function SystemPrompt({ hasMessages, actions }) {
  const [text, setText] = useState(null);
  if (text === null) {
    return html`<button type="button" class="small quiet" onClick=${() => setText("")}>
      <${Icon} name="plus" />System prompt
    </button>`;
  }
  const save = () => {
    setText(null);
    if (text.trim()) actions.writeSystem(text.trim());
  };
  return html`<form class="editor from-system" onSubmit=${(event) => event.preventDefault()}>
    <textarea
      rows="3"
      dir="auto"
      aria-label="System prompt"
      placeholder="How the model should answer"
      value=${text}
      onInput=${(event) => setText(event.target.value)}
    ></textarea>
    <div class="row">
      <button type="button" class="small primary" onClick=${save}>
        ${hasMessages ? "Save and ask again" : "Save"}
      </button>
      <button type="button" class="small" onClick=${() => setText(null)}>Cancel</button>
    </div>
  </form>`;
}

function Compared({ conversation, editing, actions }) {
  const answers = childrenOf(conversation, conversation.compared);
  const onPath = new Set(activePath(conversation).map((message) => message.id));
  return html`<div class="compared" role="group" aria-label=${`${answers.length} answers side by side`}>
    ${answers.map(
      (message) =>
        html`<${Message}
          key=${message.id}
          isCompared=${true}
          isActive=${onPath.has(message.id)}
          isEditing=${editing === message.id}
          ...${{ message, actions }}
        />`,
    )}
  </div>`;
}

/** A question without an answer, for instance after its answer was deleted. */
function Unanswered({ message, actions }) {
  if (message?.role !== "user" && message?.role !== "tool") return null;
  return html`<p class="broken">
    <button type="button" class="small" onClick=${() => actions.answer(message)}><${Icon} name="play" />Answer</button>
  </p>`;
}

/** Alt and an arrow switch between the versions of the message that has the focus, else of the last that has several. */
function switchByKey(event, conversation, actions) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!event.altKey || !step || event.target.value) return;
  event.preventDefault();
  const focused = findMessage(conversation, event.target.closest("[data-message]")?.dataset.message);
  const path = focused ? [focused] : activePath(conversation);
  const message = path.findLast((each) => siblingsOf(conversation, each.id).length > 1);
  if (message) actions.switchTo(message, step);
}

/** What can be done with the messages of a conversation. The object stays the same as long as the conversation does. */
function useActions(id, setEditing, onSent) {
  const { conversations, answers, access, models, notices } = useServices();
  return useMemo(() => {
    const change = (make) => conversations.change(id, make);
    const branch = (make) => {
      let toAnswer = null;
      change((conversation, now) => {
        const made = make(conversation, now);
        toAnswer = made.toAnswer;
        return made.conversation;
      });
      if (!toAnswer) return;
      answers.ask(id, toAnswer);
      onSent();
    };
    return {
      switchTo: (message, step) => change((each, now) => switchSibling(each, message.id, step, now)),
      compare: (message) => change((each, now) => compare(each, message.parent, now)),
      choose: (message) => change((each, now) => activate(each, message.id, now)),
      edit: (message) => setEditing(message.id),
      endEdit: () => setEditing(null),
      saveEdit: (message, text) => {
        setEditing(null);
        branch((each, now) => editMessage(each, message.id, text, now));
      },
      writeSystem: (text) => branch((each, now) => writeSystemPrompt(each, text, now)),
      setSettings: (settings) => change((each, now) => ({ ...each, settings, changed: now })),
      again: (message) => answers.ask(id, message.parent),
      answer: (message) => answers.ask(id, message.id),
      goOn: (message) => answers.goOn(id, message.id),
      stop: (message) => answers.stop(message.id),
      stopAll: () => answers.stopAll(id),
      send: ({ text, count, tool_name }) => {
        const role = tool_name ? "tool" : "user";
        let sent = null;
        change((each, now) => {
          sent = createMessage({ parent: each.active, role, content: text, now, ...(tool_name ? { tool_name } : {}) });
          return addMessage(each, sent);
        });
        answers.ask(id, sent.id, count);
        onSent();
      },
      remove: (message) => {
        const before = conversations.get(id);
        for (const running of answers.runningIn(id)) {
          if (pathTo(before, running).some((each) => each.id === message.id)) answers.stop(running);
        }
        change((each, now) => deleteBranch(each, message.id, now));
        notices.say("The branch was deleted.", () => change((each, now) => putBack(each, before, now)));
      },
      explain: async (message) => {
        const conversation = conversations.get(id);
        const messages = toChatMessages(conversation, message.parent);
        try {
          return (
            await access.requestJson("/api/cache/explain", { body: { model: models.nameFor(conversation), messages } })
          ).reason;
        } catch (error) {
          return error.message;
        }
      },
    };
  }, [id]);
}

/** Bring back what a deletion took. Messages that came since stay. */
function putBack(conversation, before, now) {
  const known = new Set(conversation.messages.map((message) => message.id));
  const back = before.messages.filter((message) => !known.has(message.id));
  if (!back.length) return conversation;
  const ids = new Set(back.map((message) => message.id));
  const deleted = conversation.deleted.filter((each) => !ids.has(each));
  const restored = { ...conversation, messages: [...conversation.messages, ...back], deleted };
  const settled = back.reduce(
    (each, { id, state }) => (state === "answering" ? changeMessage(each, id, { state: "stopped" }, now) : each),
    restored,
  );
  return activate(settled, back[0].id, now);
}
