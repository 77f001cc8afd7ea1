/** The dialog that asks for a key, and the one that lists the keys of the keyboard. */

import { html, useEffect, useState } from "../../vendor/preact-htm.js";
import { Dialog } from "./controls.js";
import { useServices } from "./services.js";

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "a new line"],
  ["Esc", "stop the answers of this conversation"],
  ["Ctrl K", "a new conversation"],
  ["Alt ← →", "the version before, or the next one"],
  ["?", "this list"],
  ["↑ ↓ ← →", "move among conversations and their branches"],
  ["F2, Delete", "rename or delete a conversation, in the list"],
];

export function HelpDialog({ onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose}>
    <dl class="keys">
      ${KEYS.map(
        ([keys, meaning]) =>
          html`<div key=${keys}>
            <dt><kbd>${keys}</kbd></dt>
            <dd>${meaning}</dd>
          </div>`,
      )}
    </dl>
    <p class="hint">On a Mac, Command K does what Ctrl K does.</p>
  <//>`;
}

export function KeyDialog() {
  const { access } = useServices();
  const [key, setKey] = useState("");
  const [isKept, setKept] = useState(false);
  const [problem, setProblem] = useState(access.problem);
  useEffect(() => access.subscribe(() => setProblem(access.problem)), [access]);
  const give = (event) => {
    event.preventDefault();
    if (key.trim()) access.give(key.trim(), isKept);
  };
  return html`<${Dialog} title="This server asks for a key" onClose=${() => access.dismiss()}>
    <form onSubmit=${give}>
      <div class="field">
        <label for="key">Key</label>
        <input
          id="key"
          type="password"
          autocomplete="current-password"
          value=${key}
          onInput=${(event) => setKey(event.target.value)}
        />
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      </div>
      <label class="check"
        ><input type="checkbox" checked=${isKept} onChange=${(event) => setKept(event.target.checked)} />Keep it in this
        browser</label
      >
      <p class="hint">Else it is forgotten when this tab is closed.</p>
      <div class="row"><button type="submit" class="primary" disabled=${!key.trim()}>Go on</button></div>
    </form>
  <//>`;
}
