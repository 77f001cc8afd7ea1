/** The shell of the page: panes, the status line, dialogs; it makes all that the parts share. */

import { Access } from "./chat/access.js";
import { Answers } from "./chat/answers.js";
import { describeEnds } from "./chat/branches.js";
import { activate } from "./chat/conversation.js";
import { Conversations } from "./chat/conversations.js";
import { Models } from "./chat/models.js";
import { Notices } from "./chat/notices.js";
import { IconButton, Icon } from "./chat/view/controls.js";
import { HelpDialog, KeyDialog } from "./chat/view/dialogs.js";
import { ModelsDialog } from "./chat/view/models_dialog.js";
import { Services, useServices, useStore } from "./chat/view/services.js";
import { Sidebar } from "./chat/view/sidebar.js";
import { Thread } from "./chat/view/thread.js";
import { Divider, usePanes } from "./panes.js";
import { LiveEvents } from "./live/events.js";
import { LivePane } from "./live/pane.js";
import { html, render, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const OPEN_NAME = "bough.open";
const THEMES = { "": "dark", dark: "light", light: "" };
const THEME_ICONS = { "": "auto", dark: "moon", light: "sun" };

/** Make what the parts share. */
function createServices() {
  const live = new LiveEvents();
  const access = new Access();
  const conversations = new Conversations();
  const models = new Models(access, live);
  const notices = new Notices();
  const answers = new Answers({ conversations, live, access, models, notices });
  return { live, access, conversations, models, notices, answers };
}

function App({ services }) {
  return html`<${Services.Provider} value=${services}><${Page} /><//>`;
}

function Page() {
  const services = useServices();
  const [dialog, setDialog] = useState(null);
  const [open, setOpen] = useOpen();
  const panes = usePanes();
  useKeyOfServer();
  const isAsking = useStore(services.access, () => services.access.isAsking);
  const onNew = () => {
    const made =
      services.conversations.list.find((each) => !each.messages.length && !open.slice(1).includes(each.id)) ??
      services.conversations.create();
    setOpen([made.id, ...open.slice(1)]);
    panes.show("chat");
    setTimeout(() => document.querySelector(".composer textarea")?.focus());
  };
  useKeys({ onNew, onHelp: () => setDialog("help") });
  const onOpen = (id) => {
    if (!open.includes(id)) setOpen([id, ...open.slice(1)]);
    panes.show("chat");
  };
  const onBeside = (id) => setOpen([open[0], id === open[0] ? services.conversations.create().id : id]);
  const onBranch = (id, messageId) => {
    services.conversations.change(id, (each, now) => activate(each, messageId, now));
    onOpen(id);
  };
  const closeOf = (id) => (open.length > 1 ? () => setOpen(open.filter((each) => each !== id)) : null);
  const onRemove = (id) => removeConversation(services, id);
  return html`
    <${TopBar} panes=${panes} onDialog=${setDialog} />
    <main class=${panes.isNarrow ? "panes is-narrow" : "panes"} style=${panes.style}>
      <nav class="pane pane-left" aria-label="Conversations" hidden=${!panes.isShown("conversations")}>
        <${Sidebar} ...${{ open, onOpen, onBeside, onNew, onRemove }} />
      </nav>
      <${Divider} side="left" panes=${panes} />
      <div class=${open.length > 1 ? "pane pane-chat is-split" : "pane pane-chat"} hidden=${!panes.isShown("chat")}>
        ${open.map((id) => html`<${Thread} key=${id} id=${id} onModels=${() => setDialog("models")} onClose=${closeOf(id)} />`)}
      </div>
      <${Divider} side="right" panes=${panes} />
      <aside class="pane pane-right" aria-label="The tree at work" hidden=${!panes.isShown("tree")}>
        <${TreePane} currentId=${open[0]} onOpen=${onBranch} />
      </aside>
    </main>
    ${panes.isNarrow && html`<${TabBar} panes=${panes} />`}
    <${Notes} />
    ${dialog === "models" && html`<${ModelsDialog} onClose=${() => setDialog(null)} />`}
    ${dialog === "help" && html`<${HelpDialog} onClose=${() => setDialog(null)} />`}
    ${isAsking && html`<${KeyDialog} />`}
  `;
}

function TreePane({ currentId, onOpen }) {
  const { conversations, live, models } = useServices();
  useStore(conversations, () => conversations.version);
  const described = conversations.list.filter((each) => each.messages.length).map(describeEnds);
  const signature = JSON.stringify(described);
  const told = useMemo(() => described, [signature]);
  const model = useStore(live, () => models.nameFor(conversations.get(currentId)));
  return html`<${LivePane} ...${{ live, model, conversations: told, currentId, onOpen }} />`;
}

function TopBar({ panes, onDialog }) {
  const { access, live } = useServices();
  const hasKey = useStore(access, () => access.hasKey);
  const [theme, setTheme] = useTheme();
  const logOut = () => {
    access.logOut();
    live.start();
  };
  return html`<header class="top-bar">
    ${!panes.isNarrow && html`<${FoldButton} side="left" icon="paneLeft" label="Show or hide the conversations" panes=${panes} />`}
    <h1><img src="/web/icon.svg" alt="" width="20" height="20" />Bough</h1>
    <${Status} />
    <span class="spring"></span>
    <button type="button" class="small" onClick=${() => onDialog("models")}><${Icon} name="model" />Models</button>
    <${IconButton}
      icon=${THEME_ICONS[theme]}
      label=${`Colours: ${theme || "as the system"}`}
      onClick=${() => setTheme(THEMES[theme])}
    />
    <${IconButton} icon="help" label="Keys (?)" onClick=${() => onDialog("help")} />
    ${hasKey && html`<${IconButton} icon="leave" label="Log out: forget the key" onClick=${logOut} />`}
    ${!panes.isNarrow && html`<${FoldButton} side="right" icon="paneRight" label="Show or hide the tree" panes=${panes} />`}
  </header>`;
}

function FoldButton({ side, icon, label, panes }) {
  const isShown = panes.isShown(side === "left" ? "conversations" : "tree");
  return html`<${IconButton} ...${{ icon, label }} aria-pressed=${String(isShown)} onClick=${() => panes.fold(side)} />`;
}

/** Whether the server is there, and whether it lets us in. */
function Status() {
  const { live, access } = useServices();
  const needsKey = useStore(live, () => live.needsKey);
  const problem = useStore(live, () =>
    live.isConnected ? "" : live.problem ? `${live.problem}: trying again` : "connecting",
  );
  return html`<p class=${problem ? "status is-away" : "status"} role="status">
    <span class="dot" aria-hidden="true"></span>
    <span class="status-text">${needsKey ? "This server asks for a key." : problem || "connected"}</span>
    ${needsKey && html`<button type="button" class="small" onClick=${() => access.ask()}>Give one</button>`}
  </p>`;
}

function TabBar({ panes }) {
  const tabs = [
    ["conversations", "Conversations"],
    ["chat", "Chat"],
    ["tree", "Tree"],
  ];
  return html`<nav class="tab-bar" aria-label="Panes">
    ${tabs.map(
      ([name, label]) => html`<button
        key=${name}
        type="button"
        aria-current=${panes.isShown(name) ? "page" : undefined}
        onClick=${() => panes.show(name)}
      >
        ${label}
      </button>`,
    )}
  </nav>`;
}

/** States for screen readers, problems of the storage, and notes. */
function Notes() {
  const { conversations, notices } = useServices();
  const announced = useStore(notices, () => notices.announced);
  const note = useStore(notices, () => notices.note);
  const problem = useStore(conversations, () => conversations.problem);
  return html`
    <div class="offscreen" aria-live="polite" role="status">${announced}</div>
    <div class="notes" role="status">
      ${problem && html`<p class="note problem">${problem}</p>`}
      ${
        note &&
        html`<p class="note" dir="auto">
          <span>${note.text}</span>
          ${note.undo && html`<button type="button" class="small" onClick=${() => notices.undo()}>Undo</button>`}
          <${IconButton} icon="close" label="Close" onClick=${() => notices.dismiss()} />
        </p>`
      }
    </div>
  `;
}

function removeConversation({ conversations, answers, notices }, id) {
  answers.stopAll(id);
  const restore = conversations.remove(id);
  notices.say("The conversation was deleted.", restore);
}

/** The ids of the conversations that are shown, one or two. They are kept in this tab; a new one stands for what is gone. */
function useOpen() {
  const { conversations } = useServices();
  const [wanted, setWanted] = useState(() => openFirst(conversations));
  const there = useStore(conversations, () => wanted.filter((id) => conversations.get(id)).join());
  useEffect(() => {
    if (!there) setWanted([conversations.create().id]);
    else sessionStorage.setItem(OPEN_NAME, JSON.stringify(wanted));
  }, [there, wanted]);
  return [wanted.filter((id) => conversations.get(id)), setWanted];
}

/** What was open before a reload. A conversation without messages is not stored: it begins again, with what was typed. */
function openFirst(conversations) {
  const stored = JSON.parse(sessionStorage.getItem(OPEN_NAME) ?? "[]");
  const found = stored.filter((id) => conversations.get(id));
  return found.length ? found : [conversations.create(stored.length ? { id: stored[0] } : {}).id];
}

/** Ask for a key when the event stream needs one, and let it go on when there is one. */
function useKeyOfServer() {
  const { live, access, models } = useServices();
  const needsKey = useStore(live, () => live.needsKey);
  const isConnected = useStore(live, () => live.isConnected);
  const numGiven = useStore(access, () => access.numGiven);
  useEffect(() => {
    if (needsKey) access.ask();
  }, [needsKey]);
  useEffect(() => {
    if (numGiven) live.start();
  }, [numGiven]);
  useEffect(() => {
    if (isConnected) models.refresh();
  }, [isConnected]);
}

/** The keys that work everywhere. */
function useKeys(acts) {
  const { answers } = useServices();
  const latest = useRef(acts);
  latest.current = acts;
  useEffect(() => {
    const onKeyDown = (event) => {
      if (document.querySelector("dialog[open]") || event.defaultPrevented) return;
      const isTyping = event.target.closest("input, textarea, select");
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        latest.current.onNew();
      } else if (event.key === "Escape") {
        const thread = event.target.closest("[data-conversation]") ?? document.querySelector("[data-conversation]");
        if (thread) answers.stopAll(thread.dataset.conversation);
      } else if (event.key === "?" && !isTyping) {
        latest.current.onHelp();
      }
    };
    document.addEventListener("keydown", onKeyDown);
    return () => document.removeEventListener("keydown", onKeyDown);
  }, []);
}

function useTheme() {
  const [theme, setTheme] = useState(() => localStorage.getItem("bough.theme") ?? "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("bough.theme", theme);
  }, [theme]);
  return [theme, setTheme];
}

const services = createServices();
await services.conversations.load();
render(html`<${App} services=${services} />`, document.getElementById("app"));
services.live.start();
