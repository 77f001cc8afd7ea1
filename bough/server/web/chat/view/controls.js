/** Small parts that others are made of: icons, buttons with one, dialogs, fields. */

import { html, useEffect, useRef, useState } from "../../vendor/preact-htm.js";

const PATHS = {
  auto: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11M8 5h4.4M8 8h5.4M8 11h4.4",
  beside: "M2.5 3h11v10h-11zM8 3v10",
  check: "M3 8.5l3.2 3.2L13 4.8",
  clip: "M12.5 7.5l-5 5a3.2 3.2 0 0 1-4.5-4.5l5.5-5.5a2.1 2.1 0 0 1 3 3L6 11a1 1 0 0 1-1.5-1.5l4.5-4.5",
  close: "M4 4l8 8M12 4l-8 8",
  columns: "M2.5 3h11v10h-11zM6.2 3v10M9.8 3v10",
  copy: "M5.5 5.5h7.5v8H5.5zM3 10.5v-8h7.5",
  down: "M4 6l4 4 4-4",
  download: "M8 2.5v7.5M5 7l3 3 3-3M3 13h10",
  edit: "M3 13l.6-3L10.6 3l2.4 2.4-7 7zM9.3 4.3l2.4 2.4",
  help: "M5.8 6a2.2 2.2 0 1 1 3.2 2c-.7.4-1 .8-1 1.5M8 12v.2",
  leave: "M6.5 3H3v10h3.5M9.5 5l3 3-3 3M12.5 8H6.5",
  left: "M10 4L6 8l4 4",
  model: "M8 2l5.5 3v6L8 14l-5.5-3V5zM2.5 5L8 8l5.5-3M8 8v6",
  moon: "M13 9.5A5.5 5.5 0 0 1 6.5 3 5.5 5.5 0 1 0 13 9.5z",
  paneLeft: "M2.5 3h11v10h-11zM6 3v10",
  paneRight: "M2.5 3h11v10h-11zM10 3v10",
  play: "M5 3.5v9l7-4.5z",
  plus: "M8 3v10M3 8h10",
  redo: "M13 8a5 5 0 1 1-1.5-3.6M13 2.5v2.8h-2.8",
  right: "M6 4l4 4-4 4",
  send: "M8 13V3.5M4 7.5l4-4 4 4",
  sliders: "M2.5 5h6M11.5 5h2M2.5 11h2M7.5 11h6M10 3.5v3M6 9.5v3",
  stop: "M4.5 4.5h7v7h-7z",
  sun: "M8 5.2A2.8 2.8 0 1 1 8 10.8 2.8 2.8 0 0 1 8 5.2zM8 1.5v1.5M8 13v1.5M1.5 8H3M13 8h1.5M3.4 3.4l1 1M11.6 11.6l1 1M12.6 3.4l-1 1M4.4 11.6l-1 1",
  trash: "M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.6 8.5h5.8l.6-8.5",
  upload: "M8 10.5V3M5 6l3-3 3 3M3 13h10",
};

/** A drawing of 16 pixels, hidden from readers: the button has a label. */
export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
}

/** A button with an icon. The label is its name for readers, and its tooltip. */
export function IconButton({ icon, label, class: more = "", ...rest }) {
  return html`<button type="button" class=${`icon-button ${more}`} aria-label=${label} title=${label} ...${rest}>
    <${Icon} name=${icon} />
  </button>`;
}

/** A button that says for a moment that something was copied. */
export function CopyButton({ copy, label }) {
  const [isDone, setDone] = useState(false);
  useEffect(() => {
    if (!isDone) return undefined;
    const timer = setTimeout(() => setDone(false), 1500);
    return () => clearTimeout(timer);
  }, [isDone]);
  return html`<${IconButton}
    icon=${isDone ? "check" : "copy"}
    label=${isDone ? "Copied" : label}
    onClick=${async () => setDone(await copy())}
  />`;
}

let numDialogs = 0;

/** A dialog over the page. `onClose` is called when the user closes it, by Esc too. */
export function Dialog({ title, onClose, class: more = "", children }) {
  const element = useRef(null);
  const id = useRef(`dialog-${++numDialogs}`);
  useEffect(() => {
    if (!element.current.open) element.current.showModal();
  }, []);
  const closeOutside = (event) => event.target === element.current && element.current.close();
  return html`<dialog
    ref=${element}
    class=${`dialog ${more}`}
    aria-labelledby=${id.current}
    onClose=${onClose}
    onMouseDown=${closeOutside}
  >
    <div class="dialog-body">
      <header class="dialog-head">
        <h2 id=${id.current}>${title}</h2>
        <${IconButton} icon="close" label="Close" onClick=${() => element.current.close()} />
      </header>
      ${children}
    </div>
  </dialog>`;
}

let numFields = 0;

/** A labelled field with a hint, or the problem with what was typed. `children` gets the attributes that link them. */
export function Field({ label, hint = "", problem = "", children }) {
  const id = useRef(`field-${++numFields}`).current;
  const note = problem || hint;
  const attributes = {
    id,
    "aria-describedby": note ? `${id}-note` : undefined,
    "aria-invalid": problem ? "true" : undefined,
  };
  return html`<div class="field">
    <label for=${id}>${label}</label>
    ${children(attributes)} ${note && html`<p id=${`${id}-note`} class=${problem ? "problem" : "hint"}>${note}</p>`}
  </div>`;
}
