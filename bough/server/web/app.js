/** The shell of the page: panes, the status line, dialogs; it makes all that the parts share. */

import { Access } from "./chat/access.js";
import { Answers } from "./chat/answers.js";
import { describeEnds } from "./chat/branches.js";
import { activate } from "./chat/conversation.js";
import { Conversations } from "./chat/conversations.js";
import { Models } from "./chat/models.js";
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
const SAY_MS = 10_000;
const THEMES = { "": "dark", dark: "light", light: "" };
const THEME_ICONS = { "": "auto", dark: "moon", light: "sun" };

/** Make what the parts share. `announce` and `say` are given by the page, when it is drawn. */
function createServices() {
  const live = new LiveEvents();
  const access = new Access();
  const conversations = new Conversations();
  const models = new Models(access, live);
  const made = { live, access, conversations, models, announce: () => {}, say: () => {} };
  const chooseModel = (conversation) => models.nameFor(conversation);
  made.answers = new Answers({ conversations, live, access, chooseModel, announce: (text) => made.announce(text) });
  return made;
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
    const made = services.conversations.list.find((each) => !each.messages.length && !open.slice(1).includes(each.id)) ?? services.conversations.create();
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
  const onRemove = (id) => removeConversation(services, id);
  return html`
    <${TopBar} panes=${panes} onDialog=${setDialog} />
    <main class=${panes.isNarrow ? "panes is-narrow" : "panes"} style=${panes.style}>
      <nav class="pane pane-left" aria-label="Conversations" hidden=${!panes.isShown("conversations")}>
        <${Sidebar} ...${{ open, onOpen, onBeside, onNew, onRemove }} />
      </nav>
      <${Divider} side="left" panes=${panes} />
      <div class=${open.length > 1 ? "pane pane-chat is-split" : "pane pane-chat"} hidden=${!panes.isShown("chat")}>
        ${open.map((id, number) => html`<${Thread} key=${id} id=${id} onModels=${() => setDialog("models")} onClose=${open.length > 1 ? () => setOpen(open.filter((_, each) => each !== number)) : null} />`)}
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
    ${!panes.isNarrow && html`<${IconButton} icon="paneLeft" label="Show or hide the conversations" aria-pressed=${panes.isShown("conversations") ? "true" : "false"} onClick=${() => panes.fold("left")} />`}
    <h1><img src="/web/icon.svg" alt="" width="20" height="20" />Bough</h1>
    <${Status} />
    <span class="spring"></span>
    <button type="button" class="small" onClick=${() => onDialog("models")}><${Icon} name="model" />Models</button>
    <${IconButton} icon=${THEME_ICONS[theme]} label=${`Colours: ${theme || "as the system"}`} onClick=${() => setTheme(THEMES[theme])} />
    <${IconButton} icon="help" label="Keys (?)" onClick=${() => onDialog("help")} />
    ${hasKey && html`<${IconButton} icon="key" label="Log out: forget the key" onClick=${logOut} />`}
    ${!panes.isNarrow && html`<${IconButton} icon="paneRight" label="Show or hide the tree" aria-pressed=${panes.isShown("tree") ? "true" : "false"} onClick=${() => panes.fold("right")} />`}
  </header>`;
}

/** Whether the server is there. A short break says nothing. */
function Status() {
  const { live } = useServices();
  const problem = useStore(live, () => (live.isConnected ? "" : live.problem ? `${live.problem}: trying again` : "connecting"));
  return html`<p class=${problem ? "status is-away" : "status"} role="status">
    <span class="dot" aria-hidden="true"></span><span class="status-text">${problem || "connected"}</span>
  </p>`;
}

function TabBar({ panes }) {
  const tabs = [["conversations", "Conversations"], ["chat", "Chat"], ["tree", "Tree"]];
  return html`<nav class="tab-bar" aria-label="Panes">
    ${tabs.map(([name, label]) => html`<button key=${name} type="button" aria-current=${panes.isShown(name) ? "page" : undefined} onClick=${() => panes.show(name)}>${label}</button>`)}
  </nav>`;
}

/** What happens, for readers (`announce`), and notes with an undo (`say`). */
function Notes() {
  const services = useServices();
  const [announced, setAnnounced] = useState("");
  const [note, setNote] = useState(null);
  const problem = useStore(services.conversations, () => services.conversations.problem);
  services.announce = setAnnounced;
  services.say = (text, undo) => setNote({ text, undo });
  useEffect(() => {
    if (!note) return undefined;
    const timer = setTimeout(() => setNote(null), SAY_MS);
    return () => clearTimeout(timer);
  }, [note]);
  const undo = () => {
    note.undo();
    setNote(null);
  };
  return html`
    <div class="offscreen" aria-live="polite" role="status">${announced}</div>
    <div class="notes" role="status">
      ${problem && html`<p class="note problem">${problem}</p>`}
      ${note && html`<p class="note" dir="auto"><span>${note.text}</span>
        ${note.undo && html`<button type="button" class="small" onClick=${undo}>Undo</button>`}
        <${IconButton} icon="close" label="Close" onClick=${() => setNote(null)} />
      </p>`}
    </div>
  `;
}

function removeConversation({ conversations, answers, say }, id) {
  answers.stopAll(id);
  const restore = conversations.remove(id);
  say("The conversation was deleted.", restore);
}

/** The ids of the conversations that are shown, one or two. They are kept in this tab; what is gone is replaced. */
function useOpen() {
  const { conversations } = useServices();
  const [wanted, setWanted] = useState(() => JSON.parse(sessionStorage.getItem(OPEN_NAME) ?? "[]"));
  const isThere = useStore(conversations, () => wanted.map((id) => Boolean(conversations.get(id))).join());
  const spare = useRef(null);
  const found = useMemo(() => {
    const there = wanted.filter((id) => conversations.get(id));
    if (there.length) return there;
    spare.current = conversations.get(spare.current) ? spare.current : conversations.create({ id: wanted[0] }).id;
    return [spare.current];
  }, [wanted, isThere]);
  useEffect(() => sessionStorage.setItem(OPEN_NAME, JSON.stringify(found)), [found]);
  return [found, setWanted];
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
