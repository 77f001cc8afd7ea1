/** The models of the server: download, load, unload, delete. */

import { html, useEffect, useState } from "../../vendor/preact-htm.js";
import { writeBytes } from "../figures.js";
import { Dialog, IconButton } from "./controls.js";
import { useServices, useStore } from "./services.js";

export function ModelsDialog({ onClose }) {
  const { models } = useServices();
  const [, setNumber] = useState(0);
  useEffect(() => models.subscribe(() => setNumber((number) => number + 1)), [models]);
  useEffect(() => void models.refresh(), [models]);
  return html`<${Dialog} title="Models" onClose=${onClose}>
    ${models.problem && html`<p class="problem" role="alert">${models.problem}</p>`}
    <ul class="models">
      ${models.list.map((model) => html`<${Model} key=${model.name} model=${model} models=${models} />`)}
      ${!models.list.length && html`<li class="hint">There is no model yet.</li>`}
    </ul>
    <${PullForm} models=${models} />
    <ul class="models">
      ${[...models.pulls].map(([name, pull]) => html`<${Pull} key=${name} name=${name} pull=${pull} models=${models} />`)}
    </ul>
  <//>`;
}

function Model({ model, models }) {
  const [isBusy, setBusy] = useState(false);
  const [isSure, setSure] = useState(false);
  const act = async (what) => {
    setBusy(true);
    await what();
    setBusy(false);
  };
  const isLoaded = model.loadedBytes !== null;
  const details = [
    model.parameters,
    model.quantization,
    `${writeBytes(model.bytes)} on disk`,
    isLoaded && `${writeBytes(model.loadedBytes)} in memory`,
  ];
  return html`<li class="model">
    <div class="model-name">
      <strong>${model.name}</strong> ${isLoaded && html`<span class="badge">loaded</span>`}
      <p class="hint">${details.filter(Boolean).join(" · ")}</p>
    </div>
    <button
      type="button"
      class="small"
      disabled=${isBusy}
      onClick=${() => act(() => (isLoaded ? models.unload(model.name) : models.load(model.name)))}
    >
      ${isBusy ? "…" : isLoaded ? "Unload" : "Load"}
    </button>
    ${
      isSure
        ? html`<button type="button" class="small danger" onClick=${() => act(() => models.remove(model.name))}>
              Delete ${model.name}
            </button>
            <button type="button" class="small" onClick=${() => setSure(false)}>Keep</button>`
        : html`<${IconButton} icon="trash" label=${`Delete ${model.name}`} onClick=${() => setSure(true)} />`
    }
  </li>`;
}

function PullForm({ models }) {
  const [name, setName] = useState("");
  const pull = (event) => {
    event.preventDefault();
    if (name.trim()) models.pull(name.trim());
    setName("");
  };
  return html`<form class="row pull-form" onSubmit=${pull}>
    <input
      aria-label="Name of a model to download"
      placeholder="A name, such as smollm2 or org/model"
      value=${name}
      onInput=${(event) => setName(event.target.value)}
    />
    <button type="submit" disabled=${!name.trim()}>Download</button>
  </form>`;
}

function Pull({ name, pull, models }) {
  const share = pull.total ? pull.completed / pull.total : undefined;
  const bytes = pull.total ? ` ${writeBytes(pull.completed)} of ${writeBytes(pull.total)}` : "";
  return html`<li class="model">
    <div class="model-name">
      <strong>${name}</strong>
      ${
        pull.problem
          ? html`<p class="problem" role="alert">${pull.problem}</p>`
          : html`<p class="hint">${pull.status}${bytes}</p>`
      }
      ${!pull.problem && html`<progress value=${share} aria-label=${`Download of ${name}`}></progress>`}
    </div>
    ${pull.problem && html`<button type="button" class="small" onClick=${() => models.pull(name)}>Try again</button>`}
    <${IconButton}
      icon="close"
      label=${pull.problem ? "Forget it" : `Cancel the download of ${name}`}
      onClick=${() => models.cancelPull(name)}
    />
  </li>`;
}
