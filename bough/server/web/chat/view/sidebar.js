/** The list of conversations, each with its branches drawn below it. One tree for readers and for the keyboard. */

import { html, useRef, useState } from "../../vendor/preact-htm.js";
import { readArchive, writeArchive } from "../archive.js";
import { layOutBranches } from "../branches.js";
import { activate, rename, titleOf } from "../conversation.js";
import { IconButton } from "./controls.js";
import { saveFile, useServices, useStore } from "./services.js";

const STEP = 14;
const ROW = 24;
const MOST_DEPTH = 9;

/** `open` are the ids of the conversations that are shown; `onOpen(id)`, `onBeside(id)`, `onNew()`. */
export function Sidebar({ open, onOpen, onBeside, onNew, onRemove }) {
  const { conversations, notices } = useServices();
  useStore(conversations, () => conversations.version);
  const [sought, setSought] = useState("");
  const file = useRef(null);
  const isShown = (each) =>
    (hasMessages(each) || open.includes(each.id)) && contains(each, sought.trim().toLowerCase());
  const shown = conversations.list.filter(isShown);
  const load = async (event) => {
    const [chosen] = event.target.files;
    event.target.value = "";
    if (chosen) await importFile(chosen, conversations, notices);
  };
  const exportAll = () =>
    saveFile("bough-conversations.json", writeArchive(conversations.list.filter(hasMessages), Date.now()));
  return html`<div class="sidebar">
    <div class="sidebar-head">
      <button type="button" class="primary new-chat" onClick=${onNew}>New conversation</button>
      <${IconButton} icon="upload" label="Import conversations from a file" onClick=${() => file.current.click()} />
      <${IconButton} icon="download" label="Export all conversations" onClick=${exportAll} />
      <input
        ref=${file}
        type="file"
        accept=".json,application/json"
        class="offscreen"
        tabindex="-1"
        aria-label="File to import"
        onChange=${load}
      />
    </div>
    <input
      type="search"
      class="search"
      aria-label="Search conversations"
      placeholder="Search"
      value=${sought}
      onInput=${(event) => setSought(event.target.value)}
    />
    <${ConversationTree} ...${{ shown, open, onOpen, onBeside, onRemove }} />
    ${!shown.length && html`<p class="hint empty-list">${sought ? `Nothing has “${sought}” in it.` : "No conversation yet."}</p>`}
  </div>`;
}

function ConversationTree({ shown, open, onOpen, onBeside, onRemove }) {
  const { conversations } = useServices();
  const [renaming, setRenaming] = useState(null);
  const [focused, setFocused] = useState(null);
  const items = shown.flatMap((each) => [{ id: each.id, conversation: each, row: null }, ...rowsOf(each)]);
  const current = items.some((item) => item.id === focused) ? focused : (open[0] ?? items[0]?.id);
  const choose = ({ conversation, row }) => {
    if (row) conversations.change(conversation.id, (each, now) => activate(each, row.end ?? row.id, now));
    onOpen(conversation.id);
  };
  const actions = { choose, setRenaming, onBeside, onRemove, setFocused };
  if (!items.length) return null;
  return html`<div
    role="tree"
    aria-label="Conversations"
    class="conversation-tree"
    onKeyDown=${(event) => moveByKey(event, items, actions)}
  >
    ${items.map((item) =>
      item.row
        ? html`<${BranchRow}
            key=${`${item.conversation.id}-${item.id}`}
            ...${{ item, isCurrent: item.id === current, actions }}
          />`
        : html`<${TitleRow}
            key=${item.id}
            ...${{ item, isOpen: open.includes(item.id), isCurrent: item.id === current, isRenaming: renaming === item.id, actions }}
          />`,
    )}
  </div>`;
}

function rowsOf(conversation) {
  return layOutBranches(conversation).map((row) => ({ id: row.id, conversation, row }));
}

