/** The models of the server: load, unload, delete; and a catalogue of what can be downloaded. */

import { html, useEffect, useState } from "../../vendor/preact-htm.js";
import { writeBytes } from "../figures.js";
import { Dialog, IconButton } from "./controls.js";
import { useServices, useStore } from "./services.js";

export function ModelsDialog({ onClose }) {
  const { models } = useServices();
  const [, setNumber] = useState(0);
  useEffect(() => models.subscribe(() => setNumber((number) => number + 1)), [models]);
  useEffect(() => {
    models.refresh();
    models.readCatalogue();
  }, [models]);
  const named = new Set(models.list.map((model) => model.name));
  const isMain = (model) => !named.has(model.target);
  const aliasesOf = (model) => models.list.filter((each) => each.target === model.name);
  return html`<${Dialog} title="Models" class="is-wide" onClose=${onClose}>
    ${models.problem && html`<p class="problem" role="alert">${models.problem}</p>`}
    <ul class="models">
      ${models.list
        .filter(isMain)
        .map(
          (model) => html`<${Model} key=${model.name} model=${model} aliases=${aliasesOf(model)} models=${models} />`,
        )}
      ${!models.list.length && html`<li class="hint">There is no model yet.</li>`}
    </ul>
    <h3>Download</h3>
    <ul class="models">
      ${[...models.pulls].map(([name, pull]) => html`<${Pull} key=${name} name=${name} pull=${pull} models=${models} />`)}
    </ul>
    <${PullForm} models=${models} />
    ${models.catalogue.length > 0 && html`<${Catalogue} models=${models} />`}
  <//>`;
}

function Model({ model, aliases, models }) {
  const [isBusy, setBusy] = useState(false);
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
    <${DeleteButton} name=${model.name} onDelete=${() => act(() => models.remove(model.name))} />
    ${
      aliases.length > 0 &&
      html`<ul class="aliases" aria-label=${`Other names of ${model.name}`}>
        ${aliases.map(
          ({ name }) =>
            html`<li key=${name}>
              <span class="model-name">${name}</span>
              <${DeleteButton} name=${name} onDelete=${() => act(() => models.remove(name))} />
            </li>`,
        )}
      </ul>`
    }
  </li>`;
}

/** Asks again before it deletes. */
function DeleteButton({ name, onDelete }) {
  const [isSure, setSure] = useState(false);
  if (!isSure) return html`<${IconButton} icon="trash" label=${`Delete ${name}`} onClick=${() => setSure(true)} />`;
  return html`<button type="button" class="small danger" onClick=${onDelete}>Delete ${name}</button>
    <button type="button" class="small" onClick=${() => setSure(false)}>Keep</button>`;
}

const FITS = { yes: "fits", tight: "only just fits", no: "does not fit" };

/** What can be downloaded by a short name, and whether it fits this machine. */
function Catalogue({ models }) {
  return html`<div class="catalogue" tabindex="0" role="region" aria-label="Catalogue">
    <table>
      <caption class="hint">
        The server's machine has ${writeBytes(models.memoryBytes)} of memory. What a model needs there is an estimate.
      </caption>
      <thead>
        <tr>
          <th>Name</th>
          <th>Download</th>
          <th>Memory</th>
          <th>Licence</th>
          <th><span class="offscreen">Get it</span></th>
        </tr>
      </thead>
      <tbody>
        ${models.catalogue.map((each) => html`<${CatalogueRow} key=${each.name} model=${each} models=${models} />`)}
      </tbody>
    </table>
  </div>`;
}

function CatalogueRow({ model, models }) {
  const { name, names, weights, download_bytes, needed_bytes, license, fits, is_here } = model;
  const isPulled = models.pulls.has(name) && !models.pulls.get(name).problem;
  const isHere = is_here || models.list.some((each) => names.includes(each.name));
  return html`<tr class=${fits === "no" ? "is-too-large" : ""}>
    <th scope="row">${name}${names.length > 1 && html` <span class="hint">or ${names[0]}</span>`}</th>
    <td>${writeBytes(download_bytes)} <span class="hint">${weights}</span></td>
    <td>${writeBytes(needed_bytes)} <span class="hint">${FITS[fits]}</span></td>
    <td>${license}</td>
    <td>
      ${
        isHere
          ? html`<span class="badge">here</span>`
          : html`<button
              type="button"
              class="small"
              disabled=${isPulled}
              aria-label=${`Download ${name}`}
              onClick=${() => models.pull(name)}
            >
              Download
            </button>`
      }
    </td>
  </tr>`;
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