function TitleRow({ item, isOpen, isCurrent, isRenaming, actions }) {
  const { conversations } = useServices();
  const { conversation } = item;
  const title = titleOf(conversation);
  const save = (event) => {
    const { value } = event.target;
    actions.setRenaming(null);
    conversations.change(conversation.id, (each, now) => (value === titleOf(each) ? each : rename(each, value, now)));
  };
  const onKeyDown = (event) => {
    event.stopPropagation();
    if (event.key === "Enter") event.target.blur();
    if (event.key === "Escape") actions.setRenaming(null);
  };
  const exportOne = () => saveFile(`${fileName(title)}.json`, writeArchive([conversation], Date.now()));
  return html`<div
    role="treeitem"
    aria-level="1"
    aria-selected=${isOpen ? "true" : "false"}
    aria-label=${title}
    class=${isOpen ? "title-row is-open" : "title-row"}
    data-item=${item.id}
    tabindex=${isCurrent ? 0 : -1}
    onClick=${(event) => event.target.closest("button") ?? actions.choose(item)}
    onFocus=${() => actions.setFocused(item.id)}
  >
    ${
      isRenaming
        ? html`<input
            class="rename"
            aria-label="Title"
            dir="auto"
            value=${title}
            ref=${selectOnce}
            onClick=${(event) => event.stopPropagation()}
            onKeyDown=${onKeyDown}
            onBlur=${save}
          />`
        : html`<span class="title" dir="auto">${title}</span>`
    }
    <span class="row-actions">
      <${IconButton}
        icon="beside"
        label="Open beside"
        tabindex="-1"
        onClick=${() => actions.onBeside(conversation.id)}
      />
      <${IconButton} icon="edit" label="Rename" tabindex="-1" onClick=${() => actions.setRenaming(conversation.id)} />
      <${IconButton} icon="download" label="Export" tabindex="-1" onClick=${exportOne} />
      <${IconButton} icon="trash" label="Delete" tabindex="-1" onClick=${() => actions.onRemove(conversation.id)} />
    </span>
  </div>`;
}

function BranchRow({ item, isCurrent, actions }) {
  const { row } = item;
  const classes = ["branch-row", row.isActive ? "is-active" : "", row.end ? "is-end" : ""].join(" ");
  return html`<div
    role="treeitem"
    aria-level=${row.depth + 2}
    aria-selected=${row.isActive ? "true" : "false"}
    class=${classes}
    data-item=${item.id}
    tabindex=${isCurrent ? 0 : -1}
    onClick=${() => actions.choose(item)}
    onFocus=${() => actions.setFocused(item.id)}
  >
    <${BranchLines} row=${row} />
    <span class="branch-label" dir="auto">${row.label}</span>
  </div>`;
}

/** The lines of one row: those that pass by, and the one that ends in a dot. */
function BranchLines({ row }) {
  const depth = Math.min(row.depth, MOST_DEPTH);
  const x = (level) => STEP * level + STEP / 2;
  const passing = row.guides.slice(-MOST_DEPTH).map((passes, level) => (passes ? `M${x(level)} 0V${ROW}` : ""));
  const own = `M${x(depth)} 0V${row.isLast ? ROW / 2 : ROW}M${x(depth)} ${ROW / 2}H${x(depth + 1) - 2}`;
  return html`<svg class="branch-lines" width=${x(depth + 1) + 5} height=${ROW} aria-hidden="true">
    <path d=${passing.join("") + own} />
    <circle cx=${x(depth + 1)} cy=${ROW / 2} r=${row.end ? 4 : 2} />
  </svg>`;
}

function moveByKey(event, items, actions) {
  const at = items.findIndex((item) => item.id === event.target.dataset?.item);
  if (at < 0) return;
  const item = items[at];
  const acts = {
    ArrowDown: () => focusItem(event, items[at + 1]),
    ArrowUp: () => focusItem(event, items[at - 1]),
    ArrowRight: () => focusItem(event, items[at + 1]?.row && items[at + 1]),
    ArrowLeft: () =>
      focusItem(
        event,
        items.slice(0, at).findLast((each) => levelOf(each) < levelOf(item)),
      ),
    Home: () => focusItem(event, items[0]),
    End: () => focusItem(event, items.at(-1)),
    Enter: () => actions.choose(item),
    " ": () => actions.choose(item),
    F2: () => !item.row && actions.setRenaming(item.id),
    Delete: () => !item.row && actions.onRemove(item.conversation.id),
  };
  if (!acts[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  acts[event.key]();
}

function levelOf(item) {
  return item.row ? item.row.depth + 2 : 1;
}

function focusItem(event, item) {
  if (item) event.currentTarget.querySelector(`[data-item="${item.id}"]`)?.focus();
}

function selectOnce(element) {
  if (!element || element.dataset.seen) return;
  element.dataset.seen = "1";
  element.focus();
  element.select();
}

function contains(conversation, sought) {
  if (!sought) return true;
  if (titleOf(conversation).toLowerCase().includes(sought)) return true;
  return conversation.messages.some((message) => message.content.toLowerCase().includes(sought));
}

function hasMessages(conversation) {
  return conversation.messages.length > 0;
}

function fileName(title) {
  return `bough-${title
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .slice(0, 40)}`;
}

async function importFile(file, conversations, notices) {
  try {
    const number = conversations.import(readArchive(await file.text()));
    notices.say(`${number} ${number === 1 ? "conversation was" : "conversations were"} imported.`);
  } catch (error) {
    notices.say(`${file.name} was not imported: ${error.message}`);
  }
}
